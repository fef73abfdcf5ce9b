"""Fences between ranks that share one event loop: a real transport, and the tests' own.

No thread and no clock but the loop's, so a loop with virtual time decides everything; what
happens depends on the order of calls alone.
"""

import asyncio
from dataclasses import dataclass, field, replace

from phasesync.core.fence import Lost, Waiting, cancelled, judge, missing_of
from phasesync.core.model import (
    Arrival,
    Broken,
    FenceCall,
    FenceKey,
    FenceVerdict,
    Opened,
    Rank,
    RootCause,
)
from phasesync.errors import FenceBroken, StaleArrival, StoreLost

__all__ = ("InProcessFences",)

GENERATIONS_KEPT = 8  # A decided fence is remembered so long, for whoever comes late.


@dataclass(eq=False)
class _Fence:
    """One fence instance: who has arrived, who waits, what was decided and by whom."""

    call: FenceCall
    arrivals: list[Arrival] = field(default_factory=list)
    verdict: FenceVerdict | None = None
    decider: Rank | None = None
    waiters: dict["asyncio.Future[FenceVerdict]", None] = field(default_factory=dict)

    def judge(self, lost: list[Lost], by: Rank | None, *, expired: bool = False) -> None:
        """Decide, unless it is decided. The first verdict stays."""
        if self.verdict is not None:
            return
        ruling = judge(self.call, self.arrivals, lost=lost, expired=expired)
        if isinstance(ruling, Waiting):
            return
        if isinstance(ruling, Broken):
            ruling = replace(ruling, arrivals=tuple(self.arrivals))
        self.verdict, self.decider = ruling, by
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(ruling)
        self.waiters.clear()

    async def heard(self) -> FenceVerdict:
        if self.verdict is not None:
            return self.verdict
        waiter: asyncio.Future[FenceVerdict] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = None
        try:
            return await waiter
        finally:
            self.waiters.pop(waiter, None)

    def heard_by(self, rank: Rank, verdict: FenceVerdict) -> FenceVerdict:
        return replace(verdict, decided=True) if self.decider == rank else verdict


class InProcessFences:
    """The fences of one run in one event loop; `endpoint` gives each rank its own."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, int, str], dict[int, _Fence]] = {}
        self._lost: list[Lost] = []

    def endpoint(self, rank: Rank, incarnation: int = 0) -> "InProcessEndpoint":
        """The transport of one rank. A new incarnation is no longer lost."""
        self._lost = [
            gone for gone in self._lost if gone.rank != rank or gone.incarnation >= incarnation
        ]
        return InProcessEndpoint(self, rank)

    def fence(self, call: FenceCall) -> _Fence:
        """The fence instance of a call, which breaks at once if a member is lost."""
        fences = self._scopes.setdefault(call.key[:3], {})
        fence = fences.get(call.key.generation)
        if fence is None:
            fence = fences[call.key.generation] = _Fence(call)
            oldest = max(fences) - GENERATIONS_KEPT
            for old in [n for n, f in fences.items() if n < oldest and f.verdict is not None]:
                del fences[old]
            fence.judge(self._lost, None)
        return fence

    def find(self, key: FenceKey) -> _Fence | None:
        return self._scopes.get(key[:3], {}).get(key.generation)

    def arrive(self, call: FenceCall, arrival: Arrival) -> _Fence:
        fence = self.fence(call)
        if fence.verdict is None:
            fence.arrivals.append(arrival)
            fence.judge(self._lost, arrival.rank)
        return fence

    def expire(self, fence: _Fence, by: Rank) -> None:
        fence.judge(self._lost, by, expired=True)

    def lose(self, lost: Lost) -> None:
        self._lost.append(lost)
        for fences in self._scopes.values():
            for fence in list(fences.values()):
                fence.judge(self._lost, None)


class InProcessEndpoint:
    """One rank's transport (see `fences.base.FenceTransport`)."""

    def __init__(self, hub: InProcessFences, rank: Rank) -> None:
        self.rank = rank
        self._hub = hub
        self._closed = False

    async def connect(self) -> None:
        self._check()

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        self._check()
        fence = self._hub.arrive(call, arrival)
        order = len(fence.arrivals)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(call.deadline_s, self._hub.expire, fence, self.rank)
        try:
            verdict = await fence.heard()
        except asyncio.CancelledError:
            self._hub.arrive(call, cancelled(call, arrival))
            raise
        finally:
            timer.cancel()
        return self._pass(arrival, fence, verdict, order)

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        self._check()
        fence = self._hub.arrive(call, arrival)
        return fence.heard_by(self.rank, await fence.heard())

    async def watch(self, call: FenceCall) -> Broken | Opened:
        self._check()
        return await self._hub.fence(call).heard()

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        fence = self._hub.find(call.key)
        return fence.verdict if fence else None

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        fence = self._hub.find(call.key)
        return missing_of(call, (a.rank for a in fence.arrivals) if fence else ())

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        for rank in cause.ranks:
            self._hub.lose(Lost(rank=rank, incarnation=incarnation, cause=cause))

    async def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreLost("the transport was closed")

    def _pass(self, arrival: Arrival, fence: _Fence, verdict: FenceVerdict, order: int) -> Opened:
        verdict = fence.heard_by(self.rank, verdict)
        if isinstance(verdict, Broken):
            raise FenceBroken(verdict)
        mine = (arrival.rank, arrival.incarnation, arrival.nonce)
        if not any((a.rank, a.incarnation, a.nonce) == mine for a in fence.arrivals):
            key = fence.call.key
            raise StaleArrival(
                f"fence {fence.call.fence!r} ({key.scope}, generation {key.generation}) "
                f"was decided without this arrival of {self.rank}"
            )
        return replace(verdict, order=order)
