"""One process that runs the protocol for all ranks: an action is a call, a fence is a join.

Each rank has the same runner, journal and fences as where it runs itself, so nothing is decided
here a second time. All answers are watched together; the first failure reaches everybody, and what
is still under way is told, cancelled and waited for: no answer is ever left unread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from phasesync.core.model import OptionValue, Rank, RootCause
from phasesync.core.plan import resolve
from phasesync.core.protocol import Protocol
from phasesync.errors import EpochFailed, PlanError
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime.actions import Action
from phasesync.runtime.device import DevicePort
from phasesync.runtime.runner import EpochReport, RankRunner
from phasesync.spec import load

__all__ = ("BlockingDriver", "Driver", "DriverReport", "Watch")

T = TypeVar("T")
Watch: TypeAlias = "Callable[[Driver], Coroutine[Any, Any, None]]"
_WORST = ("lost", "unknown", "intact")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """One epoch that went well, on every rank."""

    epoch: int
    version: int
    ranks: Mapping[Rank, EpochReport]


class Driver:
    """Runs a protocol for all its ranks from one process.

        async with Driver("colocated", ranks=4, actions={"offload": offload, ...}) as driver:
            await driver.run_epoch()

    An action is called once for each rank that has the phase, with a `Turn` that names the rank,
    and the calls of different ranks run side by side. It may be async; block, in a thread of its
    own; or return an awaitable, the future of an executor, or the answer of a Ray actor.
    `devices` are in the order of the ranks. `watch` runs beside each epoch, and may tell of
    lost ranks by `report_lost`. The rest is as for a `RankRunner`.

    Raises:
        ProtocolError: lint refuses the protocol.
        PlanError: the arguments do not make a plan, or a phase has no action.
    """

    def __init__(
        self,
        protocol: Protocol | str,
        *,
        ranks: int | Mapping[str, int],
        actions: Mapping[str, Action],
        options: Mapping[str, OptionValue] | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
        devices: Sequence[DevicePort | str] | None = None,
        caller_joins: bool = False,
        run: str | None = None,
        attempt: int | None = None,
        incarnation: int = 0,
        runs: Path | str | None = None,
        fsync: str = "none",
        plan_deadline_s: float = 600.0,
        unchecked: bool = False,
        watch: "Watch | None" = None,
        wall: Callable[[], float] = time.time,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        protocol = load(protocol) if isinstance(protocol, str) else protocol
        self.plan = resolve(protocol, ranks, options, groups=groups)
        self._fences = InProcessFences()
        self._incarnation = incarnation
        self._watch = watch
        self.runners = {
            rank: RankRunner(
                protocol,
                rank=rank,
                ranks=ranks,
                actions=actions,
                fences=self._fences.endpoint(rank, incarnation),
                options=options,
                groups=groups,
                device=device,
                caller_joins=caller_joins,
                run=run,
                attempt=attempt,
                incarnation=incarnation,
                runs=runs,
                fsync=fsync,
                plan_deadline_s=plan_deadline_s,
                unchecked=unchecked,
                wall=wall,
                mono_ns=mono_ns,
            )
            for rank, device in _by_rank(self.plan.members, devices)
        }

    @property
    def run(self) -> str:
        """The run's name; it has one once it has started."""
        return self._first.journal.path.parent.name

    @property
    def epoch(self) -> int:
        """The epoch under way, or the last one; the first is 1."""
        return self._first.epoch

    @property
    def _first(self) -> RankRunner:
        return self.runners[self.plan.members[0]]

    # ------------------------------------------------------------------ life of a driver

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
        """Start all ranks; they pass the implicit fence `plan`.

        Raises:
            EpochOrderError: this process runs one of the ranks already.
        """
        try:
            _merge(await _together(self.runners, lambda runner: runner.start()))
        except BaseException as error:
            await self.close(error)
            raise

    async def close(self, error: BaseException | None = None) -> None:
        """Say goodbye in all journals and leave nothing behind; closing twice does nothing."""
        _merge(await _together(self.runners, lambda runner: runner.close(error)))

    def blocking(self) -> "BlockingDriver":
        """The same driver, for a controller that has no event loop."""
        return BlockingDriver(self)

    # ------------------------------------------------------------------ one epoch

    async def run_epoch(
        self, epoch: int | None = None, *, version: int | None = None
    ) -> DriverReport:
        """One turn of the cycle on all ranks (see `RankRunner.run_epoch`).

        Raises:
            EpochFailed: it failed somewhere; what it says holds for the worst of the ranks.
            EpochOrderError: an epoch is under way, another one comes next, or the version falls.
        """
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(self)) if self._watch else None
            try:
                ends = await _together(
                    self.runners, lambda runner: runner.run_epoch(epoch, version=version)
                )
            finally:
                if watching is not None:
                    watching.cancel()
        reports = _merge(ends)
        return DriverReport(
            epoch=self.epoch, version=reports[self.plan.members[0]].version, ranks=reports
        )

    async def report_lost(self, rank: Rank, why: str, *, phase: str | None = None) -> None:
        """Say that who does the work of `rank` is gone: every fence that waits for it breaks."""
        cause = RootCause(kind="dead", ranks=(rank,), phase=phase, error=why)
        endpoint = self._fences.endpoint(rank)
        await endpoint.report_lost(cause, incarnation=self._incarnation)


class BlockingDriver:
    """A driver for a controller without an event loop: each call returns when it is done.

    with Driver(...).blocking() as driver:
        driver.run_epoch()
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self._loop.run(self.driver.start())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._loop.run(self.driver.close(error))
        finally:
            self._loop.close()

    def run_epoch(self, epoch: int | None = None, *, version: int | None = None) -> DriverReport:
        """One turn of the cycle on all ranks (see `Driver.run_epoch`)."""
        return self._loop.run(self.driver.run_epoch(epoch, version=version))


def _by_rank(
    members: Sequence[Rank], devices: Sequence[DevicePort | str] | None
) -> Iterable[tuple[Rank, DevicePort | str | None]]:
    if devices is None:
        return ((rank, None) for rank in members)
    if len(devices) != len(members):
        raise PlanError(
            f"there are {len(devices)} devices for {len(members)} ranks; give one for each, in "
            "the order of the ranks"
        )
    return zip(members, devices, strict=True)


async def _together(
    runners: Mapping[Rank, RankRunner], call: Callable[[RankRunner], Awaitable[T]]
) -> dict[Rank, T | Exception]:
    """Call all, and wait for all: a failure of one is carried to the others by its fences."""

    async def end(runner: RankRunner) -> T | Exception:
        try:
            return await call(runner)
        except Exception as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = {
            rank: group.create_task(end(runner), name=str(rank)) for rank, runner in runners.items()
        }
    return {rank: task.result() for rank, task in tasks.items()}


def _merge(ends: Mapping[Rank, T | Exception]) -> dict[Rank, T]:
    """What all ranks gave, or the one error that stands for theirs."""
    failures = [end for end in ends.values() if isinstance(end, EpochFailed)]
    for end in ends.values():
        if isinstance(end, Exception) and not isinstance(end, EpochFailed):
            raise end
    if failures:
        raise _one_failure(failures)
    return {rank: end for rank, end in ends.items() if not isinstance(end, Exception)}


def _one_failure(failures: Sequence[EpochFailed]) -> EpochFailed:
    """One failure for the controller: the root cause is the same on all, the rest is the worst."""
    first = failures[0]
    own = next((each for each in failures if each.rank in each.cause.ranks), first)
    others = dict.fromkeys(each.cause for each in failures if each.cause != own.cause)
    return EpochFailed(
        own.rank,
        own.epoch,
        own.cause,
        replace=tuple(sorted({rank for each in failures for rank in each.replace})),
        weights=_worst(each.weights for each in failures),
        kv=_worst(each.kv for each in failures),
        groups=_worst(each.groups for each in failures),
        can_retry=all(each.can_retry for each in failures),
        poisoned=tuple(sorted({group for each in failures for group in each.poisoned})),
        late=tuple(others),
        recovers_next=any(each.recovers_next for each in failures),
    )


def _worst(states: Iterable[str]) -> str:
    found = set(states)
    return next(state for state in _WORST if state in found)
