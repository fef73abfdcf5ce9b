"""SkyRL: `WorkerDispatch.save_weights_for_sampler` as a declared sync of its one controller.

SkyRL's own body resumes generation in a `finally`, whatever became of the transfer. What must
survive edits: the calls and their order are SkyRL's where all goes well; after a transfer that may
have left partial weights nothing wakes the engine, and the next sync may try again.

The branches that SkyRL runs without a pause (adapters in place, deltas) keep its own body.
"""

import inspect
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from importlib import import_module
from itertools import count
from typing import Any

from phasesync.errors import EngineError, EpochFailed, PlanError
from phasesync.runtime import RankRunner

__all__ = ("PROTOCOL", "install", "save_weights", "uninstall")

PROTOCOL = "disagg_broadcast"
_WORKERS = "skyrl.backends.skyrl_train.workers.worker_dispatch"
_KEPT = "_phasesync"
_USES = (
    "_broadcast_to_inference_engines",
    "_finish_weight_sync",
    "_is_lora_no_merge",
    "_prepare_for_weight_sync",
    "ensure_active_adapter",
)
_DISPATCHES = count(1)
_stock: dict[type, Any] = {}

Step = Callable[[], Awaitable[Any]]


def install(cls: Any = None, **runner: Any) -> None:
    """Replace the body in `WorkerDispatch`; `runner` are arguments of `RankRunner` (`runs`, `run`).

    Raises:
        PlanError: this SkyRL has another body.
    """
    if cls is None:
        cls = import_module(_WORKERS).WorkerDispatch
    stock = getattr(cls, "save_weights_for_sampler", None)
    takes = tuple(inspect.signature(stock).parameters) if stock else ()
    if takes != ("self", "model_id") or not all(hasattr(cls, name) for name in _USES):
        raise PlanError(
            f"{cls.__name__}.save_weights_for_sampler takes ({', '.join(takes)}), not "
            "(self, model_id), or lacks its helpers; phasesync fits SkyRL 0.4"
        )
    uninstall()
    _stock[cls] = vars(cls).get("save_weights_for_sampler")
    cls.save_weights_for_sampler = save_weights(stock, runner)


def uninstall() -> None:
    """Put SkyRL's own body back."""
    while _stock:
        cls, stock = _stock.popitem()
        if stock is None:  # It was inherited.
            del cls.save_weights_for_sampler  # type: ignore[attr-defined]
        else:
            cls.save_weights_for_sampler = stock  # type: ignore[attr-defined]


def save_weights(stock: Any, runner: dict[str, Any]) -> Any:
    """A body with the signature of `stock`."""

    @wraps(stock)
    async def save_weights_for_sampler(self: Any, model_id: str | None = None) -> None:
        if self._inference_engine_client is None or _without_pause(self):
            await stock(self, model_id)
            return
        kept = getattr(self, _KEPT, None)
        if kept is None:
            kept = _Dispatch(self, runner)
            setattr(self, _KEPT, kept)
        await kept.sync(model_id)

    return save_weights_for_sampler


def _without_pause(dispatch: Any) -> bool:
    """SkyRL swaps adapters in place, and pauses around a delta by itself."""
    trainer = dispatch.cfg.trainer
    if dispatch.colocate_all:
        return False
    merged = (
        trainer.strategy == "megatron" and trainer.policy.megatron_config.lora_config.merge_lora
    )
    adapter = trainer.policy.model.lora.rank > 0 and not merged
    engine = dispatch.cfg.generator.inference_engine
    delta = engine.weight_sync_backend == "delta" and not engine.offload_kv_for_weight_sync
    return bool(adapter or delta)


class _Dispatch:
    """One dispatch's syncs."""

    def __init__(self, dispatch: Any, runner: dict[str, Any]) -> None:
        self._of = dispatch
        self._arguments = {"run": "skyrl", **runner}
        self._runner: RankRunner | None = None
        self._model_id: str | None = None
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._run = ""
        self._runners = 0

    async def sync(self, model_id: str | None) -> None:
        """One sync.

        Raises:
            EpochFailed: a step failed. Generation goes on if the weights are whole, old or new;
                it stays paused if they may not be, and the next call sends them all.
        """
        if self._runner is None:
            self._runner = await self._started()
        self._model_id, self._begun, self._ended = model_id, set(), set()
        try:
            await self._runner.run_epoch()
        except EpochFailed as failed:
            if not self._is_whole:
                failed.weights = "unknown"
                failed.add_note(_NOT_WHOLE)
            if not failed.can_retry:
                runner, self._runner = self._runner, None
                await runner.close(failed)
            raise
        self._of._inference_engine_client.increment_weight_version()

    async def _started(self) -> RankRunner:
        self._run = self._run or f"{self._arguments['run']}-{next(_DISPATCHES)}"
        actions = {name: self._noting(name, getattr(self, f"_{name}")) for name in _STEPS}
        actions |= {"drop_buckets": _nothing, "restore_kv": self._restore_kv}
        mine = {
            "run": self._run,
            "options": {"release_kv": self._moves_kv()},
            "actions": actions,
            "attempt": self._arguments.get("attempt", 0) + self._runners,
            "incarnation": self._runners,
        }
        runner = RankRunner(PROTOCOL, rank=0, ranks=1, **{**self._arguments, **mine})
        await runner.start()
        self._runners += 1
        return runner

    def _noting(self, name: str, step: Step) -> Step:
        async def act() -> None:
            self._begun.add(name)
            await step()
            self._ended.add(name)

        return act

    @property
    def _is_whole(self) -> bool:
        """Whether the engine has all weights, of one version."""
        return "transfer" in self._ended or self._begun.isdisjoint(("release_kv", "transfer"))

    def _moves_kv(self) -> bool:
        return bool(
            self._of.colocate_all
            or self._of.cfg.generator.inference_engine.offload_kv_for_weight_sync
        )

    @property
    def _frozen(self) -> bool:
        """Requests are in flight and are kept: the scheduler is paused, KV may go to the host."""
        return not self._of.colocate_all and (
            not self._moves_kv() or self._of.cfg.trainer.fully_async.enabled
        )

    async def _pause(self) -> None:
        dispatch = self._of
        adapter_only = dispatch.colocate_all and dispatch._is_lora_no_merge()
        await dispatch._prepare_for_weight_sync(adapter_only_sync=adapter_only)
        dispatch.ensure_active_adapter(
            "policy", self._model_id, require_model_resident=not adapter_only
        )
        if self._frozen:
            await dispatch._inference_engine_client.pause_generation()

    async def _release_kv(self) -> None:
        client = self._of._inference_engine_client
        if self._frozen:
            keep = not self._of.cfg.trainer.fully_async.clear_kv_cache_on_weight_sync
            await client.sleep_for_weight_sync(offload_kv=keep)
        elif not self._of.colocate_all:
            await client.sleep()
        await self._wake("weights")

    async def _connect(self) -> None:
        """SkyRL keeps its groups between syncs."""

    async def _transfer(self) -> None:
        dispatch = self._of
        start = time.perf_counter()
        dispatch._broadcast_to_inference_engines(
            dispatch._inference_engine_client, model_id=self._model_id
        )
        adapter_only = dispatch.colocate_all and dispatch._is_lora_no_merge()
        dispatch._finish_weight_sync(adapter_only_sync=adapter_only)
        dispatch.last_weight_sync_seconds = time.perf_counter() - start

    async def _finalize(self) -> None:
        """What the workers held for the transfer went with it."""

    async def _resume_kv(self) -> None:
        await self._wake("kv_cache")

    async def _resume_generation(self) -> None:
        if self._frozen:
            await self._of._inference_engine_client.resume_generation()

    async def _wake(self, tag: str) -> None:
        client = self._of._inference_engine_client
        wake = client.wake_for_weight_sync if self._frozen else client.wake_up
        await wake(tags=[tag])

    async def _restore_kv(self) -> None:
        """KV returns where that starts nothing; an engine that would serve by it stays asleep."""
        client, whole = self._of._inference_engine_client, self._is_whole
        if "release_kv" in self._begun and "resume_kv" not in self._ended:
            if not (whole or self._frozen):
                raise EngineError(_NOT_WHOLE)
            await self._wake("kv_cache")
        if whole and self._frozen and "pause" in self._begun:
            if "transfer" in self._ended:
                client.increment_weight_version()  # What is cached is of the weights before.
            await client.resume_generation()


_NOT_WHOLE = (
    "the engine's weights are not whole, so it serves nobody; the next save_weights_for_sampler "
    "sends them all again"
)
_STEPS = (
    "pause",
    "release_kv",
    "connect",
    "transfer",
    "finalize",
    "resume_kv",
    "resume_generation",
)


async def _nothing() -> None:
    """SkyRL's workers hold no buffers between calls."""
