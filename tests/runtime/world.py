"""A colocated world in one event loop: memory that refuses, phases that take their time.

The world keeps its own book of device memory, apart from the kernel's: a fence that is missing
shows here as a real refusal, whatever phasesync believes.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasesync.core.model import OptionValue, Rank, RoleName, RootCause
from phasesync.core.protocol import Protocol
from phasesync.errors import EpochFailed
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import RankRunner, Turn
from phasesync.spec import load

GIB = {"params": 30, "cache": 10, "staging": 5, "weights": 20, "kv": 50}
CAPACITY = 80


class OutOfMemory(RuntimeError):
    """The device refused."""


class Misuse(RuntimeError):
    """Something was used that is not there."""


@dataclass
class Devices:
    """What is mapped where, and who is reading what."""

    capacity: int = CAPACITY
    held: dict[tuple[int, str], int] = field(default_factory=dict)
    reading: dict[tuple[int, str], str] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    def take(self, device: int, what: str, who: Rank) -> None:
        if (device, what) in self.held:
            raise Misuse(f"{who} maps {what} on {device} twice")
        used = sum(GIB[name] for at, name in self.held if at == device)
        if used + GIB[what] > self.capacity:
            have = [name for at, name in self.held if at == device]
            raise OutOfMemory(f"device {device}: {what} for {who} beside {', '.join(have)}")
        self.held[device, what] = GIB[what]

    def give(self, device: int, what: str) -> None:
        if (device, what) in self.reading:
            raise Misuse(f"{what} on {device} is freed under {self.reading[device, what]}")
        if self.held.pop((device, what), None) is None:
            raise Misuse(f"{what} on {device} is freed and was not mapped")

    def want(self, device: int, what: str) -> None:
        if (device, what) not in self.held:
            raise Misuse(f"{what} on {device} is used and not mapped")

    def drop(self, device: int, what: str) -> None:
        self.held.pop((device, what), None)


@dataclass
class World:
    """N ranks in replicas of `size`, and whatever goes wrong at them."""

    ranks: int
    runs: Path
    size: int = 2
    seed: int = 0
    epochs: int = 2
    protocol: Protocol = field(default_factory=lambda: load("colocated"))
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    late: Mapping[tuple[int, str], float] = field(default_factory=dict)
    fail: tuple[int, str, int] | None = None
    cancel: tuple[int, str, int] | None = None
    gone: int | None = None  # dies after its first epoch
    pause_s: float = 0.002
    capacity: int = CAPACITY
    run: str = "world"

    def __post_init__(self) -> None:
        self.devices = Devices(self.capacity)
        for option, held in (
            ("param_offload", ["params"]),
            ("free_cache_engine", ["kv", "weights"]),
        ):
            if self.options.get(option) is False:
                for device in range(self.ranks):
                    for what in held:
                        self.devices.take(device, what, Rank(RoleName("trainer"), device))
        self.chance = random.Random(self.seed)
        self.log: list[str] = []
        self.tasks: dict[int, asyncio.Task[list[EpochFailed | None]]] = {}

    def replica(self, rank: Rank) -> range:
        first = rank.number // self.size * self.size
        return range(first, first + self.size)

    def actions(self) -> dict[str, Callable[[Turn], Any]]:
        return {name: self._action(name) for name in _WORK}

    def _action(self, name: str) -> Callable[[Turn], Any]:
        async def act(turn: Turn) -> None:
            key = (turn.rank.number, name)
            await asyncio.sleep(self.late.get(key, 0) + self.chance.random() * self.pause_s)
            if self.fail == (*key, turn.epoch):
                raise RuntimeError(f"injected in {name}")
            if self.cancel == (*key, turn.epoch):
                self.tasks[turn.rank.number].cancel()
            self.log.append(f"{turn.rank} {name} {turn.epoch}")
            await _WORK[name](self, turn)

        return act

    async def rank(self, number: int, hub: InProcessFences) -> list[EpochFailed | None]:
        said: list[EpochFailed | None] = []
        runner = RankRunner(
            self.protocol,
            rank=number,
            ranks=self.ranks,
            actions=self.actions(),
            fences=hub.endpoint(Rank(RoleName("trainer"), number)),
            options={"replica_size": self.size, **self.options},
            runs=self.runs,
            run=self.run,
            unchecked=True,
        )
        async with runner:
            for _ in range(self.epochs):
                try:
                    await runner.run_epoch()
                    said.append(None)
                except EpochFailed as failed:
                    said.append(failed)
                    if not failed.can_retry:
                        break
                if number == self.gone:
                    await self._dies(hub, number)
                    break
        return said

    async def _dies(self, hub: InProcessFences, number: int) -> None:
        """Somebody who watches processes reports it, once the others are in their next epoch."""
        rank = Rank(RoleName("trainer"), number)
        await asyncio.sleep(0.05)
        cause = RootCause(kind="dead", ranks=(rank,), error="killed")
        await hub.endpoint(rank).report_lost(cause, incarnation=0)

    async def go(self, *, within_s: float = 20.0) -> list[list[EpochFailed | None] | BaseException]:
        hub = InProcessFences()
        for number in range(self.ranks):
            self.tasks[number] = asyncio.create_task(self.rank(number, hub))
        async with asyncio.timeout(within_s):
            return await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def _load_back(world: World, turn: Turn) -> None:
    world.devices.take(turn.rank.number, "params", turn.rank)


async def _train(world: World, turn: Turn) -> None:
    world.devices.take(turn.rank.number, "cache", turn.rank)


async def _trim(world: World, turn: Turn) -> None:
    world.devices.give(turn.rank.number, "cache")


async def _resume_weights(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        world.devices.take(device, "weights", turn.rank)


async def _stage(world: World, turn: Turn) -> None:
    world.devices.take(turn.rank.number, "staging", turn.rank)


async def _load(world: World, turn: Turn) -> None:
    devices = world.replica(turn.rank)
    for device in devices:
        world.devices.want(device, "staging")
        world.devices.reading[device, "staging"] = f"{turn.rank} load"
    try:
        await asyncio.sleep(0.003)
    finally:
        for device in devices:
            del world.devices.reading[device, "staging"]
    for device in devices:
        world.devices.versions[device] = turn.version


async def _flush(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        world.devices.want(device, "kv")


async def _offload(world: World, turn: Turn) -> None:
    world.devices.give(turn.rank.number, "params")


async def _empty_cache(world: World, turn: Turn) -> None:
    world.devices.give(turn.rank.number, "staging")


async def _resume_kv(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        world.devices.take(device, "kv", turn.rank)


async def _serve(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        world.devices.want(device, "kv")
        world.devices.want(device, "weights")
        if world.devices.versions.get(device) != turn.version:
            raise Misuse(f"device {device} serves version {world.devices.versions.get(device)}")
    for device in world.replica(turn.rank):
        world.devices.reading[device, "kv"] = f"{turn.rank} serve"
    try:
        await asyncio.sleep(0.002)
    finally:
        for device in world.replica(turn.rank):
            world.devices.reading.pop((device, "kv"), None)


async def _sleep(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        world.devices.give(device, "kv")
        world.devices.give(device, "weights")


async def _reclaim(world: World, turn: Turn) -> None:
    for device in world.replica(turn.rank):
        for what in ("kv", "weights"):
            _start_again(world, turn, device, what, "free_cache_engine")


async def _reset(world: World, turn: Turn) -> None:
    world.devices.drop(turn.rank.number, "cache")
    world.devices.drop(turn.rank.number, "staging")
    _start_again(world, turn, turn.rank.number, "params", "param_offload")


def _start_again(world: World, turn: Turn, device: int, what: str, absent: str) -> None:
    world.devices.drop(device, what)
    if not turn.plan.option(absent):
        world.devices.take(device, what, turn.rank)


_WORK = {
    "load_back": _load_back,
    "train": _train,
    "trim_cache": _trim,
    "resume_weights": _resume_weights,
    "stage": _stage,
    "load": _load,
    "flush": _flush,
    "offload": _offload,
    "empty_cache": _empty_cache,
    "resume_kv": _resume_kv,
    "serve": _serve,
    "sleep": _sleep,
    "reclaim": _reclaim,
    "reset": _reset,
}
