"""The coordinator: where the arrivals of all ranks come together, one connection a rank.

A dead rank is a closed connection. The coordinator belongs where no user code runs (a launcher,
an actor): it answers only as fast as its event loop turns. It listens on the loopback
interface unless told otherwise; the token keeps strangers out, but nothing is encrypted.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from phasesync.core import wire
from phasesync.core.fence import (
    Lost,
    cause_from_json,
    decode_arrivals,
    missing_of,
    ranks_from_json,
)
from phasesync.core.fence_beats import LATE_SHARE, Ask, Beat, Sign, patience, rank_of, told
from phasesync.core.fence_hub import Hub, Instance
from phasesync.core.fence_messages import (
    ANSWER_BYTES_MAX,
    NO_REQUEST,
    REQUEST_BYTES_MAX,
    Answer,
    Framer,
    FrameTooLong,
    Greeting,
    WrongGreeting,
    call_from_json,
    frame,
    greeting,
    verdict_bytes,
    version_of,
)
from phasesync.core.model import (
    Arrival,
    Broken,
    FenceCall,
    FenceVerdict,
    Opened,
    Rank,
    RoleName,
    RootCause,
)
from phasesync.fences.doors import keep_alive, shut

__all__ = ("TcpCoordinator",)

GREETING_S = 5.0  # Who has not greeted by then is cut.
UNSENT_BYTES_MAX = 2 * ANSWER_BYTES_MAX  # Who does not read is cut.
CLOSED = ("dead", "its connection closed")
SILENT = ("unavailable", "its host no longer answers")
ASK_AGAIN_S = 1.0  # Breaks that come together ask once what the others do.
REFUSED_MAX = 1000  # Of so many hosts it is remembered that they were refused.

# What comes of a request that is none, or of another version.
NO_REQUESTS = (wire.JsonError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

log = logging.getLogger(__name__)


class TcpCoordinator:
    """Where the arrivals of all ranks come together."""

    def __init__(self, *, token: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self.greeting = greeting(token)
        self.boot = secrets.token_hex(8)
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._peers: set[_Peer] = set()
        self._hubs: dict[tuple[str, int], Hub] = {}
        self._lists: dict[tuple[str, int], tuple[Rank, ...]] = {}
        self._refused: set[str] = set()
        self._came: dict[tuple[str, int], set[Rank]] = {}
        self._beats: dict[tuple[str, int], dict[Rank, _Heard]] = {}
        self._asked_at: dict[tuple[str, int], float] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for `TcpFences`. Where it listens on all interfaces (`0.0.0.0`, `::`),
        ranks elsewhere need a name of this host in place of the first."""
        return self._host, self._port

    async def start(self) -> None:
        """Listen; with port 0 on a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(partial(_Peer, self), self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    @property
    def peers(self) -> int:
        """How many connections there are."""
        return len(self._peers)

    async def close(self) -> None:
        """Cut all connections: whoever waits loses the transport."""
        self._is_closed = True
        if self._server is not None:
            shut(self._server)
        for peer in list(self._peers):
            peer.cut()
        if self._server is not None:
            await asyncio.sleep(0)
            await self._server.wait_closed()  # From Python 3.12 on it waits for the peers as well.

    def hub(self, run: str, attempt: int) -> Hub:
        return self._hubs.setdefault((run, attempt), Hub())

    def members(self, digest: str, ranks: Sequence[Any]) -> tuple[Rank, ...]:
        """A list of members, made once: each of N ranks sends all N."""
        known = self._lists.get((digest, len(ranks)))
        if known is None:
            known = self._lists[digest, len(ranks)] = ranks_from_json(ranks)
        return known

    def joined(self, peer: "_Peer") -> None:
        """Somebody is at the door; it may have been accepted just before that was closed."""
        self._peers.add(peer)
        if self._is_closed:
            peer.cut()

    def parted(self, peer: "_Peer", error: Exception | None) -> None:
        """A connection ended; without a goodbye, and as the last of its rank, it is a death.

        Unless the host has fallen silent: then its processes may live, and nobody calls them dead.
        """
        self._peers.discard(peer)
        if peer.run is None:
            return
        mates = [other for other in self._peers if other.run == peer.run]
        if not mates:
            # Somebody who has not come yet will want to know what the others have decided.
            if not self.hub(*peer.run).awaited(self._came.get(peer.run, set())):
                self._hubs.pop(peer.run, None)
                self._came.pop(peer.run, None)
            self._beats.pop(peer.run, None)
            self._asked_at.pop(peer.run, None)
            if not self._peers:
                self._lists.clear()
        elif peer.rank is not None and not peer.said_goodbye:
            same = (peer.rank, peer.incarnation)
            if not any((mate.rank, mate.incarnation) == same for mate in mates):
                kind, why = SILENT if isinstance(error, TimeoutError) else CLOSED
                cause = RootCause(kind=kind, ranks=(peer.rank,), error=why)
                lost = Lost(rank=peer.rank, incarnation=peer.incarnation, cause=cause)
                self.hub(*peer.run).lose(lost)

    def came(self, run: tuple[str, int], rank: Rank) -> None:
        """A rank of a run is here."""
        self._came.setdefault(run, set()).add(rank)

    def beat(self, peer: "_Peer", rank: Rank, beat: Beat) -> None:
        """A rank has given a sign of life."""
        assert peer.run is not None
        now = asyncio.get_running_loop().time()
        self._beats.setdefault(peer.run, {})[rank] = _Heard(beat, now, peer)

    def signs(self, run: tuple[str, int], ranks: Sequence[Rank]) -> dict[Rank, Sign]:
        """The last signs of life of those that beat."""
        now = asyncio.get_running_loop().time()
        heard = self._beats.get(run, {})
        return {r: Sign(heard[r].beat, now - heard[r].at) for r in ranks if r in heard}

    def seen(self, run: tuple[str, int], ranks: Sequence[Rank]) -> dict[Rank, str]:
        """What is known of ranks that are missing: a process may be slow, or was never here."""
        here = {peer.rank for peer in self._peers if peer.run == run}
        plain = {rank: "connected" if rank in here else "not connected" for rank in ranks}
        return plain | {r: told(sign) for r, sign in self.signs(run, ranks).items()}

    def ask(self, run: tuple[str, int], instance: Instance, why: str) -> None:
        """Ask those who have not arrived to write down what they do."""
        call = instance.call
        heard = self._beats.get(run, {})
        for rank in instance.missing() if heard else ():
            if rank in heard:
                heard[rank].peer.ask(Ask(call.key.scope, call.key.generation, call.fence, why))

    def broke(self, run: tuple[str, int], instance: Instance) -> None:
        """A fence is broken: ask, unless one has just done so for a fence that broke before."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at.get(run, now - ASK_AGAIN_S) >= ASK_AGAIN_S:
            self._asked_at[run] = now
            self.ask(run, instance, "break")

    def refuse(self, who: str, why: str) -> None:
        """Say it once for each host: a port scan must not fill the log."""
        if who not in self._refused:
            if len(self._refused) >= REFUSED_MAX:
                self._refused.clear()
            self._refused.add(who)
            log.warning("refused a connection from %s: %s", who, why)


class _Heard(NamedTuple):
    """A rank's last beat, when it came, and the connection that it came by."""

    beat: Beat
    at: float
    peer: "_Peer"


class _Peer(asyncio.Protocol):
    """One connection at the coordinator."""

    def __init__(self, coordinator: TcpCoordinator) -> None:
        self.rank: Rank | None = None
        self.incarnation = 0
        self.run: tuple[str, int] | None = None
        self.said_goodbye = False
        self._coordinator = coordinator
        self._hello = Greeting(self._coordinator.greeting)
        self._is_cut = False
        self._framer = Framer(REQUEST_BYTES_MAX)
        self._members: dict[str, tuple[Rank, ...]] = {}
        self._waits: dict[int, Callable[[], None]] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # Of asyncio or uvloop.
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        self._coordinator.joined(self)
        self._loop = asyncio.get_running_loop()
        self._greeting_timer = self._loop.call_later(GREETING_S, self._refuse, "it said nothing")

    def connection_lost(self, error: Exception | None) -> None:
        self._greeting_timer.cancel()
        if not (self._hello.is_known or self._is_cut):
            self._refuse("it left before it had greeted")
        for stop in list(self._waits.values()):
            stop()
        self._waits.clear()
        self._coordinator.parted(self, error)

    def data_received(self, data: bytes) -> None:
        if not self._hello.is_known:
            data = self._greeted(data)
        try:
            for body in self._framer.feed(data) if data else ():
                what, *said = wire.decode(body)
                REQUESTS[what](self, *said)
        except FrameTooLong as error:
            self._refuse(str(error))
        except NO_REQUESTS as error:
            self._refuse(f"no request: {type(error).__name__}: {error}")

    def cut(self) -> None:
        self._is_cut = True
        self._transport.abort()

    def _greeted(self, data: bytes) -> bytes:
        """Compare the greeting; what came after it. Nothing is parsed before."""
        try:
            rest = self._hello.feed(data)
        except WrongGreeting as error:
            self._refuse(self._why_not(error.said))
            return b""
        if self._hello.is_known:
            self._greeting_timer.cancel()
        return rest

    def _why_not(self, said: bytes) -> str:
        ours, other = version_of(self._coordinator.greeting), version_of(said)
        if other in (None, ours):
            return "it does not know the token of this run"
        return f"it greets as {other}, and this is {ours}: install one phasesync everywhere"

    def _refuse(self, why: str) -> None:
        peer = self._transport.get_extra_info("peername") or ("an unknown host",)
        self._coordinator.refuse(str(peer[0]), why)
        self.cut()

    def _send(self, answer: Answer, said: bytes) -> None:
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.cut()
        elif not self._transport.is_closing():
            self._transport.write(frame(answer.head(), said))

    def _hub(self) -> Hub:
        if self.run is None:
            raise ValueError("it did not say which run it is of")
        return self._coordinator.hub(*self.run)

    def _call(self, said: Sequence[Any]) -> FenceCall:
        if self.run is None:
            raise ValueError("it did not say which run it is of")
        return call_from_json(said, *self.run, self._members)

    def hello(
        self, request: int, rank: Sequence[Any] | None, incarnation: int, run: str, attempt: int
    ) -> None:
        self.run = (str(run), int(attempt))
        if rank is not None:
            self.rank = Rank(RoleName(str(rank[0])), int(rank[1]))
            self.incarnation = int(incarnation)
            self._hub().come_back(self.rank, self.incarnation)
            self._coordinator.came(self.run, self.rank)
        self._done(request, self._coordinator.boot)

    def members(self, digest: str, ranks: Sequence[Any]) -> None:
        self._members[digest] = self._coordinator.members(digest, ranks)

    def arrive(self, request: int, said: Sequence[Any], line: str) -> None:
        call, arrival = self._call(said), _arrival(line)
        instance = self._hub().arrive(call, arrival)
        order = len(instance.arrivals)
        waiting = _Patience(self, request, instance, arrival.rank, call.deadline_s)
        self._answer_when_decided(request, instance, arrival, order, waiting)

    def waits(self, request: int, instance: Instance, by: Rank, deadline_s: float) -> float:
        """The deadline of a rank has passed: decide, or say how much longer to wait."""
        assert self.run is not None
        missing = instance.missing()
        left_s = patience(deadline_s, missing, self._coordinator.signs(self.run, missing))
        if left_s > 0:
            self._send(Answer(request, None, True, False, None), wire.encode(["wait", left_s]))
        else:
            seen = self._coordinator.seen(self.run, missing)
            self._hub().expire(instance, by, seen)
        return left_s

    def late(self, instance: Instance) -> None:
        """Most of a deadline has passed."""
        assert self.run is not None
        self._coordinator.ask(self.run, instance, "deadline")

    def ask(self, ask: Ask) -> None:
        self._send(Answer(NO_REQUEST, None, True, False, None), wire.encode(["ask", *ask]))

    def beat(self, rank: Sequence[Any], said: str) -> None:
        beat = Beat.decode(said.encode())
        if self.run is None or beat is None:
            raise ValueError("no beat")
        self._coordinator.beat(self, rank_of(rank), beat)

    def fail(self, request: int, said: Sequence[Any], line: str) -> None:
        arrival = _arrival(line)
        instance = self._hub().arrive(self._call(said), arrival)
        self._answer_when_decided(request, instance, arrival, None, None)

    def watch(self, request: int, said: Sequence[Any]) -> None:
        instance = self._hub().instance(self._call(said))
        self._answer_when_decided(request, instance, None, None, None)

    def unwatch(self, request: int) -> None:
        if stop := self._waits.pop(request, None):
            stop()

    def _answer_when_decided(
        self,
        request: int,
        instance: Instance,
        arrival: Arrival | None,
        order: int | None,
        waiting: "_Patience | None",
    ) -> None:
        def hear(verdict: FenceVerdict) -> None:
            self._waits.pop(request, None)
            if waiting is not None:
                waiting.end()
            if isinstance(verdict, Broken) and self.run is not None:
                self._coordinator.broke(self.run, instance)
            decided = arrival is not None and instance.decider == arrival.rank
            judged = arrival is None or instance.judged(arrival)
            said = _VERDICTS.text(verdict, with_arrivals=decided)
            self._send(Answer(request, order, judged, decided, None), said)

        def stop() -> None:
            instance.unhear(hear)
            if waiting is not None:
                waiting.end()

        self._waits[request] = stop
        instance.hear(hear)

    def peek(self, request: int, said: Sequence[Any]) -> None:
        instance = self._hub().find(self._call(said).key)
        if instance is None or instance.verdict is None:
            self._done(request)
        else:
            text = verdict_bytes(instance.verdict, with_arrivals=False)
            self._send(Answer(request, None, True, False, None), text)

    def missing(self, request: int, said: Sequence[Any]) -> None:
        call = self._call(said)
        instance = self._hub().find(call.key)
        ranks = instance.missing() if instance else missing_of(call, ())
        self._done(request, [list(rank) for rank in ranks])

    def lost(self, request: int, cause: wire.Json, incarnation: int) -> None:
        root = cause_from_json(cause)
        for rank in root.ranks:
            self._hub().lose(Lost(rank=rank, incarnation=int(incarnation), cause=root))
        self._done(request)

    def goodbye(self, request: int) -> None:
        self.said_goodbye = True
        self._done(request)

    def _done(self, request: int, said: Any = None) -> None:
        self._send(Answer(request, None, True, False, None), wire.encode(said))


REQUESTS: Mapping[str, Callable[..., None]] = {
    "hello": _Peer.hello,
    "members": _Peer.members,
    "arrive": _Peer.arrive,
    "fail": _Peer.fail,
    "watch": _Peer.watch,
    "unwatch": _Peer.unwatch,
    "peek": _Peer.peek,
    "missing": _Peer.missing,
    "lost": _Peer.lost,
    "goodbye": _Peer.goodbye,
    "beat": _Peer.beat,
}


class _Patience:
    """The timers of one arrival: most of its deadline, all of it, more where there is progress."""

    def __init__(
        self, peer: _Peer, request: int, instance: Instance, by: Rank, deadline_s: float
    ) -> None:
        self._peer = peer
        self._asked = (request, instance, by, deadline_s)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LATE_SHARE * deadline_s, self._late)

    def end(self) -> None:
        self._timer.cancel()

    def _late(self) -> None:
        _, instance, _, deadline_s = self._asked
        self._timer = self._loop.call_later((1 - LATE_SHARE) * deadline_s, self._expire)
        self._peer.late(instance)

    def _expire(self) -> None:
        left_s = self._peer.waits(*self._asked)
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._expire)


def _arrival(line: str) -> Arrival:
    (arrival,) = decode_arrivals(line.encode())
    return arrival


class _LastVerdict:
    """The text of the verdict that is being told: the same for all, so it is made once."""

    def __init__(self) -> None:
        self._of: FenceVerdict | None = None
        self._carries = False
        self._text = b""

    def text(self, verdict: FenceVerdict, *, with_arrivals: bool) -> bytes:
        """Payloads go to everybody, the other arrivals to who decided alone."""
        if verdict is not self._of:
            opened = isinstance(verdict, Opened)
            self._carries = opened and any(a.payload for a in verdict.arrivals)
            self._text = verdict_bytes(verdict, with_arrivals=self._carries)
            self._of = verdict
        if with_arrivals and not self._carries:
            return verdict_bytes(verdict, with_arrivals=True)
        return self._text


_VERDICTS = _LastVerdict()
