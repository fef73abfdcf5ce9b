"""What one store or coordinator does with many clients: `bench fence --clients 1024`.

A few processes have the endpoints of all ranks, each endpoint as it is anywhere else, with as many
on a host as `HOST` says. What is measured is the work of the other end and of these processes: it
says how the time grows, and nothing about a network.
"""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from phasesync.bench.barriers import Place, arrival_of, call_of
from phasesync.bench.fence import all_say, coordinate, forked, processes
from phasesync.core.model import Rank, RoleName
from phasesync.errors import InputError

__all__ = ("HOST", "OVER", "ClientRow", "bench_clients", "clients_table")

HOST = 8
CONNECT_AT_ONCE = 8
WARM_UP = 6  # Fences by which the ranks of a host have found each other.
FIND_S = 0.1
OVER = ("store", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """Fences of so many clients over one transport; milliseconds from the last arrival to the last
    release, and the seconds until all were connected."""

    transport: str
    clients: int
    processes: int
    fences: int
    p50_ms: float
    most_ms: float
    connect_s: float
    early: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The clients of one process."""

    places: tuple[Place, ...]
    transport: str


def bench_clients(
    counts: Sequence[int],
    *,
    over: Sequence[str] = OVER,
    fences: int = 10,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[ClientRow]:
    """Measure fences of so many clients, in as many processes as there are processors.

    Raises:
        InputError: a transport has no clients to count.
    """
    for name in over:
        if name not in OVER:
            raise InputError(f"no clients over {name!r} to measure; there are: {', '.join(OVER)}")
    rows = []
    for count in counts:
        for name in over:
            say(f"{count} clients over {name}")
            rows.append(_bench(count, name, fences, min(jobs or os.cpu_count() or 1, count)))
    return rows


def _bench(count: int, transport: str, fences: int, jobs: int) -> ClientRow:
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = secrets.token_hex(4)
    with ExitStack() as ended:
        context = forked()
        coordinator = None
        if transport == "tcp":
            (_, pipe), *_ = ended.enter_context(processes(context, coordinate, [()]))
            coordinator = pipe.recv()
        places = [
            Place(number=n, size=count, port=store.port, run=run, coordinator=coordinator)
            for n in range(count)
        ]
        crowds = [
            Crowd(
                places=tuple(places[count * at // jobs : count * (at + 1) // jobs]),
                transport=transport,
            )
            for at in range(jobs)
        ]
        since = time.monotonic()
        started = ended.enter_context(processes(context, crowd, [(each,) for each in crowds]))
        pipes = [pipe for _, pipe in started]
        all_say(pipes, "ready", 2.0 * count)
        connect_s = time.monotonic() - since
        costs, early = [], 0
        for generation in range(WARM_UP + fences):
            for pipe in pipes:
                pipe.send(generation)
            said = [pipe.recv() for pipe in pipes]
            if generation >= WARM_UP:
                last_in = max(entered for entered, _, _ in said)
                costs.append((max(out for _, _, out in said) - last_in) / 1e6)
                early += min(first_out for _, first_out, _ in said) < last_in
            time.sleep(FIND_S)
        return ClientRow(
            transport=transport,
            clients=count,
            processes=jobs,
            fences=len(costs),
            p50_ms=statistics.median(costs),
            most_ms=max(costs),
            connect_s=connect_s,
            early=early,
        )


# --- One process -----------------------------------------------------------------------------


def crowd(given: Crowd, pipe: Connection) -> None:
    """Have all clients arrive at each fence that the pipe asks for, until it closes."""
    os.dup2(2, 1)
    asyncio.run(_crowd(given, pipe))


async def _crowd(given: Crowd, pipe: Connection) -> None:
    ends = {place: _endpoint(given.transport, place) for place in given.places}
    few = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def connect(end: Any) -> None:
        async with few:
            await end.connect()

    await asyncio.gather(*(connect(end) for end in ends.values()))
    pipe.send("ready")
    heard = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), heard.set)
    while True:
        await heard.wait()
        heard.clear()
        try:
            generation = pipe.recv()
        except EOFError:
            break

        async def pass_one(place: Place, end: Any, generation: int = generation) -> tuple[int, int]:
            call = call_of(place, generation)
            entered = time.monotonic_ns()
            await end.arrive(call, arrival_of(place, call))
            return entered, time.monotonic_ns()

        stamps = await asyncio.gather(*(pass_one(*each) for each in ends.items()))
        outs = [out for _, out in stamps]
        pipe.send((max(entered for entered, _ in stamps), min(outs), max(outs)))
    os._exit(0)  # What so many clients would do to leave is not measured.


def _endpoint(transport: str, place: Place) -> Any:
    rank = Rank(RoleName("trainer"), place.number)
    if transport == "tcp":
        from phasesync.fences.tcp import TcpFences  # noqa: PLC0415

        assert place.coordinator is not None
        return TcpFences(place.coordinator, rank=rank, run=place.run, token="bench")
    from phasesync.fences.store import StoreFences  # noqa: PLC0415

    host = f"host-{place.number // HOST}"
    return StoreFences(_client(place.port), rank=rank, run=place.run, host=host)


@lru_cache
def _client(port: int) -> Any:
    """The store's own client, which the endpoints of a process share."""
    dist: Any = import_module("torch.distributed")
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def clients_table(rows: Sequence[ClientRow]) -> str:
    """A line for each; these are wall times of this machine, and claim nothing."""
    lines = [f"{'clients':>8}  {'over':<6}{'p50 ms':>9}{'most ms':>9}{'connect s':>11}"]
    for row in rows:
        times = f"{row.p50_ms:>9.1f}{row.most_ms:>9.1f}{row.connect_s:>11.1f}"
        lines.append(f"{row.clients:>8}  {row.transport:<6}{times}")
    jobs = max((row.processes for row in rows), default=0)
    lines.append(f"{jobs} processes, {HOST} clients a host; last arrival to last release")
    return "\n".join(lines)
