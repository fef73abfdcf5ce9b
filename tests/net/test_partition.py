"""Two hosts and a cable between them that is cut, mended, or slow."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.fences.faults.promises import broken_promises
from tests.fences.faults.ranks import Life, Report, Started, board, listen, started, until_entered
from tests.fences.processes import hosted, rank_of
from tests.net.namespaces import Cable, cable
from tests.net.places import Place, host_in, rank_process

SIZE = 4
NEAR, FAR = (0, 1), (2, 3)
WITHIN_S = 60.0
SILENT_S = 12.0  # The kernel gives a silent host up after 5 s; a busy machine says so later.


@pytest.fixture
def link() -> Iterator[Cable]:
    with cable() as link:
        yield link


@contextmanager
def ranks(link: Cable, transport: str, *, late: int | None = None, **more: Any) -> Any:
    """Four ranks, two on each host; the fences' own host is the near one. All but `late` wait."""
    with board() as name, hosted(host_in(transport, link.near, link.address)) as host:
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(4),
            transport=transport,
            address=None,
            board=name,
            **more,
        )
        places = {n: link.near if n in NEAR else link.far for n in range(SIZE)}
        lives = [
            replace(life, number=n, address=Place(places[n], link.address, host.port))
            for n in range(SIZE)
        ]
        if late is not None:
            lives[late] = replace(lives[late], act="late", late_s=1.0)
        with started(lives, rank_process) as begun:
            if late is not None:
                until_entered(life, SIZE - 1)
            yield begun


def ended(begun: Sequence[Started]) -> list[Report]:
    assert listen(begun, WITHIN_S) == []
    return [each.report for each in begun]


def _lag_s(report: Report) -> float:
    return report.ending.lag_s if report.ending else 0.0


@pytest.mark.parametrize("transport", ["store", "tcp"])
def test_a_partition_is_known_on_both_sides_and_nobody_passes(link: Cable, transport: str) -> None:
    with ranks(link, transport, late=3, deadline_s=3.0) as begun:
        link.cut()
        reports = ended(begun)
        assert broken_promises(reports[:2], culprits=FAR) == []
        for report in reports[:2]:
            assert (report.cause and report.cause.kind) == "deadline"
            assert (report.cause and report.cause.missing) == (rank_of(3),)
        for report in reports[2:]:
            assert report.records[1].kind == "lost", report.records
            waited_s = report.records[1].waited_s - report.life.late_s
            assert waited_s < 3.0 + 1.0 + 0.5 + _lag_s(report)


@pytest.mark.parametrize("transport", ["store", "tcp"])
def test_a_host_that_is_silent_is_unavailable_and_not_dead(link: Cable, transport: str) -> None:
    """The kernel tells, long before the deadline; and its ranks are told as well."""
    with ranks(link, transport, late=3, deadline_s=40.0) as begun:
        link.cut()
        reports = ended(begun)
        assert broken_promises(reports[:2], culprits=FAR) == []
        for report in reports[:2]:
            assert report.cause is not None
            assert report.cause.kind == "unavailable"
            assert set(report.cause.ranks) <= {rank_of(n) for n in FAR}
        for report in reports[2:]:
            assert report.records[1].kind == "lost", report.records
        assert max(report.records[1].waited_s for report in reports) < SILENT_S


@pytest.mark.parametrize("transport", ["store", "tcp"])
def test_a_cable_that_is_mended_in_time_has_done_no_harm(link: Cable, transport: str) -> None:
    with ranks(link, transport, late=3, deadline_s=30.0) as begun:
        link.cut()
        assert len(listen(begun, 2.0)) == SIZE
        link.mend()
        reports = ended(begun)
        assert broken_promises(reports) == []
        assert all(len(report.records) == 3 for report in reports)


@pytest.mark.parametrize("transport", ["store", "tcp"])
def test_a_slow_link_makes_fences_slow_and_nothing_else(link: Cable, transport: str) -> None:
    with ranks(link, transport, late=3, deadline_s=40.0, generations=4) as begun:
        link.slow("48kbit", "2s")
        reports = ended(begun)
        assert broken_promises(reports) == []
        assert all(len(report.records) == 4 for report in reports)
