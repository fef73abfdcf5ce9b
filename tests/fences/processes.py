"""Ranks as real processes, forked from a server that has imported torch once."""

import asyncio
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from phasesync.core.model import (
    Arrival,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Rank,
    RoleName,
    RootCause,
    Version,
)
from phasesync.errors import FenceBroken, FenceError, StaleArrival, StoreLost

SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed", "phasesync.fences.store", "tests.fences.processes"]
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank does: how many fences, and where it behaves badly."""

    number: int
    size: int
    run: str
    address: Any
    deadline_s: float = 3.0
    generations: int = 3
    acts_at: int = 1
    act: str = "well"
    late_s: float = 1.5
    watches: bool = False


@dataclass(kw_only=True)
class Seen:
    """What one rank saw: an outcome a fence, and how it went."""

    rank: Rank
    outcomes: list[tuple[str, Any]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    lag_s: float = 0.0

    @property
    def last(self) -> tuple[str, Any]:
        return self.outcomes[-1]


def rank_of(number: int) -> Rank:
    return Rank(RoleName("trainer"), number)


def call_of(part: Part, generation: int) -> FenceCall:
    return FenceCall(
        key=FenceKey(part.run, 0, "world", generation),
        fence=FenceName("memory_released"),
        epoch=Epoch(generation),
        version=Version(generation),
        digest=Digest("d1"),
        members=tuple(rank_of(n) for n in range(part.size)),
        deadline_s=part.deadline_s,
    )


def arrival_of(part: Part, call: FenceCall) -> Arrival:
    rank = rank_of(part.number)
    acts = part.act if call.key.generation == part.acts_at else "well"
    cause = RootCause(kind="failed", ranks=(rank,), error_type="ValueError", error="no room")
    return call.arrival(
        rank,
        nonce=os.urandom(8).hex(),
        epoch=Epoch(5) if acts == "epoch" else call.epoch,
        digest=Digest("d2") if acts == "digest" else call.digest,
        seq=call.key.generation,
        cause=cause if acts == "fails" else None,
    )


async def live(part: Part, endpoint: Any) -> Seen:
    """Go through the fences; stop at the first that does not open."""
    seen = Seen(rank=rank_of(part.number))
    await endpoint.connect()
    ticking = asyncio.ensure_future(_tick(seen))
    try:
        for generation in range(part.generations):
            call = call_of(part, generation)
            if generation == part.acts_at:
                await ACTS[part.act](part)
            since = time.monotonic()
            seen.outcomes.append(await _outcome(endpoint, call, arrival_of(part, call)))
            seen.ended_at.append(time.monotonic())
            seen.waited_s.append(seen.ended_at[-1] - since)
            if seen.last[0] != "open":
                break
    finally:
        ticking.cancel()
    await endpoint.close()
    return seen


async def _outcome(endpoint: Any, call: FenceCall, arrival: Arrival) -> tuple[str, Any]:
    try:
        opened = await endpoint.arrive(call, arrival)
    except FenceBroken as error:
        return "broken", error.cause
    except StaleArrival:
        return "stale", None
    except StoreLost as error:
        return "lost", str(error)
    except FenceError as error:
        return "error", repr(error)
    return "open", opened.ticket.hash


async def _tick(seen: Seen) -> None:
    before = time.monotonic()
    while True:
        await asyncio.sleep(0.005)
        now = time.monotonic()
        seen.lag_s, before = max(seen.lag_s, now - before - 0.005), now


async def _nothing(_: Part) -> None:
    pass


async def _late(part: Part) -> None:
    await asyncio.sleep(part.late_s)


async def _killed(_: Part) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _doomed(part: Part) -> None:
    """Be killed in the middle of whatever is done then, by a timer in the kernel."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, part.late_s)


async def _frozen(_: Part) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTS: dict[str, Callable[[Part], Any]] = {
    "well": _nothing,
    "fails": _nothing,
    "digest": _nothing,
    "epoch": _nothing,
    "late": _late,
    "killed": _killed,
    "doomed": _doomed,
    "frozen": _frozen,
}


def store_client(address: Any) -> Any:
    dist: Any = import_module("torch.distributed")
    kind, where = address
    if kind == "file":
        return dist.FileStore(where, -1)
    return dist.TCPStore("127.0.0.1", where, is_master=False, wait_for_workers=False)


def store_rank(part: Part, results: Connection) -> None:
    from phasesync.fences.store import StoreFences

    endpoint = StoreFences(store_client(part.address), rank=rank_of(part.number), run=part.run)
    results.send(asyncio.run(live(part, endpoint)))


def lonely_store_rank(part: Part, results: Connection) -> None:
    """A rank that cannot see the processes of the others, as on a host of its own."""
    from phasesync.fences.store import StoreFences

    endpoint = StoreFences(
        store_client(part.address),
        rank=rank_of(part.number),
        run=part.run,
        watch_neighbours=False,
    )
    results.send(asyncio.run(live(part, endpoint)))


def tcp_rank(part: Part, results: Connection) -> None:
    from phasesync.fences.tcp import TcpFences

    endpoint = TcpFences(part.address, rank=rank_of(part.number), run=part.run, token="secret")
    results.send(asyncio.run(live(part, endpoint)))


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
        question = results.recv()
        if question == "keys":
            results.send(sorted(store.list_keys()))
        else:
            results.send(store.get(question) if store.check([question]) else b"")


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

    def wait_until_at(self, part: Part, generation: int, count: int) -> None:
        """Until so many ranks wait at a fence of a store."""
        while True:
            self.pipe.send(f"ps/{part.run}/0/world/{generation}/n")
            if int(self.pipe.recv() or 0) >= count:
                return
            time.sleep(0.02)

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


@contextmanager
def running(target: Any, parts: list[Part]) -> Iterator[dict[int, tuple[Any, Connection]]]:
    """Start a process for each part; whatever is left at the end is killed."""
    started = {}
    for part in parts:
        ours, theirs = SERVER.Pipe()
        process = SERVER.Process(target=target, args=(part, theirs), daemon=True)
        process.start()
        theirs.close()
        started[part.number] = (process, ours)
    try:
        yield started
    finally:
        for process, _ in started.values():
            end(process)


def results(started: dict[int, tuple[Any, Connection]], within_s: float) -> dict[int, Seen]:
    """What each rank sent; who died or is frozen has sent nothing."""
    seen: dict[int, Seen] = {}
    waiting = {pipe: number for number, (_, pipe) in started.items()}
    until = time.monotonic() + within_s
    while waiting and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            number = waiting.pop(pipe)
            try:
                seen[number] = pipe.recv()
            except EOFError:
                continue
    return seen
