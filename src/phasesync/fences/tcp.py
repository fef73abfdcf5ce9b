"""Fences through an asyncio coordinator: one connection a rank, two messages a fence.

Whatever is asked is answered, or the coordinator is lost: no wait is longer than its deadline and a
second, whatever becomes of the other end.
"""

import asyncio
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from phasesync.core import wire
from phasesync.core.fence import cancelled, cause_to_json, encode_arrival, ranks_from_json
from phasesync.core.fence_messages import (
    ANSWER_BYTES_MAX,
    NO_REQUEST,
    Answer,
    Framer,
    FrameTooLong,
    call_to_json,
    frame,
    greeting,
    members_hash,
)
from phasesync.core.model import Arrival, Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import FenceBroken, PlanError, StaleArrival, StoreLost
from phasesync.fences.base import Probe, connected_already
from phasesync.fences.coordinator import TcpCoordinator
from phasesync.fences.doors import keep_alive, let_go
from phasesync.fences.tcp_pulse import TcpPulse

__all__ = ("TcpCoordinator", "TcpFences")

GRACE_S = 1.0  # After a deadline the coordinator has so long to answer; then it is lost.
ANSWER_S = 5.0  # What is no wait is answered within this, or the coordinator is lost.
CONNECT_S = 30.0
LATE_S = 0.2  # A timer that fires so late tells of the event loop, not of the coordinator.


class TcpFences(asyncio.Protocol):
    """A rank's connection to the coordinator (see `fences.base.FenceTransport`)."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        rank: Rank | None,
        run: str,
        incarnation: int = 0,
        attempt: int = 0,
        token: str = "",
    ) -> None:
        self.rank = rank
        self.boot: str | None = None
        self._address = address
        self._run = (run, attempt)
        self._incarnation = incarnation
        self._greeting = greeting(token)
        self._framer = Framer(ANSWER_BYTES_MAX)
        self._requests = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._guards: dict[int, _Guard] = {}
        self._probe: Probe | None = None
        self._pulse: TcpPulse | None = None
        self._sent_members: dict[tuple[Rank, ...], str] = {}
        self._transport: asyncio.Transport | None = None
        self._lost: StoreLost | None = StoreLost("connect() was not called")
        self._gone = asyncio.Event()
        self._pid = os.getpid()

    @classmethod
    def observer(
        cls, address: tuple[str, int], *, run: str, attempt: int = 0, token: str = ""
    ) -> "TcpFences":
        """The endpoint of who watches processes and is no rank: it may only `report_lost`."""
        return cls(address, rank=None, run=run, attempt=attempt, token=token)

    async def connect(self) -> None:
        if self._transport is not None:
            raise connected_already(self.rank)
        loop = asyncio.get_running_loop()
        self._lost = None
        host, port = self._address
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self, host, port)
        except (OSError, TimeoutError) as error:
            self._lost = StoreLost(f"no coordinator at {host}:{port}: {error}")
            raise self._lost from error
        assert self._transport is not None
        _CONNECTED.add(self)
        self._transport.write(self._greeting)
        me = self.rank and list(self.rank)
        self.boot = (await self._ask("hello", me, self._incarnation, *self._run)).said
        if self._probe is not None and self.rank is not None:
            self._pulse = TcpPulse(self._address, self._greeting, self._run, self.rank, self._probe)

    def heed(self, probe: Probe) -> None:
        """As `fences.base.Heartbeats`."""
        self._probe = probe

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # Of asyncio or uvloop.
        keep_alive(transport.get_extra_info("socket"))
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        host, port = self._address
        self._give_up(
            f"the coordinator at {host}:{port} closed the connection ({error or 'no error'}); "
            "it ended, or refused this rank: compare the run's token on both sides, and the "
            "versions of phasesync"
        )
        self._gone.set()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._framer.feed(data):
                answer = Answer.decode(body)
                if type(answer.said) is list and answer.said[:1] == ["wait"]:
                    guard = self._guards.get(answer.request)
                    if guard is not None:  # Else the wait was given up meanwhile.
                        guard.extend(answer.said[1] + GRACE_S)
                    continue
                waiting = self._waiting.pop(answer.request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (FrameTooLong, wire.JsonError, LookupError, TypeError, ValueError) as error:
            self._give_up(f"the coordinator answered what is no answer: {error}")

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        request, waiting = self._request("arrive", self._said(call), _line(arrival))
        guard = _Guard(call.deadline_s + GRACE_S, partial(self._silent, call))
        self._guards[request] = guard
        try:
            answer = await waiting
        except asyncio.CancelledError:
            self._waiting.pop(request, None)
            if self._lost is None:
                said = _line(cancelled(call, arrival))
                self._write("fail", NO_REQUEST, self._said(call), said)
            raise
        finally:
            guard.end()
            del self._guards[request]
        verdict = answer.verdict(call)
        if isinstance(verdict, Broken):
            raise FenceBroken(verdict)
        if not answer.judged:
            raise StaleArrival(
                f"fence {call.fence!r} ({call.key.scope}, generation {call.key.generation}) "
                f"was decided without this arrival of {self.rank}"
            )
        return verdict

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        # As long as those who wait there do: who gives it up before knows another cause.
        within_s = max(ANSWER_S, call.deadline_s + GRACE_S)
        said = (self._said(call), _line(arrival))
        return (await self._ask("fail", *said, within_s=within_s)).verdict(call)

    async def watch(self, call: FenceCall) -> Broken | Opened:
        request, waiting = self._request("watch", self._said(call))
        try:
            answer = await waiting
        except asyncio.CancelledError:
            self._waiting.pop(request, None)
            if self._lost is None:
                self._write("unwatch", request)
            raise
        return answer.verdict(call)

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        answer = await self._ask("peek", self._said(call))
        return None if answer.said is None else answer.verdict(call)

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        answer = await self._ask("missing", self._said(call))
        return ranks_from_json(answer.said)

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        await self._ask("lost", cause_to_json(cause), incarnation)

    async def close(self) -> None:
        if self._transport is None:
            return
        if self._pulse is not None:
            await self._pulse.stop()
        if self._lost is None:
            with suppress(StoreLost):
                await self._ask("goodbye")
            self._give_up("the transport was closed")
        self._transport.abort()
        await self._gone.wait()

    def _said(self, call: FenceCall) -> list[Any]:
        """The call in a frame; the list of its members goes ahead of it, once."""
        if (call.key.run, call.key.attempt) != self._run:
            run, attempt = self._run
            raise PlanError(
                f"fence {call.fence!r} is of run {call.key.run!r}, attempt {call.key.attempt}, "
                f"this endpoint of run {run!r}, attempt {attempt}; make one for each attempt"
            )
        digest = self._sent_members.get(call.members)
        if digest is None:
            digest = members_hash(call.members)
            self._write("members", digest, [list(rank) for rank in call.members])
            self._sent_members[call.members] = digest
        return call_to_json(call, digest)

    def leave_to_parent(self) -> None:
        """In a fork: let go of the connection, which would outlive the rank here. Its number stays
        taken, so that whoever closes it closes nothing else."""
        if self._transport is not None:
            let_go(self._transport.get_extra_info("socket"))

    def _write(self, *request: Any) -> None:
        if os.getpid() != self._pid:
            raise PlanError(
                f"the fences of {self.rank} were made in process {self._pid}, and this is process "
                f"{os.getpid()}: a fork cannot speak for its parent; make them after it"
            )
        if self._lost is not None:
            raise self._lost
        assert self._transport is not None
        self._transport.write(frame(wire.encode(request)))

    def _request(self, what: str, *said: Any) -> "tuple[int, asyncio.Future[Answer]]":
        self._requests += 1
        self._write(what, self._requests, *said)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[self._requests] = waiting
        return self._requests, waiting

    async def _ask(self, what: str, *said: Any, within_s: float = ANSWER_S) -> Answer:
        request, waiting = self._request(what, *said)
        try:
            async with asyncio.timeout(within_s):
                return await waiting
        except TimeoutError:
            raise self._give_up(f"the coordinator did not answer within {within_s:g} s") from None
        finally:
            self._waiting.pop(request, None)

    def _silent(self, call: FenceCall) -> None:
        self._give_up(
            f"the coordinator gave no verdict on fence {call.fence!r} within "
            f"{call.deadline_s:g} s, and {GRACE_S:g} s more"
        )

    def _give_up(self, why: str) -> StoreLost:
        if self._lost is None:
            self._lost = StoreLost(why)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._lost)
        if self._transport is not None:
            self._transport.abort()
        return self._lost


_CONNECTED: "weakref.WeakSet[TcpFences]" = weakref.WeakSet()


def _in_fork() -> None:
    for fences in list(_CONNECTED):
        fences.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


class _Guard:
    """A timer that gives the loop another chance if the loop itself stood still."""

    def __init__(self, after_s: float, silent: Callable[[], None]) -> None:
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._until, self._fire)

    def end(self) -> None:
        self._timer.cancel()

    def extend(self, after_s: float) -> None:
        self._timer.cancel()
        self._until = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._until, self._fire)

    def _fire(self) -> None:
        if self._loop.time() > self._until + LATE_S:
            # What the coordinator said meanwhile is not read yet.
            self._until = self._loop.time() + GRACE_S
            self._timer = self._loop.call_at(self._until, self._fire)
        else:
            self._silent()


def _line(arrival: Arrival) -> str:
    return encode_arrival(arrival).decode()
