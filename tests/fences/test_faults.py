"""A few faults of each kind; `make faults` injects as many as one likes, in `faults`."""

import pytest

from tests.fences.faults.chance import play_many
from tests.fences.faults.in_processes import FAULTS, Hosts, play_one


@pytest.mark.parametrize(
    ("over", "faults"), [("inprocess", 20), ("tcp", 20), ("hash store", 12), ("tcp store", 3)]
)
def test_faults_by_chance(over: str, faults: int) -> None:
    assert play_many(over, 7_000_000, faults).total() >= faults


@pytest.mark.parametrize("name", ["killed at any time", "forks and is killed", "older version"])
def test_faults_of_a_process(name: str) -> None:
    with Hosts() as hosts:
        over, wrong = play_one(hosts, list(FAULTS).index(name), name)
    assert wrong == [], over
