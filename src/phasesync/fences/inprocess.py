"""Fences between ranks that share one event loop: a real transport, and the tests' own.

No thread and no clock but the loop's, so a loop with virtual time decides everything; what
happens depends on the order of calls alone.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from phasesync.core.fence import Lost, cancelled, missing_of
from phasesync.core.fence_hub import Hub, Instance
from phasesync.core.model import (
    Arrival,
    Broken,
    FenceCall,
    FenceVerdict,
    Opened,
    Rank,
    RootCause,
)
from phasesync.errors import FenceBroken, StaleArrival, StoreLost

__all__ = ("Gate", "InProcessEndpoint", "InProcessFences")

Gate: TypeAlias = Callable[[FenceCall], Awaitable[bool]]


class InProcessFences:
    """The fences of one run in one event loop; `endpoint` gives each rank its own."""

    def __init__(self) -> None:
        self.boot = secrets.token_hex(8)
        self._hub = Hub()

    def endpoint(
        self, rank: Rank, incarnation: int = 0, *, gate: "Gate | None" = None
    ) -> "InProcessEndpoint":
        """The transport of one rank. A new incarnation is no longer lost.

        A simulation has a `gate`: it is awaited before each arrival, and says whether that comes.
        """
        self._hub.come_back(rank, incarnation)
        return InProcessEndpoint(self._hub, rank, self.boot, gate)


class InProcessEndpoint:
    """One rank's transport (see `fences.base.FenceTransport`)."""

    def __init__(self, hub: Hub, rank: Rank, boot: str, gate: "Gate | None" = None) -> None:
        self.rank = rank
        self.boot = boot
        self._hub = hub
        self._gate = gate
        self._closed = False

    async def connect(self) -> None:
        self._check()

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        self._check()
        comes = self._gate is None or await self._gate(call)
        instance = self._hub.arrive(call, arrival) if comes else self._hub.instance(call)
        order = len(instance.arrivals)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(call.deadline_s, self._hub.expire, instance, self.rank)
        try:
            await _heard(instance)
        except asyncio.CancelledError:
            self._hub.arrive(call, cancelled(call, arrival))
            raise
        finally:
            timer.cancel()
        return self._pass(arrival, instance, order)

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        self._check()
        instance = self._hub.arrive(call, arrival)
        verdict = await _heard(instance)
        return instance.answer_for(self.rank) or verdict

    async def watch(self, call: FenceCall) -> Broken | Opened:
        self._check()
        return await _heard(self._hub.instance(call))

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        instance = self._hub.find(call.key)
        return instance.verdict if instance else None

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        instance = self._hub.find(call.key)
        return instance.missing() if instance else missing_of(call, ())

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        for rank in cause.ranks:
            self._hub.lose(Lost(rank=rank, incarnation=incarnation, cause=cause))

    async def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreLost("the transport was closed")

    def _pass(self, arrival: Arrival, instance: Instance, order: int) -> Opened:
        verdict = instance.answer_for(self.rank)
        if isinstance(verdict, Broken):
            raise FenceBroken(verdict)
        if not isinstance(verdict, Opened) or not instance.judged(arrival):
            key = instance.call.key
            raise StaleArrival(
                f"fence {instance.call.fence!r} ({key.scope}, generation {key.generation}) "
                f"was decided without this arrival of {self.rank}"
            )
        return replace(verdict, order=order)


async def _heard(instance: Instance) -> FenceVerdict:
    if instance.verdict is not None:
        return instance.verdict
    waiter: asyncio.Future[FenceVerdict] = asyncio.get_running_loop().create_future()

    def hear(verdict: FenceVerdict) -> None:
        if not waiter.done():
            waiter.set_result(verdict)

    instance.hear(hear)
    try:
        return await waiter
    finally:
        instance.unhear(hear)
