"""`ActorRolloutRefWorker.update_weights`: which body a call gets, and what it runs around it.

The protocol is `colocated_each`. What must survive edits: expandable segments are on again however
a sync ends, a job that cannot start stops before it touches memory, and whoever chose verl's own
body gets it untouched.
"""

import asyncio
import functools
import inspect
import os
import warnings
from contextlib import suppress
from itertools import count
from types import ModuleType
from typing import Any, TypeAlias

from phasesync.core.model import OptionValue, Rank, RoleName, RootCause
from phasesync.errors import EpochFailed, FenceError, PlanChanged
from phasesync.fences.base import FenceTransport
from phasesync.integrations.verl.naive import NaiveSync
from phasesync.integrations.verl.observer import Observer
from phasesync.integrations.verl.place import (
    TorchDevice,
    meeting,
    options_of,
    replicas,
    run_name,
)
from phasesync.integrations.verl.settings import Settings
from phasesync.runtime import RankRunner, tell_unready
from phasesync.runtime.alarm import ended
from phasesync.runtime.parting import Elsewhere

__all__ = ("PROTOCOL", "Worker", "worker_body")

PROTOCOL = "colocated_each"
LOOK_EVERY_S = 0.25  # How often a rank looks that has left a plan, and nobody else ever does.
_KEPT = "_phasesync"
Options: TypeAlias = dict[str, OptionValue]


def worker_body(stock: Any, module: ModuleType, settings: Settings) -> Any:
    """A body with the signature and the dispatch of `stock`."""

    @functools.wraps(stock)
    async def update_weights(self: Any, global_steps: Any = None, mode: str = "auto") -> Any:
        chosen = mode if mode != "auto" else self.config.rollout.checkpoint_engine.backend
        if chosen != "naive":
            return await stock(self, global_steps=global_steps, mode=mode)
        kept = getattr(self, _KEPT, None)
        if kept is None:
            kept = _BODIES[settings.mode](self, stock, module, settings)
            setattr(self, _KEPT, kept)
        return await kept.update_weights(global_steps)

    update_weights.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return update_weights


class Worker:
    """One worker's syncs under the protocol, from its first call to its last."""

    def __init__(self, worker: Any, stock: Any, module: ModuleType, settings: Settings) -> None:
        self._worker = worker
        self._stock = stock
        self._module = module
        self._settings = settings
        self._runner: RankRunner | None = None
        self._sync: NaiveSync | None = None
        self._plans = 0
        self._told: tuple[Options, list[list[int]]] | None = None
        self._met: tuple[int, int, Any, str] | None = None
        self._gave_up = False
        self._over: EpochFailed | None = None
        self._version = 0

    async def update_weights(self, global_steps: Any) -> Any:
        """One sync, as verl's driver asks for it; where verl's own body runs, what that answers.

        Raises:
            EpochFailed: it failed somewhere; the same root cause on every rank.
        """
        if self._over is not None:
            # Nothing put its replica back: it is no better now, and says why rather than that.
            raise self._over
        await self._notice()
        if not self._gave_up and await self._ready():
            try:
                return await self._fenced(global_steps)
            except EpochFailed as failed:
                if not await self._stays_behind(failed):
                    self._over = None if failed.can_retry or self._runner is None else failed
                    raise
                self._gives_up(failed)
        return await self._stock(self._worker, global_steps=global_steps, mode="naive")

    async def _fenced(self, global_steps: Any) -> None:
        assert self._runner is not None
        assert self._sync is not None
        self._module.set_expandable_segments(False)
        try:
            self._sync.begin(global_steps)
            await self._runner.run_epoch(version=self._version_of(global_steps))
            self._sync.done()
        finally:
            self._sync.drop()
            self._module.set_expandable_segments(True)

    async def _notice(self) -> None:
        """Where ranks of another replica have left the plan alone, this rank leaves it too.

        They share no fence of a sync with it, so it has finished the one behind it.
        """
        if self._runner is None:
            return
        cause = await self._runner.left_by()
        if cause is not None and cause.error_type == PlanChanged.__name__:
            runner, self._runner = self._runner, None
            await runner.close()
            await self._tell(cause)

    async def _stays_behind(self, failed: EpochFailed) -> bool:
        """Where a peer has left the plan alone, tell it so, at the fence where it waits for all.

        Nothing was mapped by then, and the next sync begins with a new plan for everybody. True
        where the user chose verl's own body for a start that fails: the peer's has failed too.
        """
        if failed.cause.error_type != PlanChanged.__name__ or self._runner is None:
            return False
        runner, self._runner = self._runner, None
        await runner.close(failed)
        await self._tell(failed.cause)
        return self._settings.on_start_failure == "stock"

    def _gives_up(self, error: Exception) -> None:
        self._gave_up = True
        why = f"phasesync does not start ({error}); verl's own update_weights runs instead"
        warnings.warn(why, RuntimeWarning, stacklevel=3)

    def _version_of(self, global_steps: Any) -> int:
        """verl's step, where it says one: the weights' version, on which all ranks must agree."""
        said = global_steps if isinstance(global_steps, int) else 0
        assert self._runner is not None
        self._version = max(self._version, said, self._runner.epoch)
        return self._version

    async def _ready(self) -> bool:
        """A runner under the plan that this call's configuration makes.

        Where phasesync itself cannot start, the job stops here, before memory is touched, or the
        answer is False and verl's own body runs: as the user chose.
        """
        try:
            await self._start()
        except Exception as error:
            if self._settings.on_start_failure != "stock":
                raise
            self._gives_up(error)
            return False
        return True

    async def _start(self) -> None:
        if self._met is None:
            rank, ranks, store = meeting(self._worker, self._settings)
            self._met = (rank, ranks, store, run_name(self._settings, store))
        rank, ranks, _, _ = self._met
        try:
            groups = replicas(self._worker, ranks)
            told = ({**options_of(self._worker, groups), **self._settings.options}, groups)
        except Exception as error:
            unread = f"its configuration cannot be used any more: {error}"
            await self._leave(PlanChanged(unread))
            await self._tell(error)
            raise
        changed, others = None, None
        if self._runner is not None:
            if told == self._told:
                return
            changed = PlanChanged(_changed(self._told, told))
            others = await self._leave(changed)
        try:
            runner, sync = self._make(*told)
        except Exception as error:
            await self._tell(error)
            raise
        self._plans += 1
        looking = asyncio.create_task(self._look(runner, changed, others))
        try:
            await runner.start()
        finally:
            await ended(looking)
        self._runner, self._sync, self._told = runner, sync, told

    def _make(self, options: Options, groups: list[list[int]]) -> tuple[RankRunner, NaiveSync]:
        """A runner under a new plan, as an attempt of its own: the one before had another."""
        assert self._met is not None
        rank, ranks, _, run = self._met
        device = TorchDevice(self._module, rank)
        first = any(group[0] == rank for group in groups)
        sync = NaiveSync(self._worker, self._module, device, first=first)
        runner = RankRunner(
            PROTOCOL,
            rank=rank,
            ranks=ranks,
            actions=sync.actions(options),
            fences=self._fences(),
            options=options,
            groups={"replica": groups},
            device=device,
            caller_joins=True,
            run=run,
            attempt=_attempt() + self._plans,
            incarnation=self._plans,
            runs=self._settings.folder,
            fsync=self._settings.fsync,
            plan_deadline_s=self._settings.plan_deadline_s,
        )
        return runner, sync

    def _fences(self) -> FenceTransport | None:
        assert self._met is not None
        rank, _, store, run = self._met
        if store is None:
            return None
        from phasesync.fences.store import StoreFences  # noqa: PLC0415

        return StoreFences(
            store,
            rank=Rank(RoleName("trainer"), rank),
            run=run,
            attempt=_attempt() + self._plans,
            incarnation=self._plans,
        )

    async def _leave(self, error: Exception) -> Elsewhere | None:
        """The plan so far does not hold any more; who still goes by it does not wait for us."""
        runner, self._runner = self._runner, None
        return None if runner is None else await runner.withdraw(error)

    async def _look(
        self, runner: RankRunner, changed: PlanChanged | None, others: Elsewhere | None
    ) -> None:
        """While ranks wait to begin anew, see whether another replica goes on as before: then
        nobody waits for it any longer, and all who wait hear why."""
        if others is None or self._met is None:
            return
        _, _, store, run = self._met
        from phasesync.fences.observer import StoreObserver  # noqa: PLC0415

        observer = StoreObserver(store, run=run, attempt=others.attempt)
        with suppress(FenceError):  # Then the fence itself tells what is wrong.
            await observer.connect()
            try:
                for looks in count():
                    await asyncio.sleep(LOOK_EVERY_S)
                    came = await observer.arrivals_in(others.scope, others.generations(looks))
                    if (rank := others.begun_by(came)) is not None:
                        said = f"{changed}, and {rank} has begun sync {others.epoch} as before"
                        await runner.call_off(PlanChanged(said))
                        return
            finally:
                await observer.close()

    async def _tell(self, error: Exception | RootCause) -> None:
        """This rank has no plan: its peers hear why, where they would have waited for it."""
        fences = self._fences()
        attempt = _attempt() + self._plans
        self._plans += 1
        if fences is None or self._met is None:
            return
        rank, ranks, _, run = self._met
        members = tuple(Rank(RoleName("trainer"), number) for number in range(ranks))
        await tell_unready(
            fences,
            error,
            rank=members[rank],
            members=members,
            run=run,
            attempt=attempt,
            incarnation=self._plans - 1,
        )


def _changed(before: Any, after: Any) -> str:
    """What is configured differently now, in one line."""
    (had, groups), (has, regrouped) = before, after
    said = [f"{name}: {has[name]}, was {had[name]}" for name in has if has[name] != had[name]]
    said += ["replicas are others"] if groups != regrouped else []
    return f"the configuration changed between two syncs ({'; '.join(said)})"


def _attempt() -> int:
    return int(os.environ.get("PHASESYNC_ATTEMPT", "0"))


_BODIES: dict[str, Any] = {"enforce": Worker, "observe": Observer}
