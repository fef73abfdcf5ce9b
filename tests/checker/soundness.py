"""Any N against explicit ranks, on protocols by chance and every mutation: `python -m
tests.checker.soundness 1000 [FIRST] [--jobs 16] [--every] [--time-limit 500]`.

Of each protocol it asks four things: where any N holds, no number of ranks tried breaks a rule;
what explicit ranks break, any N does not hold for, and the kernel takes the same steps; and how
often any N says neither. A line is printed as each protocol is done, and a tally every so often, at
the time limit and at SIGTERM, so that a run that is cut off has said what it covered.
"""

import argparse
import multiprocessing
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FrameType
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
#: Seconds of the processor that one search may take; more is undecided, as too many states are.
SEARCH_S = 10.0
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
    found = tracked(protocol, options, mutate=mutate, budget=_budget())
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
                budget=_budget(),
                deadlocks=False,
                shortest=False,
            )
        except AssertionError as refused:
            raise Refuted(f"{(ranks, size, epochs, most)}: {refused}") from refused
        if isinstance(verdict, Violated):
            broken.append((ranks, size, epochs, most))
        left_out += isinstance(verdict, Undecided)
    return Answer(any_n, tuple(broken), left_out)


def _budget() -> Budget:
    return Budget(
        states_max=STATES_MAX, until_s=time.process_time() + SEARCH_S, now=time.process_time
    )


class Question(NamedTuple):
    """A protocol under options, with a mistake planted in it, or none."""

    protocol: Protocol
    options: Mapping[str, OptionValue]
    name: str
    mutate: Mutate


def _questions(dice: random.Random, *, every: bool = False) -> Iterator[Question]:
    """A protocol by chance under options by chance: as it is, and with one mistake planted, or with
    each in turn."""
    protocol = chance.protocol(dice)
    options = dice.choice(assignments(protocol))
    yield Question(protocol, options, "", same)
    planted: list[Mutation] = [
        each
        for each in mutations(protocol)
        if each.name not in (Defect.NO_FLOOR.value, Defect.RESTARTS_EARLY.value)
    ]
    chosen = planted if every else [dice.choice(planted)] if planted else []
    for mutation in chosen:
        yield Question(protocol, options, mutation.name, mutation.mutate)


def _answered(seed: int, question: Question) -> tuple[Counter[str], list[str]]:
    """What came of one question, counted, and what contradicts."""
    asked = f"seed {seed} {question.name or 'as it is'} {dict(question.options)}"
    try:
        any_n, broken, left_out = ask(question.protocol, question.options, question.mutate)
    except Refuted as refuted:
        tally = Counter({"questions": 1, "the kernel does not follow": 1})
        return tally, [f"{asked}: {refuted}"]
    known = any_n in ("holds", "broken", "undecided")
    if any_n == "broken" and not broken:
        any_n = "broken by the token alone"
    tally = Counter({"questions": 1, any_n if known else f"does not apply: {any_n}": 1})
    tally.update({"explicit broken": int(bool(broken)), "sizes left out": left_out})
    wrong = any_n == "holds" and broken
    return tally, [f"{asked}: any N holds, but {broken} break a rule"] if wrong else []


def survey(first: int, count: int, *, every: bool = False) -> tuple[Counter[str], list[str]]:
    """How often each answer came up, and every contradiction."""
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in range(first, first + count):
        for question in _questions(random.Random(seed), every=every):
            counted, contradicts = _answered(seed, question)
            tally += counted
            wrong += contradicts
    return tally, wrong


def decided(tally: Counter[str]) -> float:
    """On how much any N decides: it holds, or explicit ranks break what it finds broken."""
    return (tally["holds"] + tally["broken"]) / max(tally["questions"], 1)


# --- The long form -----------------------------------------------------------------------------


class _Task(NamedTuple):
    """One question of a protocol, by its place."""

    seed: int
    at: int
    every: bool


class _Done(NamedTuple):
    """What came of a task, and the seconds of the processor that it took."""

    task: _Task
    name: str
    tally: Counter[str]
    wrong: list[str]
    took_s: float


@lru_cache(maxsize=2)
def _all_questions(seed: int, every: bool) -> tuple[Question, ...]:
    return tuple(_questions(random.Random(seed), every=every))


def _do(task: _Task) -> _Done:
    question = _all_questions(task.seed, task.every)[task.at]
    began = time.process_time()
    tally, wrong = _answered(task.seed, question)
    return _Done(task, question.name, tally, wrong, time.process_time() - began)


class _Stopped(Exception):
    """Somebody wants the run to end here."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Once: `timeout` tells a process, and then the group that it is in."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def _left_to_the_parent() -> None:
    """Workers end when the parent ends them, also where a whole group is told to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Progress:
    """What has been answered so far, said as it comes."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.began = time.monotonic()
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest: list[tuple[float, str]] = []
        self.whole = 0
        self._left: dict[int, int] = {}
        self._of: dict[int, list[_Done]] = defaultdict(list)

    def tasks(self) -> Iterator[_Task]:
        """All questions, protocol by protocol."""
        every = self.asked.every
        for seed in range(self.asked.first, self.asked.first + self.asked.count):
            self._left[seed] = len(_all_questions(seed, every))
            yield from (_Task(seed, at, every) for at in range(self._left[seed]))

    def take(self, done: _Done) -> None:
        """One more answer; a line when its protocol has no other question open."""
        self.tally += done.tally
        self.wrong += done.wrong
        seed = done.task.seed
        self.slowest.append((done.took_s, f"seed {seed} {done.name or 'as it is'}"))
        self.slowest = sorted(self.slowest, reverse=True)[:3]
        self._of[seed].append(done)
        self._left[seed] -= 1
        for each in done.wrong:
            print(f"CONTRADICTION {each}", flush=True)
        if self._left[seed] == 0:
            self._said(seed, self._of.pop(seed))

    def _said(self, seed: int, answers: list[_Done]) -> None:
        self.whole += 1
        total: Counter[str] = sum((each.tally for each in answers), Counter())
        took = sum(each.took_s for each in answers)
        at = time.monotonic() - self.began
        parts = ", ".join(f"{times} {answer}" for answer, times in total.items())
        print(f"{at:6.0f} s  seed {seed}: {parts}; {took:.1f} s", flush=True)
        if self.whole % self.asked.tally == 0:
            self.sum_up("so far")

    def sum_up(self, how: str) -> None:
        """The tally, and how much it covers."""
        took = time.monotonic() - self.began
        first, jobs = self.asked.first, self.asked.jobs
        print(f"{how}: {self.whole} protocols whole from seed {first}, {jobs} jobs, {took:.0f} s")
        for answer, times in self.tally.most_common():
            print(f"{times:8}  {answer}")
        slow = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in self.slowest)
        print(f"slowest: {slow or 'none'}")
        share = 100 * decided(self.tally)
        print(f"decided: {share:.1f} %; contradictions: {len(self.wrong)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.checker.soundness", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200, help="protocols")
    parser.add_argument("first", type=int, nargs="?", default=0, help="seed of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--every", action="store_true", help="every mutation, not one by chance")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop then, and sum up")
    parser.add_argument("--tally", type=int, default=20, metavar="N", help="sum up every N")
    return parser


def main() -> int:
    """Each protocol, sums, every contradiction; 1 if there is one, or if any N decides too
    little."""
    progress = _Progress(_parser().parse_args())
    asked = progress.asked
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGALRM, _stop)
    if asked.time_limit:
        signal.setitimer(signal.ITIMER_REAL, asked.time_limit)
    with multiprocessing.Pool(asked.jobs, _left_to_the_parent) as pool:
        how = "all"
        try:
            for done in pool.imap_unordered(_do, progress.tasks()):
                progress.take(done)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (_Stopped, KeyboardInterrupt):
            how = "stopped early"
        progress.sum_up(how)  # First: what ends the workers may be stopped too.
        for each in progress.wrong:
            print(each)
    return int(bool(progress.wrong) or decided(progress.tally) < DECIDED_MIN)


if __name__ == "__main__":
    raise SystemExit(main())
