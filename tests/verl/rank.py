"""One rank of a job: verl's own `ActorRolloutRefWorker.update_weights`, a fake engine, a fake
rollout, and the memory of its device in the ledger.

The rollout is as verl's vLLM adapter is: all ranks call it, the leader's call reaches the engine,
and a peer's transfer waits for the engine on its own device.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.engine_workers as ew
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from torch.distributed.device_mesh import init_device_mesh

from phasesync.errors import EpochFailed, describe
from phasesync.integrations import verl as integration
from tests.verl.ledger import Ledger, OutOfMemory

__all__ = ("Job", "Run", "Said", "main", "modules_with_device")

PEER_WAITS_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks run. `late` are seconds that a rank's offload takes in epoch 1; `fail` is the
    rank and the call that raises, in epoch `fail_at`; `other` is configuration of one rank alone;
    `meet` says what there is to meet at; `peer_looks_s` how often a peer's transfer looks for its
    engine; `alternate` runs verl's own body in every even epoch.
    """

    ranks: int = 4
    replica: int = 4
    epochs: int = 1
    mode: str = "off"
    late: dict[int, float] = field(default_factory=dict)
    fail: tuple[int, str] | None = None
    fail_at: int = 1
    again: bool = False
    rollout: dict[str, Any] = field(default_factory=dict)
    other: dict[int, dict[str, Any]] = field(default_factory=dict)
    param_offload: bool = True
    lora: str = "none"
    sleep_level: int = 2
    meet: str = "default"
    engine_takes_s: float = 0.2
    peer_looks_s: float = 0.005
    alternate: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one rank said of one call: `ok`, or the error and its root cause."""

    rank: int
    epoch: int
    outcome: str
    error: str = ""
    cause: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    since_failure_s: float | None = None
    calls: tuple[str, ...] = ()


class Device:
    """What `get_torch_device` answers on a CPU: cached blocks are in the ledger."""

    def __init__(self, ledger: Ledger, rank: int, calls: list[str]) -> None:
        self._ledger = ledger
        self._rank = rank
        self._calls = calls
        self.dirty = False

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._rank

    def synchronize(self, *_: Any) -> None:
        self._calls.append("device.synchronize")

    def ipc_collect(self) -> None:
        self._calls.append("device.ipc_collect")

    def empty_cache(self) -> None:
        self._calls.append("device.empty_cache")
        self._ledger.give(self._rank, "cache")
        if not self.dirty:
            self._ledger.give(self._rank, "staging")

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return self._ledger.free_bytes(self._rank), 80 << 30

    def memory_allocated(self, *_: Any) -> int:
        return 0

    def memory_reserved(self, *_: Any) -> int:
        return 0


class Engine:
    """A training engine: its parameters are on the device until it is told to offload."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.is_param_offload_enabled = run.job.param_offload

    def get_per_tensor_param(self, **named: Any) -> tuple[Any, Any]:
        self._run.call("engine.get_per_tensor_param", **named)
        adapter = {"r": 8} if self._run.job.lora == "adapter" else None
        return iter([("w", torch.zeros(4))]), adapter

    def to(self, device: str, **named: Any) -> None:
        run = self._run
        if run.epoch == 1:
            time.sleep(run.job.late.get(run.rank, 0.0))
        run.call(f"engine.to {device}", **named)
        run.ledger.give(run.rank, "params")


class Rollout:
    """The rollout's adapter on this rank; the leader's calls reach the engine of the replica."""

    def __init__(self, run: "Run", config: Any, mesh: Any) -> None:
        self._run = run
        self.config = config
        self.device_mesh = mesh
        self.sleep_level = run.job.sleep_level
        first = run.rank // run.job.replica * run.job.replica
        self._devices = range(first, first + run.job.replica)
        self._leads = run.rank == first

    async def resume(self, tags: list[str]) -> None:
        self._run.call(f"rollout.resume {','.join(tags)}")
        if not (self._leads and self.config.free_cache_engine):
            return
        await asyncio.sleep(self._run.job.engine_takes_s)
        for device in self._devices:
            self._run.ledger.take(device, tags[0])

    async def release(self) -> None:
        self._run.call("rollout.release")
        self.sleep()

    async def update_weights(self, weights: Any, **named: Any) -> None:
        run = self._run
        run.call("rollout.update_weights", **named)
        if not run.ledger.has(run.rank, "staging"):
            run.ledger.take(run.rank, "staging")
        for _ in weights:
            await self._engine_is_up()
        run.device.dirty = False

    async def _engine_is_up(self) -> None:
        until = time.monotonic() + PEER_WAITS_S
        while not self._run.ledger.has(self._run.rank, "weights"):
            if time.monotonic() > until:
                raise TimeoutError("no engine took the bucket")
            await asyncio.sleep(self._run.job.peer_looks_s)

    def sleep(self) -> None:
        """As verl's driver makes the engine sleep, through its servers."""
        if self._leads and self.config.free_cache_engine:
            for device in self._devices:
                self._run.ledger.give(device, "kv_cache")
                if self.sleep_level == 2 or self.config.name != "sglang":
                    self._run.ledger.give(device, "weights")


class Run:
    """This process's rank: its worker, its calls and its clock."""

    def __init__(self, job: Job, rank: int, ledger: Ledger) -> None:
        self.job = job
        self.rank = rank
        self.ledger = ledger
        self.epoch = 0
        self.calls: list[str] = []
        self.device = Device(ledger, rank, self.calls)
        self.failed_at: Any = None
        rollout = {
            "name": "vllm",
            "free_cache_engine": True,
            "tensor_model_parallel_size": job.replica,
            **job.rollout,
        }
        rollout |= job.other.get(rank, {})
        rollout["checkpoint_engine"] = {"backend": "naive"}
        lora = {"rank": 8 if job.lora != "none" else 0, "merge": job.lora == "merge"}
        config = OmegaConf.create({"rollout": rollout, "model": {"lora": lora}})
        shape = (job.ranks // job.replica, job.replica, 1)
        names = ("dp", "infer_tp", "infer_pp")
        mesh = None
        if job.meet == "default":
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.worker = types.SimpleNamespace(
            config=config,
            rank=rank,
            world_size=job.ranks,
            rollout=Rollout(self, config.rollout, mesh),
            actor=types.SimpleNamespace(engine=Engine(self)),
            layered_summon=False,
            peft_merge=job.lora == "merge",
            base_sync_done=job.lora != "adapter",
        )
        keeps = job.sleep_level == 1 and rollout["name"] == "sglang"
        if keeps or not job.rollout.get("free_cache_engine", True):
            ledger.take(rank, "weights")

    def expandable(self, on: bool) -> None:
        self.calls.append(f"expandable_segments {on}")

    def call(self, what: str, **named: Any) -> None:
        said = ", ".join(f"{name}={value!r}" for name, value in named.items())
        self.calls.append(f"{what} {said}".strip())
        rank, where = self.job.fail or (-1, "")
        if rank == self.rank and what.startswith(where) and self.epoch == self.job.fail_at:
            self.failed_at.value = time.time()
            raise RuntimeError("injected: the offload failed")

    def begin(self) -> None:
        """As after a training step: parameters and cached blocks are on the device."""
        self.epoch += 1
        self.calls.clear()
        # Parameters that never leave are few enough to be there beside KV.
        for what in ("params", "cache") if self.job.param_offload else ("cache",):
            if not self.ledger.has(self.rank, what):
                self.ledger.take(self.rank, what)

    async def sync(self) -> Said:
        """One call as verl's driver makes it, and what came of it."""
        began, cpu = time.time(), time.process_time()
        outcome, error, cause = "ok", "", ""
        try:
            await ew.ActorRolloutRefWorker.update_weights(self.worker, global_steps=self.epoch)
        except Exception as caught:
            outcome, error = type(caught).__name__, str(caught)
            outcome = "OOM" if isinstance(caught, OutOfMemory) else outcome
            if isinstance(caught, EpochFailed):
                cause = describe(caught.cause)
        ended = time.time()
        failed_at = self.failed_at.value
        return Said(
            rank=self.rank,
            epoch=self.epoch,
            outcome=outcome,
            error=error,
            cause=cause,
            seconds=ended - began,
            cpu_s=time.process_time() - cpu,
            since_failure_s=ended - failed_at if failed_at else None,
            calls=tuple(self.calls),
        )


def main(job: Job, rank: int, ledger: Ledger, meet: str, said: Any, joined: Any, at: Any) -> None:
    """The process of one rank. `joined` is the driver's join between two calls."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    integration.install(job.mode, **job.settings, **_MEETS[job.meet](job, rank, meet))
    ours = ew.ActorRolloutRefWorker.update_weights
    bodies = (ours.__wrapped__, ours) if job.alternate else ()
    run = Run(job, rank, ledger)
    run.failed_at = at
    for module in list(modules_with_device()):
        module.get_torch_device = lambda: run.device
    ew.set_expandable_segments = run.expandable

    async def drive() -> None:
        for _ in range(job.epochs):
            run.begin()
            if job.alternate:
                ew.ActorRolloutRefWorker.update_weights = bodies[run.epoch % 2]
            joined.wait()
            answer = await run.sync()
            said.put(answer)
            if answer.outcome != "ok" and not job.again:
                joined.abort()
                return
            joined.wait()
            run.worker.rollout.sleep()
            joined.wait()

    with suppress(threading.BrokenBarrierError):
        asyncio.run(drive())
    said.put(None)
    # An actor that raised lives on, as its connections do, until the driver ends the job.
    time.sleep(600)


def _default(job: Job, rank: int, meet: str) -> dict[str, Any]:
    where = f"tcp://127.0.0.1:{meet.rpartition(':')[2]}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=job.ranks)
    return {}


def _group(job: Job, rank: int, meet: str) -> dict[str, Any]:
    """A group that is not the default one."""
    where = f"tcp://127.0.0.1:{meet.rpartition(':')[2]}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=job.ranks)
    group = dist.new_group(list(range(job.ranks)))
    return {"group": lambda worker: group}


def _store(job: Job, rank: int, meet: str) -> dict[str, Any]:
    """No process group at all, and a store that the user hands over."""
    store = dist.FileStore(meet, job.ranks)  # type: ignore[attr-defined]
    return {"store": lambda worker: store}


def _nowhere(job: Job, rank: int, meet: str) -> dict[str, Any]:
    """No process group and no store: what verl puts into each worker's environment is enough."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meet.rpartition(":")[2]}
    return {}


_MEETS: dict[str, Callable[[Job, int, str], dict[str, Any]]] = {
    "default": _default,
    "group": _group,
    "store": _store,
    "environment": _nowhere,
}


def modules_with_device() -> Any:
    """verl's modules that have taken the device's module into their own names."""
    for name, module in sys.modules.items():
        if name.startswith("verl") and hasattr(module, "get_torch_device"):
            yield module
