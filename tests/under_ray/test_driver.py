"""A driver over Ray actors: what they are called for, and what is made of their failures."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from phasesync.core.model import Rank
from phasesync.errors import EpochFailed, FenceBroken, PlanError
from phasesync.testing import FenceWorld
from tests.fences.processes import rank_of

pytestmark = pytest.mark.timeout(120)
SIZE = 4


class Worker:
    """A trainer as an actor: each phase does what it was told beforehand."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.acts: dict[str, str] = {}
        self.errands: list[Any] = []
        self.other: Any = None
        self.cut_off = False

    def will(self, acts: dict[str, str], other: Any = None) -> None:
        self.acts, self.other, self.errands, self.cut_off = acts, other, [], False

    def seen(self) -> tuple[list[Any], bool]:
        return self.errands, self.cut_off

    async def _do(self, errand: Any) -> None:
        self.errands.append(errand)
        act = self.acts.get(errand.phase, "well")
        if act == "fails":
            raise ValueError("no room")
        if act == "exits":
            os._exit(1)
        if act == "asks":
            await self.other.sync.remote(errand)
        if act == "stuck":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cut_off = True
                raise


def _phase(name: str) -> Any:
    async def phase(self: Worker, errand: Any) -> None:
        await self._do(errand)

    phase.__name__ = name
    return phase


PHASES = (
    "sync",
    "trim_cache",
    "resume_weights",
    "stage",
    "load",
    "offload",
    "empty_cache",
    "resume_kv",
    "reclaim",
    "reset",
)
for _name in PHASES:
    setattr(Worker, _name, _phase(_name))


class Pool:
    """Workers that are kept from test to test; the dead are replaced."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actor = ray.remote(num_cpus=0)(Worker)
        self.workers = [self._actor.remote(number) for number in range(SIZE)]

    def ready(self, acts: dict[int, dict[str, str]], other: Any = None) -> list[Any]:
        for number in range(SIZE):
            try:
                self._told(number, acts, other)
            except self._ray.exceptions.RayActorError:
                self.workers[number] = self._actor.remote(number)
                self._told(number, acts, other)
        return self.workers

    def _told(self, number: int, acts: dict[int, dict[str, str]], other: Any) -> None:
        told = self.workers[number].will.remote(acts.get(number, {}), other)
        self._ray.get(told, timeout=60)


@pytest.fixture(scope="module")
def pool(ray: Any) -> Iterator[Pool]:
    pool = Pool(ray)
    yield pool
    for worker in pool.workers:
        ray.kill(worker)


def driver(tmp_path: Path, workers: list[Any], **more: Any) -> Any:
    from phasesync.integrations.ray import RayDriver

    given: dict[str, Any] = {
        "options": {"replica_size": 2},
        "caller_joins": True,
        "runs": tmp_path,
        "run": "driven",
    }
    return RayDriver(more.pop("protocol", "basic"), workers, **{**given, **more})


def failure(tmp_path: Path, workers: list[Any], **more: Any) -> EpochFailed:
    with (
        driver(tmp_path, workers, **more).blocking() as one,
        pytest.raises(EpochFailed) as caught,
    ):
        one.run_epoch()
    return caught.value


def fact(error: EpochFailed) -> tuple[str, tuple[Rank, ...], str | None]:
    return error.cause.kind, error.cause.ranks, error.cause.phase


def test_every_actor_is_called_for_its_phases_with_a_ticket(
    ray: Any, pool: Pool, tmp_path: Path
) -> None:
    workers = pool.ready({})
    with driver(tmp_path, workers).blocking() as one:
        report = one.run_epoch(version=3)
    assert set(report.ranks) == {rank_of(n) for n in range(SIZE)}
    seen = [errands for errands, _ in ray.get([each.seen.remote() for each in workers])]
    assert [[errand.phase for errand in errands] for errands in seen] == [
        ["sync", "offload", "empty_cache", *(["resume_kv"] if number % 2 == 0 else [])]
        for number in range(SIZE)
    ]
    assert {errand.version for errands in seen for errand in errands} == {3}
    assert (seen[2][-1].ticket.fence, seen[2][-1].ticket.count) == ("memory_released", 2)


def test_an_actor_s_own_error_is_the_cause(ray: Any, pool: Pool, tmp_path: Path) -> None:
    error = failure(tmp_path, pool.ready({1: {"offload": "fails"}}))
    assert fact(error) == ("failed", (rank_of(1),), "offload")
    assert (error.cause.error_type, error.cause.error) == ("ValueError", "no room")


def test_an_actor_that_dies_at_work_is_dead(ray: Any, pool: Pool, tmp_path: Path) -> None:
    workers = pool.ready({1: {"offload": "exits"}, 0: {"offload": "stuck"}})
    since = time.monotonic()
    error = failure(tmp_path, workers)
    assert time.monotonic() - since < 15
    assert fact(error) == ("dead", (rank_of(1),), "offload")
    assert error.replace == (rank_of(1),)
    _, cut_off = ray.get(workers[0].seen.remote())
    assert cut_off
    said = (tmp_path / "driven" / "trainer-1.0.jsonl").read_bytes().splitlines()
    fail = next(line for line in map(orjson.loads, said) if line["event"] == "phase.fail")
    assert (fail["phase"], fail["error_type"]) == ("offload", "ActorDiedError")


def test_the_death_of_an_idle_actor_is_known_within_a_second(
    ray: Any, pool: Pool, tmp_path: Path
) -> None:
    """Rank 1 waits for rank 0 where it is shut out from, and the other replica waits for both."""
    workers = pool.ready({0: {"stage": "stuck"}})
    journals = tmp_path / "driven"
    options = {"replica_size": 2, "fence_scope": "world"}

    async def main() -> float:
        async with driver(tmp_path, workers, protocol="colocated", options=options) as one:
            running = asyncio.create_task(one.run_epoch())
            await seen(journals / "trainer-1.0.jsonl", "fence.arrive", "staged")
            await seen(journals / "trainer-2.0.jsonl", "fence.arrive", "memory_released")
            killed = time.monotonic()
            ray.kill(workers[1])
            broken = await seen(journals / "trainer-2.0.jsonl", "fence.break", "memory_released")
            took = time.monotonic() - killed
            assert (broken["cause_kind"], broken["cause_ranks"]) == ("dead", ["trainer/1"])
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return took

    assert asyncio.run(main()) < 1


async def seen(journal: Path, event: str, fence: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            for line in map(orjson.loads, journal.read_bytes().splitlines()):
                if (line["event"], line.get("fence")) == (event, fence):
                    found: dict[str, Any] = line
                    return found
            await asyncio.sleep(0.02)


def test_an_actor_that_another_one_had_asked_is_somebody_else(
    ray: Any, pool: Pool, tmp_path: Path
) -> None:
    engine = ray.remote(num_cpus=0)(Worker).remote(9)
    ray.get(engine.will.remote({"sync": "exits"}), timeout=60)
    error = failure(tmp_path, pool.ready({2: {"sync": "asks"}}, engine))
    assert fact(error) == ("failed", (rank_of(2),), "sync")
    assert (error.cause.error_type, error.replace) == ("ActorDiedError", ())


def test_plain_actions_may_give_answers_of_actors(ray: Any, pool: Pool, tmp_path: Path) -> None:
    from phasesync.integrations.ray import Errand
    from phasesync.runtime import Driver, Turn

    workers = pool.ready({2: {"sync": "fails"}})

    def ask(turn: Turn) -> Any:
        errand = Errand(turn.rank, turn.phase, turn.epoch, turn.version, turn.ticket)
        return workers[turn.rank.number].sync.remote(errand)

    names = ("offload", "empty_cache", "resume_kv")
    plain = Driver(
        "basic",
        ranks=SIZE,
        actions={**dict.fromkeys(names, lambda: None), "sync": ask},
        options={"replica_size": 2},
        caller_joins=True,
        runs=tmp_path,
    )
    with plain.blocking() as one, pytest.raises(EpochFailed) as caught:
        one.run_epoch()
    assert fact(caught.value) == ("failed", (rank_of(2),), "sync")


def test_there_is_an_actor_for_each_rank(ray: Any, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="3 actors for 4 ranks"):
        driver(tmp_path, pool.workers[:3], ranks=4)


def test_a_driver_has_fences_of_its_own(ray: Any, pool: Pool) -> None:
    from phasesync.fences.ray import join_actors

    workers = {rank_of(n): worker for n, worker in enumerate(pool.ready({}))}
    call = FenceWorld(None, SIZE, run="d").call()  # type: ignore[arg-type]

    async def main() -> tuple[int, Any]:
        joined = await join_actors(call, workers, "seen")
        with pytest.raises(FenceBroken) as broken:
            await join_actors(call, workers, "sync", "no errand")
        del workers[rank_of(1)]
        with pytest.raises(PlanError, match="members without an actor: trainer/1"):
            await join_actors(call, workers, "seen")
        return joined.opened.ticket.count, broken.value.cause

    count, cause = asyncio.run(main())
    assert count == SIZE
    assert (cause.kind, cause.error_type) == ("failed", "AttributeError")


class Placed(Worker):
    """A worker that knows its device."""

    def device_name(self) -> str:
        return f"host{self.number}/GPU-{self.number}"

    def synchronise(self) -> None:
        if self.acts.get("synchronise") == "exits":
            os._exit(1)
        self.errands.append("synchronised")

    def collect_ipc(self) -> None:
        self.errands.append("collected")

    def free_bytes(self) -> int:
        return 7 + self.number


def test_actors_are_asked_about_their_devices(ray: Any, tmp_path: Path) -> None:
    workers = [ray.remote(num_cpus=0)(Placed).remote(number) for number in range(2)]
    with driver(tmp_path, workers).blocking() as one:
        one.run_epoch()
        errands, _ = ray.get(workers[1].seen.remote())
        assert [each if each == "synchronised" else each.phase for each in errands] == [
            "sync",
            "offload",
            "empty_cache",
            "synchronised",
        ]
        journal = (tmp_path / "driven" / "trainer-1.0.jsonl").read_bytes().splitlines()
        arrived = next(
            line
            for line in map(orjson.loads, journal)
            if line["event"] == "fence.arrive" and line["fence"] == "memory_released"
        )
        assert (arrived["device"], arrived["free_bytes"]) == ("host1/GPU-1", 8)
        ray.get(workers[1].will.remote({"synchronise": "exits"}))
        with pytest.raises(EpochFailed) as caught:
            one.run_epoch()
    cause = caught.value.cause
    assert (cause.kind, cause.ranks) == ("dead", (rank_of(1),))
    ray.kill(workers[0])
