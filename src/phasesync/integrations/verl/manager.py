"""`CheckpointEngineManager.update_weights`: the driver's side of the disaggregated path.

verl's own body runs its steps in order and nothing else: a transfer that fails leaves every replica
aborted, gated and without KV. What must survive edits: the calls and their order are verl's, every
replica has its KV again after a failure, and generation is resumed only on whole weights.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from itertools import count
from types import ModuleType
from typing import Any

from phasesync.integrations.verl.place import run_name
from phasesync.integrations.verl.settings import Settings
from phasesync.runtime import RankRunner

__all__ = ("PROTOCOL", "Disaggregated", "manager_body")

PROTOCOL = "disagg_broadcast"
STOPPED_WITHIN_S = 60.0  # After one worker failed, the others have so long to end their part.
_KEPT = "_phasesync"
_MANAGERS = count(1)  # A driver may have several managers; each has a run of its own.


def manager_body(stock: Any, module: ModuleType, settings: Settings) -> Any:
    """A body with the signature of `stock`; the naive backend and `observe` keep verl's own."""

    @wraps(stock)
    async def update_weights(self: Any, global_steps: Any = None) -> Any:
        if self.backend == "naive" or settings.mode != "enforce":
            answer = stock(self, global_steps=global_steps)
            return await answer if inspect.isawaitable(answer) else answer
        kept = getattr(self, _KEPT, None)
        if kept is None:
            kept = Disaggregated(self, module, settings)
            setattr(self, _KEPT, kept)
        return await kept.update_weights(global_steps)

    body = module.auto_await(update_weights)
    body.__signature__ = inspect.signature(stock)
    return body


class Disaggregated:
    """One manager's syncs. After a failure its next call recovers nothing more: that is done."""

    def __init__(self, manager: Any, module: ModuleType, settings: Settings) -> None:
        self._manager = manager
        self._module = module
        self._settings = settings
        self._runner: RankRunner | None = None
        self._global_steps: Any = None
        self._rollout: Any = None
        self._metrics: dict[str, Any] = {}
        self._begun: list[str] = []

    async def update_weights(self, global_steps: Any) -> dict[str, Any]:
        """One sync; its metrics, as verl's body returns them.

        Raises:
            EpochFailed: a step failed. KV is back everywhere; generation is resumed if no weight
                was touched, and stays closed if they may be partial.
        """
        if self._runner is None:
            run = f"{run_name(self._settings, None)}-driver-{next(_MANAGERS)}"
            runner = RankRunner(
                PROTOCOL,
                rank=0,
                ranks=1,
                actions=self._actions(),
                run=run,
                runs=self._settings.folder,
                fsync=self._settings.fsync,
            )
            await runner.start()
            self._runner = runner
        self._global_steps, self._metrics, self._begun = global_steps, {}, []
        await self._runner.run_epoch()
        return self._metrics

    def _actions(self) -> dict[str, Callable[[], Any]]:
        steps = {
            "pause": self._pause,
            "release_kv": self._release_kv,
            "connect": self._connect,
            "transfer": self._transfer,
            "finalize": self._finalize,
            "resume_kv": self._resume_kv,
            "resume_generation": self._resume_generation,
        }
        begun = {name: self._noting(name, step) for name, step in steps.items()}
        return {
            **begun,
            "serve": self._serve,
            "drop_buckets": self._drop_buckets,
            "restore_kv": self._restore_kv,
        }

    def _noting(self, name: str, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step that is known to have begun; what blocks in Ray gets a thread from the runner."""

        async def act() -> None:
            self._begun.append(name)
            await step()

        def block() -> None:
            self._begun.append(name)
            step()

        return act if inspect.iscoroutinefunction(step) else block

    async def _pause(self) -> None:
        await self._manager.abort_replicas()
        module = self._module
        workers = [worker for replica in self._manager.replicas for worker in replica.workers]
        self._rollout = module.RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=module.RayClassWithInitArgs(cls=module._worker_cls),
        )

    async def _release_kv(self) -> None:
        await self._manager.release_kv_cache_replicas()

    def _connect(self) -> None:
        self._manager.build_process_group(self._rollout)

    def _actors(self) -> Any:
        """The trainers' worker group; verl 0.8 calls it otherwise."""
        found = getattr(self._manager, "actor_wg", None)
        return self._manager.trainer if found is None else found

    def _transfer(self) -> None:
        actors, backend = self._actors(), self._manager.backend
        calls = actors.update_weights(global_steps=self._global_steps, mode=backend)
        calls = calls + self._rollout.update_weights(global_steps=self._global_steps)
        ray = self._module.ray
        try:
            results = ray.get(calls)
        except Exception:
            # Who is still at it reads and writes buffers that the recovery takes away.
            ray.wait(calls, num_returns=len(calls), timeout=STOPPED_WITHIN_S)
            raise
        for result in results[: actors.world_size]:
            if isinstance(result, dict):
                self._metrics.update(result)

    def _finalize(self) -> None:
        actors, rollout = self._actors(), self._rollout
        self._module.ray.get(
            actors.execute_checkpoint_engine(["finalize"] * actors.world_size)
            + rollout.execute_checkpoint_engine(["finalize"] * rollout.world_size)
        )

    async def _resume_kv(self) -> None:
        await self._manager.resume_kv_cache_replicas()

    async def _resume_generation(self) -> None:
        await self._manager.resume_generation_replicas()

    async def _serve(self) -> None:
        """Replicas serve from here on; that is nobody's call."""

    def _drop_buckets(self) -> None:
        if "connect" in self._begun:
            self._finalize()

    async def _restore_kv(self) -> None:
        if "release_kv" in self._begun:
            await self._manager.resume_kv_cache_replicas()
        if "transfer" not in self._begun:
            await self._manager.resume_generation_replicas()
