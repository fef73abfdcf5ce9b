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
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from phasesync.core.fence_keys import (
    Add,
    Append,
    CompareSet,
    Delete,
    Get,
    Put,
    Read,
    Steps,
    Tell,
    Wait,
)
from phasesync.errors import StoreLost
from phasesync.fences.jobs import Job, settle

__all__ = ("MARK", "DirectLine", "Way", "rehearsal")

CONNECT_S = 30.0
#: An option that a store's own client does not set: by it our sockets are told from those.
MARK = (socket.SO_KEEPALIVE, 1)
_LENGTH = Struct("=Q")
_NUMBER = Struct("=q")
_MAGIC = Struct("=BI").pack(0, 0x3C85F7CE)
_NOT_THERE = b"(not there)"


class _Ask(IntEnum):
    """The store's requests, by their first byte."""

    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE = 8
    APPEND = 9


class _Reply(IntEnum):
    """What a request is answered with."""

    NONE = 0
    FLAG = 1
    NUMBER = 2
    VALUE = 3
    BOTH = 4  # A number, then a value.
    DROPPED = 5  # A number that nobody waits for.


class Way(NamedTuple):
    """How to reach a store: a numeric address, and what its keys begin with."""

    host: str
    port: int
    prefix: str


_Request: TypeAlias = tuple[bytes, _Reply]
_Talk: TypeAlias = Generator[_Request, Any, Any]


def _text(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _ask(what: _Ask, key: bytes, *values: bytes) -> bytes:
    return bytes((what,)) + key + b"".join(map(_text, values))


_ONE = _LENGTH.pack(1)  # `check` and `wait` take a list of keys.


def _append(operation: Append, key: bytes) -> _Talk:
    yield _ask(_Ask.APPEND, key, operation.value), _Reply.NONE


def _put(operation: Put, key: bytes) -> _Talk:
    yield _ask(_Ask.SET, key, operation.value), _Reply.NONE


def _add(operation: Add, key: bytes) -> _Talk:
    count = yield _ask(_Ask.ADD, key) + _NUMBER.pack(operation.amount), _Reply.NUMBER
    return count


def _add_and_get(operation: Add, key: bytes, ahead: bytes) -> _Talk:
    requests = _ask(_Ask.ADD, key) + _NUMBER.pack(operation.amount) + _ask(_Ask.GET, ahead)
    return (yield requests, _Reply.BOTH)


def _get(_: Get, key: bytes) -> _Talk:
    value = yield _ask(_Ask.GET, key), _Reply.VALUE
    return value


def _read(_: Read, key: bytes) -> _Talk:
    """It may be removed between the two; and the second alone would wake who waits for it."""
    if (yield bytes((_Ask.CHECK,)) + _ONE + key, _Reply.FLAG):
        return None
    value = yield _ask(_Ask.COMPARE_SET, key, _NOT_THERE, _NOT_THERE), _Reply.VALUE
    return None if value == _NOT_THERE else value


def _wait(_: Wait, key: bytes) -> _Talk:
    while True:
        yield bytes((_Ask.WAIT,)) + _ONE + key, _Reply.FLAG
        value = yield _ask(_Ask.GET, key), _Reply.VALUE
        if value:  # Else it was woken for nothing.
            return value


def _compare_set(operation: CompareSet, key: bytes) -> _Talk:
    value = yield _ask(_Ask.COMPARE_SET, key, b"", operation.value), _Reply.VALUE
    return value


def _delete(_: Delete, key: bytes) -> _Talk:
    yield _ask(_Ask.DELETE, key), _Reply.DROPPED


_TALKS: Mapping[type, Callable[[Any, bytes], _Talk]] = {
    Append: _append,
    Add: _add,
    Put: _put,
    Get: _get,
    Read: _read,
    Wait: _wait,
    CompareSet: _compare_set,
    Delete: _delete,
}


def rehearsal(key: str, nonce: bytes) -> Steps:
    """Each request once. The store's own client has put `nonce` at `key`, and reads beside it
    what this has left there; True if all answered as they must."""
    other, count = f"{key}/other", f"{key}/count"
    if (yield Wait(key)) != nonce or (yield Get(key)) != nonce or (yield Read(key)) != nonce:
        return False
    if (yield Read(count)) is not None or (yield Add(count, 2)) != 2:
        return False
    if (yield Add(count, 1, key)) != 3 or (yield Get(key)) != nonce:
        return False
    yield Delete(count)
    if (yield Read(count)) is not None:
        return False
    yield Put(other, nonce)
    yield Append(other, nonce)
    return (yield CompareSet(other, b"x")) == nonce + nonce


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
        self._reply = _Reply.NONE
        self._unsent = bytearray(_MAGIC)
        self._unread = bytearray()
        self._dropped = 0  # Replies that nobody waits for, before the one that is waited for.
        self._ahead_key = ""
        self._ahead: tuple[str, bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._stopping = False
        self._why = ""
        self.ended = asyncio.Event()
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name=name)

    def then(self, done: Callable[..., None]) -> None:
        """Give the line to somebody else, while it is free."""
        self._done = done

    def give(self, job: Job) -> None:
        """Perform a job; the line must be free."""
        self._job = job
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
        end.setsockopt(socket.SOL_SOCKET, *MARK)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._job is not None:
            self._go(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._over(str(error or "the store closed the connection"))

    def _over(self, why: str) -> None:
        self._why = "the transport was closed" if self._stopping else why
        self.ended.set()
        self._end(None, StoreLost(f"the store does not answer: {self._why}"))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while self._job is not None:
            reply = self._take()
            if reply is None:
                return
            self._go(reply[0])

    def _take(self) -> tuple[Any] | None:
        """The reply that is waited for, once it has come in full."""
        unread = self._unread
        if self._dropped:
            if len(unread) < self._dropped * _NUMBER.size:
                return None
            del unread[: self._dropped * _NUMBER.size]
            self._dropped = 0
        size = len(unread)
        match self._reply:
            case _Reply.FLAG if size:
                value: Any = unread[0]
                del unread[:1]
            case _Reply.NUMBER if size >= _NUMBER.size:
                value = _NUMBER.unpack_from(unread)[0]
                del unread[: _NUMBER.size]
            case _Reply.VALUE if size >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(unread)[0]
                if size < end:
                    return None
                value = bytes(unread[_LENGTH.size : end])
                del unread[:end]
            case _Reply.BOTH if size >= _NUMBER.size + _LENGTH.size:
                end = _NUMBER.size + _LENGTH.size + _LENGTH.unpack_from(unread, _NUMBER.size)[0]
                if size < end:
                    return None
                ahead = bytes(unread[_NUMBER.size + _LENGTH.size : end])
                value = (_NUMBER.unpack_from(unread)[0], ahead)
                del unread[:end]
            case _:
                return None
        return (value,)

    def _go(self, reply: Any) -> None:
        """Go on with the job until a reply is needed; what needs none leaves with what does."""
        assert self._job is not None
        try:
            while True:
                request, self._reply = self._next(self._job, reply)
                self._unsent += request
                if self._reply is _Reply.DROPPED:
                    self._dropped += 1
                elif self._reply is not _Reply.NONE:
                    self._flush()
                    return
                reply = None
        except StopIteration as over:
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
            if type(reply) is tuple:
                reply, self._ahead = reply[0], (self._ahead_key, reply[1])
        while True:
            operation = job.steps.send(reply)
            if isinstance(operation, Tell):
                settle(job.future, operation.result, None)
                reply = None
            elif self._ahead is not None and operation == Get(self._ahead[0]):
                reply, self._ahead = self._ahead[1], None
            else:
                break
        self._ahead = None
        key = self._key(operation.key)
        if isinstance(operation, Add) and operation.ahead:
            self._ahead_key = operation.ahead
            self._talk = _add_and_get(operation, key, self._key(operation.ahead))
        else:
            self._talk = _TALKS[type(operation)](operation, key)
        return next(self._talk)

    def _key(self, key: str) -> bytes:
        return _text(self._prefix + key.encode())

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            unsent, self._unsent = self._unsent, bytearray()
            self._transport.write(unsent)

    def _end(self, result: Any, error: StoreLost | None) -> None:
        job, self._job, self._talk = self._job, None, None
        if job is not None:
            with suppress(asyncio.InvalidStateError):
                self._done(self, job.future, result, error)
