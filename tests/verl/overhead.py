"""What phasesync costs a sync: verl's own body and ours, turn by turn on the same workers.

python -m tests.verl.overhead [SYNCS]
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.verl.rank import Job
from tests.verl.run import run

__all__ = ("measure",)

WARM_UP = 4


class Sync(NamedTuple):
    """Seconds that a sync took its slowest rank, and seconds of CPU time of all ranks."""

    seconds: float
    cpu_s: float


def measure(
    syncs: int = 60, *, ranks: int = 4, peer_looks_s: float = 0.005
) -> dict[str, list[Sync]]:
    """What syncs cost under either body."""
    job = Job(
        ranks=ranks,
        replica=ranks,
        epochs=2 * syncs + WARM_UP,
        mode="enforce",
        alternate=True,
        engine_takes_s=0.0,
        peer_looks_s=peer_looks_s,
    )
    outcome = run(job, Path(tempfile.mkdtemp()), within_s=120)
    assert outcome.line == "passes", outcome.line
    found: dict[str, list[Sync]] = {"stock": [], "phasesync": []}
    for epoch in range(WARM_UP + 1, job.epochs + 1):
        said = outcome.of(epoch)
        sync = Sync(max(each.seconds for each in said), sum(each.cpu_s for each in said))
        found["phasesync" if epoch % 2 else "stock"].append(sync)
    return found


if __name__ == "__main__":
    how_many = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    for looks_s in (0.005, 0.0005):
        print(f"4 ranks; a peer looks for its engine every {looks_s * 1e3:g} ms")
        for name, took in measure(how_many, peer_looks_s=looks_s).items():
            times = [sync.seconds for sync in took]
            cpu = statistics.median(sync.cpu_s for sync in took) / 4
            print(
                f"{name:9}  median {statistics.median(times) * 1e3:6.1f} ms   least "
                f"{min(times) * 1e3:6.1f} ms   worst {max(times) * 1e3:6.1f} ms   CPU "
                f"{cpu * 1e3:5.2f} ms a rank"
            )
