"""Ranks and hosts as processes in a network namespace each."""

import asyncio
import ctypes
import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from tests.fences.faults.ranks import Life, live

__all__ = ("Place", "host_in", "rank_process")

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and where from there the host of its fences is."""

    namespace: str
    host: str
    port: int


def move_to(namespace: str) -> None:
    """Put this thread, and all that it starts, on another network."""
    where = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(where, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.close(where)


def rank_process(life: Life, pipe: Connection) -> None:
    """A rank at its place."""
    place: Place = life.address
    move_to(place.namespace)
    asyncio.run(live(life, ENDPOINTS[life.transport](life, place), pipe.send))
    pipe.send(None)
    os._exit(0)


def _store(life: Life, place: Place) -> Any:
    dist: Any = import_module("torch.distributed")
    client = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)
    return StoreFences(client, rank=life.rank, run=life.run, host=place.namespace)


def _tcp(life: Life, place: Place) -> Any:
    return TcpFences((place.host, place.port), rank=life.rank, run=life.run, token="secret")


ENDPOINTS = {"store": _store, "tcp": _tcp}


def host_in(transport: str, namespace: str, address: str) -> Any:
    """A process that hosts fences there; for `tests.fences.processes.hosted`."""
    return partial(HOSTS[transport], namespace, address)


def _store_host(namespace: str, address: str, results: Connection) -> None:
    move_to(namespace)
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    results.send(store.port)
    results.recv()


def _tcp_host(namespace: str, address: str, results: Connection) -> None:
    move_to(namespace)

    async def coordinate() -> None:
        coordinator = TcpCoordinator(token="secret", host=address)
        await coordinator.start()
        results.send(coordinator.address[1])
        await asyncio.Event().wait()

    asyncio.run(coordinate())


HOSTS = {"store": _store_host, "tcp": _tcp_host}
