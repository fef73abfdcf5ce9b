"""The ready-made actions: an epoch, a recovery from wherever it stopped, and the floor."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from phasesync.core.model import Epoch, FenceKey, FenceName, Ticket, Version
from phasesync.engines.actions import engine_actions
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.port import LedgerPort
from phasesync.engines.simulated import Budget, Quirks, SimulatedDriver, SimulatedEngine
from phasesync.engines.tickets import TicketRules
from phasesync.errors import EngineError, EngineRefused

REAL = Quirks()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


class Leader:
    """A leader that passes each fence alone and goes through its phases."""

    def __init__(self, quirks: Quirks = REAL) -> None:
        self.engine = SimulatedEngine([Budget(16)], quirks=quirks)
        self.port = LedgerPort(
            SimulatedDriver(self.engine), tickets=TicketRules(run="run", scope="replica/0")
        )
        self.actions = engine_actions(
            self.port, buckets=lambda turn: [str(turn.version)], serve=self.served
        )
        self.marks: list[dict[str, Any]] = []
        self.answers: list[str] = []
        self.generation = 0
        self.absent = 0

    async def served(self, turn: Any) -> None:
        self.answers.append(self.engine.generate("hello"))

    async def does(self, phase: str, fence: str | None, epoch: int) -> None:
        if fence is not None:
            self.generation += 1
        turn = SimpleNamespace(
            ticket=Ticket(
                key=FenceKey("run", 0, "replica/0", self.generation),
                fence=FenceName(fence or "rollout_over"),
                epoch=Epoch(epoch),
                count=1,
                hash="0" * 64,
            ),
            version=epoch,
            epoch=epoch,
            absent=self.absent,
            progress=lambda **marks: self.marks.append(marks),
        )
        await self.actions[phase](turn)

    async def epoch(self, number: int, *, until: str = "sleep") -> None:
        for phase, fence in (
            ("resume_weights", "ready_for_weights"),
            ("load", "staged"),
            ("resume_kv", "memory_released"),
            ("serve", "ready_to_serve"),
            ("sleep", None),
        ):
            await self.does(phase, fence, number)
            if phase == until:
                return


async def asleep(leader: Leader) -> None:
    await leader.port.pause()
    await leader.port.release((WEIGHTS, KV_CACHE))


def test_epochs_end_where_they_began_one_version_later_and_raise_the_floor() -> None:
    leader = Leader()

    async def story() -> None:
        await asleep(leader)
        for number in (1, 2, 3):
            await leader.epoch(number)
            status = await leader.port.status()
            assert status.asleep == {WEIGHTS, KV_CACHE}
            assert (status.version, status.floor) == (number, Floor(0, number + 1))

    run(story())
    assert leader.answers == ["hello@1", "hello@2", "hello@3"]
    assert [mark["version"] for mark in leader.marks] == [1, 2, 3]


@pytest.mark.parametrize("quirks", [REAL, Quirks(sleeps_whole=True)])
@pytest.mark.parametrize("until", ["resume_weights", "load", "resume_kv", "serve"])
def test_recovery_puts_the_engine_back_from_wherever_the_epoch_stopped(
    until: str, quirks: Quirks
) -> None:
    leader = Leader(quirks)

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until=until)
        await leader.does("reclaim", "let_go", 1)
        assert (await leader.port.status()).asleep == {WEIGHTS, KV_CACHE}
        leader.engine.devices[0].take("all there is", 16)  # What it says is so.
        leader.engine.devices[0].give("all there is")
        await leader.epoch(1)

    run(story())
    assert leader.answers[-1] == "hello@1"


def test_an_engine_that_is_half_awake_maps_kv_before_it_releases_only_with_a_ticket_for_it() -> (
    None
):
    leader = Leader(Quirks(sleeps_whole=True))

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until="load")
        with pytest.raises(EngineRefused, match="releases only"):
            await leader.port.release((WEIGHTS,))
        with pytest.raises(EngineRefused, match=r"cannot remap.*'memory_released' or 'let_go'"):
            await leader.does("reclaim", "stopped", 1)
        assert (await leader.port.status()).asleep == {KV_CACHE}
        await leader.does("reclaim", "let_go", 1)

    run(story())
    assert leader.engine.calls[-4:-1] == [
        "wake(kv_cache)",
        "pause(keep)",
        "sleep(weights, kv_cache)",
    ]


def test_an_engine_that_is_half_awake_is_left_alone_where_a_rank_died() -> None:
    """What the rank held may still be in the way, and a failed wake would be the engine's end."""
    leader = Leader(Quirks(sleeps_whole=True))
    leader.absent = 1

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until="load")
        with pytest.raises(EngineRefused, match="releases only"):
            await leader.does("reclaim", "let_go", 1)
        status = await leader.port.status()
        assert status.asleep == {KV_CACHE}
        assert status.health == "usable"

    run(story())
    assert "wake(kv_cache)" not in leader.engine.calls


def test_an_engine_that_cannot_map_kv_for_its_release_is_not_asked_twice() -> None:
    leader = Leader(Quirks(sleeps_whole=True))

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until="load")
        leader.engine.devices[0].take("a trainer that did not let go", 10)
        with pytest.raises(EngineError, match="out of memory"):
            await leader.does("reclaim", "let_go", 1)
        with pytest.raises(EngineError, match=r"cannot be reclaimed, it is unknown.*replace it"):
            await leader.does("quiesce", "stopped", 1)

    run(story())


def test_recovery_abandons_an_update_that_is_open() -> None:
    leader = Leader()

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until="resume_weights")
        await leader.port.begin(Version(1))
        await leader.port.load("half")
        await leader.does("reclaim", "let_go", 1)
        await leader.epoch(1)

    run(story())
    assert leader.answers == ["hello@1"]


def test_a_ticket_from_before_a_recovery_is_spent() -> None:
    leader = Leader()

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1, until="resume_weights")
        early = leader.generation
        await leader.does("reclaim", "let_go", 1)
        leader.generation = early - 1
        with pytest.raises(EngineRefused, match="has come to"):
            await leader.epoch(1, until="resume_weights")

    run(story())


def test_an_engine_that_nothing_is_known_of_cannot_be_reclaimed() -> None:
    leader = Leader()

    async def story() -> None:
        await asleep(leader)
        leader.engine.devices[0].take("a peer's parameters", 10)
        await leader.epoch(1, until="load")
        with pytest.raises(EngineError, match="out of memory"):
            await leader.does("resume_kv", "memory_released", 1)
        with pytest.raises(EngineError, match=r"cannot be reclaimed, it is unknown.*replace it"):
            await leader.does("reclaim", "let_go", 1)

    run(story())


def test_buckets_may_come_as_they_are_made() -> None:
    leader = Leader()

    async def stream(turn: Any) -> AsyncIterator[object]:
        for _ in range(3):
            yield str(turn.version)

    leader.actions = engine_actions(leader.port, buckets=stream)

    async def story() -> None:
        await asleep(leader)
        await leader.epoch(1)

    run(story())
    assert leader.engine.calls.count("update(1)") == 3
