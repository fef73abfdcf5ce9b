"""Lines to a store: a connection and a thread each, on which steps are performed.

Three facts of the stores must survive edits: a blocked call holds its connection, so whoever
breaks a fence needs another one; a frozen store ignores its own time-outs, so a line can be cut
from outside; and the default executor is never used, because leaving a loop joins its
threads. No thread is ever joined.
"""

import asyncio
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from phasesync.core.fence_keys import (
    NOT_THERE,
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Put,
    Read,
    Steps,
    Tell,
    Wait,
)
from phasesync.core.model import FenceKey
from phasesync.errors import StoreLost
from phasesync.fences.direct import MARK, DirectLine, Way, rehearsal
from phasesync.fences.driver import in_thread
from phasesync.fences.jobs import Ear, Job, Waiting, settle

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("ANSWER_S", "CONNECT_S", "GRACE_S", "Client", "Lines", "has_sockets", "nothing")

GRACE_S = 1.0  # After a deadline the store has so long to take the verdict; then it is lost.
# What is no wait is answered within this, or the store is lost. More than a name service keeps the
# store's one thread when somebody connects (5 s for each lost packet).
ANSWER_S = 15.0
CONNECT_S = 60.0  # A connection may hang in a name service for many seconds.
CONNECTING_S = 10.0  # So much more where no line is free: a name service may hold a new one up.
SOCKET_WAIT_S = 3600.0  # One blocking wait on a socket, which `close` can end.
POLLED_WAIT_S = 1.0  # One blocking wait on a store without a socket, which it cannot.
REHEARSAL_S = 10.0  # To find out whether one can do without threads; else there are threads.
CLONES_MAX = 8  # So often a client is made anew, until its socket is told from others.
LINES_AT_START = 2  # One to wait, one to break what is waited for.
INTERNET = (socket.AF_INET, socket.AF_INET6)


class _Stopped(Exception):
    """The line was told to stop while it waited."""


class Client:
    """One connection to the store. Where the store has sockets, it knows its own, to cut it."""

    _opening = threading.Lock()

    def __init__(self, store: "Store") -> None:
        self.stopping = False
        base = _base_of(store)
        self._port = getattr(base, "port", None)
        # TCPStore's older server does not wake who waits for a key when it is compared and set.
        self._sleeps_through_compare_set = not getattr(base, "libuvBackend", True)
        self._store: Any = store
        self._sockets: list[socket.socket] = []
        if hasattr(store, "clone"):
            with self._opening:
                self._store, self._sockets = _cloned(store, self._port)
        self._wait_s = SOCKET_WAIT_S if self._sockets else POLLED_WAIT_S
        if hasattr(store, "clone"):  # The connection is ours alone.
            self._store.set_timeout(timedelta(seconds=self._wait_s))

    def perform(self, operation: Any) -> Any:
        return _PERFORM[type(operation)](self, operation)

    def append(self, operation: Append) -> None:
        self._store.append(operation.key, operation.value)

    def add(self, operation: Add) -> int:
        count: int = self._store.add(operation.key, operation.amount)
        return count

    def count(self, operation: Count) -> None:
        self._store.add(operation.key, operation.amount)

    def put(self, operation: Put) -> None:
        self._store.set(operation.key, operation.value)

    def get(self, operation: Get) -> bytes:
        """One round trip, where the store's own `get` takes two: to wait, and to get. Who comes
        late may find the key removed: a missing one answers with what was expected of it."""
        value: bytes = self._store.compare_set(operation.key, NOT_THERE, NOT_THERE)
        return b"" if value == NOT_THERE.encode() else value

    def _value(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        return value

    def read(self, operation: Read) -> bytes | None:
        """Never wait: it may be removed between the two, and a missing key answers with what was
        expected of it. Without the first, those who wait for the key would be woken for nothing."""
        if not self._store.check([operation.key]):
            return None
        value: bytes = self._store.compare_set(operation.key, NOT_THERE, NOT_THERE)
        return None if value == NOT_THERE.encode() else value

    def compare_set(self, operation: CompareSet) -> bytes:
        winner: bytes = self._store.compare_set(operation.key, "", operation.value)
        if self._sleeps_through_compare_set and winner == operation.value:
            self._store.set(operation.key, winner)
        return winner

    def delete(self, operation: Delete) -> None:
        self._store.delete_key(operation.key)

    def wait(self, operation: Wait) -> bytes:
        """Block until the key is there. A time-out of the store is no news; a dead store is."""
        while not self.stopping:
            since = time.monotonic()
            try:
                if not self._sockets:
                    self._store.wait([operation.key], timedelta(seconds=self._wait_s))
                if value := self._value(operation.key):
                    return value  # Else it was woken for nothing.
            except RuntimeError:
                if time.monotonic() - since < self._wait_s / 2 and not self.stopping:
                    raise
                self._store.check([operation.key])
        raise _Stopped

    @property
    def address(self) -> tuple[str, int] | None:
        """The store's numeric address; a name might keep one waiting."""
        for end in self._sockets:
            with suppress(OSError):
                host, port = end.getpeername()[:2]
                return str(host).removeprefix("::ffff:"), int(port)
        return None

    def cut(self) -> None:
        """Make a blocked call return, frozen store or not."""
        self.stopping = True
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        _close_all(self._sockets)
        self._sockets = []
        del self._store


_PERFORM: Mapping[type, Callable[[Client, Any], Any]] = {
    Append: Client.append,
    Add: Client.add,
    Count: Client.count,
    Put: Client.put,
    Get: Client.get,
    Read: Client.read,
    Wait: Client.wait,
    CompareSet: Client.compare_set,
    Delete: Client.delete,
}


def has_sockets(store: Any) -> bool:
    """Whether it is a TCPStore, at the bottom of its prefixes."""
    return hasattr(_base_of(store), "port")


def _base_of(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _cloned(store: Any, port: int | None) -> tuple[Any, list[socket.socket]]:
    """A client of our own, and its socket: the one that is new.

    The process may connect to the same store elsewhere just then, and what is cut must not be
    somebody else's: where more than one is new it is tried again. If it stays so, the client is one
    that cannot be cut.
    """
    for _ in range(CLONES_MAX):
        before = _sockets_to(port)
        clone = store.clone()
        after = _sockets_to(port)
        new = [after.pop(name) for name in after.keys() - before.keys()]
        _close_all(before.values())
        _close_all(after.values())
        if len(new) == 1 or not (before or after or new):
            return clone, new  # Nothing is seen where there is no `/proc`, and of other stores.
        _close_all(new)
    return clone, []


def _close_all(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()


def _sockets_to(port: int | None) -> dict[Any, socket.socket]:
    """Handles on this process's sockets to `port`, by the address of their own end.

    A store's client does not show its socket, and has no call that ends a blocked one.
    """
    found: dict[Any, socket.socket] = {}
    fds = Path("/proc/self/fd")
    if port is None or not fds.is_dir():
        return found
    for entry in list(fds.iterdir()):
        with suppress(OSError):  # It is closed by now, or not connected.
            if not str(entry.readlink()).startswith("socket:"):
                continue
            end = socket.socket(fileno=os.dup(int(entry.name)))
            if _goes_to(end, port) and end.getsockname() not in found:
                found[end.getsockname()] = end
            else:
                end.close()
    return found


def _goes_to(end: socket.socket, port: int) -> bool:
    try:
        is_ours = end.family in INTERNET and end.getsockopt(socket.SOL_SOCKET, MARK[0]) == MARK[1]
        return end.family in INTERNET and end.getpeername()[1] == port and not is_ours
    except OSError:
        return False


# --- Lines: a connection and a thread each --------------------------------------------------


class _Line:
    """One connection and its daemon thread, which is never joined.

    The thread performs one job at a time. It hands what came of it to the loop, and itself back to
    `lines`, in one call: each call wakes the loop.
    """

    def __init__(self, store: "Store", lines: "Lines", name: str) -> None:
        self._store = store
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._client: Client | None = None
        self._stopping = False
        self.ended = asyncio.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread, cutting what it is blocked in."""
        self._stopping = True
        self._jobs.put(None)
        if self._client is not None:
            self._client.cut()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                result, error = self._perform(job)
                self._call(self._lines.done, self, job.future, result, error)
        finally:
            if self._client is not None:
                self._client.close()
            self._call(self.ended.set)

    def _perform(self, job: Job) -> tuple[Any, StoreLost | None]:
        try:
            if self._client is None:
                self._client = Client(self._store)
                self._client.stopping = self._stopping
            return self._walk(self._client, job), None
        except _Stopped:
            return None, StoreLost("the transport was closed while it waited")
        except Exception as error:
            why = "the transport was closed" if self._stopping else "the store does not answer"
            lost = StoreLost(f"{why}: {type(error).__name__}: {error}")
            lost.__cause__ = error
            return None, lost

    def _walk(self, client: Client, job: Job) -> Any:
        perform, steps = client.perform, job.steps
        try:
            operation = next(steps)
            while True:
                if type(operation) is Tell:
                    self._call(settle, job.future, operation.result, None)
                    operation = next(steps)
                else:
                    operation = steps.send(perform(operation))
        except StopIteration as end:
            return end.value

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # A loop that is closed has nobody left who waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class Lines:
    """The lines of one endpoint; most of the time two are enough."""

    def __init__(self, store: "Store", name: str) -> None:
        self._store = store
        self._name = name
        self._idle: list[_Line | DirectLine] = []
        self._all: list[_Line | DirectLine] = []
        self._at_work: set[_Line | DirectLine] = set()
        self._way: Way | None = None
        self.lost: StoreLost | None = None

    def submit(self, steps: Steps, *, waits: bool = False) -> "asyncio.Future[Any]":
        """Perform steps on a free line; the future also fails if the store is lost.

        Steps that wait for others take their line away for long; then a spare one is opened ahead,
        because to connect may take seconds, and whoever breaks a fence has none to lose.
        """
        future = asyncio.get_running_loop().create_future()
        self._give(Job(steps, future), waits=waits)
        return future

    def hand(self, steps: Steps, hear: Callable[[Any, Exception | None], None]) -> None:
        """As `submit`, but what comes of it is heard at once."""
        self._give(Job(steps, Ear(hear)), waits=False)

    def _give(self, job: Job, *, waits: bool) -> None:
        if self.lost is not None:
            job.future.set_exception(self.lost)
            return
        line = self._idle.pop() if self._idle else self._open()
        self.tidy(line)
        if not waits:
            self._at_work.add(line)
        line.give(job)
        if waits and not self._idle:
            self.submit_spare()

    async def straighten(self) -> None:
        """Do without threads from now on, if the store can be spoken to directly."""
        name = f"{self._name}.way"
        with suppress(TimeoutError, StoreLost, RuntimeError, OSError):
            async with asyncio.timeout(REHEARSAL_S):
                found = await _known_way(self._store, name)
                if found is None:
                    return
                self._way, line = found
                line.then(self.done)
                self._all.append(line)
                self._idle.append(line)

    @property
    def are_direct(self) -> bool:
        """Whether the store is spoken to without threads."""
        return self._way is not None

    @property
    def local_host(self) -> str | None:
        """The address of this host that the store's host is reached from, where known."""
        direct = (line for line in self._all if isinstance(line, DirectLine))
        return next((host for line in direct if (host := line.local_host)), None)

    def tidy(self, but: "_Line | DirectLine | None" = None) -> None:
        """Send what may wait, `but` what this line has: it leaves with what it is given."""
        for line in self._idle:
            if line is not but and isinstance(line, DirectLine):
                line.tidy()

    def tell(self, steps: Steps) -> None:
        """Perform steps of which nobody waits for the end."""
        self.submit(steps).add_done_callback(_read)

    def submit_spare(self) -> None:
        """Open a line ahead."""
        ready = asyncio.get_running_loop().create_future()
        ready.add_done_callback(_read)
        self._open().give(Job(nothing(), ready))

    def done(
        self,
        line: "_Line | DirectLine",
        future: Waiting,
        result: Any,
        error: StoreLost | None,
    ) -> None:
        """A line has finished a job."""
        self._idle.append(line)
        self._at_work.discard(line)
        settle(future, result, error)
        if error is not None and self.lost is None:
            self.abandon(str(error))

    async def ask(self, steps: Steps, within_s: float = ANSWER_S) -> Any:
        """What comes of steps that do not wait for anybody.

        Raises:
            StoreLost: there was no answer within the time.
        """
        limit_s = within_s if self._idle else within_s + CONNECTING_S
        try:
            async with asyncio.timeout(limit_s):
                return await self.submit(steps)
        except TimeoutError:
            raise self.abandon(f"the store did not answer within {limit_s:g} s") from None

    async def rest(self) -> None:
        """Until no line is at work, but for those that wait for others: what is still under way
        (the end of a deadline, say) would write after whatever is asked for next."""
        self.tidy()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self._at_work and self.lost is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

    def abandon(self, why: str, key: FenceKey | None = None) -> StoreLost:
        """Give the store up, for good: what it decided since cannot be known."""
        if self.lost is None:
            self.lost = StoreLost(why, key)
        for line in self._all:
            line.stop()
        return self.lost

    async def close(self) -> None:
        """Stop all threads, and wait a moment for them; none is joined."""
        if self.lost is None:
            self.lost = StoreLost("the transport was closed")
        for line in self._all:
            line.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLLED_WAIT_S + GRACE_S):
                for line in self._all:
                    await line.ended.wait()

    def _open(self) -> "_Line | DirectLine":
        name = f"{self._name}.{len(self._all)}"
        line: _Line | DirectLine
        if self._way is not None:
            line = DirectLine(self._way, self.done, name)
        else:
            line = _Line(self._store, self, name)
        self._all.append(line)
        return line


_WAYS: "weakref.WeakKeyDictionary[Any, Way]" = weakref.WeakKeyDictionary()


async def _known_way(store: "Store", name: str) -> tuple[Way, DirectLine] | None:
    """As `_find_way`, of which one rehearsal is enough for all endpoints that share a client."""
    way = _WAYS.get(store)
    if way is not None:
        return way, DirectLine(way, lambda _, future, *came: settle(future, *came), name)
    found = await _find_way(store, name)
    if found is not None:
        _WAYS[store] = found[0]
    return found


async def _find_way(store: "Store", name: str) -> tuple[Way, DirectLine] | None:
    """How to speak to the store without a thread, and a line that does: each request is known to
    work then.

    The store's own client puts something there, a direct line does each request once, and the
    client sees whether what it left is what it should be.
    """
    base = _base_of(store)
    if not getattr(base, "libuvBackend", False):
        return None
    key, nonce = f"ps/way/{secrets.token_hex(8)}", secrets.token_bytes(8)
    client, way = await in_thread(partial(_lay_out, store, key, nonce), name=name)
    line: DirectLine | None = None
    works = False
    try:
        if way is not None:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            line = DirectLine(way, lambda _, future, *came: settle(future, *came), name)
            line.give(Job(rehearsal(key, nonce), future))
            works = await future
        agrees = await in_thread(partial(_agrees, client, key, nonce), name=name)
        works = works and agrees
        return (way, line) if works and way is not None and line is not None else None
    finally:
        if line is not None and not works:
            line.stop()
        client.cut()
        client.close()


def _lay_out(store: "Store", key: str, nonce: bytes) -> tuple[Client, Way | None]:
    """Put something in the store, and find where it is: prefixes do not tell what they add."""
    client = Client(store)
    client.perform(Put(key, nonce))
    client.perform(Read(key))  # The reply proves that it is there.
    address, prefix = client.address, "/"
    base = _base_of(store)
    if base is not store and not hasattr(base, "list_keys"):
        prefix = ""  # Older than torch 2.11: there are threads then.
    elif base is not store:
        beside = f"{key}/base"
        base.set(beside, nonce)
        names = base.list_keys()
        base.delete_key(beside)
        full = [name.removesuffix(key) for name in names if name.endswith(key)]
        plain = [name.removesuffix(beside) for name in names if name.endswith(beside)]
        found = len(full) == len(plain) == 1
        prefix = f"/{full[0].removeprefix(plain[0])}" if found else ""
    return client, Way(*address, prefix) if address and prefix else None


def _agrees(client: Client, key: str, nonce: bytes) -> bool:
    """Whether the store's own client sees what a direct line has done."""
    other = client.perform(Read(f"{key}/other"))
    client.perform(Delete(f"{key}/other"))
    client.perform(Delete(key))
    return bool(other == nonce + nonce)


def _read(done: "asyncio.Future[Any]") -> None:
    """Leave no error unread that is nobody's: a store that is lost is found lost by who waits."""
    if not done.cancelled():
        done.exception()


def nothing() -> Steps:
    """No operation: opening the connection is all."""
    return
    yield
