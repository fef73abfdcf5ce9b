"""Fences over any `torch.distributed.Store`, with or without a process group.

The steps of `core.fence_steps` decide, and `fences.lines` performs them. What must survive edits
here: every wait has an outer guard on the event loop, because a frozen store keeps no time.
"""

import asyncio
import os
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phasesync.core.fence import Lost, cancelled, encode_arrival
from phasesync.core.fence_beats import HEARTBEAT_S, Beat, Sign, told
from phasesync.core.fence_gather import Word, passed_at_once
from phasesync.core.fence_keys import Process, Space, Verdict, beside, writer
from phasesync.core.fence_loss import (
    announcing,
    asking,
    leaving,
    looking,
    neighbours,
    reporting_death,
    wards,
)
from phasesync.core.fence_steps import (
    UNJUDGED,
    Counted,
    Passed,
    admitting,
    arriving,
    connecting,
    expiring,
    failing,
    missing_ranks,
    peeking,
    plainly,
)
from phasesync.core.model import (
    Arrival,
    Broken,
    FenceCall,
    FenceVerdict,
    Opened,
    Rank,
    RootCause,
)
from phasesync.errors import FenceBroken, PlanError, StaleArrival, StoreLost
from phasesync.fences.base import Probe, connected_already
from phasesync.fences.deadline import Deadline
from phasesync.fences.follower import Follower
from phasesync.fences.host import TOGETHER_FROM, Host
from phasesync.fences.jobs import settle
from phasesync.fences.lines import (
    ANSWER_S,
    CONNECT_S,
    GRACE_S,
    LINES_AT_START,
    Lines,
    has_sockets,
    nothing,
)
from phasesync.fences.neighbours import Neighbours, host_id, started_at, state_of
from phasesync.fences.observer import StoreObserver, report
from phasesync.fences.pulse import Pulse
from phasesync.fences.slots import Scope, Slot, Slots
from phasesync.fences.wards import Wards

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("GRACE_S", "StoreFences", "StoreObserver", "default_store")

LOOK_S_MAX = 4.0  # Thousands who look for each other all the time would keep a store busy.
ASK_AGAIN_S = 1.0  # Breaks that come together ask once what the others do.


def default_store() -> "Store":
    """The store of the default process group; its collectives are not touched.

    Raises:
        PlanError: there is no default process group.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            "no default process group; call torch.distributed.init_process_group first, or make "
            "a torch.distributed.TCPStore and hand it to StoreFences"
        )
    return distributed_c10d._get_default_store()


# --- One rank's endpoint --------------------------------------------------------------------


class StoreFences:
    """A rank's fences over a store (see `fences.base.FenceTransport`).

    The store is cloned where it can be; it stays the caller's own. `token` keeps out ranks of
    another run that has the same name on the same store. With `watch_neighbours` the death of a
    rank breaks its fences at once: the kernel tells of processes of this `host`, connections of
    those of the hosts next to it.
    Where the runtime is at work each rank beats every `heartbeat_s`, over a TCPStore. Of so many
    members on one host as `together_from`, or more, one brings the arrivals of all to a TCPStore;
    0 lets each come by itself.
    """

    def __init__(
        self,
        store: "Store",
        *,
        rank: Rank,
        run: str,
        incarnation: int = 0,
        attempt: int = 0,
        token: str = "",
        watch_neighbours: bool = True,
        host: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        together_from: int = TOGETHER_FROM,
    ) -> None:
        self.rank = rank
        self.boot: str | None = None
        self._pid = os.getpid()
        self._incarnation = incarnation
        self._me = writer(rank, incarnation)
        self._run = (run, attempt)
        self._space = Space.of(run, attempt, token=token)
        self._store = store
        self._heartbeat_s = heartbeat_s
        self._probe: Probe | None = None
        self._pulse: Pulse | None = None
        self._asked_at = -ASK_AGAIN_S
        self._lines = Lines(store, f"phasesync.{run}.{rank}")
        self._slots = Slots(self._lines, self._space, self._me)
        self._host = (host or host_id()) if watch_neighbours else ""
        self._mates = Host(
            self._slots, rank=rank, incarnation=incarnation, run=self._run, least=together_from
        )
        self._wards = Wards(self._space.root, self._lost_abroad)
        self._neighbours = Neighbours(self._gone)
        self._pids: dict[Rank, int] = {}
        self._look: asyncio.TimerHandle | None = None
        self._look_s = HEARTBEAT_S
        self._near_by = 0
        self._is_closing = False

    @classmethod
    def observer(
        cls, store: "Store", *, run: str, attempt: int = 0, token: str = ""
    ) -> "StoreObserver":
        """The endpoint of who watches processes and is no rank: a launcher, an agent."""
        return StoreObserver(store, run=run, attempt=attempt, token=token)

    async def connect(self) -> None:
        if self.boot is not None:
            raise connected_already(self.rank)
        await self._lines.straighten()
        nonce = secrets.token_hex(8)
        steps = connecting(self._space, self.rank, self._incarnation, nonce=nonce)
        first = self._lines.ask(steps, CONNECT_S)
        # One more where a host may come together: a look at it must not open one amid a fence.
        more = LINES_AT_START - 1 + self._lines.are_direct
        others = [self._lines.ask(nothing(), CONNECT_S) for _ in range(more)]
        self.boot, *_ = await asyncio.gather(first, *others)
        started = started_at(os.getpid())
        if self._host and started is not None:
            where = self._lines.local_host
            address = await self._wards.listen(where, self.rank, self._incarnation) if where else ""
            door = await self._mates.open() if self._lines.are_direct else ""
            me = Process(self.rank, self._incarnation, os.getpid(), started, address, door)
            announced = announcing(self._space, self._host, me)
            self._meet(*await self._lines.ask(announced, CONNECT_S))
        if self._probe is not None and has_sockets(self._store):
            self._pulse = Pulse(self._store, self._space, self.rank, self._probe, self._heartbeat_s)
        _CONNECTED.add(self)

    def heed(self, probe: Probe) -> None:
        """As `fences.base.Heartbeats`."""
        self._probe = probe

    @property
    def beats(self) -> bool:
        """Whether the ranks of this run beat."""
        return self._pulse is not None

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        since = asyncio.get_running_loop().time()
        slot, scope, register = self._come_to(call)
        try:
            passed = await self._arrive(call, arrival, slot, scope, register)
        except asyncio.CancelledError:
            await self._leave(call, arrival)
            raise
        finally:
            self._slots.drop(call.key)
        if passed.verdict.spares(call):
            return await self._arrive_beside(call, arrival, since)
        return self._pass(call, scope, passed)

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        slot, _, _ = self._come_to(call)
        # As long as those who wait there do: who gives the store up before knows another cause.
        within_s = max(ANSWER_S, call.deadline_s + GRACE_S)
        try:
            verdict = await self._lines.ask(failing(self._space, call, arrival), within_s)
        finally:
            self._slots.let_be(slot)
        if verdict.spares(call):
            return _named(call, await self.fail(beside(call), arrival))
        answer = self._heard(call, verdict)
        self._ask_at_break(call, answer)
        return answer

    async def watch(self, call: FenceCall) -> Broken | Opened:
        slot, scope, register = self._come_to(call)
        heard = self._hear(slot)
        if not self._mates.watch(call, scope, slot, register=register):
            self._slots.wait(slot, register=register)
        verdict = await heard
        if verdict is None or verdict == UNJUDGED.verdict:
            raise StaleArrival(f"fence {call.fence!r} was decided and tidied up long ago")
        if verdict.spares(call):
            return _named(call, await self.watch(beside(call)))
        return self._heard(call, verdict)

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        self._check(call)
        verdict: Verdict | None = await self._lines.ask(peeking(self._space, call))
        if verdict is not None and verdict.spares(call):
            there = await self.peek(beside(call))
            return None if there is None else _named(call, there)
        return None if verdict is None else self._heard(call, verdict)

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        self._check(call)
        verdict: Verdict | None = await self._lines.ask(peeking(self._space, call))
        if verdict is not None and verdict.spares(call):
            return await self.missing(beside(call))
        missing: tuple[Rank, ...] = await self._lines.ask(missing_ranks(self._space, call))
        return missing

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        await report(self._lines, self._space, cause, incarnation)

    async def hop(self) -> None:
        """To a line and back without touching the store: what the threads alone cost."""
        await self._lines.submit(nothing())

    async def close(self) -> None:
        self._is_closing = True
        if self._look is not None:
            self._look.cancel()
        self._neighbours.close()
        if self._pulse is not None:
            await self._pulse.stop()
        await self._mates.close()
        await self._lines.rest()
        if self._lines.lost is None:
            scopes = self._slots.scopes
            used = {name: scope.ends() for name, scope in scopes.items()}
            peers = max((len(scope.members) for scope in scopes.values()), default=1)
            with suppress(StoreLost):
                await self._lines.ask(leaving(self._space, self.rank, used, peers=peers))
        await self._wards.close()  # Whoever watches this rank finds by now that it has left.
        await self._lines.close()

    def _meet(self, here: list[Process], near: list[Process]) -> None:
        """Watch who is on this host, and this rank's share of those nearby; look again for who has
        come since: before a fence of all has opened, somebody may not have started yet."""
        for process in here:
            if process.rank != self.rank and process.pid != os.getpid():
                who = (process.rank, process.incarnation)
                self._pids[process.rank] = process.pid
                self._neighbours.watch(who, process.pid, process.started)
        self._mates.meet(here)
        for process in wards(self.rank, here, near):
            if process.address:
                self._wards.watch(process.rank, process.incarnation, process.address)
        loop = asyncio.get_running_loop()
        if not any(scope.opened is not None for scope in self._slots.scopes.values()):
            near_by = len(here) + len(near)
            is_new, self._near_by = near_by != self._near_by, near_by
            self._look_s = HEARTBEAT_S if is_new else min(2 * self._look_s, LOOK_S_MAX)
            self._look = loop.call_later(self._look_s, self._look_again)

    def _look_again(self) -> None:
        """See who has come since. Who passes the first fence of a scope does it once more."""

        def met(looking: "asyncio.Future[Any]") -> None:
            is_answered = not looking.cancelled() and looking.exception() is None
            if is_answered and not self._is_closing:
                self._meet(*looking.result())

        if self._lines.lost is None and not self._is_closing:
            self._lines.submit(neighbours(self._space, self._host)).add_done_callback(met)

    def _lost_abroad(self, rank: Rank, incarnation: int, kind: str, why: str) -> None:
        """A connection to a process of another host has ended."""
        self._report_death(rank, incarnation, RootCause(kind=kind, ranks=(rank,), error=why))

    def _gone(self, who: tuple[Rank, int], pid: int) -> None:
        """The kernel says that a neighbour has ended."""
        rank, incarnation = who
        self._mates.gone(rank, incarnation)
        cause = RootCause(kind="dead", ranks=(rank,), error=f"its process {pid} is gone")
        self._report_death(rank, incarnation, cause)

    def _report_death(self, rank: Rank, incarnation: int, cause: RootCause) -> None:
        if self._lines.lost is None:
            lost = Lost(rank=rank, incarnation=incarnation, cause=cause)
            self._lines.tell(reporting_death(self._space, lost))
            for call in self._slots.calls():
                self._submit_ask(call)

    def _check(self, call: FenceCall) -> None:
        if (call.key.run, call.key.attempt) != self._run:
            run, attempt = self._run
            raise PlanError(
                f"fence {call.fence!r} is of run {call.key.run!r}, attempt {call.key.attempt}, "
                f"this endpoint of run {run!r}, attempt {attempt}; make one for each attempt"
            )
        if os.getpid() != self._pid:
            raise PlanError(
                f"the fences of {self.rank} were made in process {self._pid}, and this is "
                f"process {os.getpid()}: a fork has none of their threads; make them after it"
            )
        if self._lines.lost is not None:
            raise self._lines.lost
        if self.boot is None:
            raise StoreLost("connect() was not called")

    def _come_to(self, call: FenceCall) -> tuple[Slot, Scope, bool]:
        """The slot of a fence, its scope, and whether it must be said anew that this rank may wait
        there."""
        self._check(call)
        known = self._slots.scopes.get(call.key.scope)
        last = -1 if known is None else known.last
        scope = self._slots.scope(call)
        is_same = scope.members is call.members or scope.members == call.members
        known_here = scope.registered and is_same and call.key.generation <= last + 1
        scope.members, scope.registered = call.members, True
        return self._slots.of(call), scope, not known_here

    async def _arrive(
        self, call: FenceCall, arrival: Arrival, slot: Slot, scope: Scope, register: bool
    ) -> Passed:
        brings = self._mates.who_brings(call, scope)
        handed: asyncio.Future[Word | None] | None = None
        if brings is not None:  # Before the timers are set: others may wait for this one.
            if isinstance(brings, Follower):
                self._lines.tidy()
            handed = brings.hand(call, arrival, encode_arrival(arrival), register=register)
        deadline = Deadline(self, call, arrival, slot)
        waits_here = False
        try:
            if handed is not None:
                word = await deadline.over(handed, is_handed=True)
                if word is not None:
                    return await self._told(deadline, call, arrival, slot, word)
            waits_here = wait = not slot.watched
            slot.watched = True
            steps = arriving(
                self._space,
                call,
                arrival,
                register=register,
                opened_before=scope.opened,
                wait=wait,
            )
            heard = None if wait else self._hear(slot)
            came: Passed | Counted = await deadline.over(self._lines.submit(steps, waits=wait))
            if isinstance(came, Passed):
                slot.settle(came.verdict)
                return came
            assert heard is not None, "the line does not wait for a fence that another waits for"
            verdict = await deadline.over(heard)
            if verdict is None:
                return UNJUDGED
            answer = plainly(call, arrival, came.order, verdict)
            if answer is not None:
                return Passed(verdict, answer)
            admitted = admitting(self._space, call, arrival, came.order, verdict)
            passed: Passed = await deadline.over(self._lines.submit(admitted))
            return passed
        finally:
            deadline.end()
            if waits_here and slot.verdict is None:
                self._pass_on(slot)

    def _pass_on(self, slot: Slot) -> None:
        """Nobody waits any more on the line of this arrival, by which others might hear."""
        slot.watched = False
        if slot.hearers:
            self._slots.wait(slot, register=True)

    async def _arrive_beside(self, call: FenceCall, arrival: Arrival, since: float) -> Opened:
        """The fence was broken for who is no member any more, and nobody else: meet beside it."""
        self._slots.forget_registrations()
        left_s = call.deadline_s - (asyncio.get_running_loop().time() - since)
        try:
            opened = await self.arrive(beside(call, max(left_s, 0.0)), arrival)
        except FenceBroken as error:
            raise FenceBroken(replace(error.broken, key=call.key)) from None
        return replace(opened, ticket=replace(opened.ticket, key=call.key))

    def _hear(self, slot: Slot) -> "asyncio.Future[Verdict | None]":
        future: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        slot.hear(lambda verdict, error: settle(future, verdict, error))
        return future

    async def _told(
        self, deadline: Deadline, call: FenceCall, arrival: Arrival, slot: Slot, word: Word
    ) -> Passed:
        """What the word of who brought this arrival means for it."""
        if slot.verdict is None:
            slot.settle(word.verdict)
        passed = passed_at_once(call, arrival, word)
        if passed is None:
            steps = admitting(self._space, call, arrival, word.order, word.verdict)
            passed = await deadline.over(self._lines.submit(steps))
        return passed

    async def expire(
        self, call: FenceCall, signs: Mapping[Rank, Sign], own: Arrival | None = None
    ) -> Verdict | None:
        """The deadline has passed: decide, on another line than the one that waits."""
        steps = expiring(self._space, call, self._me, self._seen(signs), own=own)
        verdict: Verdict | None = await self._lines.submit(steps)
        return verdict

    async def ask(self, call: FenceCall, why: str) -> None:
        """Ask those who have not arrived to write down what they do."""
        await self._lines.submit(asking(self._space, call, why))

    async def look(self, call: FenceCall) -> tuple[tuple[Rank, ...], dict[Rank, Beat | None]]:
        """Who is missing, and their last beats."""
        found: tuple[tuple[Rank, ...], dict[Rank, Beat | None]]
        found = await self._lines.submit(looking(self._space, call))
        return found

    def _seen(self, signs: Mapping[Rank, Sign]) -> dict[Rank, str]:
        """What the missing ranks said of themselves, and what those of this host do just now."""
        here = {rank: f"{state_of(pid)} (process {pid})" for rank, pid in self._pids.items()}
        said = {rank: told(sign, here.get(rank, "")) for rank, sign in signs.items()}
        return here | said

    def _ask_at_break(self, call: FenceCall, verdict: FenceVerdict) -> None:
        """Who breaks a fence asks what the others do there."""
        if isinstance(verdict, Broken) and verdict.decided:
            self._submit_ask(call)

    def _submit_ask(self, call: FenceCall) -> None:
        now = asyncio.get_running_loop().time()
        if self.beats and self._lines.lost is None and now - self._asked_at >= ASK_AGAIN_S:
            self._asked_at = now
            self._lines.tell(asking(self._space, call, "break"))

    def give_up(self, call: FenceCall) -> StoreLost:
        """The store has had its time after the deadline, too."""
        return self._lines.abandon(
            f"the store gave no verdict on fence {call.fence!r} within {call.deadline_s:g} s, and "
            f"{GRACE_S:g} s more",
            call.key,
        )

    async def _leave(self, call: FenceCall, arrival: Arrival) -> None:
        """Break the fence as cancelled. A second cancellation does not wait for the store."""
        if self._lines.lost is None:
            steps = failing(self._space, call, cancelled(call, arrival))
            with suppress(StoreLost):
                verdict = await self._lines.ask(steps, GRACE_S)
                if verdict.spares(call):
                    await self._leave(beside(call), arrival)
                else:
                    self._heard(call, verdict)

    def _pass(self, call: FenceCall, scope: Scope, passed: Passed) -> Opened:
        match passed.answer:
            case Opened() as opened:
                if scope.opened is None and self._host and self._lines.are_direct:
                    self._look_again()
                scope.opened_before, scope.opened = scope.opened, call.key.generation
                return opened
            case Broken() as broken:
                self._slots.forget_registrations()
                self._ask_at_break(call, broken)
                raise FenceBroken(broken)
            case None:
                raise StaleArrival(
                    f"fence {call.fence!r} ({call.key.scope}, generation {call.key.generation}) "
                    f"was decided without this arrival of {self.rank}"
                )

    def _heard(self, call: FenceCall, verdict: Verdict) -> FenceVerdict:
        answer = verdict.read_by(call, self._me)
        if isinstance(answer, Broken):
            self._slots.forget_registrations()
        return answer

    def leave_to_parent(self) -> None:
        """In a fork: let go of the connections by which others see this rank live."""
        self._mates.leave_to_parent()


def _named(call: FenceCall, verdict: FenceVerdict) -> FenceVerdict:
    """A verdict from beside a fence, in the words of the fence itself."""
    match verdict:
        case Opened(ticket=ticket):
            return replace(verdict, ticket=replace(ticket, key=call.key))
        case Broken():
            return replace(verdict, key=call.key)


_CONNECTED: "weakref.WeakSet[StoreFences]" = weakref.WeakSet()


def _in_fork() -> None:
    for fences in list(_CONNECTED):
        fences.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
