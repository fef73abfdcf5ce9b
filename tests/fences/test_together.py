"""One rank of a host brings the arrivals of all: how many messages, how long a chain, and what
happens when it ends, stands still, or is nobody's friend."""

import asyncio
import socket
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from phasesync.core.fence_keys import Process, Space
from phasesync.core.model import Broken, Opened, Rank
from phasesync.errors import FenceBroken
from phasesync.fences.base import FenceTransport
from phasesync.fences.direct import DirectLine
from phasesync.fences.follower import Follower
from phasesync.fences.leader import Leader, door_of
from phasesync.fences.lines import Lines
from phasesync.fences.slots import Slots
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator
from phasesync.fences.wards import Wards, address_of
from phasesync.testing import FenceWorld, arrives, failure_of
from tests.fences.faults.ranks import Life, Report, board, play
from tests.fences.processes import hosted, rank_of
from tests.fences.test_conformance import tcp_store

MESSAGES = {"Append": 1, "Count": 2, "Put": 1, "Get": 2, "Wait": 4, "Read": 4, "Tell": 0}


def world_of(store: Any, size: int, hosts: int = 1, **named: Any) -> FenceWorld:
    """So many ranks, as many on each of the hosts."""
    here = size // hosts

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        host = f"host-{rank.number // here}"
        return StoreFences(store, rank=rank, incarnation=incarnation, run=run, host=host, **named)

    return FenceWorld(make, size)


async def pass_until_together(world: FenceWorld, since: int = 0) -> int:
    """The first fences, by which the ranks of a host find each other; the next generation."""
    for generation in range(since, since + 6):
        got = await world.all_arrive(world.call(generation))
        assert all(isinstance(each, Opened) for each in got), got
        await asyncio.sleep(0.05)
    return since + 6


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """What the ranks of this process ask of the store, and say to each other."""
    asked: Counter[str] = Counter()
    said: Counter[str] = Counter()
    plain, ask, send = DirectLine._next, Follower._ask, Leader._decided

    def nexts(line: Any, job: Any, reply: Any) -> Any:
        steps, job.steps = job.steps, _Watched(job.steps, asked)
        try:
            return plain(line, job, reply)
        finally:
            job.steps = steps

    def asks(follower: Any, what: str, *rest: Any, **named: Any) -> Any:
        said[what] += 1
        return ask(follower, what, *rest, **named)

    def decides(leader: Any, gathering: Any, brought: Any) -> Any:
        said["told"] += len(gathering.ranks) - 1
        return send(leader, gathering, brought)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectLine, "_next", nexts)
        patch.setattr(Follower, "_ask", asks)
        patch.setattr(Leader, "_decided", decides)
        yield asked, said


class _Watched:
    """Steps, of which each operation is counted as it is asked for."""

    def __init__(self, steps: Any, asked: Counter[str]) -> None:
        self._steps = steps
        self._asked = asked

    def send(self, reply: Any) -> Any:
        operation = self._steps.send(reply)
        kind = type(operation)
        self._asked[kind.__name__] += 1
        return operation


def messages(asked: Counter[str]) -> int:
    return sum(MESSAGES.get(name, 2) * count for name, count in asked.items())


@pytest.mark.parametrize("size", [2, 8])
def test_a_host_by_itself_asks_the_store_twelve_times_however_many_it_has(size: int) -> None:
    """Append, count, decide and look at the head, put the head, tidy up: one round trip, 14
    messages with their replies; and one message each way for each of the others."""

    async def check() -> None:
        world = world_of(tcp_store(), size)
        async with world:
            generation = await pass_until_together(world)
            generation = await pass_until_together(world, generation)
            with counted() as (asked, said):
                got = await world.all_arrive(world.call(generation))
                assert all(isinstance(each, Opened) for each in got)
                await asyncio.sleep(0.1)
            assert asked["CompareSet"] == asked["Append"] == 1
            assert asked["Wait"] == 0
            assert messages(asked) == 14, asked
            assert said == {"arrive": size - 1, "told": size - 1}

    asyncio.run(check())


def test_hosts_ask_the_store_once_each() -> None:
    """7 messages a host and 9 for deciding and tidying up, as for single ranks."""

    async def check() -> None:
        world = world_of(tcp_store(), 8, hosts=4)
        async with world:
            generation = await pass_until_together(world)
            generation = await pass_until_together(world, generation)
            with counted() as (asked, said):
                got = await world.all_arrive(world.call(generation))
                assert all(isinstance(each, Opened) for each in got)
                await asyncio.sleep(0.1)
            assert asked["Append"] == asked["Add"] == 4
            assert messages(asked) <= 7 * 4 + 14, asked
            assert said == {"arrive": 4, "told": 4}

    asyncio.run(check())


def test_a_threshold_above_the_host_lets_each_come_by_itself() -> None:
    async def check() -> None:
        for least in (0, 4):
            world = world_of(tcp_store(), 3, together_from=least)
            async with world:
                generation = await pass_until_together(world)
                with counted() as (asked, said):
                    await world.all_arrive(world.call(generation))
                assert (asked["Append"], said["arrive"]) == (3, 0)

    asyncio.run(check())


@pytest.mark.parametrize("how", ["cancelled", "watches"])
def test_who_hears_through_an_arrival_that_is_given_up_hears_all_the_same(how: str) -> None:
    """The first arrival of a new leader comes by itself, and those of the others wait with it."""

    async def check() -> None:
        world = world_of(tcp_store(), 4)
        async with world:
            generation = await pass_until_together(world)
            old, new, *others = world.ranks
            await world.ends[old].close()
            await asyncio.sleep(0.2)
            call = replace(world.call(generation), deadline_s=30.0)
            leading = asyncio.ensure_future(world.ends[new].arrive(call, arrives(call, new)))
            await asyncio.sleep(0.1)
            waiting: list[Coroutine[Any, Any, Opened | Broken]]
            if how == "cancelled":
                waiting = [world.ends[r].arrive(call, arrives(call, r)) for r in others]
            else:
                waiting = [world.ends[r].watch(call) for r in (new, *others)]
            told = [asyncio.ensure_future(each) for each in waiting]
            await asyncio.sleep(0.2)
            leading.cancel()
            heard = await asyncio.wait_for(asyncio.gather(*told, return_exceptions=True), 10)
            for each in heard:
                assert isinstance(each, Broken | FenceBroken)
                assert (each.cause.kind, each.cause.ranks) == ("cancelled", (new,))

    asyncio.run(check())


def test_a_watch_through_the_leader_hears_a_break_before_anybody_arrives() -> None:
    async def check() -> None:
        world = world_of(tcp_store(), 4)
        async with world:
            generation = await pass_until_together(world)
            call = world.call(generation)
            *watchers, sick = world.ranks
            with counted() as (asked, said):
                watches = [asyncio.ensure_future(world.ends[r].watch(call)) for r in watchers]
                await asyncio.sleep(0.2)
                assert (asked["Wait"], said["watch"]) == (1, 2), "one line of the host waits"
            await world.ends[sick].fail(call, arrives(call, sick, cause=failure_of(sick)))
            async with asyncio.timeout(5):
                heard = await asyncio.gather(*watches)
            assert {each.cause for each in heard if isinstance(each, Broken)} == {failure_of(sick)}

    asyncio.run(check())


def leader_of(world: FenceWorld) -> StoreFences:
    end = world.ends[world.ranks[0]]
    assert isinstance(end, StoreFences)
    return end


@pytest.mark.parametrize(("watches", "leads"), [(False, False), (True, False), (False, True)])
def test_a_leader_whose_connections_close_is_passed_by_at_once(watches: bool, leads: bool) -> None:
    """It has arrivals in its hands, its own perhaps, or was to say when a fence breaks."""

    async def check() -> None:
        world = world_of(tcp_store(), 3)
        async with world:
            generation = await pass_until_together(world)
            call = world.call(generation)
            first, *others = world.ranks
            if leads:
                first, others = others[0], [first, others[1]]
            act = world.ends[others[0]].watch if watches else None
            waiting: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(act(call) if act else world.arrive(others[0], call))
            ]
            await asyncio.sleep(0.1)
            door = leader_of(world)._mates._leader
            assert door is not None
            door.close()
            async with asyncio.timeout(5):
                waiting += [
                    asyncio.ensure_future(world.arrive(rank, call)) for rank in (first, others[1])
                ]
                if watches:
                    waiting.append(asyncio.ensure_future(world.arrive(others[0], call)))
                got = await asyncio.gather(*waiting)
            assert {type(each) for each in got} == {Opened}, got
            following = await world.all_arrive(world.call(generation + 1))
            assert {type(each) for each in following} == {Opened}

    asyncio.run(check())


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("sick", [0, 1])
def test_whoever_fails_is_named_with_its_phase_by_all_others(sick: int, stays: bool) -> None:
    """The one that brings the arrivals of others no less, and if its process then ends at once."""

    async def check() -> None:
        world = world_of(tcp_store(), 4)
        async with world:
            generation = await pass_until_together(world)
            call = world.call(generation)
            bad = world.ranks[sick]
            others = [rank for rank in world.ranks if rank != bad]
            early = [asyncio.ensure_future(world.arrive(rank, call)) for rank in others[:2]]
            await asyncio.sleep(0.1)
            assert await world.ends[others[2]].missing(call) == tuple(sorted({bad, others[2]}))
            told = await world.ends[bad].fail(call, arrives(call, bad, cause=failure_of(bad)))
            if not stays:
                await world.ends[bad].close()
            async with asyncio.timeout(5):
                got = [*await asyncio.gather(*early), await world.arrive(others[2], call)]
            for each in (told, *got):
                assert isinstance(each, Broken | FenceBroken), each
                assert each.cause == failure_of(bad)

    asyncio.run(check())


def test_a_follower_that_is_cut_before_its_first_turn_has_ended() -> None:
    """Who leaves waits for it: that its task never ran must not keep it for ever."""

    async def check(turns: int) -> None:
        ended: list[Process] = []
        leader = Process(rank_of(0), 0, 1, 1, door="nobody:secret")
        follower = Follower(leader, rank=rank_of(1), run=("r", 0), over=ended.append)
        for _ in range(turns):
            await asyncio.sleep(0)
        follower.cut()
        async with asyncio.timeout(5):
            await follower.ended.wait()
        assert ended == [leader]

    for turns in range(4):
        asyncio.run(check(turns))


def test_who_leaves_begins_nothing_any_more() -> None:
    """A look at who is here is answered when the rank has let go of the others."""

    async def check() -> None:
        world = world_of(tcp_store(), 2)
        async with world:
            await pass_until_together(world)
            leaves = world.ends[world.ranks[1]]
            assert isinstance(leaves, StoreFences)
            leaves._look_again()
            await leaves.close()
            assert leaves._mates._followers == {}
            assert not [task for task in asyncio.all_tasks() if "follows" in task.get_name()]

    asyncio.run(check())


def test_who_is_let_in_while_the_door_closes_is_cut() -> None:
    """A connection may be accepted just before, and be made just after."""

    async def leads(turns: int) -> None:
        door = Leader(Slots(Lines(object(), "door"), Space("ps/r/0"), "me"), rank_of(0))  # type: ignore[arg-type]
        path, _ = door_of(await door.open())
        with socket.socket(socket.AF_UNIX) as end:
            await comes(end, path, turns)
            door.close()
            await is_cut(end)

    async def is_watched(turns: int) -> None:
        wards = Wards("run", lambda *_: None)
        address = await wards.listen("127.0.0.1", rank_of(0), 0)
        with socket.socket() as end:
            await comes(end, address_of(address), turns)
            await wards.close()
            await is_cut(end)

    async def coordinates(turns: int) -> None:
        coordinator = TcpCoordinator()
        await coordinator.start()
        with socket.socket() as end:
            await comes(end, coordinator.address, turns)
            await coordinator.close()
            await is_cut(end)

    async def comes(end: socket.socket, where: Any, turns: int) -> None:
        end.connect(where)
        end.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)

    async def is_cut(end: socket.socket) -> None:
        async with asyncio.timeout(2):
            with suppress(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(end, 64):
                    pass

    for turns in range(6):
        for door in (leads, is_watched, coordinates):
            asyncio.run(door(turns))


def test_a_stranger_at_the_door_is_refused_and_a_late_greeting_hurts_nobody() -> None:
    async def check() -> None:
        world = world_of(tcp_store(), 2)
        async with world:
            generation = await pass_until_together(world)
            door = leader_of(world)._mates._leader
            assert door is not None
            assert door._server is not None
            path = door._server.sockets[0].getsockname()
            for said in (b"x" * 44, door.greeting[:-1] + b"?", b"GET / HTTP/1.1\r\n" * 9):
                end = socket.socket(socket.AF_UNIX)
                end.connect(path)
                end.sendall(said)
                end.setblocking(False)
                reader, writer = await asyncio.open_unix_connection(sock=end)
                async with asyncio.timeout(5):
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""
                writer.close()
            got = await world.all_arrive(world.call(generation))
            assert {type(each) for each in got} == {Opened}

    asyncio.run(check())


def led(act: str, deadline_s: float) -> list[Report]:
    """Four ranks that have come together, and what they saw when the first of them did that."""
    with hosted() as host, board() as name:
        base = Life(
            number=0,
            size=4,
            run=f"{act}-leader",
            transport="store",
            address=host.address,
            board=name,
            deadline_s=deadline_s,
            generations=10,
            pace_s=0.03,
            at=9,
        )
        return play([replace(base, number=n, act="well" if n else act) for n in range(4)])


def test_a_frozen_leader_is_the_only_one_that_is_missing() -> None:
    """Its followers come by themselves before their deadline: it is not they who are late."""
    reports = led("frozen", 2.5)
    assert {report.came_to[-1].kind for report in reports} == {"broken"}, reports
    assert all(report.ending and report.ending.together for report in reports)
    (cause,) = {report.cause for report in reports}
    assert cause is not None
    assert cause.missing == (rank_of(0),)


def test_a_killed_leader_is_known_to_its_followers_at_once() -> None:
    _, *followers = led("killed", 30.0)
    for report in followers:
        assert report.ending is not None
        assert report.ending.together
        assert report.came_to[-1].waited_s < 15.0, "far from the deadline"
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("dead", (rank_of(0),))
