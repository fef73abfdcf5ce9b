"""fence.pml for minicheck: a state is each rank's phase, the faults so far, and the abort flag.

    python fence_minicheck.py RANKS CRASHES

Prints the states that were reached and whether the property holds, as one line.
"""

import sys
from collections.abc import Iterator
from typing import Any

from minicheck import Protocol, check_safety

IDLE, SYNC, OFFLOAD, EMPTY, FENCE, RESUME, DONE, ABORTED, CRASHED = range(9)
STATES_MAX = 20_000_000


def steps(state: tuple[int, ...], ranks: int, crashes: int) -> Iterator[tuple[str, Any]]:
    """Every step of every rank, with its name."""
    *phases, faults, aborted = state
    opened = all(FENCE <= phase <= DONE for phase in phases)
    for rank, phase in enumerate(phases):
        if phase >= DONE:
            continue
        before, after = state[:rank], state[rank + 1 : ranks]
        if aborted:
            yield "abort", (*before, ABORTED, *after, faults, aborted)
        elif phase != FENCE or opened:
            yield "step", (*before, phase + 1, *after, faults, aborted)
        if faults < crashes:
            yield "crash", (*before, CRASHED, *after, faults + 1, 1)


def apart(fields: dict[str, int], ranks: int) -> bool:
    """Nobody resumes while another rank holds weights or buffers."""
    phases = [fields[f"rank{number}"] for number in range(ranks)]
    return RESUME not in phases or min(phases) > OFFLOAD


def main(ranks: int, crashes: int) -> None:
    model = Protocol(
        name="fence",
        candidate=False,
        fields=(*(f"rank{number}" for number in range(ranks)), "faults", "aborted"),
        initial=(*(IDLE for _ in range(ranks)), 0, 0),
        transitions=lambda state: list(steps(state, ranks, crashes)),
        invariants={"apart": lambda fields: apart(fields, ranks)},
    )
    found = check_safety(model, max_states=STATES_MAX)
    verdict = "holds" if found["properties"]["apart"]["holds"] else "violated"
    print(found["reachable_states"], verdict)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
