"""Processes that carry fences, forked from a server that has imported torch once.

The ranks are in `faults.ranks`.
"""

import asyncio
import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from phasesync.core.model import Rank, RoleName

SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed", "phasesync.fences.store", "tests.fences.processes"]
)


def rank_of(number: int) -> Rank:
    return Rank(RoleName("trainer"), number)


def store_client(address: Any) -> Any:
    dist: Any = import_module("torch.distributed")
    kind, where = address
    if kind == "file":
        return dist.FileStore(where, -1)
    return dist.TCPStore("127.0.0.1", where, is_master=False, wait_for_workers=False)


def tcp_host(results: Connection) -> None:
    """Hosts a coordinator until it is killed."""
    asyncio.run(_coordinate(results))


async def _coordinate(results: Connection) -> None:
    from phasesync.fences.tcp import TcpCoordinator

    coordinator = TcpCoordinator(token="secret")
    await coordinator.start()
    results.send(coordinator.address)
    await asyncio.Event().wait()


def store_host(results: Connection) -> None:
    """Hosts a store until its end of the pipe closes."""
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results.send(store.port)
    while True:
        results.recv()
        results.send(sorted(store.list_keys()))


@dataclass
class Host:
    """The process that hosts the store."""

    process: Any
    pipe: Connection
    address: Any

    @property
    def port(self) -> int:
        port: int = self.address
        return port

    def keys(self) -> list[str]:
        self.pipe.send("keys")
        found: list[str] = self.pipe.recv()
        return [key for key in found if "/ps/" in key or key.startswith("ps/")]


@contextmanager
def hosted(target: Any = store_host) -> Iterator[Host]:
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    host = Host(process, ours, ours.recv())
    try:
        yield host
    finally:
        end(process)


def end(process: Any) -> None:
    process.kill()
    process.join(10)
