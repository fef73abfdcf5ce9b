"""Ranks that go through fences, as processes: over a store, and at a coordinator.

They note each arrival that has come and each verdict that they see; what must hold reads the notes.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeAlias

from phasesync.checker.messages import (
    Arrives,
    Cast,
    ComesBack,
    Expires,
    Hears,
    Loses,
    Moment,
    Note,
    Process,
    View,
    coordinator,
)
from phasesync.core.fence import Lost, judge
from phasesync.core.fence_keys import Append, Space, writer
from phasesync.core.fence_loss import reporting
from phasesync.core.fence_steps import Passed, arriving, connecting, expiring
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
Arriving: TypeAlias = Callable[..., Life]
SPACE = Space.of("r", 0)


def ranks(size: int) -> tuple[Rank, ...]:
    return tuple(Rank(RoleName("t"), number) for number in range(size))


def call(size: int, generation: int, fence: str = "f") -> FenceCall:
    return FenceCall(
        key=FenceKey("r", 0, "world", generation),
        fence=FenceName(fence),
        epoch=Epoch(generation),
        version=Version(0),
        digest=Digest("d"),
        members=ranks(size),
        deadline_s=1.0,
    )


def arrival(rank: Rank, generation: int, incarnation: int = 0, fence: str = "f") -> Arrival:
    return Arrival(
        rank=rank,
        incarnation=incarnation,
        nonce=f"{rank}.{incarnation}@{generation}",
        fence=FenceName(fence),
        epoch=Epoch(generation),
        version=Version(0),
        digest=Digest("d"),
        seq=generation,
    )


def told(generation: int, answer: Opened | Broken | None) -> Note:
    """What a rank is told: the verdict, or that nobody judged its arrival."""
    match answer:
        case Opened(ticket=ticket):
            return Note(("open", generation, ticket.hash))
        case Broken(cause=cause):
            return Note(("broken", generation, str(cause)))
        case None:
            return Note(("unjudged", generation))


def life(
    size: int,
    rank: Rank,
    generations: range,
    incarnation: int = 0,
    *,
    fence: str = "f",
    arrive: Arriving = arriving,
) -> Callable[[], Life]:
    """A rank over a store."""

    def steps() -> Life:
        yield from connecting(SPACE, rank, incarnation, nonce=str(rank))
        register, opened = True, None
        for generation in generations:
            asked = call(size, generation, fence)
            own = arrival(rank, generation, incarnation, fence)
            passed = yield from noted(
                arrive(SPACE, asked, own, register=register, opened_before=opened, wait=True),
                generation,
            )
            assert isinstance(passed, Passed)
            yield told(generation, passed.answer)
            register = not isinstance(passed.answer, Opened)
            opened = opened if register else generation

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


def hub_life(
    size: int, rank: Rank, generations: range, incarnation: int = 0, *, fence: str = "f"
) -> Callable[[], Life]:
    """A rank at a coordinator."""

    def steps() -> Life:
        if incarnation:
            yield ComesBack(rank, incarnation)
        for generation in generations:
            asked = call(size, generation, fence)
            own = arrival(rank, generation, incarnation, fence)
            yield Arrives(asked, own)
            yield Note(("arrived", generation))
            verdict, judged = yield Hears(asked, own)
            passes = judged or isinstance(verdict, Broken)
            yield told(generation, verdict if passes else None)

    return steps


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
    """So many ranks; `mortal` may die or lose a message, `at` is `hub` for a coordinator."""
    own = settings.pop("at", "store")
    make = settings.pop("life", life if own == "store" else hub_life)
    return Cast(
        processes=tuple(
            Process(str(rank), make(size, rank, range(generations)), may_crash=number in mortal)
            for number, rank in enumerate(ranks(size))
        )
        + settings.pop("more", ()),
        medium=None if own == "store" else coordinator(),
        always=settings.pop("always", one_verdict(size)),
        at_end=settings.pop("at_end", all_end),
        **settings,
    )


def gone(rank: Rank) -> Lost:
    cause = RootCause(kind="dead", ranks=(rank,), error="killed")
    return Lost(rank=rank, incarnation=0, cause=cause)


def watcher(rank: Rank, at: str = "store", *, wrongly: bool = False) -> Process:
    """Whoever watches processes finds the rank gone at any time after its end, or `wrongly`."""
    lost = gone(rank)
    return Process(
        f"watcher of {rank}",
        lambda: reporting(SPACE, lost) if at == "store" else iter_of(Loses(lost)),
        when=lambda view: wrongly or str(rank) in view.crashed | view.cut,
    )


def deadline(size: int, rank: Rank, generation: int, at: str = "store") -> Process:
    """A rank's patience ends, at any time while it waits."""
    asked = call(size, generation)
    return Process(
        f"deadline of {rank}",
        lambda: (
            expiring(SPACE, asked, writer(rank, 0), {})
            if at == "store"
            else iter_of(Expires(asked, rank))
        ),
        when=lambda view: str(rank) in view.waits,
    )


def iter_of(request: Any) -> Life:
    yield request


# --- A rank that comes back --------------------------------------------------------------------


def restarted(
    epochs: int,
    at: str = "store",
    *,
    crash: bool | Moment = True,
    patience: bool = True,
    arrive: Arriving = arriving,
) -> Cast:
    """Two ranks, of which the first may die at the moments of `crash`; a later incarnation of it
    comes to the last fence.

    It may be back before its peer has learned of the death: with `patience` a deadline at the first
    fence ends that peer's wait. The later incarnation comes by `arrive`.
    """
    first, peer = ranks(2)
    last = range(epochs - 1, epochs)
    again = (
        life(2, first, last, incarnation=1, arrive=arrive)
        if at == "store"
        else hub_life(2, first, last, incarnation=1)
    )
    more = (
        watcher(first, at),
        *([deadline(2, peer, 0, at)] if patience else []),
        Process(f"{first}.1", again, when=lambda view: f"watcher of {first}" in view.ended),
    )
    players = cast(2, epochs, at=at, crashes=1, more=more, always=_by_its_own_arrival(epochs - 1))
    dies = players.processes[0]._replace(may_crash=crash)
    alive = players.processes[1]._replace(may_crash=False)
    return replace(players, processes=(dies, alive, *players.processes[2:]))


def _by_its_own_arrival(generation: int) -> Callable[[View], str | None]:
    """One verdict, and each incarnation passes with a ticket that its own arrival is in."""
    first, peer = ranks(2)
    tickets: list[str] = []
    for incarnation in (0, 1):
        arrivals = (arrival(first, generation, incarnation), arrival(peer, generation))
        opened = judge(call(2, generation), arrivals)
        assert isinstance(opened, Opened)
        tickets.append(opened.ticket.hash)
    by_name = {str(first): tickets[0], f"{first}.1": tickets[1]}

    def always(view: View) -> str | None:
        for name, own in by_name.items():
            for note in view.notes.get(name, ()):
                if note[:2] == ("open", generation) and note[2] != own:
                    return f"{name} passes by an arrival that is not its own"
        return one_verdict(2)(view)

    return always


def in_the_second_epoch(notes: tuple[tuple[Any, ...], ...], _operation: Any) -> bool:
    """A moment to crash at: the first fence is passed, and whatever comes after that."""
    return len(notes) >= 2


def before_it_arrives(_notes: tuple[tuple[Any, ...], ...], operation: Any) -> bool:
    """A moment to crash at: the first arrival is about to be written."""
    return isinstance(operation, Append) and operation.key == SPACE.at("world", 0).log
