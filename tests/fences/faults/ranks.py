"""Ranks as real processes that misbehave at a given point, and what each of them saw.

What a rank saw is sent fence by fence, so that one which hangs or dies has still said what it knew.
When a rank entered a fence is written to a board that all share before it arrives: whoever was
killed has left that behind, and an early pass shows.
"""

import asyncio
import math
import mmap
import os
import secrets
import signal
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Rank,
    RootCause,
    Version,
)
from phasesync.errors import FenceBroken, FenceError, PlanError, StaleArrival, StoreLost
from tests.fences.processes import SERVER, end, rank_of, store_client

GENERATIONS_MAX = 64
FORKED_S = 2.0  # So long a forked child outlives its parent, with its files open.
SKIPS_S = 0.5  # Who skips a fence is at the next one so much after the others came to this one.
STARTING_S = 40.0
ENDING_S = 8.0  # An end within this is orderly: a name service may hold a line up.


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one rank does: how many fences, and at which, where in it, it behaves badly."""

    number: int
    size: int
    run: str
    transport: str
    address: Any
    board: str
    deadline_s: float = 3.0
    generations: int = 3
    pace_s: float = 0.0
    at: int = 1
    act: str = "well"
    point: int = 0
    late_s: float = 0.0
    incarnation: int = 0
    comes_back: bool = False
    hosts: int = 0  # So many hosts are made of this one; none if it is what it is.
    is_lonely: bool = False  # It cannot see the processes of the others.
    crowd: int = 0  # So many processes connect before any of them goes on.
    index: int = 0

    @property
    def rank(self) -> Rank:
        return rank_of(self.number)

    def call(self, generation: int) -> FenceCall:
        return FenceCall(
            key=FenceKey(self.run, 0, "world", generation),
            fence=FenceName("memory_released"),
            epoch=Epoch(generation),
            version=Version(generation),
            digest=Digest("d1"),
            members=tuple(rank_of(n) for n in range(self.size)),
            deadline_s=self.deadline_s,
        )

    def arrival(self, call: FenceCall, cause: RootCause | None = None) -> Arrival:
        return call.arrival(
            self.rank,
            incarnation=self.incarnation,
            nonce=os.urandom(8).hex(),
            seq=call.key.generation,
            cause=cause,
            payload=(("param_offload", "true"),),
        )


class Record(NamedTuple):
    """What one fence was to one rank: `open`, `broken`, `stale`, `lost`, `cancelled`, `skipped`."""

    generation: int
    kind: str
    said: Any
    waited_s: float
    ended_at: float

    @property
    def verdict(self) -> tuple[str, Any] | None:
        return (self.kind, self.said) if self.kind in ("open", "broken") else None


class Ending(NamedTuple):
    """What was left of a rank's fences when it had closed them, how its loop did, and whether it
    ever brought the arrivals of others of its host, or one of them brought its own."""

    leaks: tuple[str, ...]
    lag_s: float
    together: bool = False


@dataclass
class Report:
    """What came from one process."""

    life: Life
    records: list[Record] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def last(self) -> Record:
        return self.records[-1]

    @property
    def came_to(self) -> list[Record]:
        """The fences that it arrived at, without the one that it only told of a failure."""
        return [record for record in self.records if not record.kind.startswith("told")]

    @property
    def cause(self) -> RootCause | None:
        return next((r.said for r in reversed(self.records) if r.kind == "broken"), None)


# --- The board: when each rank entered each fence -------------------------------------------


@contextmanager
def board() -> Iterator[str]:
    """A file with a number for each rank and fence."""
    with NamedTemporaryFile(prefix="phasesync-board-") as file:
        file.truncate(8 * GENERATIONS_MAX * 64)
        yield file.name


@contextmanager
def lives_of(size: int, victim: int, bad: Mapping[str, Any], **common: Any) -> Iterator[list[Life]]:
    """So many ranks with what they have in common; the victim also gets what is `bad`."""
    with board() as name:
        base = Life(number=0, size=size, run=secrets.token_hex(4), board=name, **common)
        yield [replace(base, number=n, **(bad if n == victim else {})) for n in range(size)]


def enter(life: Life, generation: int) -> None:
    """Write down that this rank enters, once."""
    _stamp(life, generation, life.number)


def _stamp(life: Life, row: int, column: int) -> None:
    where = 8 * (row * 64 + column)
    with Path(life.board).open("r+b") as file, mmap.mmap(file.fileno(), 0) as slots:
        if not any(slots[where : where + 8]):
            slots[where : where + 8] = struct.pack("d", time.monotonic())


def together(lives: Sequence[Life]) -> list[Life]:
    """The same lives, none of which goes on before all have connected."""
    return [replace(life, index=n, crowd=len(lives)) for n, life in enumerate(lives)]


async def _all_here(life: Life) -> None:
    """A deadline is no match for a busy machine that starts one process long after another."""
    _stamp(life, GENERATIONS_MAX - 1, life.index)
    loop = asyncio.get_running_loop()
    until = loop.time() + STARTING_S
    while loop.time() < until:
        here = entered(life.board, GENERATIONS_MAX - 1, life.crowd)
        if all(map(math.isfinite, here)):
            break
        await asyncio.sleep(0.01)


def entered(name: str, generation: int, size: int) -> tuple[float, ...]:
    """When each rank entered a fence; infinity for who never did."""
    where = 8 * generation * 64
    text = Path(name).read_bytes()[where : where + 8 * size]
    return tuple(at or math.inf for at in struct.unpack(f"{size}d", text))


def until_entered(life: Life, count: int, within_s: float = 60.0) -> None:
    """Until so many ranks have entered the fence at which it happens, and a moment more."""
    until = time.monotonic() + within_s
    while sum(map(math.isfinite, entered(life.board, life.at, life.size))) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{life.run}: not {count} ranks have come within {within_s:g} s")
        time.sleep(0.01)
    time.sleep(0.3)


# --- One life --------------------------------------------------------------------------------


async def live(life: Life, endpoint: Any, tell: Callable[[Any], None]) -> None:
    """Go through the fences; after one that does not open, leave as a runtime does: aloud."""
    before, tasks = _files(), asyncio.all_tasks()
    if life.act == "older":
        _write_older_frames()
    await endpoint.connect()
    await _all_here(life)
    lag = _Lag()
    generation, is_together = -1, False
    while (generation := generation + 1) < life.generations:
        await asyncio.sleep(life.pace_s)
        call = life.call(generation)
        is_together = is_together or _is_together(endpoint)
        act = ACTS[life.act] if generation == life.at else _well
        since = time.monotonic()
        kind, said = await _outcome(act(life, endpoint, call))
        now = time.monotonic()
        tell(Record(generation, kind, said, now - since, now))
        if kind == "broken":
            following = life.call(generation + 1)
            arrival = life.arrival(following, said)
            kind, said = await _outcome(endpoint.fail(following, arrival))
            generation += 1
            tell(Record(generation, f"told {kind}", said, 0.0, time.monotonic()))
            if life.comes_back:
                continue
        if kind not in ("open", "skipped"):
            break
    lag.end()
    RELEASE.set()
    await endpoint.close()
    tell(Ending(await _left(life, before, tasks), lag.worst_s, is_together))


def _is_together(endpoint: Any) -> bool:
    mates = getattr(endpoint, "_mates", None)
    if mates is None:
        return False
    brings = mates._leader is not None and any(len(e) > 1 for e in mates._leader._expected.values())
    return brings or any(each.is_ready for each in mates._followers.values())


async def _outcome(arriving: Awaitable[Any]) -> tuple[str, Any]:
    try:
        opened = await arriving
    except FenceBroken as error:
        return "broken", error.cause
    except StaleArrival as error:
        return "stale", str(error)
    except StoreLost as error:
        return "lost", str(error)
    except FenceError as error:
        return "error", repr(error)
    except asyncio.CancelledError:
        return "cancelled", None
    if isinstance(opened, Broken):
        return "broken", opened.cause
    return ("skipped", None) if opened is None else ("open", opened.ticket.hash)


def _write_older_frames() -> None:
    """This rank's phasesync is of a version that writes and expects other frames.

    From its start on: no process changes its version while frames are in its hands.
    """
    from phasesync.core import fence

    fence.FRAME_FORMAT = 0


class _Lag:
    """For how long the event loop stood still at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._ticking = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.worst_s, before = max(self.worst_s, now - before - 0.005), now

    def end(self) -> None:
        self._ticking.cancel()


def _files() -> set[str]:
    """This process's open files, by what they are."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except OSError:
            continue
    return {name for name in found if "/proc/" not in name}


async def _left(life: Life, files: set[str], tasks: set[Any]) -> tuple[str, ...]:
    """Threads, files and tasks that closing has left; a thread has a moment to end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ENDING_S
    while (left := _leaks(life, files, tasks)) and loop.time() < until:
        await asyncio.sleep(0.02)
    return left


def _leaks(life: Life, files: set[str], tasks: set[Any]) -> tuple[str, ...]:
    threads = [t.name for t in threading.enumerate() if t.name.startswith("phasesync.")]
    sockets = sorted(name for name in _files() - files if "socket:" in name or "pidfd" in name)
    if life.transport == "ray":
        sockets = []  # Ray opens its own as it goes.
    running = sorted(str(task) for task in asyncio.all_tasks() - tasks - {asyncio.current_task()})
    return (*threads, *sockets, *running)


# --- Acts ------------------------------------------------------------------------------------

RELEASE = threading.Event()  # Lets the threads of a full executor go.


async def _well(life: Life, endpoint: Any, call: FenceCall) -> Any:
    enter(life, call.key.generation)
    return await endpoint.arrive(call, life.arrival(call))


async def _late(life: Life, endpoint: Any, call: FenceCall) -> Any:
    await asyncio.sleep(life.late_s)
    return await _well(life, endpoint, call)


async def _skips(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """It goes on without the fence, to the next."""
    await asyncio.sleep(SKIPS_S)
    return None


async def _fails(life: Life, endpoint: Any, call: FenceCall) -> Any:
    cause = RootCause(
        kind="failed", ranks=(life.rank,), phase="offload", error_type="ValueError", error="no room"
    )
    return await endpoint.arrive(call, life.arrival(call, cause))


async def _epoch(life: Life, endpoint: Any, call: FenceCall) -> Any:
    enter(life, call.key.generation)
    return await endpoint.arrive(call, replace(life.arrival(call), epoch=Epoch(99)))


async def _options(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """Another option on one rank makes another digest; the payload says which."""
    enter(life, call.key.generation)
    other = replace(life.arrival(call), digest=Digest("d2"), payload=(("param_offload", "false"),))
    return await endpoint.arrive(call, other)


async def _twice(life: Life, endpoint: Any, call: FenceCall) -> Any:
    enter(life, call.key.generation)
    again = asyncio.ensure_future(_outcome(endpoint.arrive(call, life.arrival(call))))
    try:
        return await endpoint.arrive(call, life.arrival(call))
    finally:
        await again


def _signalled(number: int) -> Callable[[Life, Any, FenceCall], Awaitable[Any]]:
    """The signal comes before the arrival."""

    async def act(life: Life, endpoint: Any, call: FenceCall) -> Any:
        signal_self(number)
        return await _well(life, endpoint, call)

    return act


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)  # It is another thread that takes the signal: this one would run on meanwhile.


def _signalled_at_point(number: int) -> Callable[[Life, Any, FenceCall], Awaitable[Any]]:
    """The signal comes before the operation of that number on what carries the fence."""

    async def act(life: Life, endpoint: Any, call: FenceCall) -> Any:
        await asyncio.sleep(life.late_s)
        left = life.point

        def operation() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                signal_self(number)

        POINTS[life.transport](operation)
        return await _well(life, endpoint, call)

    return act


async def _at_any_time(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """A timer of the kernel kills in the middle of whatever is done then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(life.late_s, 1e-6))
    return await _well(life, endpoint, call)


async def _exits(life: Life, endpoint: Any, call: FenceCall) -> Any:
    os._exit(1)


async def _stalls(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """The event loop stands still right after the arrival."""
    asyncio.get_running_loop().call_soon(time.sleep, life.late_s)
    return await _well(life, endpoint, call)


async def _full_executor(life: Life, endpoint: Any, call: FenceCall) -> Any:
    loop = asyncio.get_running_loop()
    for _ in range(64):
        loop.run_in_executor(None, RELEASE.wait)
    return await _well(life, endpoint, call)


async def _forks(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """A child has all that the rank has open, is told that it is none, and outlives it."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            endpoint.missing(call).send(None)
        except PlanError as error:
            os.write(write, str(error).encode())
        except BaseException as error:
            os.write(write, f"not refused: {error!r}".encode())
        time.sleep(FORKED_S)
        os._exit(0)
    said = os.read(read, 4096).decode()
    os.close(read)
    os.close(write)
    if "is process" not in said:
        raise FenceError(f"the fork said {said!r}")
    signal_self(signal.SIGKILL)


async def _clock_jumps(life: Life, endpoint: Any, call: FenceCall) -> Any:
    """The wall clock is set forth and back by a day, as time services do by less."""
    true = time.time
    since = time.monotonic()
    setattr(time, "time", lambda: true() + 86400 * (-1) ** int(50 * (time.monotonic() - since)))  # noqa: B010
    return await _well(life, endpoint, call)


async def _cancelled(life: Life, endpoint: Any, call: FenceCall) -> Any:
    arriving = asyncio.ensure_future(_well(life, endpoint, call))
    for _ in range(life.point):
        await asyncio.sleep(0)
    await asyncio.sleep(life.late_s)
    arriving.cancel()
    return await arriving


ACTS: Mapping[str, Callable[[Life, Any, FenceCall], Awaitable[Any]]] = {
    "well": _well,
    "late": _late,
    "skips": _skips,
    "fails": _fails,
    "epoch": _epoch,
    "options": _options,
    "twice": _twice,
    "killed": _signalled(signal.SIGKILL),
    "frozen": _signalled(signal.SIGSTOP),
    "killed at a point": _signalled_at_point(signal.SIGKILL),
    "frozen at a point": _signalled_at_point(signal.SIGSTOP),
    "killed at any time": _at_any_time,
    "exits": _exits,
    "stalls": _stalls,
    "full executor": _full_executor,
    "forks": _forks,
    "older": _well,
    "clock jumps": _clock_jumps,
    "cancelled": _cancelled,
}


def _store_points(operation: Callable[[], None]) -> None:
    """Each operation, and each time that bytes go or come where a line has no thread."""
    from phasesync.fences.direct import DirectLine
    from phasesync.fences.lines import Client

    _before(Client, "perform", operation)
    for name in ("_next", "_flush", "data_received"):
        _before(DirectLine, name, operation)


def _tcp_points(operation: Callable[[], None]) -> None:
    from phasesync.fences.tcp import TcpFences

    _before(TcpFences, "_write", operation)
    _before(TcpFences, "data_received", operation)


def _before(owner: type, name: str, operation: Callable[[], None]) -> None:
    plain = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        operation()
        return plain(*arguments)

    setattr(owner, name, counted)


POINTS: Mapping[str, Callable[[Callable[[], None]], None]] = {
    "store": _store_points,
    "file": _store_points,
    "tcp": _tcp_points,
    "ray": _tcp_points,
}


# --- Processes ------------------------------------------------------------------------------


def endpoint_of(life: Life) -> Any:
    return ENDPOINTS[life.transport](life)


def _store(life: Life) -> Any:
    from phasesync.fences.store import StoreFences

    kind = "file" if life.transport == "file" else "tcp"
    return StoreFences(
        store_client((kind, life.address)),
        rank=life.rank,
        run=life.run,
        incarnation=life.incarnation,
        host=f"host-{life.number * life.hosts // life.size}" if life.hosts else None,
        watch_neighbours=not life.is_lonely,
    )


def _tcp(life: Life) -> Any:
    from phasesync.fences.tcp import TcpFences

    return TcpFences(
        tuple(life.address),
        rank=life.rank,
        run=life.run,
        incarnation=life.incarnation,
        token="secret",
    )


def _ray(life: Life) -> Any:
    from phasesync.fences.ray import RayFences

    return RayFences(rank=life.rank, run=life.run, incarnation=life.incarnation)


ENDPOINTS: Mapping[str, Callable[[Life], Any]] = {
    "store": _store,
    "file": _store,
    "tcp": _tcp,
    "ray": _ray,
}


def process(life: Life, pipe: Connection) -> None:
    """A rank, in its own process."""
    asyncio.run(live(life, endpoint_of(life), pipe.send))
    pipe.send(None)
    os._exit(0)  # A thread that hangs in a store that is gone is not joined.


Target = Callable[[Any, Connection], None]


@dataclass
class Started:
    """A process, its pipe, and what has come from it."""

    process: Any
    pipe: Connection
    report: Report


@contextmanager
def started(lives: Sequence[Life], target: Target = process) -> Iterator[list[Started]]:
    """A process for each life; whatever is left at the end is killed."""
    begun: list[Started] = []
    try:
        for life in together(lives):
            ours, theirs = SERVER.Pipe()
            one = SERVER.Process(target=target, args=(life, theirs), daemon=True)
            one.start()
            theirs.close()
            begun.append(Started(one, ours, Report(life)))
        yield begun
    finally:
        for each in begun:
            end(each.process)
            each.pipe.close()


def listen(to: Sequence[Started], within_s: float) -> list[Started]:
    """Take what they send until each has ended; those that have not within the time."""
    waiting = {each.pipe: each for each in to}
    until = time.monotonic() + within_s
    while waiting and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except (EOFError, ConnectionResetError):
                said = None
            match said:
                case None:
                    del waiting[pipe]
                case Ending():
                    waiting[pipe].report.ending = said
                case _:
                    waiting[pipe].report.records.append(said)
    return list(waiting.values())


FREEZES = ("frozen", "frozen at a point")


def play(lives: Sequence[Life], within_s: float = 40.0) -> list[Report]:
    """Let them live. Who is frozen is woken when the others have ended."""
    with started(lives) as begun:
        frozen = [each for each in begun if each.report.life.act in FREEZES]
        hung = listen([each for each in begun if each not in frozen], within_s)
        for each in frozen:
            with suppress(ProcessLookupError):
                os.kill(each.process.pid, signal.SIGCONT)
        hung += listen(frozen, within_s)
        for each in hung:
            each.report.records.append(Record(-1, "hung", None, within_s, time.monotonic()))
        return [each.report for each in begun]
