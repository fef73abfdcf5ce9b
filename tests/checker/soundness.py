"""Any N against explicit ranks, on protocols by chance and every mutation: `python -m
tests.checker.soundness 1000 [FIRST] [--jobs 16] [--every]`.

Of each protocol it asks four things: where any N holds, no number of ranks tried breaks a rule;
what explicit ranks break, any N does not hold for, and the kernel takes the same steps; and how
often any N says neither.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from phasesync.checker.anyn import Mutate, counts, sized, tracked, unclosed
from phasesync.checker.explicit import explore
from phasesync.checker.mutants import Mutation, mutations
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.options import assignments
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.protocol import Protocol
from phasesync.core.verdict import Undecided, Violated

from . import chance

__all__ = ("DECIDED_MIN", "Answer", "Refuted", "ask", "decided", "same", "survey")

#: Ranks, ranks a group, epochs, faults in one run: what is counted out beside any N.
SIZES = ((2, 2, 2, 2), (3, 3, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (5, 5, 1, 1), (2, 1, 2, 1))
STATES_MAX = 30_000
#: On how much any N must decide.
DECIDED_MIN = 0.9


def same(plan: Plan) -> Plan:
    """No mutation at all."""
    return plan


class Refuted(Exception):
    """An explicit search says what the kernel does not confirm: the sizes, and what it refuses."""


class Answer(NamedTuple):
    """What any N said (`holds`, `broken`, `undecided`, or why it does not apply), the sizes that
    break a rule, and how many were too large to count out."""

    any_n: str
    broken: tuple[tuple[int, ...], ...]
    left_out: int


def ask(protocol: Protocol, options: Mapping[str, OptionValue], mutate: Mutate) -> Answer:
    """The same question to any N and to explicit ranks.

    Raises:
        Refuted: the kernel does not confirm what an explicit search found.
    """
    reason = unclosed(protocol, options, mutate)
    if reason is not None:
        return Answer(reason, (), 0)
    found = tracked(protocol, options, mutate=mutate, budget=Budget(states_max=STATES_MAX))
    any_n = "broken" if found.trail else "undecided" if found.bound else "holds"
    broken: list[tuple[int, ...]] = []
    left_out = 0
    alone = any(options.get(str(group.size)) == 1 for group in protocol.groups)
    for ranks, size, epochs, most in SIZES:
        if alone != (size == 1) or (any_n == "broken" and (broken or ranks > 4)):
            continue
        fitted = sized(protocol, options, size)
        plan = mutate(resolve(protocol, counts(protocol, ranks), fitted))
        try:
            verdict, _ = explore(
                plan,
                Faults(most=most, crash=True, fail=True),
                epochs,
                budget=Budget(states_max=STATES_MAX),
                deadlocks=False,
                shortest=False,
            )
        except AssertionError as refused:
            raise Refuted(f"{(ranks, size, epochs, most)}: {refused}") from refused
        if isinstance(verdict, Violated):
            broken.append((ranks, size, epochs, most))
        left_out += isinstance(verdict, Undecided)
    return Answer(any_n, tuple(broken), left_out)


def _questions(
    dice: random.Random, *, every: bool = False
) -> Iterator[tuple[Protocol, Mapping[str, OptionValue], str, Mutate]]:
    """A protocol by chance under options by chance: as it is, and with one mistake planted, or with
    each in turn."""
    protocol = chance.protocol(dice)
    options = dice.choice(assignments(protocol))
    yield protocol, options, "", same
    planted: list[Mutation] = [
        each
        for each in mutations(protocol)
        if each.name not in (Defect.NO_FLOOR.value, Defect.RESTARTS_EARLY.value)
    ]
    chosen = planted if every else [dice.choice(planted)] if planted else []
    for mutation in chosen:
        yield protocol, options, mutation.name, mutation.mutate


def survey(first: int, count: int, *, every: bool = False) -> tuple[Counter[str], list[str]]:
    """How often each answer came up, and every contradiction."""
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in range(first, first + count):
        for protocol, options, name, mutate in _questions(random.Random(seed), every=every):
            asked = f"seed {seed} {name or 'as it is'} {dict(options)}"
            try:
                any_n, broken, left_out = ask(protocol, options, mutate)
            except Refuted as refuted:
                tally["questions"] += 1
                tally["the kernel does not follow"] += 1
                wrong.append(f"{asked}: {refuted}")
                continue
            known = any_n in ("holds", "broken", "undecided")
            if any_n == "broken" and not broken:
                any_n = "broken by the token alone"
            tally["questions"] += 1
            tally[any_n if known else f"does not apply: {any_n}"] += 1
            tally["explicit broken"] += bool(broken)
            tally["sizes left out"] += left_out
            if any_n == "holds" and broken:
                wrong.append(f"{asked}: any N holds, but {broken} break a rule")
    return tally, wrong


def decided(tally: Counter[str]) -> float:
    """On how much any N decides: it holds, or explicit ranks break what it finds broken."""
    return (tally["holds"] + tally["broken"]) / tally["questions"]


def main() -> int:
    """Counts, then every contradiction; 1 if there is one, or if any N decides too little."""
    parser = argparse.ArgumentParser(prog="python -m tests.checker.soundness", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200, help="protocols")
    parser.add_argument("first", type=int, nargs="?", default=0, help="seed of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--every", action="store_true", help="every mutation, not one by chance")
    asked = parser.parse_args()
    began = time.monotonic()
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    one = partial(_one, every=asked.every)
    seeds = range(asked.first, asked.first + asked.count)
    with ProcessPoolExecutor(asked.jobs) as pool:
        for counts_, found in pool.map(one, seeds):
            tally += counts_
            wrong += found
    took = time.monotonic() - began
    print(f"{asked.count} protocols from seed {asked.first}, {asked.jobs} jobs, {took:.0f} s")
    for answer, times in tally.most_common():
        print(f"{times:8}  {answer}")
    print(f"decided: {100 * decided(tally):.1f} %; contradictions: {len(wrong)}")
    for each in wrong:
        print(each)
    return int(bool(wrong) or decided(tally) < DECIDED_MIN)


def _one(seed: int, *, every: bool) -> tuple[Counter[str], list[str]]:
    return survey(seed, 1, every=every)


if __name__ == "__main__":
    raise SystemExit(main())
