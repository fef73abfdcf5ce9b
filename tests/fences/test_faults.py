"""A few faults of each kind; `make faults` injects as many as one likes, in `faults`."""

import asyncio
import random

import pytest

from tests.fences.faults.chance import GROUNDS, Scenario, play_many
from tests.fences.faults.in_processes import FAULTS, Hosts, play_one


@pytest.mark.parametrize(
    ("over", "faults"), [("inprocess", 20), ("tcp", 20), ("hash store", 12), ("tcp store", 3)]
)
def test_faults_by_chance(over: str, faults: int) -> None:
    assert play_many(over, 7_000_000, faults).total() >= faults


def test_a_death_is_told_though_the_only_other_rank_has_left() -> None:
    """Else what is found broken is the teller's own transport."""

    async def check() -> None:
        async with GROUNDS["hash store"]() as ground:
            numbers = (n for n in range(100) if random.Random(n).randint(2, 5) == 2)
            scenario = Scenario(next(numbers), ground)
            first, second = scenario.world.ranks
            scenario.faulty = {(first, 1): "leaves", (second, 2): "dies"}
            await scenario.play()
            assert scenario.injected == {"leaves": 1, "dies": 1}

    asyncio.run(check())


@pytest.mark.parametrize("name", ["killed at any time", "forks and is killed", "older version"])
def test_faults_of_a_process(name: str) -> None:
    with Hosts() as hosts:
        over, wrong = play_one(hosts, list(FAULTS).index(name), name)
    assert wrong == [], over
