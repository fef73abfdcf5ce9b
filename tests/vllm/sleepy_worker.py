"""A CPU worker whose sleep really frees memory and really loses content.

vLLM's own CPU worker sleeps by writing a warning. Everything above it is real: the executor's
tags, the scheduler, the weight-update session, the model. This one empties the storages of weights
and KV, keeps a copy at level 1, and brings parameters back as NaN at level 2, so that a forgotten
load is seen. It does not show what is particular to GPU memory: address reuse, graphs, the driver's
accounting.
"""

# ruff: noqa: E402
import datetime
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import vllm._custom_ops as _ops
import vllm.v1.worker.cpu.shm  # noqa: F401  (before the worker, as vLLM itself does)

# Plain linears: packed ones keep no parameter of their own, so nothing could be emptied or hashed.
_ops._supports_onednn = False

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.cpu_worker import CPUWorker

from phasesync.engines.vllm_worker import WorkerExtension

Kept = list[tuple[Any, int, Any]]


class SleepyWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with a sleep that frees."""

    _kept: dict[str, Kept] | None = None

    def sleep(self, level: int = 1) -> None:
        kept = self._kept = self._kept or {}
        if "weights" not in kept:
            kept["weights"] = [
                (storage, storage.nbytes(), storage.clone() if level == 1 or not trained else None)
                for storage, trained in self._weights()
            ]
        if "kv_cache" not in kept:
            kept["kv_cache"] = [(storage, storage.nbytes(), None) for storage in self._caches()]
        for storages in kept.values():
            for storage, _, _ in storages:
                storage.resize_(0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in tags or ["weights", "kv_cache"]:
            fill = 0xFF if tag == "weights" else 0  # All ones is NaN in every float.
            for storage, size, copy in (self._kept or {}).pop(tag, []):
                storage.resize_(size)
                if copy is not None:
                    storage.copy_(copy)
                else:
                    bytes_ = torch.empty(0, dtype=torch.uint8)
                    bytes_.set_(storage, 0, (size,), (1,)).fill_(fill)

    def held_bytes(self) -> dict[str, int]:
        """What weights and KV hold now."""
        return {
            "weights": sum(storage.nbytes() for storage, _ in self._weights()),
            "kv_cache": sum(storage.nbytes() for storage in self._caches()),
        }

    def _weights(self) -> Iterator[tuple[Any, bool]]:
        model = self.model_runner.get_model()
        seen: dict[int, tuple[Any, bool]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.untyped_storage().resizable():
                tensor.data = tensor.data.clone()  # A reload may leave a view of the mapped file.
            storage = tensor.untyped_storage()
            if storage.nbytes():
                seen.setdefault(
                    storage.data_ptr(), (storage, isinstance(tensor, torch.nn.Parameter))
                )
        yield from seen.values()

    def _caches(self) -> Iterator[Any]:
        seen: dict[int, Any] = {}
        for layer in self.model_runner.kv_caches:
            for tensor in layer if isinstance(layer, list | tuple) else [layer]:
                storage = tensor.untyped_storage()
                seen.setdefault(storage.data_ptr(), storage)
        yield from seen.values()


class Extension(WorkerExtension):
    """What the tests ask of a worker besides."""

    def fail_if_rank(self, rank: int) -> str:
        if self.rank == rank:  # type: ignore[attr-defined]
            raise RuntimeError(f"rank {rank} was told to fail")
        return "fine"

    def die_if_rank(self, rank: int) -> str:
        if self.rank == rank:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return "fine"


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    port: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM brings no transfer engine that works without a GPU, so the tests bring one."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def init_transfer_engine(self, info: GlooInit) -> None:
        store = TCPStore(
            "127.0.0.1", info.port, info.world_size, False, datetime.timedelta(seconds=60)
        )
        self.group = gloo(store, 1 + self.parallel_config.rank, info.world_size)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, info: GlooUpdate) -> None:
        for name, shape in zip(info.names, info.shapes, strict=True):
            tensor = torch.empty(shape)
            broadcast(self.group, tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


def gloo(store: Store, rank: int, size: int) -> Any:
    return ProcessGroupGloo(
        PrefixStore("weights", store), rank, size, datetime.timedelta(seconds=60)
    )


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


if "test_gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("test_gloo", GlooEngine)
