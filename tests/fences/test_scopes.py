"""Who meets whom: scopes over every transport, with the ranks of a host coming together or not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank
from phasesync.fences.base import FenceTransport
from phasesync.fences.store import StoreFences
from phasesync.testing import FenceWorld
from tests.fences.scopes import HOSTS, SCOPE_PROMISES, SIZE, host_of
from tests.fences.test_conformance import Make, inprocess, tcp, tcp_store


def on_hosts(**named: Any) -> Callable[[Path], AbstractAsyncContextManager[Make]]:
    @asynccontextmanager
    async def made(_: Path) -> AsyncIterator[Make]:
        store = tcp_store()

        def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
            host = host_of(rank)
            return StoreFences(
                store, rank=rank, run=run, incarnation=incarnation, host=host, **named
            )

        yield make

    return made


TRANSPORTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Make]]] = {
    "inprocess": inprocess,
    "tcp": tcp,
    "store": on_hosts(),
    "store, each by itself": on_hosts(together_from=0),
}


@pytest.mark.parametrize("promise", SCOPE_PROMISES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_scopes(name: str, promise: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with TRANSPORTS[name](tmp_path) as make:
            world = FenceWorld(make, SIZE)
            try:
                await world.open()
                await promise(world)
                if name == "store":
                    assert followed(world), "no rank of a host has come with another"
            finally:
                await world.close()

    asyncio.run(check())


def followed(world: FenceWorld) -> set[Rank]:
    """Who has a connection to another rank of its host, which brings its arrivals."""
    assert len(HOSTS[0]) > 2
    ends = {**world.ends, **{end.rank: end for end in world.extra}}  # type: ignore[attr-defined]
    return {rank for rank, end in ends.items() if end._mates._followers}  # type: ignore[attr-defined]
