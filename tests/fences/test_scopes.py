"""Who meets whom: scopes follow the plan's groups, members change between epochs, and what an old
incarnation said counts for nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from phasesync.core.model import FenceCall, Opened, Rank
from phasesync.errors import FenceBroken, FenceError
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FenceWorld, arrives
from tests.fences.test_conformance import tcp_store

SECRET = "secret"


async def worlds(size: int) -> list[tuple[FenceWorld, Any]]:
    """The same ranks over a store, on two hosts, and over tcp."""
    store = tcp_store()
    coordinator = TcpCoordinator(token=SECRET)
    await coordinator.start()

    def over_store(run: str, rank: Rank, incarnation: int) -> StoreFences:
        host = f"host-{rank.number * 2 // size}"
        return StoreFences(store, rank=rank, incarnation=incarnation, run=run, host=host)

    def over_tcp(run: str, rank: Rank, incarnation: int) -> TcpFences:
        address = coordinator.address
        return TcpFences(address, rank=rank, incarnation=incarnation, run=run, token=SECRET)

    made = [FenceWorld(over_store, size), FenceWorld(over_tcp, size)]
    for world in made:
        await world.open()
    return [(made[0], None), (made[1], coordinator)]


async def close(made: Sequence[tuple[FenceWorld, Any]]) -> None:
    for world, coordinator in made:
        await world.close()
        if coordinator is not None:
            await coordinator.close()


async def meet(world: FenceWorld, call: FenceCall) -> list[Opened | FenceError]:
    return list(await asyncio.gather(*(world.arrive(rank, call) for rank in call.members)))


# Which ranks make a replica: two on each of two hosts; one over both hosts; uneven ones.
PARTS = {
    "two on one host": ((0, 1), (2, 3), (4, 5)),
    "over two hosts": ((0, 3), (1, 4), (2, 5)),
    "uneven": ((0,), (1, 2), (3, 4, 5)),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_replicas_open_on_their_own_wherever_their_ranks_are(
    parts: tuple[tuple[int, ...], ...],
) -> None:
    async def check() -> None:
        made = await worlds(6)
        for world, _ in made:
            calls = [
                world.call(0, scope=f"replica/{n}", members=[world.ranks[at] for at in part])
                for n, part in enumerate(parts)
            ]
            for number, call in enumerate(calls):
                got = await meet(world, call)
                opened = [each for each in got if isinstance(each, Opened)]
                assert len(opened) == len(parts[number]), got
                assert {each.ticket.count for each in opened} == {len(parts[number])}
                assert {each.ticket.key.scope for each in opened} == {f"replica/{number}"}
            everyone = await meet(world, world.call(0))
            assert {type(each) for each in everyone} == {Opened}
        await close(made)

    asyncio.run(check())


def test_members_may_change_from_one_generation_to_the_next() -> None:
    async def check() -> None:
        made = await worlds(4)
        for world, _ in made:
            sizes = []
            for generation, count in enumerate((4, 2, 3, 4)):
                call = world.call(generation, members=world.ranks[:count])
                got = await meet(world, call)
                sizes.append({e.ticket.count for e in got if isinstance(e, Opened)})
            assert sizes == [{4}, {2}, {3}, {4}]
        await close(made)

    asyncio.run(check())


def test_a_restarted_rank_is_new_and_what_it_said_before_counts_for_nothing() -> None:
    async def check() -> None:
        made = await worlds(2)
        for world, _ in made:
            stays, restarts = world.ranks
            call = world.call(0)
            early = asyncio.ensure_future(world.arrive(restarts, call))
            await asyncio.sleep(0.2)
            newer = await world.newcomer(restarts, 1)
            with pytest.raises(FenceBroken) as broken:
                await asyncio.gather(
                    newer.arrive(call, arrives(call, restarts, incarnation=1)),
                    world.ends[stays].arrive(call, arrives(call, stays)),
                )
            assert broken.value.cause.kind == "restarted"
            assert broken.value.cause.ranks == (restarts,)
            assert isinstance(await early, FenceBroken)
            after = world.call(1)
            opened = await asyncio.gather(
                newer.arrive(after, arrives(after, restarts, incarnation=1)),
                world.ends[stays].arrive(after, arrives(after, stays)),
            )
            assert [each.ticket.count for each in opened] == [2, 2]
        await close(made)

    asyncio.run(check())
