"""The runner: one rank's turn through the protocol, for real.

The kernel decides what may happen; `walk` performs it and waits, `leaving` carries failure. This is
what a user holds: made once, started, run epoch by epoch, closed. Whatever happens to an epoch, the
runner says so in one error and in the journal.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from phasesync.core.kernel import Kind, RankState, Status
from phasesync.core.model import OptionValue, Rank, RootCause
from phasesync.core.plan import Act, Plan, resolve
from phasesync.core.protocol import PhaseDecl, Protocol
from phasesync.errors import EpochOrderError, PlanError
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.journal import Journal
from phasesync.lint import refuse
from phasesync.runtime.actions import Action, bind, check_names
from phasesync.runtime.agreeing import agree, call_off, own_cause
from phasesync.runtime.calls import BlockingCalls
from phasesync.runtime.device import DevicePort, HostDevice, check_established
from phasesync.runtime.fencing import RankFences
from phasesync.runtime.leaving import cancelled, failed, recover, recovery_is_due, unexpected
from phasesync.runtime.parting import Elsewhere
from phasesync.runtime.walk import Halt, Walk
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
        keep_epochs: int | None = None,
        max_bytes: int | None = None,
        plan_deadline_s: float = 600.0,
        unchecked: bool = False,
        wall: Callable[[], float] = time.time,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.protocol = load(protocol) if isinstance(protocol, str) else protocol
        if not unchecked:
            _doubt(self.protocol)
        self._resolve = partial(resolve, self.protocol, ranks, options, groups=groups)
        plan: Plan = self._resolve()
        check_established(plan)
        self.rank = rank if isinstance(rank, Rank) else _named(self.protocol, rank)
        index = plan.index(self.rank)
        check_names(frozenset(_phases(self.protocol)), actions)
        self._blocking = BlockingCalls(f"phasesync {self.rank}")
        bound = bind(_own_phases(plan, index), actions, self._blocking)
        self._device = _device(device, index)
        self._plan_deadline_s = plan_deadline_s
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
            ranks=sum(member.role == self.rank.role for member in plan.members),
            incarnation=incarnation,
            device=self._device.name,
            fsync=fsync,
            keep_epochs=keep_epochs,
            max_bytes=max_bytes,
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
            device=self._device,
        )
        self._walk = Walk(
            plan,
            self.rank,
            actions=bound,
            blocking=self._blocking,
            fences=self._fences,
            journal=self.journal,
            device=self._device,
            caller_joins=caller_joins,
            mono_ns=mono_ns,
        )

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
            self.journal.bind(digest=self.plan.digest)
            self.journal.write("rank.start")
            await agree(self._walk, self._resolve, self._device.name, self._plan_deadline_s)
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
            if self._open and error is None and self._walk.rest_is_outside():
                await self._walk.record_rest()
            await self._walk.alarm.off()
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

    async def left_by(self) -> RootCause | None:
        """Why the epoch behind this rank failed for ranks that it shares only the last fence with.

        For a caller who joins, and would rather know before the next epoch than in it: they may
        have left the plan.
        """
        walk = self._walk
        if self._busy or not self._open or walk.is_fresh() or not walk.rest_is_outside():
            return None
        return await walk.record_rest()

    async def call_off(self, error: Exception) -> None:
        """End a `start` that is under way, for all who wait to start: not everybody comes."""
        await call_off(self._walk, error)

    async def withdraw(self, error: Exception) -> Elsewhere | None:
        """Close between two epochs, and tell whoever enters the next one that this rank does not.

        For a rank whose configuration has changed, say: peers where it has not would wait for it.
        The answer is where to look for those who are not told, because they share no fence with
        it before the last, and go on; None where there are none, or another rank looks.
        """
        walk = self._walk
        found = None
        if self._open and not self._busy:
            if walk.rest_is_outside() and not walk.is_fresh():
                await walk.record_rest()
            state = walk.machine.state
            coming = state if walk.is_fresh() else RankState(epoch=state.epoch + 1)
            found = self._fences.elsewhere(self.plan, coming)
            await self._fences.decline(self.plan, coming, own_cause(self.rank, error))
        await self.close()
        return found

    @property
    def epoch(self) -> int:
        """The epoch under way, or the last one; the first is 1."""
        return self._walk.epoch

    @property
    def plan(self) -> Plan:
        """What all ranks agree on; once started, with their devices."""
        return self._walk.plan

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
            await self._walk.on()
            return EpochReport(
                epoch=self.epoch,
                version=self._fences.version,
                phases_s=dict(self._walk.phases_s),
                waits_s=dict(self._fences.waits_s),
            )
        except Halt as halt:
            raise await failed(self._walk, halt.cause) from halt.__cause__
        except asyncio.CancelledError:
            await cancelled(self._walk)
            raise
        except Exception as error:
            await failed(self._walk, unexpected(self._walk, error))
            raise
        finally:
            self._busy = False

    def _may_run(self, epoch: int | None, version: int | None) -> None:
        walk, state = self._walk, self._walk.machine.state
        if not self._open:
            raise EpochOrderError(f"{self.rank} is not started; use 'async with' or start()")
        if self._busy:
            raise EpochOrderError(f"{self.rank} is in epoch {state.epoch}; await it first")
        may = state.status is Status.FINISHED or walk.is_fresh() or walk.rest_is_outside()
        if not (may or recovery_is_due(walk)):
            raise EpochOrderError(
                f"{self.rank} left epoch {state.epoch} {walk.machine.name!r} and nothing "
                "recovered it; start the rank again as a new incarnation"
            )
        coming = state.epoch if walk.is_fresh() else state.epoch + 1
        if epoch is not None and epoch != coming:
            raise EpochOrderError(f"{self.rank} comes to epoch {coming} next, not {epoch}")
        if version is not None and version < self._fences.version:
            raise EpochOrderError(
                f"{self.rank} had weight version {self._fences.version}; {version} is older"
            )

    async def _enter_epoch(self, version: int | None) -> None:
        walk = self._walk
        if walk.rest_is_outside() and not walk.is_fresh():
            await walk.record_rest()
        if recovery_is_due(walk):
            await recover(walk)
        if walk.machine.state.status is Status.FINISHED:
            walk.machine.fire(Kind.BEGIN)
        self._fences.begin()
        self._fences.version = self.epoch if version is None else version
        walk.phases_s.clear()
        self.journal.bind(epoch=self.epoch, version=self._fences.version)
        self.journal.hold("epoch.begin")


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


def _own_phases(plan: Plan, index: int) -> dict[str, bool]:
    """By phase, whether it may lack an action: it is outside, or a step of the recovery that
    touches nothing, where the arrival behind it says all that there is to say."""
    mine, mending = plan.programs[index], plan.recover[index]
    return {
        **{act.phase: act.outside or not act.touches for act in mending if isinstance(act, Act)},
        **{act.phase: act.outside for act in mine if isinstance(act, Act)},
    }
