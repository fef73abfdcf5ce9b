"""What the store transport promises beyond the promises of all transports."""

import asyncio
import errno
import os
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.fence_keys import Delete, Get, Put
from phasesync.core.fence_loss import neighbours
from phasesync.core.model import Broken, Opened, Rank, RoleName, RootCause
from phasesync.errors import PlanError, StaleArrival, StoreLost
from phasesync.fences.base import FenceTransport
from phasesync.fences.lines import Client
from phasesync.fences.neighbours import Neighbours, host_id, started_at, state_of
from phasesync.fences.store import StoreFences, StoreObserver, default_store
from phasesync.testing import FenceWorld, arrives, failure_of

T0 = Rank(RoleName("trainer"), 0)


@pytest.fixture(scope="module")
def store() -> Any:
    dist: Any = import_module("torch.distributed")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def keys(store: Any) -> list[str]:
    return [key for key in store.list_keys() if "ps/" in key]


def world_over(store: Any, size: int = 3, token: str = "") -> FenceWorld:
    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return StoreFences(store, rank=rank, incarnation=incarnation, run=run, token=token)

    return FenceWorld(make, size)


def test_an_orderly_end_leaves_no_key_and_no_thread(store: Any) -> None:
    before = set(threading.enumerate())

    async def run() -> None:
        world = world_over(store)
        async with world:
            for generation in range(25):
                assert all(
                    isinstance(a, Opened) for a in await world.all_arrive(world.call(generation))
                )
                assert len(keys(store)) < 45

    asyncio.run(run())
    assert keys(store) == []
    until = time.monotonic() + 10  # A spare line may still be connecting; nobody waits for it.
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.05)
    assert set(threading.enumerate()) - before == set()


class Busy:
    """A store to which somebody else of the process connects just as we do, so many times."""

    def __init__(self, store: Any, times: int) -> None:
        self.port = store.port
        self.libuvBackend = True
        self.others: list[Any] = []
        self._store = store
        self._times = times

    def clone(self) -> Any:
        ours = self._store.clone()
        if len(self.others) < self._times:
            self.others.append(self._store.clone())
        return ours


@pytest.mark.parametrize("times", [1, 100])
def test_nobody_elses_connection_is_cut(store: Any, times: int) -> None:
    busy = Busy(store, times)
    client = Client(busy)  # type: ignore[arg-type]
    client.perform(Put("ours", b"1"))
    assert client.perform(Get("ours")) == b"1"
    assert (client.address is not None) == (times == 1), "where it cannot be told, none is ours"
    client.cut()
    client.perform(Delete("ours")) if times > 1 else store.delete_key("ours")
    client.close()
    assert busy.others
    for other in busy.others:
        assert not other.check(["nothing"])


def test_connecting_and_leaving_without_a_fence_leaves_no_key(store: Any) -> None:
    async def run() -> None:
        world = world_over(store)
        async with world:
            pass

    asyncio.run(run())
    assert keys(store) == []


def test_who_leaves_before_the_first_fence_sweeps_nothing_of_the_others(store: Any) -> None:
    """Else it would be forgotten that it has left, and the last one would not be known as such."""

    async def run() -> None:
        world = world_over(store, 2)
        await world.open()
        one, two = world.ranks
        await world.ends[two].close()
        boot = f"ps/{world.run}/0/boot"
        assert store.check([boot])
        await world.arrive(one, world.call(deadline_s=0.2))
        await world.ends[one].close()

    asyncio.run(run())
    assert keys(store) == []


def test_a_token_keeps_the_ranks_of_another_run_of_the_same_name_out(store: Any) -> None:
    async def run() -> None:
        ours = world_over(store, 2, token="ours")
        theirs = world_over(store, 2, token="theirs")
        theirs.run = ours.run
        await asyncio.gather(ours.open(), theirs.open())
        one, two = ours.ranks
        call = ours.call(deadline_s=0.5)
        got = await asyncio.gather(ours.arrive(one, call), theirs.arrive(two, call))
        assert not any(isinstance(answer, Opened) for answer in got)
        await asyncio.gather(ours.close(), theirs.close())

    asyncio.run(run())


@pytest.mark.parametrize("generation", [0, 10])
def test_a_late_incarnation_is_told_at_once_and_leaves_nothing(store: Any, generation: int) -> None:
    """The fence is long over; its keys are gone, or its log only."""

    async def run() -> None:
        world = world_over(store, 2)
        async with world:
            for n in range(12):
                await world.all_arrive(world.call(n))
            late = StoreFences(store, rank=T0, run=world.run, incarnation=1)
            await late.connect()
            call = world.call(generation, deadline_s=60.0)
            async with asyncio.timeout(20.0):
                with pytest.raises(StaleArrival):
                    await late.arrive(call, arrives(call, T0, incarnation=1))
            await late.close()

    asyncio.run(run())
    assert keys(store) == []


def test_every_endpoint_knows_the_same_start_of_the_store(store: Any) -> None:
    async def run() -> set[str | None]:
        world = world_over(store)
        async with world:
            return {end.boot for end in world.ends.values() if isinstance(end, StoreFences)}

    boots = asyncio.run(run())
    assert len(boots) == 1
    assert None not in boots


def test_an_endpoint_is_of_one_attempt(store: Any) -> None:
    async def run() -> None:
        endpoint = StoreFences(store, rank=T0, run="r", attempt=1)
        await endpoint.connect()
        with pytest.raises(PlanError, match="make one for each attempt"):
            await endpoint.missing(world_over(store).call())
        await endpoint.close()

    asyncio.run(run())


def test_a_closed_endpoint_says_so(store: Any) -> None:
    async def run() -> None:
        world = world_over(store, 1)
        async with world:
            pass
        with pytest.raises(StoreLost, match="the transport was closed"):
            await world.ends[T0].arrive(world.call(), arrives(world.call(), T0))

    asyncio.run(run())


def test_an_endpoint_is_connected_once_and_first(store: Any) -> None:
    """That it was not is no word of the fence; and a second time would leave the first one open."""

    async def run() -> None:
        world = world_over(store, 1)
        endpoint = world.ends[T0] = world.make(world.run, T0, 0)
        with pytest.raises(StoreLost, match=r"connect\(\) was not called"):
            await endpoint.arrive(world.call(), arrives(world.call(), T0))
        await endpoint.connect()
        with pytest.raises(PlanError, match="make others to connect anew"):
            await endpoint.connect()
        assert isinstance(await world.arrive(T0, world.call()), Opened)
        await world.close()

    asyncio.run(run())
    assert keys(store) == []


def test_a_host_may_have_any_name(store: Any) -> None:
    async def run() -> None:
        ends = [
            StoreFences(store, rank=Rank(T0.role, n), run="names", host=f"node {n} / é")
            for n in range(2)
        ]
        for end in ends:
            await end.connect()
        here, near = await ends[0]._lines.ask(neighbours(ends[0]._space, "node 0 / é"))
        assert ([each.rank for each in here], [each.rank for each in near]) == (
            [ends[0].rank],
            [ends[1].rank],
        )
        await asyncio.gather(*(end.close() for end in ends))

    asyncio.run(run())
    assert keys(store) == []


def test_nothing_is_kept_of_a_fence_at_which_somebody_failed(store: Any) -> None:
    async def run() -> None:
        world = world_over(store, 1)
        async with world:
            end = world.ends[T0]
            assert isinstance(end, StoreFences)
            for generation in range(3):
                call = world.call(generation)
                watch = asyncio.ensure_future(end.watch(call)) if generation else None
                await asyncio.sleep(0)
                await end.fail(call, arrives(call, T0, cause=failure_of(T0)))
                assert watch is None or isinstance(await watch, Broken)
            assert end._slots.calls() == []

    asyncio.run(run())


def test_a_full_default_executor_holds_nobody_up(store: Any) -> None:
    release = threading.Event()

    async def run() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(64):
            loop.run_in_executor(None, release.wait)
        world = world_over(store)
        async with world:
            since = time.monotonic()
            got = await world.all_arrive(world.call())
            took = time.monotonic() - since
            assert all(isinstance(answer, Opened) for answer in got)
        release.set()
        return took

    assert asyncio.run(run()) < 5


@pytest.mark.parametrize("steps", range(1, 12))
def test_cancelling_at_any_point_breaks_the_fence_or_finds_it_open(store: Any, steps: int) -> None:
    """The wait is cancelled after so many turns of the loop."""

    async def run() -> None:
        world = world_over(store, 2)
        async with world:
            one, two = world.ranks
            call = world.call(deadline_s=5.0)
            first = asyncio.ensure_future(world.arrive(one, call))
            for _ in range(steps):
                await asyncio.sleep(0)
            first.cancel()
            since = time.monotonic()
            other = await world.arrive(two, call)
            took = time.monotonic() - since
            await asyncio.gather(first, return_exceptions=True)
            assert first.cancelled() or isinstance(first.result(), Opened)
            assert isinstance(other, Opened) or getattr(other, "cause").kind == "cancelled"  # noqa: B009
            assert took < 4, "it broke at the deadline, not at the cancellation"

    asyncio.run(run())


def test_an_observer_may_tell_before_anybody_has_come(store: Any) -> None:
    async def run() -> None:
        world = world_over(store, 2)
        async with world:
            one, two = world.ranks
            observer = StoreFences.observer(store, run=world.run)
            assert isinstance(observer, StoreObserver)
            await observer.connect()
            cause = RootCause(kind="dead", ranks=(two,), error="exit status 1")
            await observer.report_lost(cause, incarnation=0)
            answer = await world.arrive(one, world.call())
            assert getattr(answer, "cause", None) == cause
            await observer.close()

    asyncio.run(run())


def test_a_fork_is_told_to_make_its_own(store: Any) -> None:
    async def run() -> None:
        world = world_over(store, 1)
        async with world:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    world.ends[T0]._check(world.call())  # type: ignore[attr-defined]
                except PlanError as error:
                    os.write(write, str(error).encode())
                os._exit(0)
            os.waitpid(child, 0)
            assert b"a fork has none of their threads" in os.read(read, 4096)
            os.close(read)
            os.close(write)

    asyncio.run(run())


def test_without_a_process_group_there_is_no_default_store() -> None:
    with pytest.raises(PlanError, match="hand it to StoreFences"):
        default_store()


def test_the_store_of_a_default_group_carries_fences_without_its_collectives() -> None:
    dist: Any = import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        async def run() -> None:
            world = world_over(default_store(), 3)
            async with world:
                got = await world.all_arrive(world.call())
                assert all(isinstance(answer, Opened) for answer in got)

        asyncio.run(run())
    finally:
        dist.destroy_process_group()


def test_the_kernel_tells_of_a_process_that_ends() -> None:
    async def run() -> list[str]:
        told: list[str] = []
        over = asyncio.Event()

        def gone(who: str, pid: int) -> None:
            told.append(who)
            if len(told) == 3:
                over.set()

        neighbours = Neighbours(gone)
        process = await asyncio.create_subprocess_exec("sleep", "0.3")
        started = started_at(process.pid)
        assert started is not None
        neighbours.watch("sleeper", process.pid, started)
        neighbours.watch("another of its number", process.pid, started + 1)
        neighbours.watch("nobody", 2**22 - 7, 1)
        assert told == ["another of its number", "nobody"]
        await asyncio.wait_for(over.wait(), 10)
        await process.wait()
        neighbours.close()
        return told

    assert asyncio.run(run())[-1] == "sleeper"
    assert host_id()


def test_who_cannot_be_watched_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may forbid it, and a process may have no files left."""

    def refuses(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        told: list[Any] = []
        started = started_at(os.getpid())
        assert started is not None
        neighbours = Neighbours(lambda *who: told.append(who))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", refuses)
            neighbours.watch("me", os.getpid(), started)
        assert told == []
        neighbours.close()

    asyncio.run(run())
    unreadable = Path("/proc") / "self" / "mem"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: unreadable.read_bytes())
        assert state_of(os.getpid()) == "not seen from here"
