"""The fence's own steps on a store, in every order, with a death between any two operations."""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from phasesync.checker.messages import Cast, Note, Process, View, explore_messages
from phasesync.checker.search import Budget
from phasesync.core.fence import Lost
from phasesync.core.fence_keys import Add, Append, CompareSet, Space, Wait, writer
from phasesync.core.fence_loss import reporting
from phasesync.core.fence_steps import Passed, arriving, connecting, expiring, failing
from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    RoleName,
    RootCause,
    Version,
)

Life: TypeAlias = Generator[Any, Any, Any]
SPACE = Space.of("r", 0)
STATES = Budget(states_max=400_000)


def ranks(size: int) -> tuple[Rank, ...]:
    return tuple(Rank(RoleName("t"), number) for number in range(size))


def call(size: int, generation: int) -> FenceCall:
    return FenceCall(
        key=FenceKey("r", 0, "world", generation),
        fence=FenceName("f"),
        epoch=Epoch(generation),
        version=Version(0),
        digest=Digest("d"),
        members=ranks(size),
        deadline_s=1.0,
    )


def arrival(rank: Rank, generation: int, incarnation: int = 0) -> Arrival:
    return Arrival(
        rank=rank,
        incarnation=incarnation,
        nonce=f"{rank}.{incarnation}@{generation}",
        fence=FenceName("f"),
        epoch=Epoch(generation),
        version=Version(0),
        digest=Digest("d"),
        seq=generation,
    )


def life(size: int, rank: Rank, generations: range, incarnation: int = 0) -> Callable[[], Life]:
    """A rank goes through fences, and notes each arrival that is in the log and each verdict."""

    def steps() -> Life:
        yield from connecting(SPACE, rank, incarnation, nonce=str(rank))
        register, opened = True, None
        for generation in generations:
            passed = yield from noted(
                arriving(
                    SPACE,
                    call(size, generation),
                    arrival(rank, generation, incarnation),
                    register=register,
                    opened_before=opened,
                    wait=True,
                ),
                generation,
            )
            assert isinstance(passed, Passed)
            match passed.answer:
                case Opened(ticket=ticket):
                    yield Note(("open", generation, ticket.hash))
                    register, opened = False, generation
                case Broken(cause=cause):
                    yield Note(("broken", generation, str(cause)))
                    register = True
                case None:
                    yield Note(("unjudged", generation))

    return steps


def noted(steps: Life, generation: int) -> Life:
    log = SPACE.at("world", generation).log
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as end:
            return end.value
        reply = yield operation
        if isinstance(operation, Append) and operation.key == log:
            yield Note(("arrived", generation))


def one_verdict(size: int) -> Callable[[View], str | None]:
    """Nobody passes unless all arrived, and no two see different verdicts."""

    def always(view: View) -> str | None:
        verdicts: dict[int, set[tuple[Any, ...]]] = {}
        arrived: dict[int, set[str]] = {}
        for name, notes in view.notes.items():
            for note in notes:
                if note[0] == "arrived":
                    arrived.setdefault(note[1], set()).add(name.split(".")[0])
                elif note[0] in {"open", "broken"}:
                    verdicts.setdefault(note[1], set()).add(note)
        for generation, seen in verdicts.items():
            if len(seen) > 1:
                return f"generation {generation} has two verdicts: {sorted(map(str, seen))}"
            if next(iter(seen))[0] == "open" and len(arrived.get(generation, ())) < size:
                return f"generation {generation} opened before all arrived"
        return None

    return always


def all_end(view: View) -> str | None:
    left = view.waits - view.crashed
    return f"waits for ever: {sorted(left)}" if left else None


def cast(size: int, generations: int, mortal: tuple[int, ...] = (0, 1), **settings: Any) -> Cast:
    return Cast(
        processes=tuple(
            Process(str(rank), life(size, rank, range(generations)), may_crash=number in mortal)
            for number, rank in enumerate(ranks(size))
        )
        + settings.pop("more", ()),
        always=settings.pop("always", one_verdict(size)),
        at_end=settings.pop("at_end", all_end),
        **settings,
    )


def watcher(rank: Rank) -> Process:
    """Whoever watches processes finds the rank dead, at any time after its death."""
    cause = RootCause(kind="dead", ranks=(rank,), error="killed")
    lost = Lost(rank=rank, incarnation=0, cause=cause)
    return Process(
        f"watcher of {rank}",
        lambda: reporting(SPACE, lost),
        when=lambda view: str(rank) in view.crashed,
    )


def deadline(size: int, rank: Rank, generation: int) -> Process:
    """A rank's patience ends, at any time while it waits."""
    return Process(
        f"deadline of {rank}",
        lambda: expiring(SPACE, call(size, generation), writer(rank, 0), {}),
        when=lambda view: str(rank) in view.waits,
    )


def test_two_ranks_two_epochs_in_every_order() -> None:
    found = explore_messages(cast(2, 2), STATES)
    assert (found.wrong, found.bound) == (None, None)
    assert (found.states, found.ends) == (477, 32)


def test_three_ranks_in_every_order() -> None:
    found = explore_messages(cast(3, 1), STATES)
    assert (found.wrong, found.bound) == (None, None)


def test_a_death_between_any_two_operations_is_known_by_its_watcher() -> None:
    """The last to arrive may die before it opens the fence; both ranks may be the one that dies."""
    more = tuple(watcher(rank) for rank in ranks(2))
    found = explore_messages(cast(2, 2, crashes=1, more=more), STATES)
    assert (found.wrong, found.bound) == (None, None)


def test_a_deadline_at_any_moment_splits_no_verdict() -> None:
    more = tuple(deadline(2, rank, 0) for rank in ranks(2))
    found = explore_messages(cast(2, 1, crashes=1, more=more), STATES)
    assert (found.wrong, found.bound) == (None, None)


def test_a_message_that_comes_twice_counts_once() -> None:
    found = explore_messages(cast(2, 1, repeats=1), STATES)
    assert (found.wrong, found.bound) == (None, None)


def test_a_late_failure_breaks_nothing_that_is_open() -> None:
    cause = RootCause(kind="cancelled", ranks=(ranks(2)[0],))
    late = replace(arrival(ranks(2)[0], 0), cause=cause, nonce="late")
    more = (Process("late", lambda: failing(SPACE, call(2, 0), late)),)
    found = explore_messages(cast(2, 2, more=more), STATES)
    assert (found.wrong, found.bound) == (None, None)


def test_a_restarted_rank_does_not_take_the_place_of_its_older_self() -> None:
    """The older one dies at any point; the new one comes to the same fence."""
    first = ranks(2)[0]
    more = (
        watcher(first),
        Process(
            f"{first}.1",
            life(2, first, range(1), incarnation=1),
            when=lambda view: f"watcher of {first}" in view.ended,
        ),
    )
    found = explore_messages(cast(2, 1, mortal=(0,), crashes=1, more=more), STATES)
    assert (found.wrong, found.bound) == (None, None)


def _anonymous(space: Space, call: FenceCall, arrival: Arrival, **_: Any) -> Life:
    """A fence that only counts: whoever comes when the count is full opens it."""
    at = space.at(call.key.scope, 0)
    yield Append(space.at(call.key.scope, call.key.generation).log, b"x\n")
    order = yield Add(at.counter, 1)
    if order >= len(call.members):
        yield CompareSet(at.verdict, b"open")
    text = yield Wait(at.verdict)
    yield Note(("open", call.key.generation, text))
    return Passed(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("generations", [1, 2], ids=["one epoch", "key reused"])
def test_a_reused_key_is_found(generations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "arriving", _anonymous)
    found = explore_messages(cast(2, generations), STATES)
    wrong = None if generations == 1 else "generation 1 opened before all arrived"
    assert found.wrong == wrong


def test_a_failure_without_a_status_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: who dies is never reported, so that its peer waits for ever."""
    found = explore_messages(cast(2, 1, crashes=1), STATES)
    assert found.wrong is not None
    assert "waits for ever" in found.wrong
    assert found.path[-1].endswith("crashes") or "crashes" in " ".join(found.path)
