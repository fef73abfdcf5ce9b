"""A rank's connection to the one of its host that brings its arrivals to the store.

Whatever is asked there is answered, or the answer is None: then the rank comes to the store by
itself. That is so at once when the connection closes, and after a moment when nobody answers.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, cast

from phasesync.core import wire
from phasesync.core.fence_gather import Word, head_of, word_of
from phasesync.core.fence_keys import Process
from phasesync.core.fence_messages import (
    ANSWER_BYTES_MAX,
    Framer,
    FrameTooLong,
    frame,
    greeting,
    members_hash,
)
from phasesync.core.model import Arrival, FenceCall, Rank
from phasesync.fences.doors import let_go
from phasesync.fences.leader import PONG, door_of

__all__ = ("Follower",)

CONNECT_S = 5.0
PING_S = 0.5  # Who does not answer for so long is passed by.
PING = frame(wire.encode(["ping"]))
NO_ANSWERS = (wire.JsonError, FrameTooLong, LookupError, TypeError, ValueError)

HearWord: TypeAlias = Callable[[Word | None], None]


class Follower(asyncio.Protocol):
    """One rank's connection to one leader; `over` hears that it has ended."""

    def __init__(
        self,
        leader: Process,
        *,
        rank: Rank,
        run: tuple[str, int],
        over: Callable[[Process], None],
    ) -> None:
        self.leader = leader
        self._rank = rank
        self._run = run
        self._over = over
        self._framer = Framer(ANSWER_BYTES_MAX)
        self._requests = 0
        self._waiting: dict[int, HearWord] = {}
        self._sent_members: dict[tuple[Rank, ...], str] = {}
        self._transport: asyncio.Transport | None = None
        self._is_deaf = False
        self._asked = False
        self._ping_timer: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        name = f"{rank} follows {leader.rank}"
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name=name)
        self._connecting.add_done_callback(self._connected)

    @property
    def is_ready(self) -> bool:
        """Whether arrivals can be handed over now."""
        return self._transport is not None and not self._is_deaf and not self.ended.is_set()

    def hand(
        self, call: FenceCall, arrival: Arrival, line: bytes, *, register: bool
    ) -> "asyncio.Future[Word | None]":
        """Hand an arrival over; None is heard if it is not known what became of it."""
        future: asyncio.Future[Word | None] = asyncio.get_running_loop().create_future()

        def hear(word: Word | None) -> None:
            if not future.done():
                future.set_result(word)

        self._ask("arrive", call, hear, register=register, line=line[:-1])
        return future

    def watch(self, call: FenceCall, hear: HearWord, *, register: bool) -> None:
        """Hear of a fence without arriving."""
        self._ask("watch", call, hear, register=register)

    def cut(self) -> None:
        """End the connection; whoever waits hears None."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._connecting.cancel()

    def leave_to_parent(self) -> None:
        """In a fork: let go of the connection. Its number stays taken."""
        if self._transport is not None:
            let_go(self._transport.get_extra_info("socket"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # Of asyncio or uvloop.
        _, secret = door_of(self.leader.door)
        hello = wire.encode(["hello", *self._rank, *self._run])
        transport.write(greeting(secret) + frame(hello))
        self._transport = transport
        self._ping_later()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._framer.feed(data):
                if body == PONG:
                    self._asked = self._is_deaf = False
                    continue
                request, word = word_of(body)
                hear = self._waiting.pop(request, None)
                if hear is not None:
                    hear(word)
        except NO_ANSWERS:
            self.cut()

    def _ask(
        self, what: str, call: FenceCall, hear: HearWord, *, register: bool, line: bytes = b""
    ) -> None:
        assert self._transport is not None
        digest = self._sent_members.get(call.members)
        ahead = b""
        if digest is None:
            digest = self._sent_members[call.members] = members_hash(call.members)
            ranks = [list(rank) for rank in call.members]
            ahead = frame(wire.encode(["members", digest, ranks]))
        self._requests += 1
        self._waiting[self._requests] = hear
        head = head_of(what, self._requests, register=register, call=call, members=digest)
        self._transport.write(ahead + frame(head, line))

    async def _connect(self) -> None:
        path, _ = door_of(self.leader.door)
        loop = asyncio.get_running_loop()
        # A socket of our own: uvloop connects by itself to paths of the file system only.
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(end, path)
                await loop.create_unix_connection(lambda: self, sock=end)
        except (OSError, TimeoutError):
            self._end()
        finally:
            if self._transport is None:
                end.close()

    def _connected(self, connecting: "asyncio.Task[None]") -> None:
        """A task that is cancelled before its first turn has run none of its own lines."""
        if connecting.cancelled():
            self._end()

    def _ping_later(self) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _ping(self) -> None:
        """Find out whether the leader still answers, as long as somebody waits for it."""
        if self._asked and not self._is_deaf:
            self._is_deaf = True
            self._pass_by()
        elif (self._waiting or self._is_deaf) and self._transport is not None:
            self._asked = True
            self._transport.write(PING)
        self._ping_later()

    def _pass_by(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for hear in waiting.values():
            hear(None)

    def _end(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if not self.ended.is_set():
            self.ended.set()
            with suppress(RuntimeError):
                self._pass_by()
            self._over(self.leader)
