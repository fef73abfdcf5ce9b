"""One rank's dealings with fences: which instance comes next, what it reports, what it heard.

Every verdict goes to the journal before anybody acts on it. Generations count the fences that a
scope instance has come to, passed or not, so that all members name the same instance after a
failure too.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from phasesync.core.fence import judged_list
from phasesync.core.kernel import RankState, Stage, fences_left, next_step
from phasesync.core.model import (
    Arrival,
    Broken,
    Epoch,
    FenceCall,
    FenceKey,
    FenceVerdict,
    Opened,
    Rank,
    RootCause,
    Ticket,
    Version,
)
from phasesync.core.plan import Plan, Wait
from phasesync.errors import FenceBroken, FenceError, StaleArrival, StoreLost, describe
from phasesync.fences.base import FenceTransport, Heartbeats
from phasesync.journal import Journal, line_cut
from phasesync.runtime.device import DevicePort
from phasesync.runtime.parting import Elsewhere, elsewhere
from phasesync.runtime.probe import Probe

__all__ = ("RankFences",)


class RankFences:
    """The fences of a run as one rank meets them, each verdict written to its journal."""

    def __init__(
        self,
        transport: FenceTransport,
        journal: Journal,
        *,
        run: str,
        attempt: int,
        rank: Rank,
        incarnation: int,
        mono_ns: Callable[[], int],
        device: DevicePort | None = None,
    ) -> None:
        self.transport = transport
        self.probe = Probe(journal, device, mono_ns)
        if isinstance(transport, Heartbeats):
            transport.heed(self.probe)
        self.ticket: Ticket | None = None
        self.version = 0
        self.passed: set[str] = set()
        self.broken: set[str] = set()
        self.arrived: set[str] = set()
        self.waits_s: dict[str, float] = {}
        self.gone: frozenset[Rank] = frozenset()
        self._journal = journal
        self._run = run
        self._attempt = attempt
        self._rank = rank
        self._incarnation = incarnation
        self._mono_ns = mono_ns
        self._generations: dict[int, int] = {}
        self._epochs_begun = 0
        self._plan: Plan | None = None
        self._index = 0
        self._listed: dict[int, tuple[Rank, ...]] = {}
        self._plain: dict[str, Any] | None = None

    def begin(self) -> None:
        """A new epoch: nothing is passed, broken or arrived at."""
        self._epochs_begun += 1
        for seen in (self.passed, self.broken, self.arrived, self.waits_s):
            seen.clear()

    def call(self, plan: Plan, state: RankState, wait: Wait) -> FenceCall:
        """The instance of `wait` that this rank comes to from where it stands."""
        scope = plan.scopes[wait.scope]
        members = self._members_of(plan, wait.scope)
        if state.stage is Stage.RECOVER and self.gone:
            members = tuple(member for member in members if member not in self.gone)
        generation = self._generations.get(wait.scope, 0) + self._ahead(plan, state, wait)
        self.probe.may_come(scope.name, generation)
        return FenceCall(
            key=FenceKey(self._run, self._attempt, scope.name, generation),
            fence=wait.fence,
            epoch=Epoch(state.epoch),
            version=Version(self.version),
            digest=plan.digest,
            members=members,
            deadline_s=self._patience_s(state, wait),
        )

    def _ahead(self, plan: Plan, state: RankState, wait: Wait) -> int:
        """How many fences of the same scope this rank comes to before `wait`."""
        rank = self._index_in(plan)
        if next_step(plan, rank, state) is wait:
            return 0
        left = fences_left(plan, rank, state)
        before = left[: left.index(wait)] if wait in left else ()
        return sum(step.scope == wait.scope for step in before)

    def _patience_s(self, state: RankState, wait: Wait) -> float:
        """How long to wait: in a rank's first epoch perhaps longer, for what is done only once."""
        is_first = self._epochs_begun <= 1 and state.stage is Stage.EPOCH
        return (is_first and wait.first_deadline_s) or wait.deadline_s

    def _members_of(self, plan: Plan, scope: int) -> tuple[Rank, ...]:
        """The members of a scope, listed once a plan: there may be thousands."""
        self._index_in(plan)
        found = self._listed.get(scope)
        if found is None:
            ranks = plan.scopes[scope].members
            found = self._listed[scope] = tuple(plan.members[at] for at in ranks)
        return found

    def _index_in(self, plan: Plan) -> int:
        if self._plan is not plan:
            self._plan, self._listed = plan, {}
            self._index = plan.index(self._rank)
        return self._index

    def use_up(self, waits: Iterable[Wait]) -> None:
        """These fences are behind this rank, passed or not."""
        for wait in waits:
            self._generations[wait.scope] = self._generations.get(wait.scope, 0) + 1

    async def arrive(
        self,
        call: FenceCall,
        *,
        free_bytes: int | None = None,
        payload: tuple[tuple[str, str], ...] = (),
    ) -> Opened | RootCause:
        """Report to the fence and wait; its opening, or why this rank must leave the epoch."""
        arrival = self._arrival(call, free_bytes=free_bytes, payload=payload)
        self.arrived.add(call.fence)
        self.probe.arrived(call.key.scope, call.key.generation)
        began = self._mono_ns()
        try:
            opened = await self.transport.arrive(call, arrival)
        except FenceBroken as error:
            self.heard(error.broken)
            return error.cause
        except (StaleArrival, StoreLost) as error:
            cause = _lost(call, error)
            self.heard(Broken(key=call.key, fence=call.fence, cause=cause))
            return cause
        self.waits_s[call.fence] = (self._mono_ns() - began) / 1e9
        return opened

    def announce(self, call: FenceCall, *, error: str | None = None, **fields: Any) -> None:
        """Write down that this rank arrives, before it does."""
        self.write(
            "fence.arrive",
            call,
            level="info" if error is None else "warning",
            status="ok" if error is None else "failed",
            error=error,
            **fields,
        )

    def opened(self, call: FenceCall, opened: Opened) -> Ticket:
        """Write down that this rank passes; its ticket. The next step's line is to follow."""
        self.ticket = opened.ticket
        self._plain = _plain_ticket(opened.ticket)
        self.passed.add(call.fence)
        if opened.decided:
            judged = judged_list(opened.arrivals)
            self._hold("fence.decide", call, verdict="open", judged=judged)
        self._hold(
            "fence.pass",
            call,
            arrival=opened.order,
            ticket=self._plain,
            duration_s=round(self.waits_s.get(call.fence, 0.0), 6),
        )
        return opened.ticket

    def heard(self, broken: Broken) -> None:
        """Write down that a fence broke, and why; once a fence."""
        if broken.fence in self.broken:
            return
        self.broken.add(broken.fence)
        cause = broken.cause
        where: dict[str, Any] = {
            "fence": broken.fence,
            "scope": broken.key.scope,
            "generation": broken.key.generation,
            "verdict": "broken",
        }
        if broken.decided:
            judged = judged_list(broken.arrivals)
            self._journal.write("fence.decide", judged=judged, **where)
        self._journal.write(
            "fence.break",
            level="error",
            cause_kind=cause.kind,
            cause_ranks=[str(rank) for rank in cause.ranks],
            cause_phase=cause.phase,
            cause_fence=cause.fence,
            error_type=cause.error_type,
            error=cause.error,
            missing=[str(rank) for rank in broken.missing or cause.missing],
            **where,
        )

    async def fail_at(self, call: FenceCall, cause: RootCause) -> RootCause:
        """Arrive as failed; the cause that the fence has now, which may be an earlier one."""
        self.announce(call, error=describe(cause))
        self.probe.arrived(call.key.scope, call.key.generation)
        verdict: FenceVerdict
        try:
            verdict = await self.transport.fail(call, self._arrival(call, cause=cause))
        except FenceError as error:
            verdict = Broken(key=call.key, fence=call.fence, cause=_lost(call, error))
        if isinstance(verdict, Opened):
            return cause
        self.heard(verdict)
        return cause if verdict.cause.kind == "store_lost" else verdict.cause

    async def fail_all(
        self, plan: Plan, state: RankState, cause: RootCause, waits: tuple[Wait, ...]
    ) -> RootCause:
        """Arrive as failed at every fence that is left; the cause that the last of them has."""
        found = cause
        for wait in waits:
            if wait.fence not in self.arrived:
                found = await self.fail_at(self.call(plan, state, wait), cause)
        self.use_up(waits)
        return found

    async def decline(self, plan: Plan, state: RankState, cause: RootCause) -> None:
        """Break the fences of an epoch that this rank will not enter, for whoever enters it.

        Nothing is written: as a rule nobody does, because all leave for the same reason.
        """
        for wait in fences_left(plan, self._index_in(plan), state):
            await self.shut(self.call(plan, state, wait), cause)

    async def shut(self, call: FenceCall, cause: RootCause) -> None:
        """Break a fence for whoever comes or waits there, without a word in the journal."""
        with contextlib.suppress(FenceError):
            await self.transport.fail(call, self._arrival(call, cause=cause))

    def elsewhere(self, plan: Plan, state: RankState) -> Elsewhere | None:
        """Where it shows that others begin the epoch that this rank, who leaves, does not."""
        rank, came = self._index_in(plan), self._generations
        return elsewhere(plan, rank, attempt=self._attempt, epoch=state.epoch, generations=came)

    def joined(self, call: FenceCall) -> Ticket:
        """The caller's own join stands for this fence: its word, with no arrivals to show.

        Nobody is told, and it was over before this rank heard of it: the next line may follow.
        """
        self._hold("fence.arrive", call, status="ok", caller="outside")
        self._hold("fence.pass", call, caller="outside", joined=len(call.members))
        return Ticket(key=call.key, fence=call.fence, epoch=call.epoch, count=0, hash="")

    def plain_ticket(self) -> dict[str, Any] | None:
        """The ticket in hand as the journal writes it."""
        return self._plain

    def write(self, event: str, call: FenceCall, *, level: str = "info", **fields: Any) -> None:
        self._journal.write(event, level=level, **_where(call), **fields)

    def _hold(self, event: str, call: FenceCall, **fields: Any) -> None:
        self._journal.hold(event, **_where(call), **fields)

    def _arrival(
        self,
        call: FenceCall,
        *,
        cause: RootCause | None = None,
        free_bytes: int | None = None,
        payload: tuple[tuple[str, str], ...] = (),
    ) -> Arrival:
        return call.arrival(
            self._rank,
            incarnation=self._incarnation,
            nonce=secrets.token_hex(8),
            seq=self._journal.seq - 1,
            cause=cause,
            free_bytes=free_bytes,
            payload=payload,
        )


def _where(call: FenceCall) -> dict[str, Any]:
    key = call.key
    return {"fence": call.fence, "scope": key.scope, "generation": key.generation}


def _plain_ticket(ticket: Ticket) -> dict[str, Any]:
    return {
        "fence": ticket.fence,
        "scope": ticket.key.scope,
        "epoch": ticket.epoch,
        "generation": ticket.key.generation,
        "count": ticket.count,
        "hash": ticket.hash,
    }


def _lost(call: FenceCall, error: FenceError) -> RootCause:
    return RootCause(kind="store_lost", ranks=(), fence=call.fence, error=line_cut(str(error)))
