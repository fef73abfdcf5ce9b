"""A rank killed or frozen between any two operations, and what real processes can do besides."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.fences.faults.promises import broken_promises
from tests.fences.faults.ranks import Life, Report, board, play
from tests.fences.processes import Host, hosted, store_host, tcp_host

SIZE = 3
VICTIM = 1
HOSTS = {"store": store_host, "tcp": tcp_host}
# As many as the longest arrival has: register, append, count, judge, decide, tidy up.
POINTS = {"store": 32, "tcp": 6}


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[tuple[str, Host]]:
    with hosted(HOSTS[request.param]) as host:
        yield request.param, host


def played(host: tuple[str, Host], size: int = SIZE, **victim: Any) -> list[Report]:
    transport, there = host
    with board() as name:
        base = Life(
            number=0,
            size=size,
            run=secrets.token_hex(4),
            transport=transport,
            address=there.address,
            board=name,
            deadline_s=1.5,
        )
        lives = [replace(base, number=n) for n in range(size)]
        lives[VICTIM] = replace(lives[VICTIM], **victim)
        reports = play(lives)
        assert broken_promises(reports, culprits=[VICTIM]) == []
        return reports


@pytest.mark.parametrize("late_s", [0.0, 0.2], ids=["among the first", "the last"])
@pytest.mark.parametrize("act", ["killed at a point", "frozen at a point"])
def test_between_any_two_operations(host: tuple[str, Host], act: str, late_s: float) -> None:
    def one(point: int) -> bool:
        reports = played(host, act=act, point=point, late_s=late_s)
        return reports[VICTIM].ending is None or reports[0].cause is not None

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(one, range(POINTS[host[0]]))) >= 3
