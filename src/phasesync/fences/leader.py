"""The rank that brings the arrivals of its host to the store, and tells the others what came of it.

They hand theirs over on a socket of this host. Whoever leads does nothing that they could not do
themselves: if it ends, stands still or is slow to answer, each comes to the store by itself.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Set
from functools import partial
from struct import Struct
from typing import Any, cast

from phasesync.core import wire
from phasesync.core.fence import decode_arrivals, ranks_from_json
from phasesync.core.fence_gather import Batch, Came, Gathering, Word, words
from phasesync.core.fence_keys import Verdict
from phasesync.core.fence_messages import (
    REQUEST_BYTES_MAX,
    Framer,
    FrameTooLong,
    Greeting,
    WrongGreeting,
    call_from_json,
    frame,
    greeting,
)
from phasesync.core.fence_steps import UNJUDGED, Brought, bringing
from phasesync.core.model import Arrival, FenceCall, FenceKey, Rank, RoleName
from phasesync.fences.doors import let_go, shut
from phasesync.fences.jobs import settle
from phasesync.fences.slots import HearVerdict, Slot, Slots

__all__ = ("PONG", "Leader", "can_lead", "door_of")

# Who has come is brought when all have come that came here last time, or after so long: then
# others see who is late, and a deadline blames nobody else.
HOLD_S = 0.02
GREETING_S = 5.0
PONG = wire.encode(["pong"])
_CREDENTIALS = Struct("3i")
NO_REQUESTS = (wire.JsonError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

log = logging.getLogger(__name__)


def can_lead() -> bool:
    """Whether this machine has sockets by which ranks of one host find each other."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "SO_PEERCRED")


def door_of(said: str) -> tuple[str, str]:
    """The address of a door, and what to show there, from how they are announced."""
    name, _, secret = said.partition(":")
    return f"\0{name}", secret


class Leader:
    """What one endpoint does for others of its host."""

    def __init__(self, slots: Slots, rank: Rank) -> None:
        self._slots = slots
        self._rank = rank
        self._own: set[asyncio.Future[Word | None]] = set()
        self._secret = secrets.token_hex(16)
        self.greeting = greeting(self._secret)
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._guests: set[_Guest] = set()
        self._gatherings: dict[FenceKey, Gathering] = {}
        self._timers: dict[FenceKey, asyncio.TimerHandle] = {}
        self._under_way: set[FenceKey] = set()
        self._expected: dict[str, Set[Rank]] = {}
        self._lists: dict[str, tuple[Rank, ...]] = {}

    async def open(self) -> str:
        """Let others of this host hand their arrivals over; where, and what to show there."""
        name = f"phasesync.{secrets.token_hex(8)}"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(partial(_Guest, self), f"\0{name}")
        return f"{name}:{self._secret}"

    def close(self) -> None:
        """Whoever waits here comes to the store by itself, the leader too."""
        self._is_closed = True
        if self._server is not None:
            shut(self._server)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._gatherings.clear()
        for future in list(self._own):
            settle(future, None, None)
        for guest in list(self._guests):
            guest.cut()

    def leave_to_parent(self) -> None:
        """In a fork: let go of the sockets. Their numbers stay taken."""
        ends = [guest.end for guest in self._guests]
        for end in (*ends, *(self._server.sockets if self._server is not None else ())):
            let_go(end)

    def leads(self, call: FenceCall) -> bool:
        """Whether others of this host come, or came last time, to fences of this scope here."""
        if call.key in self._gatherings:
            return True
        expected = self._expected.get(call.key.scope)
        return expected is not None and not expected <= {self._rank}

    def hand(
        self, call: FenceCall, arrival: Arrival, line: bytes, *, register: bool
    ) -> "asyncio.Future[Word | None]":
        """The leader's own arrival, brought with the others."""
        future: asyncio.Future[Word | None] = asyncio.get_running_loop().create_future()
        self._own.add(future)
        future.add_done_callback(self._own.discard)

        def hear(word: Word) -> None:
            if not future.done():
                future.set_result(word)

        self.take(call, Came(arrival, line, hear), register=register)
        return future

    def take(self, call: FenceCall, came: Came, *, register: bool) -> None:
        """Somebody has come; bring it with the others, as soon as nobody is waited for."""
        gathering = self._gatherings.get(call.key)
        if gathering is None:
            gathering = self._gatherings[call.key] = Gathering(call)
        gathering.take(came, register=register)
        if not gathering.waits_for(self._expected.get(call.key.scope, frozenset())):
            self._bring(gathering)
        elif call.key not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[call.key] = loop.call_later(HOLD_S, self._bring, gathering)

    def watch(
        self,
        call: FenceCall,
        hear: HearVerdict,
        *,
        register: bool,
    ) -> None:
        """Somebody wants to hear of a fence before it arrives there."""
        slot = self._slots.of(call)
        slot.hear(hear)
        self._slots.wait(slot, register=register)

    def members(self, digest: str, ranks: Any) -> tuple[Rank, ...]:
        """A list of members, made once: each rank of this host sends it."""
        known = self._lists.get(digest)
        if known is None:
            known = self._lists[digest] = ranks_from_json(ranks)
        return known

    def joined(self, guest: "_Guest") -> None:
        """Somebody is at the door; it may have been accepted just before that was closed."""
        self._guests.add(guest)
        if self._is_closed:
            guest.cut()

    def parted(self, guest: "_Guest") -> None:
        """Somebody is gone: nobody waits for it any more."""
        self._guests.discard(guest)
        if guest.rank is None:
            return
        for scope, expected in self._expected.items():
            self._expected[scope] = expected - {guest.rank}
        for gathering in list(self._gatherings.values()):
            if not gathering.waits_for(self._expected.get(gathering.call.key.scope, frozenset())):
                self._bring(gathering)

    def _bring(self, gathering: Gathering) -> None:
        """Bring who has come and is not brought; one batch at a time, because another one would
        need another connection, and to connect may take a store long."""
        call = gathering.call
        if call.key in self._under_way:
            return
        timer = self._timers.pop(call.key, None)
        if timer is not None:
            timer.cancel()
        batch = gathering.batch()
        if batch is None or self._gatherings.get(call.key) is not gathering:
            return
        self._under_way.add(call.key)
        scope = self._slots.scope(call)
        steps = bringing(
            self._slots.space,
            call,
            batch.arrivals,
            self._slots.me,
            lines=batch.lines,
            whole=batch.whole,
            whole_bytes=batch.whole_bytes,
            register=batch.register,
            opened_before=scope.opened,
        )
        self._slots.lines.hand(steps, partial(self._brought, gathering, batch))

    def _brought(
        self, gathering: Gathering, batch: Batch, brought: Brought | None, error: Exception | None
    ) -> None:
        self._under_way.discard(gathering.call.key)
        if error is not None:
            self._lost(error)
            return
        assert brought is not None
        if brought.order is not None:
            gathering.counted(batch, brought.order)
        if brought.verdict is not None:
            self._decided(gathering, brought)
        elif self._gatherings.get(gathering.call.key) is gathering:
            slot = self._slots.of(gathering.call)
            slot.hear(partial(self._heard, gathering, slot))
            self._slots.wait(slot, register=False)
            if not gathering.is_brought:
                self._bring(gathering)

    def _heard(
        self, gathering: Gathering, slot: Slot, verdict: Verdict | None, error: Exception | None
    ) -> None:
        """The line that waits has come back."""
        if error is not None:
            self._lost(error)
        else:
            self._decided(gathering, Brought(None, verdict or UNJUDGED.verdict))

    def _decided(self, gathering: Gathering, brought: Brought) -> None:
        """There is a verdict: tell all who came, others before oneself."""
        key = gathering.call.key
        if self._gatherings.get(key) is not gathering:
            return
        del self._gatherings[key]
        assert brought.verdict is not None
        text = brought.verdict.encode()
        own: list[tuple[Came, Word]] = []
        for came, word in gathering.told(brought):
            if isinstance(came.hear, _Reply):
                came.hear.send(word, text)
            else:
                own.append((came, word))
        for came, word in own:
            came.hear(word)
        here = {guest.rank for guest in self._guests if guest.rank is not None}
        self._expected[key.scope] = gathering.ranks & (here | {self._rank}) if here else set()
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._slots.of(gathering.call).settle(brought.verdict)
        self._slots.drop(key)

    def _lost(self, error: Exception) -> None:
        """The store is lost to this endpoint: the others may find it alive."""
        self._gatherings.clear()
        for future in list(self._own):
            if not future.done():
                future.set_exception(error)
        for guest in list(self._guests):
            guest.cut()


class _Reply:
    """Hears on behalf of a rank at the other end of a connection."""

    __slots__ = ("_guest", "_request")

    def __init__(self, guest: "_Guest", request: int) -> None:
        self._guest = guest
        self._request = request

    def __call__(self, word: Word) -> None:
        self.send(word, word.verdict.encode())

    def send(self, word: Word, text: bytes) -> None:
        self._guest.send(*words(self._request, word, text))

    def verdict(self, verdict: Verdict | None, error: Exception | None) -> None:
        """As one who watches."""
        if error is not None:
            self._guest.cut()
        else:
            self(Word(None, False, verdict or UNJUDGED.verdict))


class _Guest(asyncio.Protocol):
    """The connection of another rank of this host."""

    def __init__(self, leader: Leader) -> None:
        self.rank: Rank | None = None
        self._leader = leader
        self._hello = Greeting(self._leader.greeting)
        self._framer = Framer(REQUEST_BYTES_MAX)
        self._members: dict[str, tuple[Rank, ...]] = {}
        self._run: tuple[str, int] = ("", 0)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # Of asyncio or uvloop.
        self._transport = transport
        self._leader.joined(self)
        loop = asyncio.get_running_loop()
        self._greeting_timer = loop.call_later(GREETING_S, self._refuse, "it said nothing")
        end = transport.get_extra_info("socket")
        said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(said)[1]
        if user not in (os.getuid(), 0):
            self._refuse(f"it belongs to user {user}")

    def connection_lost(self, error: Exception | None) -> None:
        self._greeting_timer.cancel()
        self._leader.parted(self)

    def data_received(self, data: bytes) -> None:
        if not self._hello.is_known:
            data = self._greeted(data)
        try:
            for body in self._framer.feed(data) if data else ():
                head, _, line = body.partition(b"\n")
                what, *said = wire.decode(head)
                REQUESTS[what](self, line, *said)
        except FrameTooLong as error:
            self._refuse(str(error))
        except NO_REQUESTS as error:
            self._refuse(f"no request: {type(error).__name__}: {error}")

    def send(self, *parts: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame(*parts))

    def cut(self) -> None:
        self._transport.abort()

    @property
    def end(self) -> Any:
        return self._transport.get_extra_info("socket")

    def _greeted(self, data: bytes) -> bytes:
        """Compare the greeting; what came after it. Nothing is parsed before."""
        try:
            rest = self._hello.feed(data)
        except WrongGreeting:
            self._refuse("it does not know the secret of this door")
            return b""
        if self._hello.is_known:
            self._greeting_timer.cancel()
        return rest

    def _refuse(self, why: str) -> None:
        log.warning("refused a connection of this host: %s", why)
        self.cut()

    def hello(self, _: bytes, role: str, number: int, run: str, attempt: int) -> None:
        self.rank = Rank(RoleName(str(role)), int(number))
        self._run = (str(run), int(attempt))

    def members(self, _: bytes, digest: str, ranks: Any) -> None:
        self._members[digest] = self._leader.members(digest, ranks)

    def arrive(self, line: bytes, request: int, register: bool, said: list[Any]) -> None:
        (arrival,) = decode_arrivals(line)
        came = Came(arrival, line + b"\n", _Reply(self, request))
        self._leader.take(self._call(said), came, register=register)

    def watch(self, _: bytes, request: int, register: bool, said: list[Any]) -> None:
        self._leader.watch(self._call(said), _Reply(self, request).verdict, register=register)

    def ping(self, _: bytes) -> None:
        self.send(PONG)

    def _call(self, said: list[Any]) -> FenceCall:
        return call_from_json(said, *self._run, self._members)


REQUESTS: Mapping[str, Callable[..., None]] = {
    "hello": _Guest.hello,
    "members": _Guest.members,
    "arrive": _Guest.arrive,
    "watch": _Guest.watch,
    "ping": _Guest.ping,
}
