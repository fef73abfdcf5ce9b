"""The rollout engine of the demo: it spans the devices of a replica and does what it is told.

It maps weights and KV on every one of its devices, reads weights from the staging files of all
trainers of its replica, and generates. It never asks whether it may: that is the protocol's.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasesync.core.model import Rank
from phasesync.demo.base import KV, WEIGHTS, Command, FreeNow, Said
from phasesync.demo.budget import DeviceBudget
from phasesync.demo.model import LAYERS, WIDTH, generate, halves
from phasesync.demo.settings import Script
from phasesync.errors import Refused
from phasesync.runtime.calls import in_thread

__all__ = ("Engine", "LocalEngine")

SLOW_PHASE = "resume_kv"  # Where a slow engine is slow.


class Engine:
    """One engine: a shard of each layer and a part of the KV cache on each device."""

    def __init__(self, rank: Rank, devices: Sequence[DeviceBudget], script: Script) -> None:
        self.rank = rank
        self.version = 0
        self._devices = devices
        self._sizes = {KV: script.sizes.kv, WEIGHTS: script.sizes.weights}
        self._slow_s = script.slow_s.get(rank, 0.0)
        self._one = threading.Lock()
        for what in script.resident:
            self.map(what)
        self._shards: list[dict[int, Tensor]] = [{} for _ in devices]
        self._kv: list[Tensor] = []

    def perform(self, command: Command) -> Any:
        """Do one thing at a time, whoever asks."""
        with self._one:
            if self._slow_s and command.phase == SLOW_PHASE:
                time.sleep(self._slow_s)
            return _COMMANDS[command.name](self, **command.arguments)

    def map(self, what: str) -> FreeNow:
        """Hold memory for `what` on each device, one after the other."""
        for device in self._devices:
            device.take(str(self.rank), what, self._sizes[what])
        if what == KV:
            count = self._sizes[KV] // 4
            self._kv = [torch.zeros(count) for _ in self._devices]
        return self._free_now()

    def unmap(self, what: Sequence[str]) -> FreeNow:
        """Give back what is mapped of `what`, on whichever device it is."""
        if KV in what:
            self._kv = []
        if WEIGHTS in what:
            self._shards = [{} for _ in self._devices]
            self.version = 0
        for device in self._devices:
            for each in what:
                device.give(str(self.rank), each)
        return self._free_now()

    def load(self, path: Path, bucket: int, layer: int, version: int) -> None:
        """Copy one staged layer to the devices, a part to each."""
        self._must_hold(WEIGHTS)
        staged = torch.from_file(str(path), shared=True, size=(bucket + 1) * WIDTH * WIDTH)
        whole = staged[bucket * WIDTH * WIDTH :].view(WIDTH, WIDTH)
        for shards, part in zip(self._shards, halves(whole, len(self._devices)), strict=True):
            shards[layer] = part.clone()
        self.version = version

    def generate(self, seed: int) -> Said:
        """What the model says; each token's activations go to the KV cache."""
        self._must_hold(WEIGHTS)
        self._must_hold(KV)
        missing = [layer for layer in range(LAYERS) if layer not in self._shards[0]]
        if missing:
            raise Refused(f"{self.rank} cannot generate: layers {missing} were never loaded")
        layers = [[shards[layer] for shards in self._shards] for layer in range(LAYERS)]
        return Said(self.version, generate(layers, seed, self._keep))

    def _keep(self, device: int, layer: int, position: int, part: Tensor) -> None:
        at = (position * LAYERS + layer) * part.numel()
        self._kv[device][at : at + part.numel()] = part.flatten()

    def _must_hold(self, what: str) -> None:
        for device in self._devices:
            if (str(self.rank), what) not in [each[:2] for each in device.held()]:
                raise Refused(f"{self.rank} has no {what} mapped on {device.name}")

    def _free_now(self) -> FreeNow:
        return FreeNow({device.name: device.free_bytes() for device in self._devices})


_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "map": Engine.map,
    "unmap": Engine.unmap,
    "load": Engine.load,
    "generate": Engine.generate,
}


class LocalEngine:
    """An engine in this process, asked in a thread so that the event loop goes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ask(self, command: Command) -> Any:
        return await in_thread(
            lambda: self._engine.perform(command), name=f"{self._engine.rank} {command.name}"
        )
