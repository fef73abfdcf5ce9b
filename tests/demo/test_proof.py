"""What `serve` proves: an engine that says anything else fails the phase."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Phase, Rank, RoleName
from phasesync.demo.base import Command, Said
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.engine import Engine, LocalEngine
from phasesync.demo.settings import DemoSettings, Script, script_of
from phasesync.demo.trainer import Trainer, TrainerDevice
from phasesync.errors import EngineError, Refused
from phasesync.journal import Journal
from phasesync.runtime import Turn

RANK = Rank(RoleName("trainer"), 0)


class Bench:
    """One replica's leader at its engine, phase by phase, without fences."""

    def __init__(self, folder: Path) -> None:
        settings = DemoSettings(ranks=2)
        self.script: Script = script_of(settings, run="bench", runs=folder, host="vm")
        budgets = [
            DeviceBudget.create(
                device_path(folder, at), name=name, capacity=self.script.sizes.capacity
            )
            for at, name in enumerate(self.script.devices)
        ]
        self.engine = Engine(Rank(RoleName("engine"), 0), budgets, self.script)
        self.trainers = [
            Trainer(rank, self.script, TrainerDevice(budgets[at]), LocalEngine(self.engine), folder)
            for at, rank in enumerate(self.script.plan.members)
        ]
        self.journal = Journal(folder, run="bench", rank=RANK, ranks=2)

    def turn(self, phase: str, epoch: int) -> Turn:
        return Turn(
            rank=RANK,
            phase=Phase(phase),
            epoch=epoch,
            version=epoch,
            ticket=None,
            plan=self.script.plan,
            journal=self.journal,
        )

    async def hand_over(self, epoch: int = 1) -> None:
        """All phases up to `serve`, in order."""
        for phase in ("load_back", "train", "trim_cache"):
            await self.all(phase, epoch)
        await self.one("resume_weights", epoch)
        await self.all("stage", epoch)
        await self.one("load", epoch)
        await self.all("offload", epoch)
        await self.all("empty_cache", epoch)
        await self.one("resume_kv", epoch)

    async def all(self, phase: str, epoch: int = 1) -> None:
        for trainer in self.trainers:
            await trainer.actions()[phase](self.turn(phase, epoch))
            trainer.device.synchronise()

    async def one(self, phase: str, epoch: int = 1) -> None:
        await self.trainers[0].actions()[phase](self.turn(phase, epoch))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_engine_with_this_epochs_weights_passes(bench: Bench) -> None:
    async def story() -> None:
        await bench.hand_over()
        await bench.all("serve")

    asyncio.run(story())


def test_an_engine_with_layers_of_the_epoch_before_fails(bench: Bench) -> None:
    async def story() -> None:
        old = bench.trainers[0]
        await bench.all("load_back")
        old._fill_staging()
        stale = old._file_of(0).read_bytes()
        for phase in ("train", "trim_cache"):
            await bench.all(phase)
        await bench.one("resume_weights")
        await bench.all("stage")
        old._file_of(0).write_bytes(stale)
        await bench.one("load")
        await bench.all("offload")
        await bench.all("empty_cache")
        await bench.one("resume_kv")
        await bench.one("serve")

    with pytest.raises(EngineError, match="engine/0 does not say what trainer/0 says in epoch 1"):
        asyncio.run(story())


def test_an_engine_that_says_what_it_said_before_fails(bench: Bench) -> None:
    class Untrained(LocalEngine):
        async def ask(self, command: Command) -> Any:
            return Said(1, bench.trainers[0]._said)

    async def story() -> None:
        trainer = bench.trainers[0]
        trainer._engine = Untrained(bench.engine)
        await bench.one("serve")

    with pytest.raises(EngineError, match="engine/0 says in epoch 1 what it said before it"):
        asyncio.run(story())


def test_an_engine_that_serves_another_version_fails(bench: Bench) -> None:
    async def story() -> None:
        await bench.hand_over()
        bench.engine.version = 7
        await bench.one("serve")

    with pytest.raises(EngineError, match="engine/0 serves version 7 in epoch 1, which makes 1"):
        asyncio.run(story())


def test_an_engine_without_kv_does_not_serve(bench: Bench) -> None:
    async def story() -> None:
        await bench.one("resume_weights")
        await bench.one("serve")

    with pytest.raises(Refused, match="engine/0 has no kv_cache mapped on vm/cpu0"):
        asyncio.run(story())


def test_an_engine_that_was_never_loaded_does_not_serve(bench: Bench) -> None:
    async def story() -> None:
        await bench.one("resume_weights")
        await bench.one("resume_kv")
        await bench.one("serve")

    with pytest.raises(Refused, match=r"layers .* were never loaded"):
        asyncio.run(story())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("rollout_weights", "engine/0"), ("train_cache", "trainer/1")),
        (("kv_cache", "engine/0"), ("train_cache", "trainer/1")),
        (("kv_cache", "engine/0"), ("trainer_params", "trainer/1")),
        (("kv_cache", "engine/0"), ("staging", "trainer/1")),
    ],
)
def test_what_the_protocol_forbids_together_does_not_fit(
    one: tuple[str, str], other: tuple[str, str], bench: Bench
) -> None:
    """With what stands beside them anyway, the sizes make each `never` a fact."""
    sizes = bench.script.sizes
    size = {
        "rollout_weights": sizes.weights,
        "kv_cache": sizes.kv,
        "train_cache": sizes.cache,
        "trainer_params": sizes.params,
        "staging": sizes.params // 2,
    }
    beside = {
        "rollout_weights": ("trainer_params",),
        "kv_cache": ("rollout_weights",),
    }[one[0]]
    named = {one[0], other[0], *beside}
    assert sum(size[name] for name in named) > sizes.capacity
