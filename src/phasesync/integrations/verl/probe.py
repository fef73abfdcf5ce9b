"""What phasesync needs of verl, asked of the verl that is installed. It is probed, not pinned."""

import inspect
from types import ModuleType
from typing import Any

from phasesync.errors import PlanError

__all__ = ("MANAGER", "WORKERS", "manager_class", "worker_class")

WORKERS = "verl.workers.engine_workers"
MANAGER = "verl.checkpoint_engine.base"
_FITS = "phasesync fits verl 0.8.0 and newer"
_WORKER_TAKES = ("self", "global_steps", "mode")
_MANAGER_TAKES = ("self", "global_steps")
_WORKER_USES = ("get_torch_device", "set_expandable_segments", "log_gpu_memory_usage")
_MANAGER_USES = (
    "abort_replicas",
    "release_kv_cache_replicas",
    "build_process_group",
    "resume_kv_cache_replicas",
    "resume_generation_replicas",
)


def worker_class(module: ModuleType) -> Any:
    """`ActorRolloutRefWorker`, if its `update_weights` is the one that phasesync replaces.

    Raises:
        PlanError: it is another; the message has the version and the signature.
    """
    cls = _class(module, "ActorRolloutRefWorker", _WORKER_TAKES)
    if not inspect.iscoroutinefunction(cls.update_weights):
        raise _refusal(f"{cls.__name__}.update_weights is not async")
    for name in _WORKER_USES:
        if not hasattr(module, name):
            raise _refusal(f"{module.__name__} has no {name}")
    return cls


def manager_class(module: ModuleType) -> Any:
    """`CheckpointEngineManager`, if its `update_weights` is the one that phasesync replaces.

    Raises:
        PlanError: it is another.
    """
    cls = _class(module, "CheckpointEngineManager", _MANAGER_TAKES)
    for name in _MANAGER_USES:
        if not hasattr(cls, name):
            raise _refusal(f"{cls.__name__} has no {name}")
    return cls


def _class(module: ModuleType, name: str, takes: tuple[str, ...]) -> Any:
    cls = getattr(module, name, None)
    method = getattr(cls, "update_weights", None)
    if cls is None or method is None:
        raise _refusal(f"{module.__name__} has no {name}.update_weights")
    # Ray adds one of its own, `_ray_trace_ctx`, to the methods of what it has made an actor.
    found = tuple(name for name in inspect.signature(method).parameters if name[0] != "_")
    if found != takes:
        raise _refusal(
            f"{name}.update_weights takes ({', '.join(found)}), not ({', '.join(takes)})"
        )
    return cls


def _refusal(what: str) -> PlanError:
    import verl  # noqa: PLC0415

    return PlanError(f"verl {getattr(verl, '__version__', '?')}: {what}; {_FITS}")
