"""verl as far as phasesync touches it, written down from 0.9.1: names, signatures, one worker.

The module stands where `verl.workers.engine_workers` would; what the worker's engine and rollout
are asked to do is kept as calls, to be held against what verl's own body was seen to ask.
"""

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ("module", "worker")


class ActorRolloutRefWorker:
    """verl 0.9.1: `@register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)`."""

    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        """verl's own body."""
        self.stock_ran = (global_steps, mode)


class Old:
    """verl 0.7.1: no mode, and no plug-in point for it."""

    async def update_weights(self, global_steps: int | None = None) -> None:
        """verl's own body."""


class Device:
    """What `get_torch_device` answers where there is no accelerator."""

    def synchronize(self) -> None:
        """Nothing is enqueued."""

    def empty_cache(self) -> None:
        """Nothing is cached."""


def module(cls: type = ActorRolloutRefWorker) -> ModuleType:
    """A module of its own, so that tests do not see each other's."""
    made: Any = ModuleType("verl.workers.engine_workers")
    made.ActorRolloutRefWorker = type("ActorRolloutRefWorker", (cls,), dict(vars(cls)))
    made.segments = []
    made.set_expandable_segments = made.segments.append
    made.get_torch_device = Device
    made.log_gpu_memory_usage = lambda where, logger: None
    made.logger = logging.getLogger("written_down")
    found: ModuleType = made
    return found


def worker(cls: type, case: str) -> tuple[Any, list[str]]:
    """The leader of a replica of one rank, configured as `case` says; and its calls."""
    calls: list[str] = []
    adapter = {"r": 8} if "adapter" in case else None
    sglang = "sglang" in case

    def say(what: str, **named: Any) -> None:
        said = ", ".join(f"{name}={value!r}" for name, value in named.items())
        calls.append(f"{what} {said}".strip())

    def parameters(**named: Any) -> Any:
        say("engine.get_per_tensor_param", **named)
        return iter(()), adapter

    async def resume(tags: list[str]) -> None:
        say(f"rollout.resume {','.join(tags)}")

    async def update(weights: Any, **named: Any) -> None:
        say("rollout.update_weights", **named)

    async def release() -> None:
        say("rollout.release")

    made = cls()
    made.rank, made.world_size = 0, 1
    made.layered_summon = False
    made.peft_merge = "merged" in case
    made.base_sync_done = adapter is None
    made.actor = SimpleNamespace(
        engine=SimpleNamespace(
            is_param_offload_enabled=case != "no offload",
            get_per_tensor_param=parameters,
            to=lambda device, **named: say(f"engine.to {device}", **named),
        )
    )
    made.rollout = SimpleNamespace(
        resume=resume,
        update_weights=update,
        release=release,
        sleep_level=1 if sglang and adapter is not None else 2,
    )
    made.config = SimpleNamespace(
        rollout=SimpleNamespace(
            name="sglang" if sglang else "vllm",
            free_cache_engine=case != "engine keeps its memory",
            checkpoint_engine=SimpleNamespace(backend="naive"),
        ),
        model=SimpleNamespace(lora=SimpleNamespace(rank=8 if "lora" in case else 0)),
    )
    made.rollout.config = made.config.rollout
    return made, calls
