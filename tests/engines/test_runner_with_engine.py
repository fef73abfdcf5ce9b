"""A rank's runner around a guarded engine: real tickets, verdicts read from the journals."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Opened, Rank, RoleName
from phasesync.engines.actions import engine_actions
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import TicketRules
from phasesync.engines.verdicts import JournalVerdicts, StoreVerdicts
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


def test_a_store_tells_the_verdict_that_a_guard_in_another_process_asks_for() -> None:
    """Two ranks over a real store; a reader with a connection of its own."""
    torch = pytest.importorskip("torch")
    from phasesync.core.model import Arrival, Digest, Epoch, FenceCall, FenceKey, FenceName, Version
    from phasesync.fences.store import StoreFences

    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    members = (Rank(RoleName("trainer"), 0), Rank(RoleName("trainer"), 1))
    key = FenceKey("run", 0, "replica/0", 0)
    reader = StoreVerdicts(store)

    async def pass_it() -> list[Opened]:
        ranks = [StoreFences(store, rank=member, run="run") for member in members]
        call = FenceCall(
            key=key,
            fence=FenceName("memory_released"),
            epoch=Epoch(4),
            version=Version(4),
            digest=Digest("d"),
            members=members,
            deadline_s=10,
        )
        for rank in ranks:
            await rank.connect()
        assert reader(key) is None
        told = await asyncio.gather(
            *(
                rank.arrive(
                    call,
                    Arrival(
                        rank=member,
                        incarnation=0,
                        nonce=str(member),
                        fence=call.fence,
                        epoch=call.epoch,
                        version=call.version,
                        digest=call.digest,
                        seq=1,
                    ),
                )
                for rank, member in zip(ranks, members, strict=True)
            )
        )
        found = reader(key)
        assert isinstance(found, Opened)
        assert found.ticket == told[0].ticket == told[1].ticket
        for rank in ranks:
            await rank.close()
        return list(told)

    asyncio.run(pass_it())


def test_a_guard_waits_a_moment_for_the_journal_of_whoever_closed_the_fence(tmp_path: Path) -> None:
    world = World(tmp_path)
    asyncio.run(world.run(1))
    key = world.tickets[0].key
    lines = [(path, path.read_bytes()) for path in sorted(tmp_path.rglob("*.jsonl"))]
    for path, _ in lines:
        path.write_bytes(b"")

    def write_late() -> None:
        time.sleep(0.05)
        for path, content in lines:
            path.write_bytes(content)

    writer = threading.Thread(target=write_late)
    writer.start()
    assert JournalVerdicts(tmp_path)(key) is None
    assert isinstance(JournalVerdicts(tmp_path, within_s=5.0)(key), Opened)
    writer.join()
