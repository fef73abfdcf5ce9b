"""`CheckpointEngineManager.update_weights`: the driver's side of the disaggregated path.

verl's own body runs its steps in order and nothing else: a transfer that fails leaves every replica
aborted, gated and without KV. What must survive edits: the calls and their order are verl's, every
replica that can have its KV again has it after a failure, however many others fail to, none is
asked for what it has already (SGLang's scheduler dies of that), nothing is put back while a replica
is still at what failed, and generation is resumed only on whole weights. verl has vLLM release its
KV by a sleep that discards the weights too, so there they are whole again only after a transfer.
"""

import asyncio
import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import count
from types import ModuleType
from typing import Any

from phasesync.errors import EngineError, EpochFailed
from phasesync.integrations.verl.observer import ManagerObserver
from phasesync.integrations.verl.place import run_name
from phasesync.integrations.verl.settings import Settings
from phasesync.runtime import RankRunner
from phasesync.runtime.calls import in_thread

__all__ = ("PROTOCOL", "Disaggregated", "manager_body")

PROTOCOL = "disagg_broadcast"
STOPPED_WITHIN_S = 60.0  # After one has failed, the others have so long to end their part.
#: Rollouts that release their KV and nothing else; of another one nobody knows what it kept.
_KEEP_WEIGHTS = ("sglang", "trtllm")
#: The manager's steps over all replicas, and what each replica is asked to do.
_REPLICAS = {
    "abort_replicas": "abort_all_requests",
    "release_kv_cache_replicas": "release_kv_cache",
    "resume_kv_cache_replicas": "resume_kv_cache",
    "resume_generation_replicas": "resume_generation",
}
_KEPT = "_phasesync"
_MANAGERS = count(1)  # A driver may have several managers; each has a run of its own.


def manager_body(stock: Any, module: ModuleType, settings: Settings) -> Any:
    """A body with the signature of `stock`; the naive backend keeps verl's own, which is watched
    under `observe`."""

    @wraps(stock)
    async def update_weights(self: Any, global_steps: Any = None) -> Any:
        kept = getattr(self, _KEPT, None)
        if kept is None and self.backend != "naive":
            run = f"{run_name(settings, None)}-driver-{next(_MANAGERS)}"
            if settings.mode == "observe":
                kept = ManagerObserver(self, stock, settings, run)
            else:
                kept = Disaggregated(self, module, settings, run)
            setattr(self, _KEPT, kept)
        if isinstance(kept, ManagerObserver) or (kept is not None and await kept.is_ready()):
            return await kept.update_weights(global_steps)
        answer = stock(self, global_steps=global_steps)
        return await answer if inspect.isawaitable(answer) else answer

    body = module.auto_await(update_weights)
    body.__signature__ = inspect.signature(stock)
    return body


class Disaggregated:
    """One manager's syncs. What a failure left is put back at once, not at the next call."""

    def __init__(self, manager: Any, module: ModuleType, settings: Settings, run: str) -> None:
        self._manager = manager
        self._module = module
        self._settings = settings
        self._runner: RankRunner | None = None
        self._run = run
        self._runners = 0
        self._gave_up = False
        self._global_steps: Any = None
        self._rollout: Any = None
        self._metrics: dict[str, Any] = {}
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._replicas: list[Any] = []
        self._did: dict[str, set[int]] = {}
        self._lacking = ""

    async def is_ready(self) -> bool:
        """Whether a runner is there; False where the user chose verl's own body for that case.

        Raises:
            PhasesyncError: phasesync itself cannot start; no replica was asked for anything.
        """
        if self._runner is None and not self._gave_up:
            try:
                self._runner = await self._started()
            except Exception as error:
                if not self._settings.spares_the_job:
                    raise
                self._gave_up = True
                why = f"phasesync does not start ({error}); verl's own update_weights runs instead"
                warnings.warn(why, RuntimeWarning, stacklevel=2)
        return not self._gave_up

    async def _started(self) -> RankRunner:
        known = ("release_kv",)
        runner = RankRunner(
            PROTOCOL,
            rank=0,
            ranks=1,
            actions=self._actions(),
            options={
                name: self._settings.options[name]
                for name in known
                if name in self._settings.options
            },
            run=self._run,
            attempt=int(os.environ.get("PHASESYNC_ATTEMPT", "0")) + self._runners,
            incarnation=self._runners,
            runs=self._settings.folder,
            fsync=self._settings.fsync,
        )
        await runner.start()
        self._runners += 1
        return runner

    async def update_weights(self, global_steps: Any) -> dict[str, Any]:
        """One sync; its metrics, as verl's body returns them.

        Raises:
            EpochFailed: a step failed. KV is back everywhere; generation is resumed where the
                weights are whole, old or new, and stays closed where they may not be, which a note
                says: the next call sends them all. Where `can_retry` is false another note says
                who could not be put back.
        """
        assert self._runner is not None
        self._global_steps, self._metrics = global_steps, {}
        self._begun, self._ended, self._did, self._lacking = set(), set(), {}, ""
        try:
            await self._runner.run_epoch()
        except EpochFailed as failed:
            closed = [each for each in self._replicas if not self._is_whole(each)]
            if closed:
                failed.weights = "unknown"
                failed.add_note(
                    f"{len(closed)} of {len(self._replicas)} replicas have weights that may not be "
                    "whole and serve nobody; the next update_weights sends them all again"
                )
            if not failed.can_retry:
                await self._forget(failed)
                if self._lacking:
                    failed.add_note(self._lacking)
            raise
        return self._metrics

    async def _forget(self, failed: EpochFailed) -> None:
        """What has mended the replicas by the next call, it begins as another incarnation."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close(failed)

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
        """A step that is known to have begun, and to have ended; what blocks in Ray gets a thread
        from the runner."""

        async def act() -> None:
            self._begun.add(name)
            await step()
            self._ended.add(name)

        def block() -> None:
            self._begun.add(name)
            step()
            self._ended.add(name)

        return act if inspect.iscoroutinefunction(step) else block

    async def _on_all(self, step: str) -> None:
        """A step of the manager over all replicas, which ends when all are through.

        verl's own ends with the first that fails: the others would go on under the recovery.
        """
        manager, method = self._manager, _REPLICAS[step]
        stock = getattr(self._module.CheckpointEngineManager, step)
        if getattr(type(manager), step) is not stock:
            await getattr(manager, step)()
            self._did[method] = set(range(len(self._replicas)))
            return
        failed = await self._on_each(method, range(len(self._replicas)))
        for error in failed.values():
            raise error

    async def _on_each(self, method: str, which: Iterable[int]) -> dict[int, BaseException]:
        """Ask these replicas, all at once; who failed, and how. Who is at it long after another
        has failed is not waited for."""
        asked = {
            asyncio.ensure_future(getattr(self._replicas[number], method)()): number
            for number in which
        }
        if not asked:
            return {}
        try:
            _, open_ = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if open_:
                _, open_ = await asyncio.wait(open_, timeout=STOPPED_WITHIN_S)
        finally:
            late = [task for task in asked if not task.done()]
            for task in late:
                task.cancel()
        failed: dict[int, BaseException] = {}
        for task, number in asked.items():
            if task in late:
                failed[number] = TimeoutError(f"{method} did not end")
            elif task.cancelled():
                failed[number] = asyncio.CancelledError()
            elif (error := task.exception()) is not None:
                failed[number] = error
            else:
                self._did.setdefault(method, set()).add(number)
        # The first cause first: one that timed out has most likely waited for it.
        return dict(sorted(failed.items(), key=lambda each: isinstance(each[1], TimeoutError)))

    async def _pause(self) -> None:
        self._replicas = list(self._manager.replicas)
        await self._on_all("abort_replicas")
        module = self._module
        workers = [worker for replica in self._manager.replicas for worker in replica.workers]
        self._rollout = module.RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=module.RayClassWithInitArgs(cls=module._worker_cls),
        )

    async def _release_kv(self) -> None:
        await self._on_all("release_kv_cache_replicas")

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

    def _finalizing(self) -> list[Any]:
        """All workers, asked to end their part; one answer each."""
        actors, rollout = self._actors(), self._rollout
        senders = actors.execute_checkpoint_engine(["finalize"] * actors.world_size)
        return [*senders, *rollout.execute_checkpoint_engine(["finalize"] * rollout.world_size)]

    def _finalize(self) -> None:
        self._module.ray.get(self._finalizing())

    async def _resume_kv(self) -> None:
        await self._on_all("resume_kv_cache_replicas")

    async def _resume_generation(self) -> None:
        await self._on_all("resume_generation_replicas")

    async def _serve(self) -> None:
        """Replicas serve from here on; that is nobody's call."""

    async def _drop_buckets(self) -> None:
        """After a failure. One worker that does not let go of its buffers keeps no other replica
        from its KV: where there is room for it the engine has it, and refuses it where not."""
        if "connect" not in self._begun or "finalize" in self._ended:
            return
        if held := await in_thread(self._let_go, name="phasesync finalize"):
            said = f"workers that did not let go of the transfer's buffers: {len(held)}, {held[0]}"
            self._cannot([said, *await self._put_back()])

    def _let_go(self) -> list[str]:
        """Ask all workers to finalize; why some did not. What a dead one held died with it."""
        ray = self._module.ray
        calls = self._finalizing()
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=STOPPED_WITHIN_S)
        held = []
        for call in calls:
            if call not in ended:
                held.append(f"no answer in {STOPPED_WITHIN_S:.0f} s")
                continue
            try:
                ray.get([call])
            except ray.exceptions.RayActorError:
                continue
            except Exception as error:
                cause = getattr(error, "cause", None) or error  # Ray's own text has many lines.
                held.append(f"{type(cause).__name__}: {cause}")
        return held

    def _is_whole(self, replica: Any) -> bool:
        """Whether the replica has all weights, of one version."""
        if "transfer" in self._begun:
            return "transfer" in self._ended
        return "release_kv" not in self._begun or _keeps_weights(replica)

    async def _restore_kv(self) -> None:
        if left := await self._put_back():
            self._cannot(left)

    def _cannot(self, said: list[str]) -> None:
        self._lacking = "; ".join(said)
        raise EngineError(self._lacking)

    async def _put_back(self) -> list[str]:
        """After a failure: give each replica what it lacks, as far as it is to have it; for whom
        that failed."""
        everybody = set(range(len(self._replicas)))
        bad: dict[int, BaseException] = {}
        if "release_kv" in self._begun:
            has = self._did.get("resume_kv_cache", set())
            bad = await self._on_each("resume_kv_cache", sorted(everybody - has))
        whole = {number for number in everybody if self._is_whole(self._replicas[number])}
        lacks = whole - self._did.get("resume_generation", set()) - set(bad)
        bad |= await self._on_each("resume_generation", sorted(lacks))
        return [
            f"replica {number} could not be put back: {type(error).__name__}: {error}"
            for number, error in bad.items()
        ]


def _keeps_weights(replica: Any) -> bool:
    """Whether weights outlive a release of the KV cache there."""
    config = getattr(replica, "config", None)
    frees = getattr(config, "free_cache_engine", True)
    return not frees or getattr(config, "name", None) in _KEEP_WEIGHTS
