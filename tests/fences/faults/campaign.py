"""Many faults over every transport, and what was injected.

    python -m tests.fences.faults.campaign --faults 10000 [--first 0] [--over NAME ...]

Scenarios are numbered from `--first` on; one that failed is played again alone by its number. With
10,000 faults it takes about an hour of two cores.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.fences.faults.chance import SHARES, play_many
from tests.fences.faults.in_processes import play_in_processes
from tests.fences.faults.matrix import actors_if

__all__ = ("OVER", "faults_over", "summary")

PROCESSES = "processes"
PROCESSES_SHARE = 0.1
OVER: Mapping[str, float] = {**SHARES, PROCESSES: PROCESSES_SHARE}


def faults_over(over: str, first: int, faults: int) -> Counter[str]:
    """Inject so many faults over one ground; which, and how many of each.

    Raises:
        AssertionError: a promise was broken; the message names the scenario.
    """
    if over == PROCESSES:
        return play_in_processes(first, faults)
    with actors_if(over == "ray"):
        return play_many(over, first, faults)


def summary(tallies: Mapping[str, Counter[str]]) -> str:
    """One line for each ground, then the total."""
    lines = [
        f"{over:12} {tally.total():6}  {', '.join(f'{n} {k}' for k, n in sorted(tally.items()))}"
        for over, tally in tallies.items()
    ]
    total = sum(tally.total() for tally in tallies.values())
    return "\n".join([*lines, f"{'together':12} {total:6}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Many faults over every transport.")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--over", nargs="+", default=list(OVER), choices=OVER)
    given = parser.parse_args(argv)
    share = sum(OVER[over] for over in given.over)
    tallies: dict[str, Counter[str]] = {}
    failed = 0
    for over in given.over:
        since = time.monotonic()
        count = max(round(given.faults * OVER[over] / share), 1)
        try:
            tallies[over] = faults_over(over, given.first, count)
        except AssertionError as error:
            failed += 1
            print(f"BROKEN: {error}", flush=True)
        print(f"{over}: {count} faults in {time.monotonic() - since:.0f} s", flush=True)
    print(summary(tallies))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
