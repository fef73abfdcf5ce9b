"""A line to a TCPStore without a thread: its requests as bytes, in the event loop.

A thread for each line costs two hand-overs a fence, which is more than all that the store does. The
store's requests are not a public interface, so nothing is assumed of them: `rehearsal` has each
done once, against what the store's own client says, and the lines with threads stay where one of
them does not give what it must.
"""

import asyncio
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, cast

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
from phasesync.errors import StoreLost
from phasesync.fences.doors import keep_alive
from phasesync.fences.jobs import Job, settle

__all__ = ("MARK", "DirectLine", "Way", "rehearsal")

CONNECT_S = 30.0
TIDY_S = 0.05  # What follows a `Tell` leaves with the line's next request, or after so long.
#: An option of `keep_alive` that a store's own client does not set: by it our sockets are told from
#: those.
MARK = (socket.SO_KEEPALIVE, 1)
_LENGTH = Struct("=Q")
_NUMBER = Struct("=q")
_MAGIC = Struct("=BI").pack(0, 0x3C85F7CE)
_NOT_THERE = NOT_THERE.encode()


# The store's requests, by their first byte.
_SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _DELETE, _APPEND = (
    bytes((number,)) for number in (1, 2, 3, 4, 5, 6, 8, 9)
)
# What they are answered with: the parts of the reply, in their order. A number may come that
# nobody waits for.
_NOTHING, _FLAG, _COUNT, _VALUE, _DROPPED = "", "f", "n", "v", "d"


class Way(NamedTuple):
    """How to reach a store: a numeric address, and what its keys begin with."""

    host: str
    port: int
    prefix: str


_Request: TypeAlias = tuple[bytes, str]
_Talk: TypeAlias = Generator[_Request, Any, Any]


def _text(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


_ONE = _LENGTH.pack(1)  # `check` and `wait` take a list of keys.
_EMPTY = _text(b"")


def _append(operation: Append, key: bytes) -> _Request:
    return _APPEND + key + _text(operation.value), _NOTHING


def _put(operation: Put, key: bytes) -> _Request:
    return _SET + key + _text(operation.value), _NOTHING


def _add(operation: Add, key: bytes) -> _Request:
    return _ADD + key + _NUMBER.pack(operation.amount), _COUNT


def _count(operation: Count, key: bytes) -> _Request:
    return _ADD + key + _NUMBER.pack(operation.amount), _DROPPED


def _get(_: Get, key: bytes) -> _Request:
    return _GET + key, _VALUE


def _compare_set(operation: CompareSet, key: bytes) -> _Request:
    return _COMPARE_SET + key + _EMPTY + _text(operation.value), _VALUE


def _delete(_: Delete, key: bytes) -> _Request:
    return _DELETE + key, _DROPPED


def _look(key: bytes) -> _Request:
    """What a key holds, whether it is there or not: a missing one answers with what is expected."""
    return _COMPARE_SET + key + _text(_NOT_THERE) + _text(_NOT_THERE), _VALUE


def _read(_: Read, key: bytes) -> _Talk:
    """It may be removed between the two; and the second alone would wake who waits for it."""
    if (yield _CHECK + _ONE + key, _FLAG):
        return None
    value = yield _look(key)
    return None if value == _NOT_THERE else value


def _wait(_: Wait, key: bytes) -> _Talk:
    while True:
        yield _WAIT + _ONE + key, _FLAG
        value = yield _get(Get(""), key)
        if value:  # Else it was woken for nothing.
            return value


_REQUESTS: Mapping[type, Callable[[Any, bytes], _Request]] = {
    Append: _append,
    Add: _add,
    Count: _count,
    Put: _put,
    Get: _get,
    CompareSet: _compare_set,
    Delete: _delete,
}
_TALKS: Mapping[type, Callable[[Any, bytes], _Talk]] = {Read: _read, Wait: _wait}
# What may be read together with a request, by what was asked for.
_AHEAD: Mapping[type, Callable[[bytes], _Request]] = {
    Add: lambda key: _get(Get(""), key),
    CompareSet: _look,
}


def rehearsal(key: str, nonce: bytes) -> Steps:
    """Each request once. The store's own client has put `nonce` at `key`, and reads beside it
    what this has left there; True if all answered as they must."""
    other, count = f"{key}/other", f"{key}/count"
    # To read goes first: where the keys are others than was thought, a wait would last for ever.
    if (yield Read(key)) != nonce or (yield Wait(key)) != nonce or (yield Get(key)) != nonce:
        return False
    if (yield Read(count)) is not None or (yield Add(count, 2)) != 2:
        return False
    if (yield Add(count, 1, key)) != 3 or (yield Get(key)) != nonce:
        return False
    yield Count(count, 2)
    if (yield Add(count, 0)) != 5:
        return False
    yield Delete(count)
    if (yield Read(count)) is not None:
        return False
    yield Put(other, nonce)
    yield Append(other, nonce)
    if (yield CompareSet(other, b"x", ahead=key)) != nonce + nonce or (yield Get(key)) != nonce:
        return False
    return (yield CompareSet(other, b"x", ahead=count)) == nonce + nonce and not (yield Get(count))


class DirectLine(asyncio.Protocol):
    """One connection, which performs one job at a time.

    `done` is told what came of a job, and gets the line back.
    """

    def __init__(self, way: Way, done: Callable[..., None], name: str) -> None:
        self._way = way
        self._done = done
        self._prefix = way.prefix.encode()
        self._job: Job | None = None
        self._talk: _Talk | None = None
        self._reply = _NOTHING
        self._unsent = bytearray(_MAGIC)
        self._unread = bytearray()
        self._dropped = 0  # Replies that nobody waits for, before the one that is waited for.
        self._ahead_key = ""
        self._ahead: tuple[str, bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._has_told = False
        self._tidying: asyncio.TimerHandle | None = None
        self._stopping = False
        self._why = ""
        self.ended = asyncio.Event()
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name=name)

    def then(self, done: Callable[..., None]) -> None:
        """Give the line to somebody else, while it is free."""
        self._done = done

    def give(self, job: Job) -> None:
        """Perform a job; the line must be free."""
        self._job, self._has_told = job, False
        if self.ended.is_set():
            self._over(self._why)
        elif self._transport is not None:
            self._go(None)

    @property
    def local_host(self) -> str | None:
        """The address of this end, once there is a connection."""
        if self._transport is None:
            return None
        return str(self._transport.get_extra_info("sockname")[0])

    def stop(self) -> None:
        """Cut the connection, whatever it waits for."""
        self._stopping = True
        if self._transport is not None:
            self._transport.abort()
        elif self._connecting.cancel():
            self._connecting.add_done_callback(lambda _: self._over("it was not connected yet"))

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self._way.host else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setblocking(False)
        keep_alive(end)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(end, (self._way.host, self._way.port))
            await loop.create_connection(lambda: self, sock=end)
        except (OSError, TimeoutError) as error:
            end.close()
            self._over(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            end.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # Of asyncio or uvloop.
        self._transport = transport
        if self._job is not None:
            self._go(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._over(str(error or "the store closed the connection"))

    def _over(self, why: str) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        self._why = "the transport was closed" if self._stopping else why
        self.ended.set()
        self._end(None, StoreLost(f"the store does not answer: {self._why}"))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while self._job is not None:
            reply = self._take()
            if reply is None:
                return
            if len(reply) > 1:
                self._ahead = (self._ahead_key, reply[1])
            self._go(reply[0])

    def _take(self) -> list[Any] | None:
        """The reply that is waited for, part by part, once it has come in full."""
        unread, at = self._unread, self._dropped * _NUMBER.size
        size = len(unread)
        parts: list[Any] = []
        for part in self._reply:
            if part == _FLAG:
                if size <= at:
                    return None
                parts.append(unread[at])
                at += 1
                continue
            if size < at + _NUMBER.size:
                return None
            (number,) = _NUMBER.unpack_from(unread, at)
            at += _NUMBER.size
            if part == _COUNT:
                parts.append(number)
                continue
            if size < at + number:
                return None
            parts.append(bytes(unread[at : at + number]))
            at += number
        del unread[:at]
        self._dropped = 0
        return parts

    def _go(self, reply: Any) -> None:
        """Go on with the job until a reply is needed; what needs none leaves with what does."""
        assert self._job is not None
        try:
            while True:
                request, self._reply = self._next(self._job, reply)
                self._unsent += request
                if self._reply == _DROPPED:
                    self._dropped += 1
                elif self._reply:
                    self._flush()
                    return
                reply = None
        except StopIteration as over:
            if self._has_told and self._unsent:
                self._tidy_later()
            else:
                self._flush()
            self._end(over.value, None)
        except Exception as error:
            lost = StoreLost(f"the store does not answer: {type(error).__name__}: {error}")
            lost.__cause__ = error
            self._end(None, lost)

    def _next(self, job: Job, reply: Any) -> _Request:
        """The next request: of the operation under way, or of the one that follows it."""
        if self._talk is not None:
            try:
                return self._talk.send(reply)
            except StopIteration as over:
                self._talk, reply = None, over.value
        ahead, self._ahead = self._ahead, None
        while True:
            operation: Any = job.steps.send(reply)
            kind = type(operation)
            if kind is Tell:
                settle(job.future, operation.result, None)
                self._has_told, reply = True, None
            elif kind is Get and ahead is not None and operation.key == ahead[0]:
                # What was there is what was looked for, unless the look was answered with itself.
                reply, ahead = b"" if ahead[1] == _NOT_THERE else ahead[1], None
            else:
                break
        key = self._key(operation.key)
        if kind in _TALKS:
            self._talk = _TALKS[kind](operation, key)
            return next(self._talk)
        request, expected = _REQUESTS[kind](operation, key)
        if kind in _AHEAD and operation.ahead:
            self._ahead_key = operation.ahead
            more, _ = _AHEAD[kind](self._key(operation.ahead))
            return request + more, expected + _VALUE
        return request, expected

    def _key(self, key: str) -> bytes:
        return _text(self._prefix + key.encode())

    def _tidy_later(self) -> None:
        """Whoever was told goes on first: to send costs more than all that it took to decide."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_S, self.tidy)

    def tidy(self) -> None:
        """Send what may wait. It must have left before this rank comes to its next fence, since
        others may decide that one, and put the head further on."""
        if self._tidying is not None:
            self._flush()

    def _flush(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            self._tidying = None
        if self._unsent and self._transport is not None:
            unsent, self._unsent = self._unsent, bytearray()
            self._transport.write(unsent)

    def _end(self, result: Any, error: StoreLost | None) -> None:
        job, self._job, self._talk = self._job, None, None
        if job is not None:
            with suppress(asyncio.InvalidStateError):
                self._done(self, job.future, result, error)
