"""Where one verl worker stands: its rank, its replica, its device, and where ranks meet.

Everything is read from the worker as verl built it. All ranks must come to the same groups, so they
are computed for the whole world and never from this rank's own role alone.
"""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from phasesync.core.model import OptionValue
from phasesync.errors import PlanError
from phasesync.integrations.verl.settings import Settings

__all__ = ("TorchDevice", "lora_of", "meeting", "options_of", "replicas", "run_name")

_RUN_KEY = "phasesync/verl/run"
_last_mesh: list[Any] = [None, []]  # A process has one; its object is kept with its rows.
#: What a device's module raises where it lacks a call, or has no such device.
_UNABLE = (AttributeError, RuntimeError, NotImplementedError, AssertionError)


def meeting(worker: Any, settings: Settings, *, waits: bool = True) -> tuple[int, int, Any | None]:
    """This worker's rank, how many ranks there are, and the store where they meet.

    The store is that of the chosen group, of the default one, or one made at MASTER_ADDR; alone,
    a rank needs none. Making one waits for the first rank: who may not wait goes without.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    ready = dist.is_available() and dist.is_initialized()
    group = settings.group(worker) if settings.group else None
    if group is not None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    elif ready:
        rank, ranks = dist.get_rank(), dist.get_world_size()
    else:
        rank, ranks = (
            int(_own(worker, "rank", "RANK")),
            int(_own(worker, "world_size", "WORLD_SIZE")),
        )
    if settings.store is not None:
        return rank, ranks, settings.store(worker)
    if ranks == 1:
        return rank, ranks, None
    if group is not None:
        return rank, ranks, distributed_c10d._world.pg_map[group][1]
    if ready:
        return rank, ranks, distributed_c10d._get_default_store()
    return rank, ranks, _own_store(rank, ranks) if waits else None


def _own(worker: Any, attribute: str, variable: str) -> Any:
    found = getattr(worker, attribute, None)
    found = os.environ.get(variable) if found is None else found
    if found is None:
        raise PlanError(
            f"no process group, no worker.{attribute} and no ${variable}: nobody says which rank "
            "this is; hand install() a group= or a store="
        )
    return found


def _own_store(rank: int, ranks: int) -> Any:
    from torch import distributed as dist  # noqa: PLC0415

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (host and port):
        raise PlanError(
            f"{ranks} ranks and nowhere to meet: no process group, no $MASTER_ADDR and "
            "$MASTER_PORT; hand install() a group= or a store="
        )
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(host, int(port), ranks, is_master=rank == 0, wait_for_workers=False)


def run_name(settings: Settings, store: Any | None, *, alone: bool = True) -> str:
    """The run's name, the same on all ranks: as chosen, or what the first rank here proposes, or,
    where ranks do not meet, the name of the place where they would."""
    chosen = settings.run or os.environ.get("PHASESYNC_RUN")
    if chosen:
        return chosen
    if store is None and not alone:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        return f"verl-{host.replace('/', '-')}-{port}"
    mine = f"verl-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    if store is None:
        return mine
    name: bytes = store.compare_set(_RUN_KEY, "", mine)
    return name.decode()


def replicas(worker: Any, ranks: int) -> list[list[int]]:
    """The ranks that share an engine, leader first, for the whole world.

    From the rollout's device mesh; with prefill and decode apart, each server is a group of its
    own; without a mesh, from the configured sizes. Where nothing says, all ranks are one replica,
    which only waits for more than it must.
    """
    rollout = worker.config.rollout
    split = _get(rollout, "disaggregation")
    if split is not None and _get(split, "enabled", False):
        return _servers(rollout, split, ranks)
    mesh = getattr(getattr(worker, "rollout", None), "device_mesh", None)
    rows = _rows(mesh) if mesh is not None else []
    if rows and sum(map(len, rows)) == ranks:
        return rows
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    size = 1
    for name in sizes:
        size *= int(_get(rollout, name, 1))
    if _get(rollout, sizes[0]) is None or ranks % size:
        size = ranks
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


def _rows(mesh: Any) -> list[list[int]]:
    """The ranks of each row of a device mesh, which never changes: torch makes the tensor of them
    anew whenever it is asked, and that takes as long as some fences do."""
    known, rows = _last_mesh
    if known is not mesh:
        placed = getattr(mesh, "mesh", None)
        parts = () if placed is None else placed
        rows = [[int(rank) for rank in part.flatten().tolist()] for part in parts]
        _last_mesh[:] = mesh, rows
    return [list(row) for row in rows]


def _servers(rollout: Any, split: Any, ranks: int) -> list[list[int]]:
    """Prefill and decode servers, each over its own tensor-parallel ranks, one after another."""
    prefill = int(_get(rollout, "tensor_model_parallel_size", 1))
    decode = int(_get(split, "decode_tensor_model_parallel_size") or prefill)
    sizes = [prefill] * int(_get(split, "prefill_replicas", 1))
    sizes += [decode] * int(_get(split, "decode_replicas", 1))
    if ranks % sum(sizes):
        raise PlanError(
            f"{ranks} ranks do not make whole replicas of {sum(sizes)} "
            f"(prefill and decode servers of {sizes}); check the rollout's disaggregation"
        )
    found: list[list[int]] = []
    first = 0
    while first < ranks:
        for size in sizes:
            found.append(list(range(first, first + size)))
            first += size
    return found


def options_of(worker: Any, groups: Sequence[Sequence[int]]) -> dict[str, OptionValue]:
    """The options of the protocol, as this worker's configuration has them."""
    rollout, engine = worker.config.rollout, worker.actor.engine
    free = bool(_get(rollout, "free_cache_engine", True))
    keeps = (
        free
        and _get(rollout, "name", "") == "sglang"
        and getattr(worker.rollout, "sleep_level", 2) == 1
    )
    return {
        "replica_size": max(len(group) for group in groups),
        "param_offload": bool(engine.is_param_offload_enabled),
        "optimizer_offload": bool(getattr(engine, "is_optimizer_offload_enabled", False)),
        "free_cache_engine": free,
        "sleep_keeps": "weights" if keeps else "nothing",
        "lora": lora_of(worker),
    }


def lora_of(worker: Any) -> str:
    """Whether there is LoRA, and whether the rollout serves it merged or as an adapter."""
    model = _get(worker.config, "model")
    lora = _get(model, "lora") if model is not None else None
    rank = 0
    if model is not None:
        rank = _get(model, "lora_rank", 0) or (_get(lora, "rank", 0) if lora is not None else 0)
    if not rank:
        return "none"
    return "merge" if getattr(worker, "peft_merge", False) else "adapter"


def _get(config: Any, name: str, default: Any = None) -> Any:
    found = config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)
    return default if found is None else found


class TorchDevice:
    """The device of a verl worker, through verl's own module of it.

    Calls stay on the thread that verl makes its own on: the current device is a thread's.
    """

    blocks = False

    def __init__(self, module: ModuleType, rank: int) -> None:
        self._module = module
        self.name = f"{socket.gethostname()}/{_name_of(self._of(), rank)}"

    def _of(self) -> Any:
        return self._module.get_torch_device()

    def synchronise(self) -> None:
        self._of().synchronize()

    def collect_ipc(self) -> None:
        collect = getattr(self._of(), "ipc_collect", None)
        if collect is not None:
            collect()

    def empty_cache(self) -> None:
        """Give cached blocks back to the device; what is still being computed keeps its own."""
        self._of().empty_cache()

    def free_bytes(self) -> int | None:
        try:
            free, _ = self._of().mem_get_info()
        except _UNABLE:
            return None
        return int(free)


def _name_of(device: Any, rank: int) -> str:
    """`GPU-UUID` where the device has one: ordinals differ between processes."""
    try:
        current = device.current_device()
        uuid = getattr(device.get_device_properties(current), "uuid", None)
    except _UNABLE:
        return f"cpu{rank}"
    if uuid is not None:
        return f"GPU-{uuid}"
    kind = getattr(device, "__name__", "device").rpartition(".")[2]
    return f"{kind}{rank}"
