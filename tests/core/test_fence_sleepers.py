"""A rank that is stopped between two operations on the store, and wakes when the others are far on.

Wherever it stood, and however many fences went by meanwhile: it passes only where the others passed
with it, it is told what there is to tell, and once all have left there is no key.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from tests.core.test_fence_steps import SPACE, DictStore, World

from phasesync.core.fence import Lost, cancelled, encode_arrival
from phasesync.core.fence_keys import Tell, Verdict, Wait, writer
from phasesync.core.fence_loss import leaving, reporting
from phasesync.core.fence_steps import (
    COLLECTED_MAX,
    VERDICTS_KEPT,
    Brought,
    Passed,
    admitting,
    arriving,
    bringing,
    connecting,
    expiring,
    failing,
)
from phasesync.core.model import Arrival, FenceCall, Opened, Rank, RootCause

SIZE = 3
AT = 2  # The fence that it sleeps at.
FOR_EVER = 99  # Until the others have left, and the run is swept.
FAR = VERDICTS_KEPT + COLLECTED_MAX + 3  # Nothing is swept that is further back.
LAGS = (0, 1, 2, *range(VERDICTS_KEPT - 1, VERDICTS_KEPT + 3), FOR_EVER)
Steps = Generator[Any, Any, Any]
WAITS = object()


@dataclass
class Walk:
    """Steps on a store, as far as they get without anybody else."""

    store: DictStore
    steps: Steps
    pending: Any = None
    result: Any = WAITS

    def __post_init__(self) -> None:
        self._go(None)

    def go(self, operations: int = 1000) -> Any:
        """So many operations, or fewer where it waits; what came of it, or `WAITS`."""
        while operations and not self.is_blocked:
            operations -= 1
            self._go(self.store.perform(self.pending))
        return self.result

    @property
    def is_blocked(self) -> bool:
        """Whether it is over, or waits for what is not there."""
        waits = isinstance(self.pending, Wait) and self.pending.key not in self.store.values
        return waits or self.result is not WAITS

    def _go(self, reply: Any) -> None:
        told = self.pending.result if isinstance(self.pending, Tell) else WAITS
        try:
            self.pending = self.steps.send(reply)
        except StopIteration as end:
            self.result = end.value if told is WAITS else told


@dataclass
class Run:
    """Three ranks on a store, of which the first is the sleeper."""

    store: DictStore = field(default_factory=DictStore)
    world: World = field(default_factory=lambda: World(size=SIZE, generations=0))
    opened: dict[Rank, int] = field(default_factory=dict)
    nonces: dict[Rank, str] = field(default_factory=dict)

    @property
    def sleeper(self) -> Rank:
        return self.world.ranks[0]

    @property
    def others(self) -> list[Rank]:
        return self.world.ranks[1:]

    def do(self, steps: Steps) -> Any:
        result = Walk(self.store, steps).go()
        assert result is not WAITS
        return result

    def arrive(self, call: FenceCall, arrival: Arrival, *, register: bool = False) -> Walk:
        before = self.opened.get(arrival.rank) if arrival.incarnation == 0 else None
        steps = arriving(SPACE, call, arrival, register=register, opened_before=before, wait=True)
        return Walk(self.store, steps)

    def meet(self, call: FenceCall, arrivals: Sequence[Arrival], *, register: bool = False) -> Any:
        """All of these come, and wait until a deadline for who does not. The answer."""
        walks = [self.arrive(call, each, register=register) for each in arrivals]
        return self.end(call, arrivals, walks)

    def end(
        self,
        call: FenceCall,
        arrivals: Sequence[Arrival],
        walks: Sequence[Walk],
        end: "End | None" = None,
    ) -> Any:
        """They go on until they are through; where one waits, this is how it ends. The answer."""
        for walk in walks:
            walk.go()
        if any(walk.go() is WAITS for walk in walks):
            self.do((end or _deadline)(call, arrivals[0]))
        answers = {type(walk.go().answer) for walk in walks}
        assert len(answers) == 1, answers
        for walk, arrival in zip(walks, arrivals, strict=True):
            if isinstance(walk.result.answer, Opened):
                self.opened[arrival.rank] = call.key.generation
        return walks[0].result.answer


End = Callable[[FenceCall, Arrival], Steps]


def _deadline(call: FenceCall, arrival: Arrival) -> Steps:
    return expiring(SPACE, call, writer(arrival.rank, 0), {})


def _cancelled(call: FenceCall, arrival: Arrival) -> Steps:
    return failing(SPACE, call, cancelled(call, arrival))


ENDS: tuple[End, ...] = (_deadline, _cancelled)


# --- Where it is stopped: the steps of its fence, made when all have passed those before ----------


def _arrives(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    return arriving(
        SPACE, call, arrival, register=False, opened_before=run.opened[arrival.rank], wait=True
    )


def _registers(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    return arriving(SPACE, call, arrival, register=True, opened_before=None, wait=True)


def _brings_all(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    """It has the arrivals of all in its hands; the others pass it by and come with theirs."""
    arrivals = [arrival, *(run.world.arrival(rank, AT) for rank in run.others)]
    lines = b"".join(map(encode_arrival, arrivals))
    return bringing(
        SPACE,
        call,
        arrivals,
        writer(arrival.rank, 0),
        lines=lines,
        whole=arrivals,
        whole_bytes=len(lines),
        register=False,
        opened_before=run.opened[arrival.rank],
    )


def _brings_two(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    """It has those of its host in its hands; one is elsewhere."""
    arrivals = [arrival, run.world.arrival(run.others[0], AT)]
    lines = b"".join(map(encode_arrival, arrivals))
    return bringing(
        SPACE,
        call,
        arrivals,
        writer(arrival.rank, 0),
        lines=lines,
        register=False,
        opened_before=run.opened[arrival.rank],
    )


def _expires(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    """It handed its arrival over, and its deadline has passed."""
    return expiring(SPACE, call, writer(arrival.rank, 0), {}, own=arrival)


def _fails(run: Run, call: FenceCall, arrival: Arrival) -> Steps:
    cause = RootCause(kind="failed", ranks=(arrival.rank,))
    return failing(SPACE, call, replace(arrival, cause=cause))


SLEEPS: Mapping[str, Callable[[Run, FenceCall, Arrival], Steps]] = {
    "arrives": _arrives,
    "registers": _registers,
    "brings all": _brings_all,
    "brings two": _brings_two,
    "expires": _expires,
    "fails": _fails,
}


# --- What the others do meanwhile -----------------------------------------------------------------


def _break_each(run: Run, generation: int) -> None:
    """The same members: each fence breaks at its deadline."""
    arrivals = [run.world.arrival(rank, generation) for rank in run.others]
    run.meet(run.world.call(generation), arrivals, register=True)


def _go_without(run: Run, generation: int) -> None:
    """They are the only members from now on."""
    call = replace(run.world.call(generation), members=tuple(run.others))
    arrivals = [run.world.arrival(rank, generation) for rank in run.others]
    answer = run.meet(call, arrivals, register=generation == AT + 1)
    assert isinstance(answer, Opened)


def _replace_it(run: Run, generation: int) -> None:
    """Another incarnation has taken its place."""
    if generation == AT + 1:
        run.do(connecting(SPACE, run.sleeper, 1, nonce="back"))
    arrivals = [run.world.arrival(rank, generation) for rank in run.world.ranks]
    arrivals[0] = replace(arrivals[0], incarnation=1)
    answer = run.meet(run.world.call(generation), arrivals, register=generation == AT + 1)
    assert isinstance(answer, Opened)


MEANWHILE = {"break": _break_each, "without it": _go_without, "replaced": _replace_it}


def leave(run: Run, rank: Rank, last: int) -> None:
    first = max(min(run.opened.get(rank, 0) - VERDICTS_KEPT, AT), 0)
    run.do(leaving(SPACE, rank, {"world": (first, last)}, peers=SIZE))


def answer_of(run: Run, call: FenceCall, arrival: Arrival, walk: Walk) -> Any:
    """What the sleeper is told when it goes on, and its deadline passes if it waits."""
    came = walk.go()
    if isinstance(came, Brought):
        verdict = came.verdict
        if verdict is None:
            verdict = run.do(expiring(SPACE, call, writer(arrival.rank, 0), {}))
        if verdict is None or came.ruling is not None:
            return came.ruling
        return run.do(admitting(SPACE, call, arrival, came.order, verdict)).answer
    if came is WAITS:
        verdict = run.do(expiring(SPACE, call, writer(arrival.rank, 0), {}))
        if verdict is None:
            return None
        came = walk.go()
    if isinstance(came, Verdict):
        return run.do(admitting(SPACE, call, arrival, None, came)).answer
    return came.answer if isinstance(came, Passed) else came


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("sleeps", SLEEPS)
def test_a_sleeper_passes_with_the_others_or_not_at_all(sleeps: str, meanwhile: str) -> None:
    for lag, end, is_last in (*product(LAGS, ENDS, (False, True)), (FAR, _deadline, True)):
        operations, is_over = 0, False
        while not is_over:
            is_over = sleep(sleeps, meanwhile, operations, lag, end=end, is_last=is_last)
            operations += 1


def sleep(
    sleeps: str, meanwhile: str, operations: int, lag: int, *, end: End, is_last: bool
) -> bool:
    """Play one, where the sleeper comes to its fence before or after the others; whether it had
    nothing left to do when it fell asleep."""
    run = Run()
    for rank in run.world.ranks:
        run.do(connecting(SPACE, rank, 0, nonce=str(rank)))
    for generation in range(AT):
        arrivals = [run.world.arrival(rank, generation) for rank in run.world.ranks]
        run.meet(run.world.call(generation), arrivals, register=generation == 0)
    call, arrival = run.world.call(AT), run.world.arrival(run.sleeper, AT)
    arrivals = [run.world.arrival(rank, AT) for rank in run.others]
    come = [run.arrive(call, each, register=True) for each in arrivals]
    if is_last:
        for each in come:
            each.go()
    walk = Walk(run.store, SLEEPS[sleeps](run, call, arrival))
    walk.go(operations)
    is_over = walk.is_blocked
    others = run.end(call, arrivals, come, end)
    last = AT + (VERDICTS_KEPT + 4 if lag == FOR_EVER else lag)
    for generation in range(AT + 1, last + 1):
        MEANWHILE[meanwhile](run, generation)
    if lag == FOR_EVER:
        cause = RootCause(kind="dead", ranks=(run.sleeper,))
        run.do(reporting(SPACE, Lost(rank=run.sleeper, incarnation=0, cause=cause)))
        for rank in run.others:
            leave(run, rank, last + 1)
    said = (sleeps, meanwhile, operations, lag, end.__name__, is_last)
    told = answer_of(run, call, arrival, walk)
    if isinstance(told, Opened):
        assert isinstance(others, Opened), (*said, told)
        assert told.ticket == others.ticket, (*said, told)
    elif isinstance(others, Opened) and sleeps != "fails":
        assert told is None, (*said, told)
    leave(run, run.sleeper, AT)
    if lag != FOR_EVER:
        for rank in run.others:
            leave(run, rank, last)
    assert run.store.values == {}, (*said, sorted(run.store.values))
    return is_over


def test_a_head_that_is_put_on_when_all_was_swept_begins_no_fence_anew() -> None:
    """A second process of a rank decided, and is slow to tidy up; all have left by then."""
    run = Run()
    for rank in run.world.ranks:
        run.do(connecting(SPACE, rank, 0, nonce=str(rank)))
    call = run.world.call(0)
    come = [run.arrive(call, run.world.arrival(rank, 0), register=True) for rank in run.others]
    for each in come:
        each.go()
    own = run.world.arrival(run.sleeper, 0)
    twin = run.arrive(call, replace(own, nonce="twin"), register=True)
    verdict = SPACE.at("world", 0).verdict
    while verdict not in run.store.values:
        twin.go(1)
    twin.go(2)  # It has seen that the fence is not over.
    assert all(isinstance(each.go().answer, Opened) for each in come)
    for rank in run.world.ranks:
        leave(run, rank, 0)
    assert run.store.values == {}
    assert isinstance(twin.go().answer, Opened)
    assert run.store.values == {SPACE.head("world"): b"0"}
    late = run.arrive(call, own, register=False).go()
    assert (late.answer, late.verdict.broken) == (None, None)
    assert run.do(expiring(SPACE, call, writer(run.sleeper, 0), {}, own=own)) is None
    leave(run, run.sleeper, 0)
    assert run.store.values == {}
