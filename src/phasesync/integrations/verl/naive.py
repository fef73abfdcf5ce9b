"""The phases of verl's colocated sync: what each does, in verl's own calls and order.

Every rank makes every call of the rollout, as verl's own body does: the adapter decides whose call
reaches the engine, and some adapters meet their peers inside a call. Calls stay on the event loop's
thread, where verl makes its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from phasesync.core.model import OptionValue
from phasesync.errors import EngineError
from phasesync.integrations.verl.place import TorchDevice
from phasesync.runtime import Turn, at_once

__all__ = ("NaiveSync",)

_LEADER_WAKES = frozenset({"vllm", "sglang"})


class NaiveSync:
    """One worker's actions. `first` says that this rank is the first of its replica."""

    def __init__(
        self, worker: Any, module: ModuleType, device: TorchDevice, *, first: bool
    ) -> None:
        self._worker = worker
        self._module = module
        self._device = device
        self._first = first
        self._global_steps: Any = None
        self._weights: Any = None
        self._adapter: Any = None
        self._base_is_due = False
        self._mapped: Literal["nothing", "weights", "all", "unknown"] = "nothing"
        self._is_read = False

    def actions(self, options: Mapping[str, OptionValue]) -> dict[str, Callable[..., Any]]:
        """What to do in each phase that the options leave in the plan."""
        found: dict[str, Callable[..., Any]] = {
            "trim_cache": self.trim_cache,
            "resume_weights": self.resume_weights,
            "meet_weights": self.meet_weights,
            "stage": self.stage,
            "ensure_base": self.ensure_base,
            "feed": self.feed,
            "offload": self.offload,
            "empty_cache": self.empty_cache,
            "resume_kv": self.resume_kv,
            "meet_kv": self.meet_kv,
            "quiesce": self.quiesce,
            "reclaim": self.reclaim,
            "reset": self.reset,
        }
        return found

    def begin(self, global_steps: Any) -> None:
        """A sync begins; the step is what the rollout is told."""
        self._global_steps = global_steps

    def done(self) -> None:
        """The sync went well everywhere in the replica: the base, if it was due, is there."""
        self._worker.base_sync_done = True
        self._mapped = "nothing"  # The engine serves, and is put to sleep by verl's driver.

    def drop(self) -> None:
        """Hold on to no weight once the sync is over, however it ended."""
        self._weights = self._adapter = None

    @at_once
    def trim_cache(self) -> None:
        self._device.synchronise()
        self._device.empty_cache()
        self._say("Before resume weights")

    async def resume_weights(self) -> None:
        self._mapped = "unknown"
        await self._worker.rollout.resume(tags=["weights"])
        self._mapped = "weights"

    @at_once
    def meet_weights(self) -> Awaitable[None] | None:
        return None if self._first else self.resume_weights()

    @at_once
    def stage(self) -> None:
        self._say("After resume weights")
        worker = self._worker
        self._weights, self._adapter = worker.actor.engine.get_per_tensor_param(
            layered_summon=worker.layered_summon, base_sync_done=True
        )
        self._base_is_due = False
        if not worker.peft_merge and self._adapter is not None:
            worker.rollout.sleep_level = 1
            self._base_is_due = not worker.base_sync_done

    @at_once
    def ensure_base(self) -> Awaitable[None] | None:
        """Send the base if this worker's rollout lacks it; afterwards it is there."""
        return self._send_base() if self._base_is_due else None

    async def _send_base(self) -> None:
        worker = self._worker
        base, adapter = worker.actor.engine.get_per_tensor_param(
            layered_summon=worker.layered_summon, base_sync_done=False
        )
        await self._send(base, peft_config=adapter, base_sync_done=False)
        self._base_is_due = False

    async def feed(self) -> None:
        # An adapter that the configuration does not show has its base due here.
        if self._base_is_due:
            await self._send_base()
        await self._send(self._weights, peft_config=self._adapter, base_sync_done=True)
        self._say("After update_weights")

    async def _send(self, weights: Any, **named: Any) -> None:
        self._is_read = True
        try:
            await self._worker.rollout.update_weights(
                weights, **named, global_steps=self._global_steps
            )
        except Exception:
            self._is_read = False  # It ended, if badly; one that was cut off may go on.
            raise
        self._is_read = False

    @at_once
    def offload(self) -> None:
        self._worker.actor.engine.to("cpu", model=True, optimizer=False, grad=False)
        self._device.synchronise()

    @at_once
    def empty_cache(self) -> None:
        self.drop()
        self._device.synchronise()
        # Before the cache is emptied: a block whose handle a peer had is free only after this.
        self._device.collect_ipc()
        self._device.empty_cache()
        self._say("After offload model to cpu")

    async def resume_kv(self) -> None:
        self._mapped = "unknown"
        await self._worker.rollout.resume(tags=["kv_cache"])
        self._mapped = "all"
        self._say("After resume kv_cache")

    @at_once
    def meet_kv(self) -> Awaitable[None] | None:
        return None if self._first else self.resume_kv()

    async def quiesce(self) -> None:
        """After a failed sync: nobody reads this rank's weights any more."""
        self._is_read_no_more()

    def _is_read_no_more(self) -> None:
        if self._is_read:
            raise EngineError(
                "the update was cut off; whether the engine still reads is not known, so nothing "
                "is taken from it: start the job again"
            )

    async def reclaim(self, turn: Turn) -> None:
        """After a failed sync: the engine gives back what it mapped.

        An engine that is half awake takes a release for done (vLLM 0.24), so it is woken first;
        there is room for it, every trainer of the replica has let go. TensorRT-LLM releases what
        is mapped, and its ranks meet in a wake, which the leader would be alone in.
        """
        match self._mapped:
            case "nothing":
                return
            case "unknown":
                raise EngineError(
                    "the engine failed to resume, or was cut off in it; what it holds is not "
                    "known: start the job again"
                )
            case "weights" if self._worker.rollout.config.name in _LEADER_WAKES:
                if turn.absent:
                    raise EngineError(
                        "the engine is half awake, and a rank that died may hold what it needs to "
                        "wake; start it again"
                    )
                await self.resume_kv()
            case "weights" | "all":
                pass
        await self._worker.rollout.release()
        self._mapped = "nothing"

    async def reset(self) -> None:
        # Each rank has fed the engine on its own device; the leader's word is of its own alone.
        self._is_read_no_more()
        engine = self._worker.actor.engine
        self.drop()
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)
        self._device.synchronise()
        self._device.empty_cache()

    def _say(self, where: str) -> None:
        self._module.log_gpu_memory_usage(where, logger=self._module.logger)
