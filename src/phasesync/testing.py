"""What every implementation of an interface must pass, ours and others'.

A check runs the promises of an interface against real implementations of it, and raises
AssertionError with the promise that was broken. It needs no test framework.
"""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self, TypeAlias

from phasesync.core.fence import judged_list, ticket_hash
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
from phasesync.errors import FenceBroken, FenceError, StaleArrival
from phasesync.fences.base import FenceTransport

__all__ = ("FENCE_PROMISES", "FenceWorld", "check_fence_transport")

MakeFences: TypeAlias = Callable[[str, Rank, int], FenceTransport]
Promise: TypeAlias = "Callable[[FenceWorld], Awaitable[None]]"

SHORT_S = 0.4  # A deadline that a check waits for.
LONG_S = 20.0  # A deadline that no check may wait for.
SOON_S = 5.0  # "At once", on a busy machine; far from any deadline of a check.
LAG_S_MAX = 0.25  # No step of a transport may keep the loop from others for longer.


async def check_fence_transport(make: MakeFences, *, size: int = 3, together: bool = False) -> None:
    """Hold a transport to every promise of `FenceTransport`, with `size` ranks.

    `make(run, rank, incarnation)` gives an endpoint that is not connected yet; endpoints of one
    run must meet. `together` checks most promises at once, which is quicker where it costs
    little to connect.

    Raises:
        AssertionError: a promise was broken; the message names it.
    """
    at_once = [p for p in FENCE_PROMISES if together and p not in ALONE]
    await asyncio.gather(*(_keep(promise, make, size) for promise in at_once))
    for promise in FENCE_PROMISES:
        if promise not in at_once:
            await _keep(promise, make, size)


async def _keep(promise: Promise, make: MakeFences, size: int) -> None:
    world = FenceWorld(make, size)
    try:
        async with asyncio.timeout(3 * LONG_S):
            await world.open()
            await promise(world)
    except Exception as error:
        raise AssertionError(f"{_title(promise)}: {_innermost(error)}") from error
    finally:
        await world.close()


@dataclass(eq=False)
class FenceWorld:
    """The ranks of one check, each with its endpoint, and the words they need."""

    make: MakeFences
    size: int
    run: str = field(default_factory=lambda: f"check-{secrets.token_hex(4)}")
    ends: dict[Rank, FenceTransport] = field(default_factory=dict)
    extra: list[FenceTransport] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(RoleName("trainer"), n) for n in range(self.size))

    async def open(self) -> None:
        for rank in self.ranks:
            self.ends[rank] = self.make(self.run, rank, 0)
        await asyncio.gather(*(end.connect() for end in self.ends.values()))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(end.close() for end in (*self.ends.values(), *self.extra)))

    async def newcomer(self, rank: Rank, incarnation: int) -> FenceTransport:
        end = self.make(self.run, rank, incarnation)
        self.extra.append(end)
        await end.connect()
        return end

    def call(
        self,
        generation: int = 0,
        *,
        scope: str = "world",
        deadline_s: float = LONG_S,
        members: Sequence[Rank] | None = None,
    ) -> FenceCall:
        return FenceCall(
            key=FenceKey(self.run, 0, scope, generation),
            fence=FenceName("memory_released"),
            epoch=Epoch(7),
            version=Version(7),
            digest=Digest("d1"),
            members=self.ranks if members is None else tuple(members),
            deadline_s=deadline_s,
        )

    async def arrive(
        self, rank: Rank, call: FenceCall, arrival: Arrival | None = None
    ) -> Opened | FenceError:
        """What the rank gets, as a value: the open fence, or the error."""
        try:
            return await self.ends[rank].arrive(call, arrival or arrives(call, rank))
        except FenceError as error:
            return error

    async def all_arrive(
        self, call: FenceCall, arrivals: Sequence[Arrival] = ()
    ) -> list[Opened | FenceError]:
        by_rank = {a.rank: a for a in arrivals}
        return await asyncio.gather(
            *(self.arrive(rank, call, by_rank.get(rank)) for rank in call.members)
        )


def arrives(call: FenceCall, rank: Rank, **changed: object) -> Arrival:
    """A healthy arrival of `rank`, with what is `changed`."""
    usual = {
        "nonce": secrets.token_hex(8),
        "seq": 100 + rank.number,
        "free_bytes": rank.number << 30,
    }
    return call.arrival(rank, **usual | changed)


def failure_of(rank: Rank) -> RootCause:
    return RootCause(
        kind="failed", ranks=(rank,), phase="offload", error_type="ValueError", error="no room"
    )


# --- The promises, each a check --------------------------------------------------------------


async def opens_for_all_with_one_ticket(world: FenceWorld) -> None:
    for generation in range(12):
        call = world.call(generation)
        given = [arrives(call, rank) for rank in world.ranks]
        got = await world.all_arrive(call, given)
        opened = [answer for answer in got if isinstance(answer, Opened)]
        _expect(len(opened) == world.size, f"generation {generation} did not open: {got}")
        tickets = {answer.ticket for answer in opened}
        _expect(len(tickets) == 1, f"tickets differ: {tickets}")
        expected = ticket_hash(judged_list(given))
        _expect(opened[0].ticket.hash == expected, "the ticket does not hash the judged list")
        _expect(opened[0].ticket.count == world.size, "the ticket counts the arrivals wrongly")
        deciders = [answer for answer in opened if answer.decided]
        _expect(len(deciders) == 1, f"{len(deciders)} ranks say that they decided, not 1")
        _expect(len(deciders[0].arrivals) == world.size, "who decided does not show what it judged")


async def does_not_open_before_the_last(world: FenceWorld) -> None:
    call = world.call()
    *early, last = world.ranks
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(world.arrive(rank, call)) for rank in early]
        await asyncio.sleep(SHORT_S / 2)
        _expect(not any(task.done() for task in waiting), "a rank passed before the last arrived")
        _expect(await _missing_becomes(world, call, (last,)), "`missing` does not name the last")
        waiting.append(group.create_task(world.arrive(last, call)))
    _expect(all(isinstance(task.result(), Opened) for task in waiting), "it did not open")
    missing = await world.ends[last].missing(call)
    _expect(missing == (), f"`missing` names {missing} at a fence to which all have come")


async def carries_payloads_to_all(world: FenceWorld) -> None:
    call = world.call()
    given = [arrives(call, r, payload=(("device", f"host/cpu{r.number}"),)) for r in world.ranks]
    for answer in await world.all_arrive(call, given):
        _expect(isinstance(answer, Opened), f"it did not open: {answer}")
        assert isinstance(answer, Opened)
        said = {a.rank: a.payload for a in answer.arrivals}
        _expect(said == {a.rank: a.payload for a in given}, "a rank did not get every payload")


async def a_late_rank_never_passes_alone(world: FenceWorld) -> None:
    call = world.call(deadline_s=SHORT_S)
    *early, late = world.ranks
    got = await asyncio.gather(*(world.arrive(rank, call) for rank in early))
    got.append(await world.arrive(late, call))
    causes = _causes(got)
    _expect(len(set(causes)) == 1, f"ranks saw different verdicts: {causes}")
    _expect(causes[0].kind == "deadline", f"it broke as {causes[0].kind!r}, not 'deadline'")
    _expect(causes[0].missing == (late,), f"it named {causes[0].missing} as missing, not {late}")


async def a_failed_arrival_reaches_everyone_at_once(world: FenceWorld) -> None:
    call = world.call()
    *well, sick = world.ranks
    failed = arrives(call, sick, cause=failure_of(sick))
    async with asyncio.timeout(SOON_S):
        got = await world.all_arrive(call, [failed])
    _expect(set(_causes(got)) == {failure_of(sick)}, f"not the one root cause: {got}")
    next_call = world.call(1)
    async with asyncio.timeout(SOON_S):
        again = await world.ends[sick].fail(next_call, replace(failed, nonce="second"))
        got = await asyncio.gather(*(world.arrive(rank, next_call) for rank in well))
    _expect(isinstance(again, Broken), "`fail` did not answer that the fence is broken")
    _expect(set(_causes(got)) == {failure_of(sick)}, "a failure told ahead was not seen")


async def an_odd_plan_is_named(world: FenceWorld) -> None:
    call = world.call()
    odd = world.ranks[1]
    given = [
        arrives(
            call,
            rank,
            digest="d2" if rank == odd else "d1",
            payload=(
                ("param_offload", "false" if rank == odd else "true"),
                ("device", f"host/cpu{rank.number}"),
            ),
        )
        for rank in world.ranks
    ]
    async with asyncio.timeout(SOON_S):
        causes = set(_causes(await world.all_arrive(call, given)))
    _expect(len(causes) == 1, f"ranks saw different verdicts: {causes}")
    cause = causes.pop()
    _expect(cause.kind == "digest", f"it broke as {cause.kind!r}, not 'digest'")
    if world.size > 2:
        _expect(cause.ranks == (odd,), f"it named {cause.ranks}, not {odd}")
        text = f"param_offload: false on {odd}, true on the others"
        _expect(cause.error == text, f"it said {cause.error!r}, not {text!r}")


async def an_odd_epoch_is_named(world: FenceWorld) -> None:
    call = world.call()
    odd = world.ranks[-1]
    async with asyncio.timeout(SOON_S):
        got = await world.all_arrive(call, [arrives(call, odd, epoch=Epoch(6))])
    cause = _causes(got)[0]
    _expect(cause.kind == "disagreement", f"it broke as {cause.kind!r}, not 'disagreement'")
    said = cause.error or ""
    _expect(said.startswith("epoch:") and f"6 on {odd}" in said, f"it does not name it: {said!r}")


async def a_cancelled_wait_breaks_the_fence(world: FenceWorld) -> None:
    call = world.call()
    leaver, *others = world.ranks
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(world.arrive(leaver, call))
        waiting = [group.create_task(world.arrive(rank, call)) for rank in others[:-1]]
        await asyncio.sleep(SHORT_S / 4)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(SOON_S):
            got = [await task for task in waiting]
            got.append(await world.arrive(others[-1], call))
    _expect(leaving.cancelled(), "the cancelled wait did not end as cancelled")
    _expect({c.kind for c in _causes(got)} == {"cancelled"}, f"not broken as cancelled: {got}")
    _expect(_causes(got)[0].ranks == (leaver,), "it does not name who was cancelled")


async def a_watch_hears_what_happens(world: FenceWorld) -> None:
    watcher, *others = world.ranks
    async with asyncio.TaskGroup() as group:
        call = world.call(0)
        watch = group.create_task(world.ends[watcher].watch(call))
        await asyncio.sleep(SHORT_S / 4)
        got = await world.all_arrive(call)
        _expect(all(isinstance(answer, Opened) for answer in got), f"not open: {got}")
        async with asyncio.timeout(SOON_S):
            _expect(isinstance(await watch, Opened), "the watch did not see the fence open")
        call = world.call(1)
        watch = group.create_task(world.ends[watcher].watch(call))
        await asyncio.sleep(SHORT_S / 4)
        sick = others[0]
        await world.ends[sick].fail(call, arrives(call, sick, cause=failure_of(sick)))
        async with asyncio.timeout(SOON_S):
            heard = await watch
    _expect(isinstance(heard, Broken), "the watch did not see the fence break")
    assert isinstance(heard, Broken)
    _expect(heard.cause == failure_of(sick), "the watch heard another cause")


async def a_watch_may_be_given_up(world: FenceWorld) -> None:
    call = world.call()
    watch = asyncio.ensure_future(world.ends[world.ranks[0]].watch(call))
    await asyncio.sleep(SHORT_S / 4)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    got = await world.all_arrive(call)
    _expect(all(isinstance(answer, Opened) for answer in got), f"it did not open: {got}")


async def a_lost_rank_breaks_what_it_keeps_shut(world: FenceWorld) -> None:
    *living, dead = world.ranks
    cause = RootCause(kind="dead", ranks=(dead,), phase="offload", error="killed by signal 9")
    opened = await world.all_arrive(world.call(0))
    _expect(all(isinstance(answer, Opened) for answer in opened), f"not open: {opened}")
    call = world.call(1)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(world.arrive(rank, call)) for rank in living]
        await asyncio.sleep(SHORT_S / 4)
        async with asyncio.timeout(SOON_S):
            await world.ends[living[0]].report_lost(cause, incarnation=0)
            got = [await task for task in waiting]
    _expect(set(_causes(got)) == {cause}, f"not broken by the loss: {got}")
    async with asyncio.timeout(SOON_S):
        for later in (world.call(2), world.call(0, scope="replica/0")):
            got = await asyncio.gather(*(world.arrive(rank, later) for rank in living))
            _expect(set(_causes(got)) == {cause}, f"a fence to come did not break: {got}")
        without = world.call(3, members=living)
        got = await world.all_arrive(without)
    _expect(all(isinstance(a, Opened) for a in got), f"a fence without it did not open: {got}")


async def a_new_incarnation_is_no_old_one(world: FenceWorld) -> None:
    first, *others = world.ranks
    call = world.call()
    newer = await world.newcomer(first, 1)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(world.arrive(rank, call)) for rank in world.ranks[:-1]]
        await asyncio.sleep(SHORT_S / 4)
        taken_over = group.create_task(
            _caught(newer.arrive(call, arrives(call, first, incarnation=1)))
        )
        await asyncio.sleep(SHORT_S / 4)
        waiting.append(group.create_task(world.arrive(others[-1], call)))
    got = [task.result() for task in (*waiting, taken_over)]
    kinds = {cause.kind for cause in _causes(got)}
    _expect(kinds == {"restarted"}, f"it broke as {kinds}, not 'restarted'")


async def a_second_arrival_is_no_first(world: FenceWorld) -> None:
    first, *_ = world.ranks
    call = world.call()
    twice = arrives(call, first)
    async with asyncio.TaskGroup() as group:
        one = group.create_task(world.arrive(first, call, twice))
        await asyncio.sleep(SHORT_S / 4)
        two = group.create_task(world.arrive(first, call, replace(twice, nonce="another")))
        await asyncio.sleep(SHORT_S / 4)
        waiting = [group.create_task(world.arrive(rank, call)) for rank in world.ranks[1:]]
    got = [task.result() for task in (one, two, *waiting)]
    kinds = {cause.kind for cause in _causes(got)}
    _expect(kinds == {"duplicate"}, f"it broke as {kinds}, not 'duplicate'")


async def an_old_verdict_releases_nobody(world: FenceWorld) -> None:
    call = world.call()
    sleeper = world.ranks[0]
    got = await world.all_arrive(call)
    _expect(all(isinstance(answer, Opened) for answer in got), f"it did not open: {got}")
    late = await world.arrive(sleeper, replace(call, deadline_s=SHORT_S), arrives(call, sleeper))
    _expect(isinstance(late, StaleArrival | FenceBroken), f"an old verdict released it: {late}")
    for generation in range(1, 12):
        got = await world.all_arrive(world.call(generation))
        _expect(all(isinstance(answer, Opened) for answer in got), f"it did not open: {got}")
    late = await world.arrive(sleeper, replace(call, deadline_s=SHORT_S), arrives(call, sleeper))
    _expect(isinstance(late, StaleArrival | FenceBroken), f"an old verdict released it: {late}")


async def scopes_do_not_meet(world: FenceWorld) -> None:
    one, two, *_ = world.ranks
    alone = [world.call(0, scope=f"replica/{r.number}", members=(r,)) for r in (one, two)]
    async with asyncio.timeout(SOON_S):
        got = [await world.arrive(rank, call) for rank, call in zip((one, two), alone, strict=True)]
    _expect(all(isinstance(answer, Opened) for answer in got), f"a scope of one waits: {got}")


async def the_event_loop_stays_free(world: FenceWorld) -> None:
    ticks: list[float] = []
    loop = asyncio.get_running_loop()

    async def ticker() -> None:
        while True:
            ticks.append(loop.time())
            await asyncio.sleep(0.005)

    ticking = asyncio.ensure_future(ticker())
    *early, last = world.ranks
    for generation in range(5):
        call = world.call(generation)
        waiting = [asyncio.ensure_future(world.arrive(rank, call)) for rank in early]
        await asyncio.sleep(0.05)
        await asyncio.gather(*waiting, world.arrive(last, call))
    ticking.cancel()
    lag = max(after - before for before, after in pairwise(ticks))
    _expect(lag < LAG_S_MAX, f"the event loop stood still for {lag:.2f} s")


async def closing_leaves_nothing_behind(world: FenceWorld) -> None:
    threads = set(threading.enumerate())
    tasks = asyncio.all_tasks()
    run = FenceWorld(world.make, world.size)
    await run.open()
    await run.all_arrive(run.call(0))
    watch = asyncio.ensure_future(run.ends[run.ranks[0]].watch(run.call(1)))
    await asyncio.sleep(SHORT_S / 4)
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    await run.close()
    async with asyncio.timeout(SOON_S):
        while set(threading.enumerate()) - threads or asyncio.all_tasks() - tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


FENCE_PROMISES: tuple[Promise, ...] = (
    opens_for_all_with_one_ticket,
    does_not_open_before_the_last,
    carries_payloads_to_all,
    a_late_rank_never_passes_alone,
    a_failed_arrival_reaches_everyone_at_once,
    an_odd_plan_is_named,
    an_odd_epoch_is_named,
    a_cancelled_wait_breaks_the_fence,
    a_watch_hears_what_happens,
    a_watch_may_be_given_up,
    a_lost_rank_breaks_what_it_keeps_shut,
    a_new_incarnation_is_no_old_one,
    a_second_arrival_is_no_first,
    an_old_verdict_releases_nobody,
    scopes_do_not_meet,
    the_event_loop_stays_free,
    closing_leaves_nothing_behind,
)


# These look at the whole process.
ALONE = (the_event_loop_stays_free, closing_leaves_nothing_behind)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _title(promise: Callable[..., object]) -> str:
    return promise.__name__.replace("_", " ")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _causes(got: Sequence[Opened | FenceError]) -> list[RootCause]:
    for answer in got:
        _expect(isinstance(answer, FenceBroken), f"not broken for all: {got}")
    return [answer.cause for answer in got if isinstance(answer, FenceBroken)]


async def _caught(arriving: Awaitable[Opened]) -> Opened | FenceError:
    try:
        return await arriving
    except FenceError as error:
        return error


async def _missing_becomes(world: FenceWorld, call: FenceCall, expected: tuple[Rank, ...]) -> bool:
    """Whether `missing` comes to name just the `expected`; arrivals take a moment."""
    missing: tuple[Rank, ...] = ()
    loop = asyncio.get_running_loop()
    until = loop.time() + SOON_S
    while missing != expected and loop.time() < until:
        missing = await world.ends[world.ranks[0]].missing(call)
        await asyncio.sleep(0.01)
    return missing == expected
