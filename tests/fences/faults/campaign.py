"""Many faults over every transport, and what was injected.

    python -m tests.fences.faults.campaign --faults 10000 [--jobs 16] [--first 0] [--over NAME ...]

Scenarios are numbered from `--first` on; one that failed is played again alone by its number. Each
of the `--jobs` is a process that takes a part of the numbers of a ground, and there is one summary
in the end. Where Ray is missing, that is said, and its share is left out.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from phasesync.core import wire
from tests.fences.faults.chance import SHARES, play_many
from tests.fences.faults.in_actors import play_in_actors
from tests.fences.faults.in_processes import play_in_processes
from tests.fences.faults.matrix import actors_if

__all__ = ("OVER", "faults_over", "summary")

PROCESSES = "processes"
PROCESSES_SHARE = 0.1
ACTORS = "ray actors"
ACTORS_SHARE = 0.005  # To start an actor takes longer than to play with it.
RAY = ("ray", ACTORS)
OVER: Mapping[str, float] = {**SHARES, PROCESSES: PROCESSES_SHARE, ACTORS: ACTORS_SHARE}


def faults_over(over: str, first: int, faults: int) -> Counter[str]:
    """Inject so many faults over one ground; which, and how many of each.

    Raises:
        AssertionError: a promise was broken; the message names the scenario.
    """
    if over == PROCESSES:
        return play_in_processes(first, faults)
    with actors_if(over in RAY) as actors:
        if over == ACTORS:
            assert actors is not None
            return play_in_actors(first, faults, actors, import_module("ray"))
        return play_many(over, first, faults)


def summary(tallies: Mapping[str, Counter[str]]) -> str:
    """One line for each ground, then the total."""
    lines = [
        f"{over:12} {tally.total():6}  {', '.join(f'{n} {k}' for k, n in sorted(tally.items()))}"
        for over, tally in tallies.items()
    ]
    total = sum(tally.total() for tally in tallies.values())
    return "\n".join([*lines, f"{'together':12} {total:6}"])


class Part(NamedTuple):
    """Some scenarios over one ground, for one process."""

    over: str
    first: int
    faults: int


def parts_of(over: Sequence[str], first: int, faults: int, jobs: int) -> Iterator[Part]:
    """Each ground's share, cut so that no process has the rest of it to itself.

    Those under Ray are one part each: a cluster for each process costs more than it saves.
    """
    share = sum(OVER[each] for each in over)
    for each in sorted(over, key=lambda name: name not in (*RAY, PROCESSES)):
        count = max(round(faults * OVER[each] / share), 1)
        pieces = 1 if each in RAY else min(4 * jobs if jobs > 1 else 1, max(count // 20, 1))
        for piece in range(pieces):
            begin, end = (count * at // pieces for at in (piece, piece + 1))
            if end > begin:
                yield Part(each, first + begin, end - begin)


class Played(NamedTuple):
    """What came of a part: what was injected, or what was broken."""

    part: Part
    tally: Counter[str]
    broken: str


def play_part(part: Part) -> Played:
    try:
        return Played(part, faults_over(*part), "")
    except AssertionError as error:
        return Played(part, Counter(), str(error))


def play_elsewhere(part: Part, within_s: float) -> Played:
    """Play a part in a process of its own, which may hang or die without harm to the others."""
    command = [sys.executable, "-m", __spec__.name, "--part", wire.encode(list(part)).decode()]
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, check=False)
        tally, broken = wire.decode(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Played(part, Counter(), f"not done within {within_s:g} s")
    except (IndexError, ValueError):
        return Played(part, Counter(), f"it ended with {done.returncode}: {done.stderr[-2000:]!r}")
    return Played(part, Counter(tally), broken)


PART_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Many faults over every transport.")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--over", nargs="+", default=list(OVER), choices=OVER)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.part is not None:
        played = play_part(Part(*wire.decode(given.part)))
        sys.stdout.write("\n" + wire.encode([played.tally, played.broken]).decode() + "\n")
        sys.stdout.flush()
        os._exit(0)
    if set(RAY).intersection(given.over) and find_spec("ray") is None:
        print("ray is not installed: nothing is injected over it", flush=True)
        given.over = [over for over in given.over if over not in RAY]
    since = time.monotonic()
    tallies: dict[str, Counter[str]] = {over: Counter() for over in given.over}
    failed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        parts = parts_of(given.over, given.first, given.faults, given.jobs)
        for played in pool.map(lambda part: play_elsewhere(part, PART_S), list(parts)):
            over, first, count = played.part
            tallies[over] += played.tally
            took_s = time.monotonic() - since
            print(f"{took_s:5.0f} s  {over}: {count} faults from scenario {first}", flush=True)
            if played.broken:
                failed += 1
                print(f"BROKEN: {over} from {first}: {played.broken}", flush=True)
    print(summary(tallies))
    print(f"{failed} parts broke a promise; {time.monotonic() - since:.0f} s, {given.jobs} jobs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
