"""The runner: one rank's turn through the protocol, for real.

Order inside a rank: pass the fence (ticket), write the start line, perform, write the end line,
announce. Log first, then tell: after a crash the journal says at least as much as any peer can
have seen. The kernel decides what may happen; the runner performs it, waits, and carries failure.
"""

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from phasesync.core.aftermath import aftermath, put_back, to_replace
from phasesync.core.kernel import Kind, Stage, Status, fences_left, lost_leaders, next_step
from phasesync.core.model import Broken, Epoch, FenceCall, OptionValue, Rank, RootCause, Version
from phasesync.core.plan import PLAN, Act, Plan, Wait, resolve
from phasesync.core.protocol import PhaseDecl, Protocol, Retry
from phasesync.errors import EpochFailed, EpochOrderError, PlanError, RankLost, describe
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.journal import Journal, line_cut
from phasesync.lint import refuse
from phasesync.machine import RankMachine
from phasesync.runtime.actions import Action, Turn, bind, check_names
from phasesync.runtime.alarm import Alarm, ended
from phasesync.runtime.calls import BlockingCalls
from phasesync.runtime.device import DevicePort, HostDevice, Proof, check_established, prove
from phasesync.runtime.fencing import RankFences, plain_ticket
from phasesync.spec import load

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("EpochReport", "RankRunner")

_RUNNING: set[tuple[str, int, Rank]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One epoch that went well: seconds a phase took, and seconds waited at each fence."""

    epoch: int
    version: int
    phases_s: Mapping[str, float]
    waits_s: Mapping[str, float]


class _Halt(Exception):
    """This rank leaves the epoch: its own failure, or somebody else's that it learned of."""

    def __init__(self, cause: RootCause) -> None:
        super().__init__(cause)
        self.cause = cause


class RankRunner:
    """Runs a protocol for one rank.

        async with RankRunner("colocated", rank=r, ranks=n, fences=fences, actions={...}) as runner:
            await runner.run_epoch()

    `actions` binds plain sync or async callables, of no argument or of a `Turn`, to phase names;
    blocking ones get a thread of their own. `outside` phases without an action are the caller's:
    they are recorded, and so are fences `joined: outside` when `caller_joins` is set. `fences` is
    a fence transport or a `torch.distributed` store; without one the run has one process, and
    waits for nobody. A run without a name is called after the start of its store, so that each
    job has a folder of its own. A protocol that lint refuses is not run, unless `unchecked`, which
    is for experiments that take a fence away.

    Raises:
        ProtocolError: lint refuses the protocol.
        PlanError: the arguments do not make a plan, or a phase has no action.
    """

    def __init__(
        self,
        protocol: Protocol | str,
        *,
        rank: Rank | str | int,
        ranks: int | Mapping[str, int],
        actions: Mapping[str, Action],
        fences: "FenceTransport | Store | None" = None,
        options: Mapping[str, OptionValue] | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
        device: DevicePort | str | None = None,
        caller_joins: bool = False,
        run: str | None = None,
        attempt: int | None = None,
        incarnation: int = 0,
        runs: Path | str | None = None,
        fsync: str = "none",
        plan_deadline_s: float = 600.0,
        unchecked: bool = False,
        wall: Callable[[], float] = time.time,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.protocol = load(protocol) if isinstance(protocol, str) else protocol
        if not unchecked:
            _doubt(self.protocol)
        self._resolve = partial(resolve, self.protocol, ranks, options, groups=groups)
        self.plan: Plan = self._resolve()
        check_established(self.plan)
        self.rank = rank if isinstance(rank, Rank) else _named(self.protocol, rank)
        self._index = self.plan.index(self.rank)
        check_names(frozenset(_phases(self.protocol)), actions)
        self._blocking = BlockingCalls(f"phasesync {self.rank}")
        self._calls = bind(self._own_phases(), actions, self._blocking)
        self._device = _device(device, self._index)
        self._caller_joins = caller_joins
        self._plan_deadline_s = plan_deadline_s
        self._mono_ns = mono_ns
        self._machine = RankMachine(self.plan, self._index)
        self._phases_s: dict[str, float] = {}
        self._busy = self._open = False
        given = run or os.environ.get("PHASESYNC_RUN")
        self.run = given or "run"
        self._is_named = given is not None
        self.attempt = int(os.environ.get("PHASESYNC_ATTEMPT", "0")) if attempt is None else attempt
        self._claim = (self.run, self.attempt, self.rank)
        self.journal = Journal(
            runs or os.environ.get("PHASESYNC_RUNS") or "runs",
            run=self.run,
            rank=self.rank,
            ranks=sum(member.role == self.rank.role for member in self.plan.members),
            incarnation=incarnation,
            device=self._device.name,
            fsync=fsync,
            mono_ns=mono_ns,
            wall=wall,
        )
        self.journal.bind(attempt=self.attempt, protocol=self.protocol.name)
        self._fences = RankFences(
            self._transport(fences, incarnation),
            self.journal,
            run=self.run,
            attempt=self.attempt,
            rank=self.rank,
            incarnation=incarnation,
            mono_ns=mono_ns,
        )
        self._alarm = Alarm(self._fences.transport, f"{self.rank} heeds")

    def _transport(
        self, fences: "FenceTransport | Store | None", incarnation: int
    ) -> FenceTransport:
        if fences is None:
            return InProcessFences().endpoint(self.rank, incarnation)
        if not hasattr(fences, "compare_set"):
            return fences
        store = cast("Store", fences)
        return StoreFences(
            store, rank=self.rank, run=self.run, attempt=self.attempt, incarnation=incarnation
        )

    # ------------------------------------------------------------------ life of a runner

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(error)

    async def start(self) -> None:
        """Connect and pass the implicit fence `plan` with all ranks of the run.

        Raises:
            EpochFailed: ranks hold different plans, or somebody did not come.
            EpochOrderError: this process has another runner for the rank.
            StoreLost: the fence transport does not answer.
        """
        if self._claim in _RUNNING:
            raise EpochOrderError(
                f"{self.rank} has a runner in this process already (run {self.run!r}, attempt "
                f"{self.attempt}); close it before another one is made"
            )
        _RUNNING.add(self._claim)
        try:
            await self._fences.transport.connect()
            if not self._is_named:
                self.journal.name_run(f"run-{getattr(self._fences.transport, 'boot', None) or 0}")
            self.journal.write("rank.start", digest=self.plan.digest)
            await self._agree()
        except BaseException as error:
            await self.close(error)
            raise
        self._open = True

    async def close(self, error: BaseException | None = None) -> None:
        """Say goodbye in the journal and leave nothing behind; closing twice does nothing."""
        if self._claim not in _RUNNING:
            return
        _RUNNING.discard(self._claim)
        try:
            if self._open and error is None and self._rest_is_outside():
                await self._record_rest()
            await self._alarm.off()
            self._blocking.close()
            await self._fences.transport.close()
        finally:
            self._open = False
            self.journal.write(
                "rank.exit",
                level="info" if error is None else "error",
                error_type=type(error).__name__ if error else None,
                error=str(error) if error else None,
            )
            self.journal.close()

    @property
    def epoch(self) -> int:
        """The epoch under way, or the last one; the first is 1."""
        return self._machine.state.epoch

    # ------------------------------------------------------------------ one epoch

    async def run_epoch(
        self, epoch: int | None = None, *, version: int | None = None
    ) -> EpochReport:
        """One turn of the cycle. `epoch`, where given, must be the one that comes next.

        `version` is the caller's own count of weights (its training step, say), which all ranks
        must agree on and which never falls; left out, it is the epoch.

        Raises:
            EpochFailed: the epoch failed somewhere; the same root cause on every rank.
            EpochOrderError: an epoch is under way, another one comes next, or the version falls.
        """
        self._may_run(epoch, version)
        self._busy = True
        try:
            await self._enter_epoch(version)
            await self._walk()
            return EpochReport(
                epoch=self.epoch,
                version=self._fences.version,
                phases_s=dict(self._phases_s),
                waits_s=dict(self._fences.waits_s),
            )
        except _Halt as halt:
            raise await self._failed(halt.cause) from halt.__cause__
        except asyncio.CancelledError:
            await self._cancelled()
            raise
        except Exception as error:
            await self._failed(await self._unexpected(error))
            raise
        finally:
            self._busy = False

    def _may_run(self, epoch: int | None, version: int | None) -> None:
        state = self._machine.state
        if not self._open:
            raise EpochOrderError(f"{self.rank} is not started; use 'async with' or start()")
        if self._busy:
            raise EpochOrderError(f"{self.rank} is in epoch {state.epoch}; await it first")
        may = state.status is Status.FINISHED or self._is_fresh() or self._rest_is_outside()
        if not (may or self._recovery_is_due()):
            raise EpochOrderError(
                f"{self.rank} left epoch {state.epoch} {self._machine.name!r} and nothing "
                "recovered it; start the rank again as a new incarnation"
            )
        coming = state.epoch if self._is_fresh() else state.epoch + 1
        if epoch is not None and epoch != coming:
            raise EpochOrderError(f"{self.rank} comes to epoch {coming} next, not {epoch}")
        if version is not None and version < self._fences.version:
            raise EpochOrderError(
                f"{self.rank} had weight version {self._fences.version}; {version} is older"
            )

    def _is_fresh(self) -> bool:
        state = self._machine.state
        return state.at == 0 and state.status is Status.READY and state.stage is Stage.EPOCH

    async def _enter_epoch(self, version: int | None) -> None:
        if self._rest_is_outside() and not self._is_fresh():
            await self._record_rest()
        if self._recovery_is_due():
            await self._recover()
        if self._machine.state.status is Status.FINISHED:
            await self._machine.fire(Kind.BEGIN)
        self._fences.begin()
        self._fences.version = self.epoch if version is None else version
        self._phases_s.clear()
        self.journal.bind(epoch=self.epoch, version=self._fences.version)
        self.journal.write("epoch.begin")

    def _recovery_is_due(self) -> bool:
        """After a failure, where the caller joins: recovery waits for all to be called again."""
        state = self._machine.state
        return (
            self._caller_joins
            and state.status in _STOPPED
            and state.stage is Stage.EPOCH
            and bool(self.protocol.recover)
            and not self._fences.gone
        )

    async def _walk(self) -> None:
        """All steps of this stage, up to where the caller takes over."""
        while (here := next_step(self.plan, self._index, self._machine.state)) is not None:
            if self._rest_is_outside() and not self._is_fresh():
                break
            match here:
                case Act():
                    await self._act(here)
                case Wait(joined=True) if self._caller_joins:
                    await self._joined(here)
                case Wait():
                    await self._wait(here)
        in_epoch = self._machine.state.stage is Stage.EPOCH
        self.journal.write("epoch.end" if in_epoch else "recover.end")

    # ------------------------------------------------------------------ phases

    async def _act(self, act: Act) -> None:
        call = self._calls.get(act.phase)
        if (broken := self._alarm.broken) is not None:
            self._fences.heard(broken)
            await self._machine.fire(Kind.ABORT)
            raise _Halt(broken.cause)
        await self._machine.fire(Kind.START, act.phase)
        self.journal.write(
            "phase.start",
            phase=act.phase,
            ticket=plain_ticket(self._fences.ticket),
            caller="outside" if call is None else None,
        )
        began = self._mono_ns()
        if call is not None:
            await self._perform(act, call)
        took = (self._mono_ns() - began) / 1e9
        self._phases_s[act.phase] = took
        self.journal.write(
            "phase.end",
            phase=act.phase,
            duration_s=round(took, 6),
            free_bytes=None if call is None else await self._free_bytes(act),
            caller="outside" if call is None else None,
        )
        await self._machine.fire(Kind.END, act.phase)

    async def _perform(self, act: Act, call: Callable[[Turn], Awaitable[Any]]) -> None:
        """Run the action, and meanwhile heed its next fence: if that breaks, cut the action off."""
        tries = 1 if act.retry is Retry.NEVER else 2
        for retry in range(tries):
            error = await self._once(act, call, retry)
            if error is None:
                return
            if retry + 1 < tries:
                self.journal.write(
                    "phase.progress",
                    level="warning",
                    phase=act.phase,
                    retry=retry + 1,
                    error_type=type(error).__name__,
                    error=str(error),
                )
        assert error is not None
        raise _Halt(await self._own_failure(act, error)) from error

    async def _once(
        self, act: Act, call: Callable[[Turn], Awaitable[Any]], retry: int
    ) -> Exception | None:
        """One try of an action; what it raised. A try that was cut off is not tried again."""
        turn = Turn(
            rank=self.rank,
            phase=act.phase,
            epoch=self.epoch,
            version=self._fences.version,
            ticket=self._fences.ticket,
            plan=self.plan,
            journal=self.journal,
            retry=retry,
        )
        alarm = await self._alarm.watch(self._next_call())
        action = asyncio.ensure_future(call(turn))
        try:
            await asyncio.wait(
                (action, *((alarm,) if alarm else ())),
                timeout=act.deadline_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not action.done():
                await ended(action)
                if (broken := self._alarm.broken) is not None:
                    raise _Halt(await self._cut_off(act, broken))
                late = f"it took longer than its deadline of {act.deadline_s:g} s"
                raise _Halt(await self._own_failure(act, TimeoutError(late)))
            error = action.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            return error
        finally:
            await ended(action)

    async def _own_failure(self, act: Act, error: Exception) -> RootCause:
        """The action raised: what it acquires or releases is unknown, what it writes partial."""
        said = error.__cause__ if isinstance(error, RankLost) and error.__cause__ else error
        name, text = type(said).__name__, line_cut(str(error) or repr(error))
        self.journal.write(
            "phase.fail",
            level="error",
            phase=act.phase,
            error_type=name,
            error=text,
            where=_innermost(error),
        )
        await self._machine.fire(Kind.FAIL, act.phase)
        return RootCause(
            kind=error.kind if isinstance(error, RankLost) else "failed",
            ranks=(self.rank,),
            phase=act.phase,
            error_type=name,
            error=text,
        )

    def _next_call(self) -> FenceCall | None:
        """The fence to heed while an action runs, if any.

        The break of the epoch's last fence is learned there and not before.
        """
        state = self._machine.state
        left = fences_left(self.plan, self._index, state)
        if len(left) < 2 or (left[0].joined and self._caller_joins):
            return None
        return self._fences.call(self.plan, state, left[0])

    async def _cut_off(self, act: Act, broken: Broken) -> RootCause:
        """The action was cancelled because a peer failed: half done, and not this rank's fault."""
        self._fences.heard(broken)
        self.journal.write(
            "phase.fail",
            level="warning",
            phase=act.phase,
            error_type="Cancelled",
            error=f"fence {broken.fence!r} broke while the phase ran",
        )
        await self._machine.fire(Kind.FAIL, act.phase)
        return broken.cause

    # ------------------------------------------------------------------ fences

    async def _wait(self, wait: Wait) -> None:
        call = self._fences.call(self.plan, self._machine.state, wait)
        proof = await self._prove(wait)
        if proof.error is not None:
            cause = RootCause(
                kind=proof.kind,
                ranks=(self.rank,),
                fence=wait.fence,
                error_type=proof.error_type,
                error=proof.error,
            )
            await self._machine.fire(Kind.REFUSE, wait.fence)
            raise _Halt(cause)
        await self._alarm.off()
        self._fences.announce(call, free_bytes=proof.free_bytes)
        await self._machine.fire(Kind.ARRIVE, wait.fence)
        if self._machine.state.stage is Stage.RECOVER and (lost := self._lost_leaders(wait)):
            await self._machine.fire(Kind.ABORT)
            raise _Halt(RootCause(kind="dead", ranks=lost, fence=wait.fence, error=_POISONED))
        answer = await self._fences.arrive(call, free_bytes=proof.free_bytes)
        if isinstance(answer, RootCause):
            await self._machine.fire(Kind.ABORT)
            raise _Halt(answer)
        self._fences.use_up((wait,))
        ticket = self._fences.opened(call, answer)
        await self._machine.fire(Kind.PASS, wait.fence, ticket)

    def _lost_leaders(self, wait: Wait) -> tuple[Rank, ...]:
        """Dead leaders whose part of the recovery nobody can do: the replica is poisoned."""
        gone = [self.plan.index(rank) for rank in self._fences.gone if rank in self.plan.members]
        return tuple(self.plan.members[at] for at in lost_leaders(self.plan, wait, gone))

    async def _free_bytes(self, act: Act) -> int | None:
        if not self._device.blocks:
            return self._device.free_bytes()
        try:
            found: int | None = await self._blocking.run(self._device.free_bytes)
        except RankLost as error:
            raise _Halt(await self._own_failure(act, error)) from error
        return found

    async def _prove(self, wait: Wait) -> Proof:
        if self._device.blocks:
            proof: Proof = await self._blocking.run(lambda: prove(self._device, wait))
            return proof
        return prove(self._device, wait)

    async def _joined(self, wait: Wait) -> None:
        call = self._fences.call(self.plan, self._machine.state, wait)
        await self._machine.fire(Kind.ARRIVE, wait.fence)
        word = self._fences.joined(call)
        self._fences.use_up((wait,))
        await self._machine.fire(Kind.PASS, wait.fence, word)

    # ------------------------------------------------------------------ the plan

    async def _agree(self) -> None:
        """Pass the implicit world fence `plan`; who differs is named, and devices are learned."""
        wait = Wait(PLAN, self.plan.world, self._plan_deadline_s, (), (), False)
        call = replace(
            self._fences.call(self.plan, self._machine.state, wait),
            epoch=Epoch(0),
            version=Version(0),
        )
        payload = (
            ("protocol", self.protocol.name),
            ("ranks", str(len(self.plan.members))),
            *((name, _word(value)) for name, value in self.plan.options),
            ("device", self._device.name),
        )
        self._fences.announce(call, epoch=0)
        answer = await self._fences.arrive(call, payload=payload)
        if isinstance(answer, RootCause):
            raise EpochFailed(
                self.rank, 0, answer, to_replace(answer), weights="intact", kv="intact"
            )
        self._fences.use_up((wait,))
        devices = {held.rank: dict(held.payload).get("device", "") for held in answer.arrivals}
        self.plan = self._resolve(devices=[devices[member] for member in self.plan.members])
        self._machine = RankMachine(self.plan, self._index)
        self._fences.opened(call, answer)
        self.journal.bind(digest=self.plan.digest)
        self.journal.write(
            "plan",
            epoch=0,
            options=dict(self.plan.options),
            members=[str(member) for member in self.plan.members],
            devices=list(self.plan.devices),
            place=list(self.plan.place),
            groups={name: [list(part) for part in parts] for name, parts in self.plan.groups},
            caller_joins=self._caller_joins or None,
        )

    # ------------------------------------------------------------------ failure

    async def _failed(self, cause: RootCause) -> EpochFailed:
        """Carry the failure to every fence that is left, recover if the protocol can, and say so.

        The last fence of the epoch has the one root cause that all ranks name.
        """
        await self._alarm.off()
        state = self._machine.state
        left = fences_left(self.plan, self._index, state)
        shut = frozenset(wait.fence for wait in left)
        root = await self._fences.fail_all(self.plan, state, cause, left)
        behind = aftermath(self.plan, self._index, state, frozenset(self._fences.passed), shut)
        self._fences.gone = frozenset(to_replace(root)) | frozenset(to_replace(cause))
        self.journal.write(
            "epoch.end", level="error", error_type=root.error_type, error=describe(root)
        )
        recovered = self._recovery_is_due() or await self._recovered()
        behind = put_back(self.plan, behind) if recovered else behind
        return EpochFailed(
            self.rank,
            self.epoch,
            root,
            to_replace(root),
            weights=behind.weights,
            kv=behind.kv,
            groups="lost" if root.kind == "store_lost" else "intact",
            can_retry=recovered and not self._fences.gone,
            poisoned=() if recovered else self._own_groups(),
        )

    async def _recovered(self) -> bool:
        """Whether the declared recovery went well; whom the others go on without, stays out."""
        if not self.protocol.recover or self._caller_joins or self.rank in self._fences.gone:
            return False
        try:
            await self._recover()
        except _Halt:
            return False
        return True

    async def _recover(self) -> None:
        """The declared recovery, behind a fence that every live rank has stopped."""
        await self._machine.fire(Kind.RECOVER)
        self._fences.begin()
        self.journal.write("recover.begin")
        try:
            await self._walk()
        except _Halt as halt:
            state = self._machine.state
            left = fences_left(self.plan, self._index, state)
            await self._fences.fail_all(self.plan, state, halt.cause, left)
            self.journal.write("recover.end", level="error", error=describe(halt.cause))
            raise

    async def _unexpected(self, error: Exception) -> RootCause:
        """An error of phasesync's own, or of a journal or device: peers hear of it all the same."""
        state = self._machine.state
        here = next_step(self.plan, self._index, state)
        if state.status is Status.ACTING and isinstance(here, Act):
            return await self._own_failure(here, error)
        if state.status in (Status.READY, Status.WAITING):
            await self._machine.fire(Kind.ABORT)
        kind, text = type(error).__name__, line_cut(str(error) or repr(error))
        return RootCause(kind="failed", ranks=(self.rank,), error_type=kind, error=text)

    async def _cancelled(self) -> None:
        """Nobody leaves in silence: a cancelled rank arrives as failed wherever it is awaited."""
        await self._alarm.off()
        cause = RootCause(kind="cancelled", ranks=(self.rank,))
        state = self._machine.state
        here = next_step(self.plan, self._index, state)
        if state.status is Status.ACTING and isinstance(here, Act):
            cause = replace(cause, phase=here.phase)
            self.journal.write(
                "phase.fail",
                level="error",
                phase=here.phase,
                error_type="Cancelled",
                error="the task of this rank was cancelled",
            )
            await self._machine.fire(Kind.FAIL, here.phase)
        elif state.status in (Status.READY, Status.WAITING):
            await self._machine.fire(Kind.ABORT)
        left = fences_left(self.plan, self._index, state)
        await self._fences.fail_all(self.plan, state, cause, left)
        self.journal.write(
            "epoch.end", level="error", error_type="Cancelled", error=describe(cause)
        )

    def _own_groups(self) -> tuple[str, ...]:
        return tuple(
            f"{name}/{number}"
            for name, parts in self.plan.groups
            for number, part in enumerate(parts)
            if self._index in part
        )

    # ------------------------------------------------------------------ outside the runtime

    def _rest_is_outside(self) -> bool:
        """Whether all that is left of the epoch is the caller's own."""
        state = self._machine.state
        if state.stage is not Stage.EPOCH or not self._caller_joins or state.status in _STOPPED:
            return False
        steps = self.plan.programs[self._index][state.at :]
        return all(
            step.joined if isinstance(step, Wait) else step.phase not in self._calls
            for step in steps
        )

    async def _record_rest(self) -> None:
        """The caller has done the rest of the epoch, or would not be here: record its word.

        A failure elsewhere in the epoch is learned at its last fence, as by everybody.
        """
        while (here := next_step(self.plan, self._index, self._machine.state)) is not None:
            if isinstance(here, Act):
                await self._act(here)
                continue
            last = len(fences_left(self.plan, self._index, self._machine.state)) == 1
            if last and (broken := await self._broken_at(here)) is not None:
                self._fences.heard(broken)
                self._fences.use_up((here,))
                await self._machine.fire(Kind.ARRIVE, here.fence)
                await self._machine.fire(Kind.ABORT)
                return
            await self._joined(here)

    async def _broken_at(self, wait: Wait) -> Broken | None:
        call = self._fences.call(self.plan, self._machine.state, wait)
        verdict = await self._fences.transport.peek(call)
        return verdict if isinstance(verdict, Broken) else None

    def _own_phases(self) -> dict[str, bool]:
        steps = self.plan.programs[self._index] + self.plan.recover[self._index]
        return {step.phase: step.outside for step in steps if isinstance(step, Act)}


_POISONED = "its part of the recovery can never be done; the replica is poisoned"
_STOPPED = frozenset((Status.STOPPED, Status.ABORTED))


@lru_cache(maxsize=64)
def _doubt(protocol: Protocol) -> None:
    """Once a protocol and process: lint looks at every assignment of the options."""
    refuse(protocol)


def _named(protocol: Protocol, rank: str | int) -> Rank:
    role = protocol.active_roles[0]
    try:
        return Rank(role, rank) if isinstance(rank, int) else Rank.parse(rank, role=role)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _phases(protocol: Protocol) -> list[str]:
    steps = (*protocol.steps, *protocol.recover)
    return [step.name for step in steps if isinstance(step, PhaseDecl)]


def _device(device: DevicePort | str | None, index: int) -> DevicePort:
    if isinstance(device, str):
        return HostDevice(device)
    return device or HostDevice(f"{socket.gethostname()}/cpu{index}")


def _word(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _innermost(error: BaseException) -> str | None:
    """The last frame of the user's code: where to look first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/phasesync/" not in frame.filename] or list(frames)
    if not own:
        return None
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
