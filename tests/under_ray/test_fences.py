"""Fences under Ray, with ranks as real actors of a small local cluster."""

import asyncio
import gc
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from phasesync.core.model import Rank
from phasesync.errors import StoreLost
from phasesync.fences.base import FenceTransport
from phasesync.testing import FenceWorld, check_fence_transport
from tests.fences.faults.ranks import (
    Life,
    Record,
    Report,
    endpoint_of,
    live,
    lives_of,
    together,
    until_entered,
)
from tests.fences.processes import rank_of
from tests.fences.scopes import SCOPE_PROMISES
from tests.fences.scopes import SIZE as SCOPES_SIZE

pytestmark = pytest.mark.timeout(120)
SIZE = 3
VICTIM = 1


class Member:
    """A rank as an actor."""

    async def live(self, life: Life) -> Report:
        report = Report(life)

        def tell(said: Any) -> None:
            if isinstance(said, Record):
                report.records.append(said)

        await live(life, endpoint_of(life), tell)
        return report


@pytest.fixture(scope="module")
def standing(ray: Any) -> Iterator[dict[Rank, Any]]:
    """Actors that are kept from test to test."""
    kept: dict[Rank, Any] = {}
    yield kept
    for actor in kept.values():
        ray.kill(actor)


@pytest.fixture
def actors(ray: Any, standing: dict[Rank, Any]) -> dict[Rank, Any]:
    """A living actor for each rank; those that the last test killed are made again."""
    for rank in map(rank_of, range(SIZE)):
        if rank not in standing:
            standing[rank] = ray.remote(num_cpus=0)(Member).remote()
    return standing


def lives(**bad: Any) -> AbstractContextManager[list[Life]]:
    """A life for each rank; the victim gets what is `bad`."""
    return lives_of(SIZE, VICTIM, bad, transport="ray", address=None, deadline_s=20.0)


def begin(actors: dict[Rank, Any], of: Sequence[Life]) -> list[Any]:
    return [actors[life.rank].live.remote(life) for life in together(of)]


def ended_at(reports: Sequence[Report]) -> float:
    return max(report.came_to[-1].ended_at for report in reports)


def is_dead(reports: Sequence[Report]) -> bool:
    """Whether all say so of the victim."""
    said = {(c.kind, c.ranks) for report in reports if (c := report.cause) is not None}
    return said == {("dead", (rank_of(VICTIM),))} and all(report.cause for report in reports)


def shared(run: str, rank: Rank, incarnation: int) -> FenceTransport:
    """An endpoint of a run whose coordinator serves all runs of a test: one for each takes long."""
    from phasesync.fences.ray import RayFences, start_coordinator

    class Shared(RayFences):
        def _look_up(self) -> Any:
            return start_coordinator("shared", idle_exit_s=2.0)

    return Shared(rank=rank, run=run, incarnation=incarnation)


def test_the_promises_hold_under_ray(ray: Any) -> None:
    asyncio.run(check_fence_transport(shared, together=True))


def test_scopes_under_ray(ray: Any) -> None:
    async def check(promise: Any) -> None:
        world = FenceWorld(shared, SCOPES_SIZE)
        try:
            await world.open()
            await promise(world)
        finally:
            await world.close()

    async def all_at_once() -> None:
        async with asyncio.TaskGroup() as group:
            for promise in SCOPE_PROMISES:
                group.create_task(check(promise), name=promise.__name__)

    asyncio.run(all_at_once())


def test_actors_pass_together(ray: Any, actors: dict[Rank, Any]) -> None:
    with lives() as ranks:
        reports = ray.get(begin(actors, ranks), timeout=60)
    passed = [[record.verdict for record in report.records] for report in reports]
    assert [len(verdicts) for verdicts in passed] == [3] * SIZE
    assert {record.kind for report in reports for record in report.records} == {"open"}
    assert all(verdicts == passed[0] for verdicts in passed)


def test_a_killed_actor_is_known_within_a_second(ray: Any, actors: dict[Rank, Any]) -> None:
    with lives(act="late", late_s=60.0) as ranks:
        answers = begin(actors, ranks)
        until_entered(ranks[0], SIZE - 1)
        killed = time.monotonic()
        ray.kill(actors.pop(rank_of(VICTIM)))
        reports = ray.get([a for n, a in enumerate(answers) if n != VICTIM], timeout=30)
    assert is_dead(reports), reports
    assert ended_at(reports) - killed < 1


def test_an_actor_that_dies_before_it_comes_is_reported_by_who_started_it(
    ray: Any, actors: dict[Rank, Any]
) -> None:
    from phasesync.fences.ray import report_deaths

    async def main(ranks: list[Life]) -> tuple[float, list[Report]]:
        answers = begin(actors, [life for life in ranks if life.number != VICTIM])
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(report_deaths(ranks[0].run, actors))
            await asyncio.to_thread(until_entered, replace(ranks[0], at=0), SIZE - 1)
            killed = time.monotonic()
            ray.kill(actors.pop(rank_of(VICTIM)))
            reports = await asyncio.wait_for(asyncio.gather(*answers), 30)
            reporting.cancel()
        return killed, list(reports)

    with lives() as ranks:
        killed, reports = asyncio.run(main(ranks))
    assert is_dead(reports), reports
    assert ended_at(reports) - killed < 1


def test_a_killed_coordinator_is_lost_at_once(ray: Any, actors: dict[Rank, Any]) -> None:
    from phasesync.fences.ray import NAMESPACE

    with lives(act="late", late_s=60.0) as ranks:
        answers = begin(actors, ranks)
        until_entered(ranks[0], SIZE - 1)
        coordinator = ray.get_actor(f"phasesync.{ranks[0].run}.0", namespace=NAMESPACE)
        killed = time.monotonic()
        ray.kill(coordinator)
        reports = ray.get([a for n, a in enumerate(answers) if n != VICTIM], timeout=30)
        ray.kill(actors.pop(rank_of(VICTIM)))  # It would sleep on.
    assert {report.came_to[-1].kind for report in reports} == {"lost"}
    assert ended_at(reports) - killed < 1


def is_there(ray: Any, run: str) -> bool:
    from phasesync.fences.ray import NAMESPACE

    try:
        ray.get_actor(f"phasesync.{run}.0", namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def test_a_coordinator_that_nobody_needs_ends_itself(ray: Any) -> None:
    from phasesync.fences.ray import RayFences, start_coordinator

    run = secrets.token_hex(4)
    coordinator = start_coordinator(run, idle_exit_s=0.5)

    async def be_there() -> None:
        fences = RayFences(rank=rank_of(0), run=run)
        await fences.connect()
        await asyncio.sleep(1)
        assert is_there(ray, run)
        await fences.close()

    asyncio.run(be_there())
    until = time.monotonic() + 20
    while is_there(ray, run) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_there(ray, run)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(coordinator.address.remote(), timeout=10)


class _Lacking:
    """A coordinator whose worker lacks what it needs."""

    def __init__(self, idle_exit_s: float) -> None:
        raise ModuleNotFoundError("No module named 'phasesync'")

    async def address(self) -> tuple[tuple[str, int], str]:
        return ("127.0.0.1", 1), "never told"


def test_a_coordinator_that_cannot_start_is_told_at_once(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phasesync.fences import ray as under_ray

    async def rank_0() -> None:
        async with asyncio.timeout(under_ray.CONNECT_S / 2):
            await under_ray.RayFences(rank=rank_of(0), run=secrets.token_hex(4)).connect()

    monkeypatch.setattr(under_ray, "_CoordinatorActor", _Lacking)
    with pytest.raises(StoreLost, match="which needs phasesync as well") as told:
        asyncio.run(rank_0())
    assert "(ModuleNotFoundError: No module named 'phasesync')" in str(told.value)


class _Slow:
    async def wait(self) -> None:
        await asyncio.sleep(60)


def test_a_call_that_is_given_up_raises_nothing_later(ray: Any) -> None:
    from phasesync.fences.ray import answer

    said: list[dict[str, Any]] = []

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        actor = ray.remote(num_cpus=0)(_Slow).remote()
        await answer(actor.__ray_ready__.remote(), grace_s=0)
        call = actor.wait.remote()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer(call, grace_s=0), 0.3)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            await call
        await asyncio.sleep(0.1)
        gc.collect()

    asyncio.run(give_up())
    assert said == []
