"""`ActorRolloutRefWorker.update_weights`: which body a call gets, and what it runs around it.

The protocol is `colocated_each`. What must survive edits: expandable segments are on again however
a sync ends, a job that cannot start stops before it touches memory, and whoever chose verl's own
body gets it untouched.
"""

import functools
import inspect
import os
import warnings
from types import ModuleType
from typing import Any

from phasesync.core.model import Rank, RoleName
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
from phasesync.runtime import RankRunner

__all__ = ("PROTOCOL", "Worker", "worker_body")

PROTOCOL = "colocated_each"
_KEPT = "_phasesync"


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
        self._told: object = None
        self._met: tuple[int, int, Any] | None = None
        self._gave_up = False
        self._version = 0

    async def update_weights(self, global_steps: Any) -> None:
        """One sync, as verl's driver asks for it.

        Raises:
            EpochFailed: it failed somewhere; the same root cause on every rank.
        """
        if not self._gave_up and not await self._ready():
            self._gave_up = True
        if self._gave_up:
            await self._stock(self._worker, global_steps=global_steps, mode="naive")
            return
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
            why = f"phasesync does not start ({error}); verl's own update_weights runs instead"
            warnings.warn(why, RuntimeWarning, stacklevel=2)
            return False
        return True

    async def _start(self) -> None:
        if self._met is None:
            self._met = meeting(self._worker, self._settings)
        rank, ranks, store = self._met
        groups = replicas(self._worker, ranks)
        options = {**options_of(self._worker, groups), **self._settings.options}
        told = (options, groups)
        if self._runner is not None:
            if told == self._told:
                return
            await self._runner.close()
        device = TorchDevice(self._module, rank)
        sync = NaiveSync(self._worker, self._module, device, first=_leads(rank, groups))
        run = run_name(self._settings, store)
        attempt = _attempt() + self._plans
        runner = RankRunner(
            PROTOCOL,
            rank=rank,
            ranks=ranks,
            actions=sync.actions(options),
            fences=self._fences(store, rank, run, attempt),
            options=options,
            groups={"replica": groups},
            device=device,
            caller_joins=True,
            run=run,
            attempt=attempt,
            incarnation=self._plans,
            runs=self._settings.folder,
            fsync=self._settings.fsync,
            plan_deadline_s=self._settings.plan_deadline_s,
        )
        self._plans += 1
        await runner.start()
        self._runner, self._sync, self._told = runner, sync, told

    def _fences(self, store: Any, rank: int, run: str, attempt: int) -> FenceTransport | None:
        if store is None:
            return None
        from phasesync.fences.store import StoreFences  # noqa: PLC0415

        return StoreFences(
            store,
            rank=Rank(RoleName("trainer"), rank),
            run=run,
            attempt=attempt,
            incarnation=self._plans,
        )


def _attempt() -> int:
    return int(os.environ.get("PHASESYNC_ATTEMPT", "0"))


def _leads(rank: int, groups: list[list[int]]) -> bool:
    return any(group[0] == rank for group in groups)


_BODIES: dict[str, Any] = {"enforce": Worker, "observe": Observer}
