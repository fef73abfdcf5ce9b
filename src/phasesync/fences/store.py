"""Fences over any `torch.distributed.Store`, with or without a process group.

The steps of `core.fence_steps` decide, and `fences.lines` performs them. What must survive edits
here: every wait has an outer guard on the event loop, because a frozen store keeps no time.
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phasesync.core.fence import Lost, cancelled
from phasesync.core.fence_beats import HEARTBEAT_S, LATE_SHARE, Beat, Sign, patience, told
from phasesync.core.fence_keys import Process, Space, Verdict, writer
from phasesync.core.fence_loss import (
    announcing,
    asking,
    leaving,
    looking,
    neighbours,
    reporting,
    reporting_death,
    sweeping,
    wards,
)
from phasesync.core.fence_steps import (
    UNJUDGED,
    VERDICTS_KEPT,
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
    watching,
)
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
from phasesync.errors import FenceBroken, PlanError, StaleArrival, StoreLost
from phasesync.fences.base import Probe
from phasesync.fences.jobs import settle
from phasesync.fences.lines import GRACE_S, LINES_AT_START, Lines, has_sockets, nothing
from phasesync.fences.neighbours import Neighbours, host_id, started_at, state_of
from phasesync.fences.pulse import Pulse
from phasesync.fences.wards import Wards

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("GRACE_S", "StoreFences", "StoreObserver", "default_store")

ASK_AGAIN_S = 1.0  # Breaks that come together ask once what the others do.
LOOK_AHEAD_S = 2.5  # To tell silent from slow takes two looks, so far apart.
CONNECT_S = 60.0  # A connection may hang in a name service for many seconds.
LATE_S = 0.2  # A timer that fires so late tells of the event loop, not of the store.


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


@dataclass(eq=False)
class _Slot:
    """What this endpoint knows of one fence: whether a line waits, and who wants to hear."""

    call: FenceCall
    watched: bool = False
    verdict: Verdict | None = None
    waiters: list["asyncio.Future[Verdict | None]"] = field(default_factory=list)

    def settle(self, verdict: Verdict | None) -> None:
        self.verdict = verdict
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            settle(waiter, verdict, None)

    def fail(self, error: Exception) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            settle(waiter, None, error)

    async def heard(self) -> Verdict | None:
        """The verdict; None if it was tidied up before this rank looked."""
        if self.verdict is not None:
            return self.verdict
        waiter: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return await waiter


@dataclass
class _Scope:
    """What this endpoint remembers of one scope instance between fences."""

    members: tuple[Rank, ...] = ()
    registered: bool = False
    first: int | None = None
    last: int = -1
    opened: int | None = None
    opened_before: int | None = None


class _Deadline:
    """The timers of one arrival: a look at who is missing, the fence's deadline, and the store's
    last chance. None of them depends on the store's answer to another."""

    def __init__(
        self, fences: "StoreFences", call: FenceCall, slot: _Slot, job: "asyncio.Future[Any]"
    ) -> None:
        self.job = job
        self._fences = fences
        self._call = call
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._jobs: list[asyncio.Task[None]] = []
        self._seen: dict[Rank, tuple[Beat | None, float]] = {}
        self._look_timer: asyncio.TimerHandle | None = None
        if fences.beats:
            ahead = min(LATE_SHARE * call.deadline_s, call.deadline_s - LOOK_AHEAD_S)
            look_s = max(ahead, (1 - LATE_SHARE) * call.deadline_s)
            self._look_timer = self._loop.call_later(look_s, self._do, self._look)
        self._until = self._loop.time() + call.deadline_s
        self._timer = self._loop.call_at(self._until, self._expire)

    def end(self) -> None:
        self._timer.cancel()
        if self._look_timer is not None:
            self._look_timer.cancel()
        for job in self._jobs:
            job.cancel()

    def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._jobs.append(self._loop.create_task(work(), name=f"late at {self._call.fence}"))

    async def _look(self) -> None:
        """Ask the ranks that are missing what they do, and see who beats."""
        with suppress(StoreLost):
            await self._fences.ask(self._call, "deadline")
            await self._signs()

    async def _signs(self) -> tuple[tuple[Rank, ...], dict[Rank, Sign]]:
        """Who is missing, and how long ago each was heard of, as far as one has watched."""
        missing, beats = await self._fences.look(self._call)
        now = self._loop.time()
        signs: dict[Rank, Sign] = {}
        for rank, beat in beats.items():
            before, since = self._seen.setdefault(rank, (beat, now))
            if beat != before:
                self._seen[rank], since = (beat, now), now
            is_known = beat is not None and since < now
            signs[rank] = Sign(beat, now - since if is_known else None)
        return missing, signs

    def _expire(self) -> None:
        self._last_chance()
        self._do(self._decide)

    async def _decide(self) -> None:
        """Break the fence, unless all who are missing make progress."""
        with suppress(StoreLost):
            signs: dict[Rank, Sign] = {}
            if self._fences.beats:
                missing, signs = await self._signs()
                left_s = patience(self._call.deadline_s, missing, signs)
                if left_s > 0:
                    self._timer.cancel()
                    self._until = self._loop.time() + left_s
                    self._timer = self._loop.call_at(self._until, self._expire)
                    return
            # The line that waits hears the verdict itself, unless it was tidied up long ago.
            verdict = await self._fences.expire(self._call, signs)
            self._slot.settle(verdict)
            if verdict is None:
                settle(self.job, UNJUDGED, None)

    def _last_chance(self) -> None:
        self._until = self._loop.time() + GRACE_S
        self._timer = self._loop.call_at(self._until, self._give_up)

    def _give_up(self) -> None:
        if self._loop.time() > self._until + LATE_S:
            # The loop itself stood still: what the store said meanwhile is not read yet.
            self._last_chance()
            return
        error = self._fences.give_up(self._call)
        settle(self.job, None, error)
        self._slot.fail(error)


class StoreFences:
    """A rank's fences over a store (see `fences.base.FenceTransport`).

    The store is cloned where it can be; it stays the caller's own. `token` keeps out ranks of
    another run that has the same name on the same store. With `watch_neighbours` the death of a
    rank breaks its fences at once: the kernel tells of processes of this `host`, connections of
    those of the hosts next to it.
    Where the runtime is at work each rank beats every `heartbeat_s`, over a TCPStore.
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
        self._slots: dict[FenceKey, _Slot] = {}
        self._scopes: dict[str, _Scope] = {}
        self._host = (host or host_id()) if watch_neighbours else ""
        self._wards = Wards(self._space.root, self._lost_abroad)
        self._neighbours = Neighbours(self._gone)
        self._pids: dict[Rank, int] = {}
        self._look: asyncio.TimerHandle | None = None

    @classmethod
    def observer(
        cls, store: "Store", *, run: str, attempt: int = 0, token: str = ""
    ) -> "StoreObserver":
        """The endpoint of who watches processes and is no rank: a launcher, an agent."""
        return StoreObserver(store, run=run, attempt=attempt, token=token)

    async def connect(self) -> None:
        await self._lines.straighten()
        nonce = secrets.token_hex(8)
        steps = connecting(self._space, self.rank, self._incarnation, nonce=nonce)
        first = self._lines.ask(steps, CONNECT_S)
        others = [self._lines.ask(nothing(), CONNECT_S) for _ in range(LINES_AT_START - 1)]
        self.boot, *_ = await asyncio.gather(first, *others)
        started = started_at(os.getpid())
        if self._host and started is not None:
            where = self._lines.local_host
            address = await self._wards.listen(where, self.rank, self._incarnation) if where else ""
            me = Process(self.rank, self._incarnation, os.getpid(), started, address)
            announced = announcing(self._space, self._host, me)
            self._meet(*await self._lines.ask(announced, CONNECT_S))
        if self._probe is not None and has_sockets(self._store):
            self._pulse = Pulse(self._store, self._space, self.rank, self._probe, self._heartbeat_s)

    def heed(self, probe: Probe) -> None:
        """As `fences.base.Heartbeats`."""
        self._probe = probe

    @property
    def beats(self) -> bool:
        """Whether the ranks of this run beat."""
        return self._pulse is not None

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        slot, register = self._come_to(call)
        try:
            passed = await self._arrive(call, arrival, slot, register)
        except asyncio.CancelledError:
            await self._leave(call, arrival)
            raise
        finally:
            self._slots.pop(call.key, None)
        return self._pass(call, passed)

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        self._come_to(call)
        verdict = await self._lines.ask(failing(self._space, call, arrival))
        answer = self._heard(call, verdict)
        self._ask_at_break(call, answer)
        return answer

    async def watch(self, call: FenceCall) -> Broken | Opened:
        slot, register = self._come_to(call)
        if not slot.watched:
            slot.watched = True
            steps = watching(self._space, call, self._me, register=register)
            watching_line = self._lines.submit(steps, waits=True)
            watching_line.add_done_callback(lambda job: self._hand_on(call, slot, job))
        verdict = await slot.heard()
        if verdict is None:
            raise StaleArrival(f"fence {call.fence!r} was decided and tidied up long ago")
        return self._heard(call, verdict)

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        self._check(call)
        verdict: Verdict | None = await self._lines.ask(peeking(self._space, call))
        return None if verdict is None else self._heard(call, verdict)

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        self._check(call)
        missing: tuple[Rank, ...] = await self._lines.ask(missing_ranks(self._space, call))
        return missing

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        await _report(self._lines, self._space, cause, incarnation)

    async def hop(self) -> None:
        """To a line and back without touching the store: what the threads alone cost."""
        await self._lines.submit(nothing())

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        self._neighbours.close()
        if self._pulse is not None:
            await self._pulse.stop()
        await self._lines.rest()
        if self._lines.lost is None:
            used = {name: _scope_ends(scope) for name, scope in self._scopes.items()}
            peers = max((len(scope.members) for scope in self._scopes.values()), default=1)
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
        for process in wards(self.rank, here, near):
            if process.address:
                self._wards.watch(process.rank, process.incarnation, process.address)
        loop = asyncio.get_running_loop()
        if not any(scope.opened is not None for scope in self._scopes.values()):
            self._look = loop.call_later(HEARTBEAT_S, self._look_again)

    def _look_again(self) -> None:
        def met(looking: "asyncio.Future[Any]") -> None:
            if not looking.cancelled() and looking.exception() is None:
                self._meet(*looking.result())

        if self._lines.lost is None:
            self._lines.submit(neighbours(self._space, self._host)).add_done_callback(met)

    def _lost_abroad(self, rank: Rank, incarnation: int, kind: str, why: str) -> None:
        """A connection to a process of another host has ended."""
        self._report_death(rank, incarnation, RootCause(kind=kind, ranks=(rank,), error=why))

    def _gone(self, who: tuple[Rank, int], pid: int) -> None:
        """The kernel says that a neighbour has ended."""
        rank, incarnation = who
        cause = RootCause(kind="dead", ranks=(rank,), error=f"its process {pid} is gone")
        self._report_death(rank, incarnation, cause)

    def _report_death(self, rank: Rank, incarnation: int, cause: RootCause) -> None:
        if self._lines.lost is None:
            lost = Lost(rank=rank, incarnation=incarnation, cause=cause)
            self._lines.tell(reporting_death(self._space, lost))
            for slot in self._slots.values():
                self._submit_ask(slot.call)

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

    def _come_to(self, call: FenceCall) -> tuple[_Slot, bool]:
        """The slot of a fence, and whether this rank must say anew that it may wait there."""
        self._check(call)
        slot = self._slots.setdefault(call.key, _Slot(call))
        scope = self._scopes.setdefault(call.key.scope, _Scope())
        generation = call.key.generation
        known = scope.registered and scope.members == call.members and generation <= scope.last + 1
        scope.members, scope.registered = call.members, True
        scope.first = generation if scope.first is None else min(scope.first, generation)
        scope.last = max(scope.last, generation)
        return slot, not known

    async def _arrive(
        self, call: FenceCall, arrival: Arrival, slot: _Slot, register: bool
    ) -> Passed:
        wait, slot.watched = not slot.watched, True
        steps = arriving(
            self._space,
            call,
            arrival,
            register=register,
            opened_before=self._scopes[call.key.scope].opened,
            wait=wait,
        )
        watch = _Deadline(self, call, slot, self._lines.submit(steps, waits=wait))
        try:
            came: Passed | Counted = await watch.job
            if isinstance(came, Passed):
                slot.settle(came.verdict)
                return came
            verdict = await slot.heard()
            if verdict is None:
                return UNJUDGED
            answer = plainly(call, arrival, came.order, verdict)
            if answer is not None:
                return Passed(verdict, answer)
            watch.job = self._lines.submit(
                admitting(self._space, call, arrival, came.order, verdict)
            )
            passed: Passed = await watch.job
            return passed
        finally:
            watch.end()

    async def expire(self, call: FenceCall, signs: Mapping[Rank, Sign]) -> Verdict | None:
        """The deadline has passed: decide, on another line than the one that waits."""
        steps = expiring(self._space, call, self._me, self._seen(signs))
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
                self._heard(call, await self._lines.ask(steps, GRACE_S))

    def _pass(self, call: FenceCall, passed: Passed) -> Opened:
        match passed.answer:
            case Opened() as opened:
                scope = self._scopes[call.key.scope]
                scope.opened_before, scope.opened = scope.opened, call.key.generation
                return opened
            case Broken() as broken:
                self._forget_registrations()
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
            self._forget_registrations()
        return answer

    def _hand_on(self, call: FenceCall, slot: _Slot, job: "asyncio.Future[Any]") -> None:
        """A watching line has come back: tell whoever waits here."""
        slot.watched = False
        if self._slots.get(call.key) is slot:
            del self._slots[call.key]
        if job.cancelled():
            return
        error = job.exception()
        if isinstance(error, Exception):
            slot.fail(error)
        else:
            slot.settle(job.result())

    def _forget_registrations(self) -> None:
        # After a break somebody may be lost whom another verdict kept quiet about.
        for scope in self._scopes.values():
            scope.registered = False


class StoreObserver:
    """Tells the ranks of a run that one of them is gone. It is a member of nothing."""

    def __init__(self, store: "Store", *, run: str, attempt: int = 0, token: str = "") -> None:
        self._space = Space.of(run, attempt, token=token)
        self._lines = Lines(store, f"phasesync.{run}.observer")

    async def connect(self) -> None:
        await self._lines.ask(nothing(), CONNECT_S)

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        """As `FenceTransport.report_lost`."""
        await _report(self._lines, self._space, cause, incarnation)

    async def close(self) -> None:
        """Remove the keys of the run if all its ranks have left or are lost, then end."""
        if self._lines.lost is None:
            with suppress(StoreLost):
                await self._lines.ask(sweeping(self._space))
        await self._lines.close()


async def _report(lines: Lines, space: Space, cause: RootCause, incarnation: int) -> None:
    for rank in cause.ranks:
        await lines.ask(reporting(space, Lost(rank=rank, incarnation=incarnation, cause=cause)))


def _scope_ends(scope: _Scope) -> tuple[int, int]:
    """The generations whose keys this rank may have left behind.

    Closing may cut the tidying up after the last fence, so that one's share counts too.
    """
    first = scope.first or 0
    known = [n for n in (scope.opened_before, scope.opened, first) if n is not None]
    return max(min(first, known[0]), known[0] - VERDICTS_KEPT, 0), scope.last
