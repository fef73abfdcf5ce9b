"""Every transport keeps every promise."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.testing import FENCE_PROMISES, FenceWorld

Make = Callable[[str, Rank, int], FenceTransport]


def inprocess(_: Path) -> Make:
    hubs: dict[str, InProcessFences] = {}

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return hubs.setdefault(run, InProcessFences()).endpoint(rank, incarnation)

    return make


def over(store: Any) -> Make:
    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return StoreFences(store, rank=rank, incarnation=incarnation, run=run, token="secret")

    return make


def tcp_store(_: Path) -> Make:
    dist: Any = import_module("torch.distributed")

    return over(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


def tcp_store_legacy(_: Path) -> Make:
    dist: Any = import_module("torch.distributed")

    return over(
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    )


def prefix_store(_: Path) -> Make:
    dist: Any = import_module("torch.distributed")

    base = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return over(dist.PrefixStore("default_pg", dist.PrefixStore("0", base)))


def file_store(folder: Path) -> Make:
    dist: Any = import_module("torch.distributed")

    return over(dist.FileStore(str(folder / "store"), -1))


def hash_store(_: Path) -> Make:
    dist: Any = import_module("torch.distributed")

    return over(dist.HashStore())


TRANSPORTS: tuple[Callable[[Path], Make], ...] = (
    inprocess,
    tcp_store,
    tcp_store_legacy,
    prefix_store,
    file_store,
    hash_store,
)


@pytest.mark.parametrize("promise", FENCE_PROMISES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda t: t.__name__)
def test_a_transport_keeps_its_promises(
    transport: Callable[[Path], Make], promise: Any, tmp_path: Path
) -> None:
    async def check() -> None:
        world = FenceWorld(transport(tmp_path), 3)
        try:
            await world.open()
            await promise(world)
        finally:
            await world.close()

    asyncio.run(check())
