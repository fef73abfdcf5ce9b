"""What phasesync costs a sync: verl's own body and ours, turn by turn on the same workers.

python -m tests.verl.overhead [SYNCS]
"""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.verl.rank import Job
from tests.verl.run import run

__all__ = ("measure",)

WARM_UP = 4


def measure(syncs: int = 60, *, ranks: int = 4) -> dict[str, list[float]]:
    """Seconds that a sync took its slowest rank, under either body."""
    job = Job(
        ranks=ranks,
        replica=ranks,
        epochs=2 * syncs + WARM_UP,
        mode="enforce",
        alternate=True,
        engine_takes_s=0.0,
    )
    outcome = run(job, Path(tempfile.mkdtemp()), within_s=120)
    assert outcome.line == "passes", outcome.line
    found: dict[str, list[float]] = {"stock": [], "phasesync": []}
    for epoch in range(WARM_UP + 1, job.epochs + 1):
        slowest = max(said.seconds for said in outcome.of(epoch))
        found["phasesync" if epoch % 2 else "stock"].append(slowest)
    return found


if __name__ == "__main__":
    for name, times in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 60).items():
        median, worst = statistics.median(times), max(times)
        print(f"{name:9}  median {median * 1e3:6.1f} ms   worst {worst * 1e3:6.1f} ms")
