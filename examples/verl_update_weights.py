"""verl's own weight sync under phasesync; engine and rollout of its worker are stand-ins."""

import asyncio
from types import SimpleNamespace
from typing import Any

import verl.workers.engine_workers as workers

from phasesync.errors import EpochFailed
from phasesync.integrations import verl

verl.install(runs="runs", run="job")  # Or export VERL_USE_EXTERNAL_MODULES, and no line at all.
workers.get_torch_device = lambda: SimpleNamespace(synchronize=int, empty_cache=int)
workers.log_gpu_memory_usage = lambda where, logger: None


class Engine:
    is_param_offload_enabled, broken = True, False

    def get_per_tensor_param(self, **_: Any) -> Any:
        return iter([("weight", 0)]), None

    def to(self, where: str, **_: Any) -> None:
        print(f"  parameters to {where}")
        if self.broken:
            raise RuntimeError("the host has no memory left")


class Rollout:
    sleep_level, device_mesh, config = 2, None, SimpleNamespace(name="vllm")

    async def resume(self, tags: list[str]) -> None:
        print(f"  resume {tags}")

    async def release(self) -> None:
        print("  release")

    async def update_weights(self, weights: Any, **_: Any) -> None:
        print(f"  update_weights {[name for name, _ in weights]}")


config = SimpleNamespace(free_cache_engine=True, checkpoint_engine=SimpleNamespace(backend="naive"))
worker = SimpleNamespace(
    rank=0, world_size=1, layered_summon=False, peft_merge=False, base_sync_done=True,
    config=SimpleNamespace(rollout=config), rollout=Rollout(),
    actor=SimpleNamespace(engine=Engine()),
)  # fmt: skip


async def main() -> None:
    for step in (1, 2, 3):
        print(f"sync {step}")
        worker.actor.engine.broken = step == 2
        try:
            await workers.ActorRolloutRefWorker.update_weights(worker, global_steps=step)
        except EpochFailed as failed:
            print(f"  failed: {failed.cause.phase}: {failed.cause.error}")


asyncio.run(main())
