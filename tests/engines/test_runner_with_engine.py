"""A rank's runner around a guarded engine: real tickets, verdicts read from the journals."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Opened, Rank, RoleName
from phasesync.engines.actions import engine_actions
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import TicketRules
from phasesync.engines.verdicts import JournalVerdicts
from phasesync.engines.vllm import VllmEngine
from phasesync.errors import EngineRefused, EpochFailed
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import RankRunner, Turn

from .surfaces import SyncSurface


class World:
    """Two trainer ranks on two devices, and one engine that spans both, driven by rank 0."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.devices = [Budget(16), Budget(16)]
        self.surface = SyncSurface(SimulatedEngine(self.devices))
        self.verdicts = JournalVerdicts(runs)
        self.guard = guard(self.surface, run="run", scope="replica/0", verdicts=self.verdicts)
        self.port = VllmEngine(
            self.surface,
            tickets=TicketRules(run="run", scope="replica/0", verdicts=self.verdicts),
        )
        self.fences = InProcessFences()
        self.answers: list[str] = []
        self.tickets: list[Any] = []
        self.late_s = 0.0
        self.broken = False

    async def serve(self, turn: Turn) -> None:
        self.answers += self.surface.generate(["hello"])

    def actions(self, number: int) -> dict[str, Any]:
        device = self.devices[number]
        mine = {
            "load_back": lambda: device.take("params", 6),
            "train": lambda: device.take("cache", 4),
            "trim_cache": lambda: device.give("cache"),
            "stage": lambda: device.take("staging", 2),
            "offload": self._offload(number),
            "empty_cache": lambda: device.give("staging"),
            "reset": lambda: [device.give(owner) for owner in ("params", "cache", "staging")],
        }
        engine = engine_actions(
            self.port, buckets=lambda turn: [{"version": str(turn.version)}], serve=self.serve
        )
        resume = engine["resume_kv"]

        async def resume_kv(turn: Turn) -> None:
            self.tickets.append(turn.ticket)
            await resume(turn)

        return {**engine, **mine, "resume_kv": resume_kv} if number == 0 else {
            **mine, **dict.fromkeys(engine, _nothing),
        }  # fmt: skip

    def _offload(self, number: int) -> Any:
        async def offload() -> None:
            if number:
                await asyncio.sleep(self.late_s)
                if self.broken:
                    raise RuntimeError("rank 1 cannot offload")
            self.devices[number].give("params")

        return offload

    async def run(self, epochs: int) -> list[BaseException | None]:
        await self.port.pause()
        if not (await self.port.status()).asleep:
            await self.port.release((WEIGHTS, KV_CACHE))

        async def rank(number: int) -> BaseException | None:
            member = Rank(RoleName("trainer"), number)
            runner = RankRunner(
                "colocated",
                rank=number,
                ranks=2,
                fences=self.fences.endpoint(member, 0),
                actions=self.actions(number),
                run="run",
                runs=self.runs,
            )
            async with runner:
                for _ in range(epochs):
                    try:
                        await runner.run_epoch()
                    except EpochFailed as failed:
                        return failed
            return None

        return list(await asyncio.gather(rank(0), rank(1)))


def _nothing() -> None:
    """What another rank than the leader does in a leader's phase: it is passed by."""


def test_epochs_of_two_ranks_around_a_guarded_engine(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.late_s = 0.05
    assert asyncio.run(world.run(3)) == [None, None]
    assert world.answers == ["hello@1", "hello@2", "hello@3"]
    assert world.guard.floor == Floor(0, 4)
    verdict = world.verdicts(world.tickets[0].key)
    assert isinstance(verdict, Opened)
    assert verdict.ticket == world.tickets[0]


def test_a_ticket_of_an_epoch_that_is_over_does_not_map_kv_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    asyncio.run(world.run(2))
    with pytest.raises(EngineRefused, match="floor"):
        world.surface.wake_up(["kv_cache"], ticket=world.tickets[0])  # type: ignore[call-arg]


def test_a_peer_that_fails_in_offload_leaves_the_engine_reclaimed_and_usable(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.broken = True
    outcome = asyncio.run(world.run(1))
    for failed in outcome:
        assert isinstance(failed, EpochFailed)
        assert "rank 1 cannot offload" in str(failed)
    assert world.tickets == [], "KV was never asked for"
    assert world.surface.simulated.asleep >= {KV_CACHE}
