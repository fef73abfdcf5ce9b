"""Fences under Ray, with ranks as real actors of a small local cluster."""

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank
from phasesync.errors import FenceBroken
from phasesync.testing import check_fence_transport
from tests.fences.processes import Part, Seen, call_of, live, rank_of

ray: Any = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(180),
]
SIZE = 3
VICTIM = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
    )
    yield
    ray.shutdown()


class Member:
    """A rank as an actor."""

    async def live(self, part: Part) -> Seen:
        from phasesync.fences.ray import RayFences

        return await live(part, RayFences(rank=rank_of(part.number), run=part.run))

    def work(self, act: str) -> str:
        if act == "fails":
            raise ValueError("no room")
        if act == "exits":
            os._exit(1)
        if act == "stuck":
            time.sleep(60)
        return "done"


def members(size: int = SIZE) -> dict[Rank, Any]:
    actor = ray.remote(Member)
    return {rank_of(n): actor.options(num_cpus=0).remote() for n in range(size)}


def parts(**bad: Any) -> list[Part]:
    run = secrets.token_hex(4)
    base = Part(number=0, size=SIZE, run=run, address=None, deadline_s=20.0)
    return [replace(base, number=n, **(bad if n == VICTIM else {})) for n in range(SIZE)]


def test_the_promises_hold_under_ray(cluster: None) -> None:
    from phasesync.fences.ray import RayFences

    def make(run: str, rank: Rank, incarnation: int) -> RayFences:
        return RayFences(rank=rank, run=run, incarnation=incarnation)

    asyncio.run(check_fence_transport(make))


def test_actors_pass_together(cluster: None) -> None:
    actors = members()
    seen = ray.get([actors[rank_of(p.number)].live.remote(p) for p in parts()], timeout=60)
    assert [len(who.outcomes) for who in seen] == [3] * SIZE
    assert len({tuple(who.outcomes) for who in seen}) == 1


async def all_wait_for_the_victim(part: Part) -> None:
    from phasesync.fences.ray import RayFences

    onlooker = RayFences(rank=rank_of(99), run=part.run)
    await onlooker.connect()
    while await onlooker.missing(call_of(part, 1)) != (rank_of(VICTIM),):
        await asyncio.sleep(0.05)
    await onlooker.close()


def test_a_killed_actor_is_known_within_a_second(cluster: None) -> None:
    actors = members()
    given = parts(act="late", late_s=60.0)
    answers = [actors[rank_of(p.number)].live.remote(p) for p in given]
    asyncio.run(all_wait_for_the_victim(given[0]))
    killed = time.monotonic()
    ray.kill(actors[rank_of(VICTIM)])
    seen = ray.get([a for n, a in enumerate(answers) if n != VICTIM], timeout=30)
    causes = {who.last[1] for who in seen}
    (cause,) = causes
    assert (cause.kind, cause.ranks) == ("dead", (rank_of(VICTIM),))
    assert max(who.ended_at[-1] for who in seen) - killed < 1


def test_a_killed_coordinator_is_lost_at_once(cluster: None) -> None:
    from phasesync.fences.ray import NAMESPACE

    given = parts(act="late", late_s=60.0)
    actors = members()
    answers = [actors[rank_of(p.number)].live.remote(p) for p in given]
    asyncio.run(all_wait_for_the_victim(given[0]))
    coordinator = ray.get_actor(f"phasesync.{given[0].run}.0", namespace=NAMESPACE)
    killed = time.monotonic()
    ray.kill(coordinator)
    seen = ray.get([a for n, a in enumerate(answers) if n != VICTIM], timeout=30)
    assert {who.last[0] for who in seen} == {"lost"}
    assert max(who.ended_at[-1] for who in seen) - killed < 1


def join_of(acts: dict[int, str], deadline_s: float = 20.0) -> Any:
    """Each member's call, joined: the results, or the root cause."""
    from phasesync.fences.ray import RayDriver

    part = Part(number=0, size=SIZE, run="d", address=None, deadline_s=deadline_s)
    actors = members()

    class Acting:
        def __init__(self, number: int) -> None:
            self.work = self
            self._number = number

        def remote(self) -> Any:
            act = acts.get(self._number, "well")
            return actors[rank_of(self._number)].work.remote(act)

    driver = RayDriver({rank: Acting(rank.number) for rank in actors})

    async def run() -> Any:
        try:
            return (await driver.run(call_of(part, 0), "work")).results
        except FenceBroken as error:
            return error.cause

    return asyncio.run(run())


def test_a_driver_joins_all_actors(cluster: None) -> None:
    assert join_of({}) == {rank_of(n): "done" for n in range(SIZE)}


@pytest.mark.parametrize(("act", "kind"), [("fails", "failed"), ("exits", "dead")])
def test_a_driver_names_the_first_failure(cluster: None, act: str, kind: str) -> None:
    since = time.monotonic()
    cause = join_of({VICTIM: act, 0: "stuck"})
    assert (cause.kind, cause.ranks) == (kind, (rank_of(VICTIM),))
    if act == "fails":
        assert (cause.error_type, cause.error) == ("ValueError", "no room")
    assert time.monotonic() - since < 20


def test_a_driver_names_who_is_stuck(cluster: None) -> None:
    cause = join_of({VICTIM: "stuck"}, deadline_s=5.0)
    assert (cause.kind, cause.missing) == ("deadline", (rank_of(VICTIM),))
