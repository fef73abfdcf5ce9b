"""One rank behind a proxy that stalls, resets or half-opens its connections."""

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fences.faults.promises import broken_promises
from tests.fences.faults.ranks import Life, Report, board, listen, started, until_entered
from tests.fences.processes import Host, hosted, rank_of, store_host, tcp_host
from tests.net.proxy import Proxy

SIZE = 4
VICTIM, LATE = 2, 3
DEADLINE_S = 2.0
WITHIN_S = 40.0
HOSTS = {"store": store_host, "tcp": tcp_host}


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[tuple[str, Host]]:
    with hosted(HOSTS[request.param]) as host:
        yield request.param, host


def port_of(host: tuple[str, Host]) -> int:
    transport, there = host
    return there.port if transport == "store" else int(there.address[1])


@pytest.fixture
def stamps() -> Iterator[str]:
    with board() as name:
        yield name


def played(
    host: tuple[str, Host], stamps: str, does: str, *, late_s: float, then: str = ""
) -> list[Report]:
    """The victim waits at a fence behind the proxy, which then `does` something."""
    transport, _ = host
    with Proxy(("127.0.0.1", port_of(host))) as proxy:
        at = {"store": port_of(host), "tcp": ("127.0.0.1", port_of(host))}
        behind = {"store": proxy.port, "tcp": ("127.0.0.1", proxy.port)}
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(4),
            transport=transport,
            address=at[transport],
            board=stamps,
            deadline_s=DEADLINE_S,
        )
        lives = [replace(life, number=n) for n in range(SIZE)]
        lives[VICTIM] = replace(lives[VICTIM], address=behind[transport])
        lives[LATE] = replace(lives[LATE], act="late", late_s=late_s)
        with started(lives) as begun:
            until_entered(life, SIZE - 1)
            ACTS[does](proxy)
            if then:
                listen(begun, DEADLINE_S / 2)
                ACTS[then](proxy)
            hung = listen([each for each in begun if each.report.life.number != VICTIM], WITHIN_S)
            hung += listen([begun[VICTIM]], WITHIN_S)
            assert hung == []
            return [each.report for each in begun]


def _half_open_all(proxy: Proxy) -> None:
    for number in range(proxy.connections):
        proxy.half_open(number)


ACTS = {
    "stall": Proxy.stall,
    "flow": Proxy.flow,
    "reset": Proxy.reset,
    "half-open": _half_open_all,
}


def test_a_stall_that_ends_in_time_does_no_harm(host: tuple[str, Host], stamps: str) -> None:
    reports = played(host, stamps, "stall", late_s=0.2, then="flow")
    assert broken_promises(reports) == []
    assert all(len(report.records) == 3 for report in reports)


@pytest.mark.parametrize("does", ["stall", "reset", "half-open"])
def test_a_connection_that_is_gone_stops_its_rank_alone_and_is_named(
    host: tuple[str, Host], stamps: str, does: str
) -> None:
    """The last rank comes after it: the fence may open for those who can hear so."""
    reports = played(host, stamps, does, late_s=0.5)
    assert broken_promises(_without_victim(reports), culprits=[VICTIM]) == []
    victim = reports[VICTIM]
    assert victim.last.kind == "lost", victim.records
    lag_s = victim.ending.lag_s if victim.ending else 0.0
    assert victim.last.waited_s < DEADLINE_S + 1.0 + 0.5 + lag_s
    for report in _without_victim(reports):
        assert report.cause is not None, report.records
        assert rank_of(VICTIM) in (*report.cause.ranks, *report.cause.missing)


def _without_victim(reports: list[Report]) -> list[Report]:
    return [report for report in reports if report.life.number != VICTIM]
