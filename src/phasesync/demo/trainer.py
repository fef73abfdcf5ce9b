"""A trainer of the demo: the user code of a rank, phase by phase.

What a phase takes from the device it asks the budget for first, and gives back only once the
memory is gone. Enqueued releases happen when the device is synchronised, as on a GPU: until
then the budget still counts them.
"""

import asyncio
import hashlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phasesync.core.model import Rank
from phasesync.core.plan import Act
from phasesync.demo.base import KV, WEIGHTS, Command, FreeNow, Link, Said
from phasesync.demo.budget import DeviceBudget
from phasesync.demo.model import LAYER_BYTES, LAYERS, WIDTH, fresh, generate, halves, learn
from phasesync.demo.settings import ACCIDENTS, SLOW_PHASE, Script
from phasesync.errors import DeviceOutOfMemory, EngineError
from phasesync.runtime.actions import Turn
from phasesync.runtime.calls import in_thread

__all__ = ("Trainer", "TrainerDevice")

T = TypeVar("T")

CLOSE_ENOUGH = 1e-4  # Outputs lie in -1 .. 1.
SURELY_CHANGED = 1e-6
SLICE_S = 0.25
ACCIDENT_S = 3.0  # Longer than the slow rank is late.


class Names(NamedTuple):
    """What the protocol calls the memory of a trainer."""

    params: str
    cache: str
    staging: str


NAMES = {
    "colocated": Names("trainer_params", "train_cache", "staging"),
    "basic": Names("params", "cache", "cache"),
}


class TrainerDevice:
    """A trainer's device as the runtime asks for it, with what is enqueued on it."""

    blocks = False

    def __init__(self, budget: DeviceBudget) -> None:
        self.name = budget.name
        self.budget = budget
        self._enqueued: list[Callable[[], object]] = []

    def enqueue(self, work: Callable[[], object]) -> None:
        self._enqueued.append(work)

    def synchronise(self) -> None:
        while self._enqueued:
            self._enqueued.pop(0)()

    def collect_ipc(self) -> None:
        """Staging files are unlinked by who made them; no handle is left to collect."""

    def free_bytes(self) -> int | None:
        return self.budget.free_bytes()


class Trainer:
    """One rank: its model, its device, and the link to the engine of its replica."""

    def __init__(
        self, rank: Rank, script: Script, device: TrainerDevice, engine: Link, scratch: Path
    ) -> None:
        self.rank = rank
        self.device = device
        self._script = script
        self._engine = engine
        self._scratch = scratch
        self._who = str(rank)
        self._names = NAMES[script.protocol.name]
        self._peers = script.replicas[script.replica_of(rank)]
        self._host = fresh(script.seed)
        self._params: list[Tensor] = []
        self._staged: Tensor | None = None
        self._said = self._own_words()

    def actions(self) -> dict[str, Callable[[Turn], Awaitable[None]]]:
        """This rank's action for each phase that the protocol has."""
        known = {**_ACTIONS, **_OTHER_ACTIONS.get(self._script.protocol.name, {})}
        return {step.phase: self._directed(step, known[step.phase]) for step in self._steps()}

    def _steps(self) -> list[Act]:
        at = self._script.plan.index(self.rank)
        steps = self._script.plan.programs[at] + self._script.plan.recover[at]
        return [step for step in steps if isinstance(step, Act)]

    def _directed(
        self, step: Act, action: "Callable[[Trainer, Turn], Awaitable[None]]"
    ) -> Callable[[Turn], Awaitable[None]]:
        """The action as the script wants it: killed, slow, or as it is."""
        script = self._script

        async def directed(turn: Turn) -> None:
            if script.kill == (self.rank, step.phase, turn.epoch):
                os.kill(os.getpid(), signal.SIGKILL)
            if step.phase == SLOW_PHASE:
                await self._dawdle(turn)
            await action(self, turn)
            if not step.enqueued:
                self.device.synchronise()

        return directed

    async def _dawdle(self, turn: Turn) -> None:
        """Be slow, in slices: whoever looks sees that this rank is alive."""
        for _ in range(round(self._script.slow_s.get(self.rank, 0.0) / SLICE_S)):
            await asyncio.sleep(SLICE_S)
            turn.progress(slow=True)

    # ------------------------------------------------------------------ training

    async def load_back(self, turn: Turn) -> None:
        budget = self.device.budget
        turn.progress(capacity_bytes=budget.capacity, free_bytes=budget.free_bytes())
        budget.take(self._who, self._names.params, self._script.sizes.params)
        self._params = await self._work(lambda: [layer.clone() for layer in self._host])
        turn.progress(free_bytes=budget.free_bytes())

    async def train(self, turn: Turn) -> None:
        budget = self.device.budget
        budget.take(self._who, self._names.cache, self._script.sizes.cache)
        turn.progress(free_bytes=budget.free_bytes())
        losses = await self._work(lambda: learn(self._params, self._script.seed))
        turn.progress(loss=round(losses[-1], 6))

    async def load_back_and_train(self, turn: Turn) -> None:
        await self.load_back(turn)
        await self.train(turn)

    async def trim_cache(self, turn: Turn) -> None:
        self.device.enqueue(self._drop_gradients)

    def _drop_gradients(self) -> None:
        for layer in self._params:
            layer.grad = None
        self.device.budget.give(self._who, self._names.cache)

    # ------------------------------------------------------------------ hand-over

    async def resume_weights(self, turn: Turn) -> None:
        await self._map(turn, WEIGHTS)

    async def stage(self, turn: Turn) -> None:
        size = len(self._layers_of(self.rank.number)) * LAYER_BYTES
        self.device.budget.take(self._who, self._names.staging, size)
        await self._work(self._fill_staging)

    def _fill_staging(self) -> None:
        layers = self._layers_of(self.rank.number)
        path = self._file_of(self.rank.number)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(layers) * LAYER_BYTES)
        count = len(layers) * WIDTH * WIDTH
        self._staged = torch.from_file(str(path), shared=True, size=count)
        for bucket, layer in enumerate(layers):
            at = bucket * WIDTH * WIDTH
            self._staged[at : at + WIDTH * WIDTH] = self._params[layer].flatten()

    async def load(self, turn: Turn) -> None:
        for peer in self._peers:
            await self._load_from(turn, peer)

    async def _load_from(self, turn: Turn, peer: int) -> None:
        for bucket, layer in enumerate(self._layers_of(peer)):
            await self._ask(
                turn,
                "load",
                path=self._file_of(peer),
                bucket=bucket,
                layer=layer,
                version=turn.version,
            )
            turn.progress(bucket=layer, bytes=LAYER_BYTES)

    async def sync(self, turn: Turn) -> None:
        """Each rank sends its own part; the buffer is part of the cache."""
        await self._work(self._fill_staging)
        await self._load_from(turn, self.rank.number)
        self._drop_staging()

    async def offload(self, turn: Turn) -> None:
        self._host = await self._work(lambda: [each.detach().clone() for each in self._params])
        self.device.enqueue(self._drop_params)

    def _drop_params(self) -> None:
        self._params = []
        self.device.budget.give(self._who, self._names.params)

    async def empty_cache(self, turn: Turn) -> None:
        self.device.enqueue(self._drop_staging)
        self.device.enqueue(lambda: self.device.budget.give(self._who, self._names.staging))
        if self._script.accident is not None:
            await self._meet_by_accident(turn)

    async def _meet_by_accident(self, turn: Turn) -> None:
        """What no protocol says, and what yet keeps the ranks apart."""
        self.device.synchronise()
        turn.synchronised()
        if self._script.accident == "all_reduce":
            turn.progress(call=ACCIDENTS["all_reduce"])
            await self._work(self._all_reduce)
        elif self.rank.number == self._peers[0]:
            await asyncio.sleep(ACCIDENT_S)

    def _all_reduce(self) -> None:
        """As a framework's own metrics would do, on the world's group."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._scratch}/world",
                rank=self.rank.number,
                world_size=len(self._script.plan.members),
            )
        dist.all_reduce(torch.ones(1))

    def _drop_staging(self) -> None:
        self._staged = None
        self._file_of(self.rank.number).unlink(missing_ok=True)

    # ------------------------------------------------------------------ serving

    async def resume_kv(self, turn: Turn) -> None:
        await self._map(turn, KV)

    async def serve(self, turn: Turn) -> None:
        """Prove that the engine serves this epoch's weights.

        Raises:
            EngineError: its outputs are not the trainer's own, or those of the epoch before.
        """
        said: Said = await self._ask(turn, "generate", seed=self._script.seed)
        mine = await self._work(self._own_words)
        apart, moved = _apart(said.values, mine), _apart(said.values, self._said)
        engine = f"engine/{self._script.replica_of(self.rank)}"
        if said.version != turn.version:
            raise EngineError(
                f"{engine} serves version {said.version} in epoch {turn.epoch}, which makes "
                f"{turn.version}"
            )
        if apart > CLOSE_ENOUGH:
            raise EngineError(
                f"{engine} does not say what {self.rank} says in epoch {turn.epoch}: outputs are "
                f"{apart:.3g} apart"
            )
        if moved < SURELY_CHANGED:
            raise EngineError(f"{engine} says in epoch {turn.epoch} what it said before it")
        self._said = said.values
        turn.progress(
            checksum=_checksum(said.values), outputs=len(mine), apart=apart, moved=round(moved, 6)
        )

    async def sleep(self, turn: Turn) -> None:
        await self._unmap(turn, KV, WEIGHTS)

    async def rollout(self, turn: Turn) -> None:
        await self.serve(turn)
        await self._unmap(turn, KV)

    # ------------------------------------------------------------------ recovery

    async def quiesce(self, turn: Turn) -> None:
        await self._unmap(turn)  # Commands are answered in order: nothing is being read any more.

    async def reclaim(self, turn: Turn) -> None:
        await self._unmap(turn, KV, WEIGHTS)

    async def reset(self, turn: Turn) -> None:
        self.device.synchronise()
        self._params = []
        self._drop_staging()
        self.device.budget.give(self._who)

    # ------------------------------------------------------------------ how

    async def _map(self, turn: Turn, what: str) -> None:
        try:
            found: FreeNow = await self._ask(turn, "map", what=what)
        except DeviceOutOfMemory as error:
            turn.progress(
                tags=[what],
                refused={
                    "device": error.device,
                    "wanted_bytes": error.wanted,
                    "free_bytes": error.free,
                    "held": [list(each) for each in error.held],
                },
            )
            raise
        turn.progress(tags=[what], free_by_device=found.free_bytes)

    async def _unmap(self, turn: Turn, *what: str) -> None:
        found: FreeNow = await self._ask(turn, "unmap", what=list(what))
        turn.progress(tags=list(what), free_by_device=found.free_bytes)

    async def _ask(self, turn: Turn, name: str, **arguments: object) -> Any:
        return await self._engine.ask(Command(name, arguments, turn.phase, turn.epoch))

    async def _work(self, call: Callable[[], T]) -> T:
        result: T = await in_thread(call, name=f"{self.rank} works")
        return result

    def _layers_of(self, number: int) -> range:
        """The layers that a rank of the replica stages."""
        return range(self._peers.index(number), LAYERS, len(self._peers))

    def _file_of(self, number: int) -> Path:
        return self._scratch / f"staging-{number}"

    def _own_words(self) -> list[float]:
        parts = len(self._peers)
        return generate([halves(layer, parts) for layer in self._host], self._script.seed)


_ACTIONS: Mapping[str, Callable[[Trainer, Turn], Awaitable[None]]] = {
    "load_back": Trainer.load_back,
    "train": Trainer.train,
    "trim_cache": Trainer.trim_cache,
    "resume_weights": Trainer.resume_weights,
    "stage": Trainer.stage,
    "load": Trainer.load,
    "offload": Trainer.offload,
    "empty_cache": Trainer.empty_cache,
    "resume_kv": Trainer.resume_kv,
    "serve": Trainer.serve,
    "sleep": Trainer.sleep,
    "quiesce": Trainer.quiesce,
    "reclaim": Trainer.reclaim,
    "reset": Trainer.reset,
    "sync": Trainer.sync,
    "rollout": Trainer.rollout,
}
_OTHER_ACTIONS = {"basic": {"train": Trainer.load_back_and_train}}


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _checksum(values: list[float]) -> str:
    return hashlib.sha256(pack(f"<{len(values)}f", *values)).hexdigest()[:16]
