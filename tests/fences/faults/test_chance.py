"""`PHASESYNC_FAULTS` faults by chance, over every transport; `make faults` says how many."""

import os
from collections import Counter

import pytest

from tests.fences.faults.campaign import OVER, RAY, faults_over, summary

COUNT = int(os.environ.get("PHASESYNC_FAULTS", "100"))
TALLIES: dict[str, Counter[str]] = {}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("over", OVER)
def test_faults_by_chance(over: str, request: pytest.FixtureRequest) -> None:
    if over in RAY:
        request.getfixturevalue("shared_ray")
    count = max(round(COUNT * OVER[over]), 1)
    TALLIES[over] = faults_over(over, 0, count)
    assert TALLIES[over].total() >= count


def test_as_many_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{summary(TALLIES)}")
    if len(TALLIES) == len(OVER):
        assert sum(tally.total() for tally in TALLIES.values()) >= COUNT - len(OVER)
