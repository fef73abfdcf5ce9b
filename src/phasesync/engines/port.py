"""The port of every engine: check, call, book. What differs between engines is the driver.

The ledger is asked before each call and told after it, so that no driver is ever given a
call that its engine must not get. A refusal changes nothing; a call that failed, ran out of time
or was cancelled is booked as failed before anybody hears of it, and is never repeated here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from phasesync.core.model import Ticket, Version
from phasesync.engines.base import (
    WEIGHTS,
    EngineDriver,
    EngineStatus,
    Evidence,
    Floor,
    InFlight,
    Tag,
)
from phasesync.engines.gate import Gate, Late
from phasesync.engines.ledger import Call, begun, done, failed, refusal
from phasesync.engines.tickets import TicketRules, Warden
from phasesync.errors import EngineError, EngineLost, EngineRefused

__all__ = ("DEADLINES_S", "LedgerPort")

T = TypeVar("T")

_DRAINS = frozenset({"abort", "wait"})

DEADLINES_S: Mapping[str, float] = {
    "pause": 300.0,
    "resume_generation": 60.0,
    "release": 120.0,
    "resume": 120.0,
    "remap": 120.0,
    "begin": 120.0,
    "load": 900.0,
    "finish": 300.0,
    "abandon": 120.0,
    "flush": 60.0,
    "raise_floor": 60.0,
}


class LedgerPort:
    """An `EnginePort` over any `EngineDriver`.

    `version` is what the engine holds now, `asleep` which of its tags are released already.
    """

    def __init__(
        self,
        driver: EngineDriver,
        *,
        tickets: TicketRules,
        version: Version | None = None,
        asleep: tuple[Tag, ...] = (),
        deadlines_s: Mapping[str, float] = {},
        late: Late = "reject",
    ) -> None:
        self._driver = driver
        self._warden = Warden(tickets)
        self._gate = Gate(late=late)
        self._deadlines_s = {**DEADLINES_S, **deadlines_s}
        self._status = EngineStatus(version=version)
        self._ready = False
        if asleep:
            self._adopt(frozenset(asleep))

    def _adopt(self, asleep: frozenset[Tag]) -> None:
        """The engine was put to sleep before this port was made, by a launcher or a leader."""
        lost = WEIGHTS in asleep and not self._driver.keeps_weights
        self._driver.adopt(asleep)
        self._gate.shut()
        self._status = replace(
            self._status,
            gate="shut",
            asleep=asleep,
            content="discarded" if lost else "whole",
        )

    @property
    def driver(self) -> EngineDriver:
        """The engine's own calls, unguarded."""
        return self._driver

    def admission(self) -> AbstractAsyncContextManager[None]:
        """Hold this while a request is under way; refused or parked while the engine is paused."""
        return self._gate.admission()

    async def pause(self, policy: InFlight = "abort") -> None:
        call = await self._call("pause", policy=policy)
        self._check(call)
        self._gate.shut()

        async def stop() -> None:
            await self._driver.pause(policy)
            if policy in _DRAINS:
                await self._gate.drained()

        await self._run(call, stop)

    async def resume_generation(self, ticket: Ticket | None = None) -> None:
        call = await self._call("resume_generation")
        self._check(call)
        self._admit(call, "generate", ticket)
        await self._run(call, lambda: self._driver.resume_generation(ticket))
        self._gate.open()

    async def release(self, tags: tuple[Tag, ...], ticket: Ticket | None = None) -> None:
        tags = tuple(dict.fromkeys(tags))
        if ticket is not None:
            tags = await self._with_the_rest(tags, ticket)
        call = await self._call("release", tags=tags)
        await self._run(call, lambda: self._driver.release(tags))
        self._warden.give_up()

    async def _with_the_rest(self, tags: tuple[Tag, ...], ticket: Ticket) -> tuple[Tag, ...]:
        """`tags`, with what the engine can release only together with them, mapped again."""
        await self._prepare()
        status, can = self._status, self._driver.releasable
        if not can or frozenset(tags) in can or frozenset(tags) | status.asleep not in can:
            return tags
        rest = tuple(tag for tag in status.tags if tag in status.asleep)
        for tag in rest:
            call = await self._call("remap", tags=(tag,))
            self._check(call)
            self._admit(call, tag, ticket)
            await self._run(call, partial(self._driver.resume, tag, ticket))
        return tuple(tag for tag in status.tags if tag in {*tags, *rest})

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        call = await self._call("resume", tags=(tag,))
        self._check(call)
        self._admit(call, tag, ticket)
        await self._run(call, lambda: self._driver.resume(tag, ticket))

    async def begin(self, version: Version) -> None:
        call = await self._call("begin", version=version)
        await self._run(call, lambda: self._driver.begin(version))

    async def load(self, bucket: object) -> None:
        call = await self._call("load")
        await self._run(call, lambda: self._driver.load(bucket))

    async def finish(self, version: Version) -> Evidence:
        async def commit() -> Evidence:
            evidence = await self._driver.finish(version)
            if set(evidence.versions) != {str(version)}:
                raise EngineError(
                    f"{self._driver.name} was told version {version}; its ranks hold "
                    f"{', '.join(map(str, evidence.versions)) or 'nothing that they tell'}"
                )
            return evidence

        evidence = await self._run(await self._call("finish", version=version), commit)
        if self._status.kv_stale:
            await self.flush()
        return evidence

    async def abandon(self) -> None:
        await self._run(await self._call("abandon"), self._driver.abandon)

    async def flush(self) -> None:
        await self._run(await self._call("flush"), self._driver.flush)

    async def status(self) -> EngineStatus:
        await self._prepare()
        return replace(
            self._status,
            floor=self._warden.floor,
            unverified=(*self._driver.unverified, *self._warden.rules.unverified),
        )

    async def raise_floor(self, floor: Floor) -> None:
        """Raise the floor here and beside the engine; a call below it is refused at both.

        Raises:
            EngineError: the guard beside the engine could not be told. The floor here has risen.
        """
        floor = self._warden.raise_floor(floor)
        within = self._deadlines_s["raise_floor"]
        try:
            async with asyncio.timeout(within):
                await self._driver.raise_floor(floor)
        except TimeoutError as error:
            raise EngineError(
                f"the guard of {self._driver.name} was not told within {within:g} s that the floor "
                f"is {floor}; whether it knows is unknown"
            ) from error

    async def spend(self, ticket: Ticket) -> None:
        """Refuse all tickets of this scope that are older than `ticket`, as recovery must."""
        self._warden.spend(ticket.key)

    async def close(self) -> None:
        await self._driver.close()

    async def _call(
        self,
        name: str,
        *,
        tags: tuple[Tag, ...] = (),
        policy: InFlight | None = None,
        version: Version | None = None,
    ) -> Call:
        driver = self._driver
        await self._prepare()
        return Call(
            name=name,
            tags=tags,
            policy=policy,
            policies=driver.policies,
            version=version,
            releasable=driver.releasable,
            keeps_weights=driver.keeps_weights,
            ranks=driver.ranks,
        )

    async def _prepare(self) -> None:
        if not self._ready:
            await self._driver.prepare()
            self._status = replace(self._status, tags=self._driver.tags)
            self._ready = True

    def _check(self, call: Call) -> None:
        if (reason := refusal(self._status, call)) is not None:
            raise EngineRefused(f"{self._driver.name} {reason}")

    def _admit(self, call: Call, wanted: str, ticket: Ticket | None) -> None:
        if (reason := self._warden.refusal(wanted, ticket)) is not None:
            raise EngineRefused(f"{self._driver.name} cannot {call}: {reason}")

    async def _run(self, call: Call, perform: Callable[[], Awaitable[T]]) -> T:
        self._check(call)
        before = self._status
        self._status = begun(before, call)
        try:
            async with asyncio.timeout(self._deadlines_s[call.name]) as clock:
                value = await perform()
        except asyncio.CancelledError:
            # The engine may still be doing it.
            self._status = failed(self._status, call, "cancelled", outcome_known=False)
            raise
        except EngineRefused:
            # The guard beside the engine, or the driver: the engine never heard of the call.
            self._status = replace(before, gate=self._status.gate)
            raise
        except Exception as error:
            late = clock.expired()
            why = (
                f"no answer within {self._deadlines_s[call.name]:g} s"
                if late
                else f"{type(error).__name__}: {error}"
            )
            known = not late and not isinstance(error, EngineLost)
            self._status = failed(self._status, call, why, outcome_known=known)
            raise EngineError(f"{self._driver.name} failed to {call}: {why}") from error
        self._status = done(self._status, call)
        return value
