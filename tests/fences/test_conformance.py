"""Every transport keeps every promise."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.fence_hub import Hub
from phasesync.core.model import Arrival, FenceCall, Opened, Rank, Ticket
from phasesync.errors import FenceBroken
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessEndpoint, InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FENCE_PROMISES, FenceWorld, check_fence_transport

Make = Callable[[str, Rank, int], FenceTransport]


@asynccontextmanager
async def inprocess(_: Path) -> AsyncIterator[Make]:
    hubs: dict[str, InProcessFences] = {}

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return hubs.setdefault(run, InProcessFences()).endpoint(rank, incarnation)

    yield make


@asynccontextmanager
async def tcp(_: Path) -> AsyncIterator[Make]:
    coordinator = TcpCoordinator(token="secret")
    await coordinator.start()

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return TcpFences(
            coordinator.address, rank=rank, incarnation=incarnation, run=run, token="secret"
        )

    yield make
    await coordinator.close()


def over(name: str) -> Callable[[Path], AbstractAsyncContextManager[Make]]:
    @asynccontextmanager
    async def store_of(folder: Path) -> AsyncIterator[Make]:
        store = STORES[name](folder)

        def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
            return StoreFences(store, rank=rank, incarnation=incarnation, run=run, token="secret")

        yield make

    return store_of


def torch_store(kind: str, *arguments: Any, **named: Any) -> Any:
    dist: Any = import_module("torch.distributed")
    return getattr(dist, kind)(*arguments, **named)


def tcp_store(**named: Any) -> Any:
    return torch_store("TCPStore", "127.0.0.1", 0, is_master=True, wait_for_workers=False, **named)


def prefix_store() -> Any:
    return torch_store("PrefixStore", "group", torch_store("PrefixStore", "0", tcp_store()))


STORES: dict[str, Callable[[Path], Any]] = {
    "tcp_store": lambda _: tcp_store(),
    "tcp_store_legacy": lambda _: tcp_store(use_libuv=False),
    "prefix_store": lambda _: prefix_store(),
    "file_store": lambda folder: torch_store("FileStore", str(folder / "store"), -1),
    "hash_store": lambda _: torch_store("HashStore"),
}
TRANSPORTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Make]]] = {
    "inprocess": inprocess,
    "tcp": tcp,
    **{name: over(name) for name in STORES},
}
ONE_BY_ONE = ("inprocess", "tcp", "tcp_store")


@pytest.mark.parametrize("promise", FENCE_PROMISES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_transport_keeps_each_promise(name: str, promise: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with TRANSPORTS[name](tmp_path) as make:
            world = FenceWorld(make, 3)
            try:
                await world.open()
                await promise(world)
            finally:
                await world.close()

    asyncio.run(check())


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name not in ONE_BY_ONE])
def test_a_transport_keeps_all_promises(name: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with TRANSPORTS[name](tmp_path) as make:
            await check_fence_transport(make, together=name in ("file_store", "hash_store"))

    asyncio.run(check())


@pytest.mark.parametrize("size", [2, 5])
def test_the_promises_hold_for_other_sizes(size: int, tmp_path: Path) -> None:
    async def check() -> None:
        async with TRANSPORTS["inprocess"](tmp_path) as make:
            await check_fence_transport(make, size=size, together=True)

    asyncio.run(check())


def test_a_broken_promise_is_named() -> None:
    """A transport that lets a late rank pass alone, as a counter does, is found out."""

    class Counter(InProcessEndpoint):
        async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
            try:
                return await super().arrive(call, arrival)
            except FenceBroken as error:
                if error.cause.missing == (self.rank,):
                    ticket = Ticket(
                        key=call.key, fence=call.fence, epoch=call.epoch, count=3, hash=""
                    )
                    return Opened(ticket=ticket)
                raise

    hubs: dict[str, Hub] = {}

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return Counter(hubs.setdefault(run, Hub()), rank, "boot")

    with pytest.raises(AssertionError, match="a late rank never passes alone: not broken for all"):
        asyncio.run(check_fence_transport(make))
