"""What scopes promise, over every transport: who meets whom follows the members of a call alone.

Each promise is checked with `SIZE` ranks, of which `HOSTS` says who shares a host: a transport that
lets ranks of one host come together does so here, within scopes that lie on one host, over two, or
on a part of each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from phasesync.core.model import Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import FenceBroken, FenceError
from phasesync.testing import FenceWorld, arrives, failure_of

__all__ = ("HOSTS", "SCOPE_PROMISES", "SIZE", "host_of")

SIZE = 6
HOSTS = ((0, 1, 2, 3), (4, 5))
ROUNDS = 5  # By then ranks of one host have found each other, where they do.
FIND_S = 0.03
SOON_S = 10.0

Parts: TypeAlias = tuple[tuple[int, ...], ...]
Promise: TypeAlias = Callable[[FenceWorld], Awaitable[None]]


def host_of(rank: Rank) -> str:
    """The host of a rank; who is in no list is on a host of its own."""
    at = next((n for n, ranks in enumerate(HOSTS) if rank.number in ranks), rank.number)
    return f"host-{at}"


def members_of(world: FenceWorld, part: Sequence[int]) -> tuple[Rank, ...]:
    return tuple(world.ranks[at] for at in part)


async def meet(world: FenceWorld, call: FenceCall) -> list[Opened | FenceError]:
    async with asyncio.timeout(SOON_S):
        return await world.all_arrive(call)


async def opens(world: FenceWorld, call: FenceCall) -> None:
    """All members pass with one ticket, which counts them and nobody else."""
    got = await meet(world, call)
    tickets = {each.ticket for each in got if isinstance(each, Opened)}
    assert len(got) == len(call.members)
    assert all(isinstance(each, Opened) for each in got), f"{call.key}: {got}"
    assert {(t.key, t.count) for t in tickets} == {(call.key, len(call.members))}, tickets
    assert len(tickets) == 1, tickets


# --- Groups that share nobody: replicas, nodes ---------------------------------------------------

PARTS: dict[str, Parts] = {
    "two replicas on one host": ((0, 1), (2, 3), (4, 5)),
    "a replica over two hosts": ((0, 4), (1, 5), (2, 3)),
    "uneven replicas": ((0,), (1, 2, 4), (3, 5)),
    "nodes": HOSTS,
}


def calls_of(world: FenceWorld, parts: Parts, generation: int) -> list[FenceCall]:
    return [
        world.call(generation, scope=f"replica/{n}", members=members_of(world, part))
        for n, part in enumerate(parts)
    ]


async def parts_open_on_their_own(world: FenceWorld) -> None:
    """Each opens while nobody of another one has come, in any order; then all meet as the world."""
    everyone = 0
    for number, parts in enumerate(PARTS.values()):
        for turn in range(ROUNDS):
            calls = calls_of(world, parts, number * ROUNDS + turn)
            for call in calls[:: 1 if turn % 2 else -1]:
                onlooker = world.ends[world.ranks[0]]
                assert await onlooker.missing(call) == tuple(sorted(call.members))
                await opens(world, call)
            await opens(world, world.call(everyone))
            everyone += 1
            await asyncio.sleep(FIND_S)


async def a_break_stays_in_its_scope(world: FenceWorld) -> None:
    """Others open as if nothing were, and so does the next fence of the scope itself."""
    generation = 0
    for parts in PARTS.values():
        for _ in range(ROUNDS):
            await asyncio.gather(*(opens(world, c) for c in calls_of(world, parts, generation)))
            await asyncio.sleep(FIND_S)
            generation += 1
        for number, part in enumerate(parts):
            calls = calls_of(world, parts, generation)
            broken = calls.pop(number)
            sick = world.ranks[part[-1]]
            failed = arrives(broken, sick, cause=failure_of(sick))
            async with asyncio.timeout(SOON_S):
                breaking = asyncio.ensure_future(world.all_arrive(broken, [failed]))
                await asyncio.gather(*(opens(world, call) for call in calls))
                got = await breaking
            causes = {each.cause if isinstance(each, FenceBroken) else each for each in got}
            assert causes == {failure_of(sick)}, got
            generation += 1


# --- Named groups, which share members -----------------------------------------------------------

GROUPS: dict[str, tuple[int, ...]] = {
    "evens/0": (0, 2, 4),
    "ends/0": (0, 5),
    "middle/0": (1, 2, 3, 4),
    "world": (0, 1, 2, 3, 4, 5),
}


async def named_groups_count_by_themselves(world: FenceWorld) -> None:
    """Each has generations of its own, however often the others have met."""
    met = dict.fromkeys(GROUPS, 0)
    for turn in range(4 * ROUNDS):
        for at, (scope, part) in enumerate(GROUPS.items()):
            if turn % (at + 1) == 0:
                call = world.call(met[scope], scope=scope, members=members_of(world, part))
                await opens(world, call)
                met[scope] += 1
        await asyncio.sleep(FIND_S / 4)
    assert len(set(met.values())) == len(GROUPS), met


async def one_rank_waits_in_one_scope_for_who_waits_in_another(world: FenceWorld) -> None:
    """0 waits for 5 in `ends`, 2 and 4 wait for 0 in `evens`: neither is in the other's way."""
    evens, ends = (members_of(world, GROUPS[name]) for name in ("evens/0", "ends/0"))
    first, last = ends
    for generation in range(ROUNDS):
        at_evens = world.call(generation, scope="evens/0", members=evens)
        at_ends = world.call(generation, scope="ends/0", members=ends)
        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
            waiting = [group.create_task(world.arrive(rank, at_evens)) for rank in evens[1:]]
            waiting.append(group.create_task(world.arrive(first, at_ends)))
            await asyncio.sleep(FIND_S)
            assert not any(task.done() for task in waiting)
            assert isinstance(await world.arrive(last, at_ends), Opened)
            assert isinstance(await world.arrive(first, at_evens), Opened)
        assert all(isinstance(task.result(), Opened) for task in waiting)


# --- Members that change -------------------------------------------------------------------------

CHANGES: Parts = (
    (0, 1, 2, 3, 4, 5),
    (1, 2, 3, 4, 5),  # Without the first, who has brought what its host says.
    (1, 3),  # Without a whole host.
    (4, 5),  # Without the other one.
    (0, 5),
    (0, 1, 2, 3),
    (2,),
    (0, 1, 2, 3, 4, 5),
)


async def members_may_change_between_fences(world: FenceWorld) -> None:
    for generation, part in enumerate(part for part in CHANGES for _ in range(2)):
        await opens(world, world.call(generation, members=members_of(world, part)))
        await asyncio.sleep(FIND_S)


async def report_dead(world: FenceWorld, by: int, *numbers: int) -> None:
    for number in numbers:
        lost = world.ranks[number]
        cause = RootCause(kind="dead", ranks=(lost,), error="killed by signal 9")
        await world.ends[world.ranks[by]].report_lost(cause, incarnation=0)


async def who_has_left_the_scope_does_not_hold_it_up(world: FenceWorld) -> None:
    """The first and the last of each host are lost: the fences of the rest go on, and one that is
    to have them breaks with what is known of them."""
    for generation in range(ROUNDS):
        await opens(world, world.call(generation))
        await asyncio.sleep(FIND_S)
    await report_dead(world, 1, 0, 3, 4)
    rest = members_of(world, (1, 2, 5))
    onlooker = world.ends[rest[0]]
    for generation in range(ROUNDS, 2 * ROUNDS):
        call = world.call(generation, members=rest)
        watching = asyncio.ensure_future(onlooker.watch(call))
        assert await onlooker.peek(call) is None
        assert await onlooker.missing(call) == rest
        await opens(world, call)
        async with asyncio.timeout(SOON_S):
            heard = await watching
        assert isinstance(heard, Opened)
        assert heard.ticket.key == call.key
    call = world.call(2 * ROUNDS)
    async with asyncio.timeout(SOON_S):
        got = await asyncio.gather(*(world.arrive(rank, call) for rank in rest))
    causes = {each.cause for each in got if isinstance(each, FenceBroken)}
    assert len(causes) == 1, got
    assert causes.pop().ranks in [(world.ranks[n],) for n in (0, 3, 4)]


async def a_failure_is_heard_by_who_is_left(world: FenceWorld) -> None:
    """One is lost between two fences, and another one fails at the next, which has the rest only:
    all of those hear of the failure."""
    for generation in range(ROUNDS):
        await opens(world, world.call(generation))
        await asyncio.sleep(FIND_S)
    await report_dead(world, 2, 1)
    *well, sick = rest = members_of(world, (0, 2, 3, 4, 5))
    call = world.call(ROUNDS, members=rest)
    async with asyncio.timeout(SOON_S):
        waiting = asyncio.gather(*(world.arrive(rank, call) for rank in well))
        told = await world.ends[sick].fail(call, arrives(call, sick, cause=failure_of(sick)))
        got = await waiting
    assert isinstance(told, Broken)
    heard = [told, *(each.broken for each in got if isinstance(each, FenceBroken))]
    assert len(heard) == len(rest), got
    assert {(each.key, each.cause) for each in heard} == {(call.key, failure_of(sick))}
    await opens(world, world.call(ROUNDS + 1, members=rest))


# --- Ranks that are replaced ---------------------------------------------------------------------


async def a_replaced_rank_takes_its_place(world: FenceWorld) -> None:
    """The first of a host, one in its middle, and the first of the other: each is lost, and comes
    back as a later incarnation. What the old one says then lets nobody pass, and harms nobody who
    has passed."""
    generation = 0
    incarnations = dict.fromkeys(world.ranks, 0)

    async def all_pass() -> None:
        nonlocal generation
        for _ in range(ROUNDS):
            call = world.call(generation)
            given = [arrives(call, r, incarnation=incarnations[r]) for r in world.ranks]
            async with asyncio.timeout(SOON_S):
                got = await world.all_arrive(call, given)
            assert [type(each) for each in got] == [Opened] * SIZE, got
            assert {each.ticket.count for each in got if isinstance(each, Opened)} == {SIZE}
            generation += 1
            await asyncio.sleep(FIND_S)

    await all_pass()
    for number in (0, 2, 4):
        lost, others = world.ranks[number], [r for r in world.ranks if r.number != number]
        cause = RootCause(kind="dead", ranks=(lost,), error="killed by signal 9")
        call = world.call(generation)
        given = {r: arrives(call, r, incarnation=incarnations[r]) for r in others}
        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
            waiting = [group.create_task(world.arrive(r, call, given[r])) for r in others]
            await asyncio.sleep(FIND_S)
            await world.ends[others[0]].report_lost(cause, incarnation=incarnations[lost])
        causes = {
            e.cause for e in (task.result() for task in waiting) if isinstance(e, FenceBroken)
        }
        assert causes == {cause}
        old, before = world.ends[lost], incarnations[lost]
        incarnations[lost] += 1
        world.ends[lost] = await world.newcomer(lost, incarnations[lost])
        world.extra.append(old)
        passed, generation = call, generation + 1
        await all_pass()
        late = arrives(passed, lost, incarnation=before)
        async with asyncio.timeout(SOON_S):
            try:
                heard: object = await old.arrive(passed, late)
            except FenceError as error:
                heard = error
        assert isinstance(heard, FenceError), f"an old incarnation passed: {heard}"
        await all_pass()


SCOPE_PROMISES: tuple[Promise, ...] = (
    parts_open_on_their_own,
    a_break_stays_in_its_scope,
    named_groups_count_by_themselves,
    one_rank_waits_in_one_scope_for_who_waits_in_another,
    members_may_change_between_fences,
    who_has_left_the_scope_does_not_hold_it_up,
    a_failure_is_heard_by_who_is_left,
    a_replaced_rank_takes_its_place,
)
