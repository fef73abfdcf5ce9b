"""From the signal that kills a rank to the break at the last of the others in its scope."""

import secrets
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.fences.faults.matrix import Actors, actors_if
from tests.fences.faults.ranks import Life, Report, board, listen, started, until_entered
from tests.fences.processes import hosted, rank_of, store_host, tcp_host

SIZE = 4
# What is promised: on tcp and Ray a second, on a store two heartbeats of half a second.
PROMISED_S = 1.0
AT = 8  # By then ranks of one host have found each other.
HOSTS = {"store": store_host, "tcp": tcp_host}


class Case(NamedTuple):
    """Who is killed, over what, and on how many hosts (0: on this one, as it is)."""

    transport: str
    victim: int
    hosts: int = 0


# Where one rank of each host brings the arrivals of all: who brings, and who is brought, seen from
# the same host and from another one.
CASES = {
    "store, a follower": Case("store", 2),
    "store, the leader": Case("store", 0),
    "store, a follower of two hosts": Case("store", 3, hosts=2),
    "store, a leader of two hosts": Case("store", 2, hosts=2),
    "store, alone on its host": Case("store", 2, hosts=4),
    "tcp": Case("tcp", 2),
}


def known_after_s(case: Case, address: Any, actors: Actors | None = None) -> float:
    """All but the victim wait with all the time in the world; then it is killed."""
    with board() as name:
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(4),
            transport=case.transport,
            address=address,
            board=name,
            deadline_s=60.0,
            generations=AT + 1,
            at=AT,
            pace_s=0.03,
            hosts=case.hosts,
        )
        lives = [replace(life, number=n) for n in range(SIZE)]
        lives[case.victim] = replace(lives[case.victim], act="late", late_s=60.0)
        if actors is not None:
            return _known(case, *actors.play_and_kill(lives, case.victim))
        with started(lives) as begun:
            until_entered(life, SIZE - 1)
            killed = time.monotonic()
            begun[case.victim].process.kill()
            others = [each for each in begun if each.report.life.number != case.victim]
            assert listen(others, 30.0) == []
            return _known(case, killed, [each.report for each in others])


def _known(case: Case, killed: float, others: list[Report]) -> float:
    for report in others:
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("dead", (rank_of(case.victim),))
    if case.transport == "store" and case.hosts < SIZE:
        assert any(r.ending is not None and r.ending.together for r in others), "none came together"
    return (
        max(r.ended_at for report in others for r in report.records if r.kind == "broken") - killed
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_killed_rank_is_known_within_a_second(case: Case) -> None:
    """The median of a few: a busy machine may hold one up, and not all."""
    with hosted(HOSTS[case.transport]) as host:
        took = [known_after_s(case, host.address) for _ in range(3)]
    assert statistics.median(took) < PROMISED_S, took


def main() -> None:
    """python -m tests.fences.faults.test_latency: medians over twenty kills of each."""
    for name, case in CASES.items():
        with hosted(HOSTS[case.transport]) as host:
            _say(name, [known_after_s(case, host.address) for _ in range(20)])
    with actors_if(True) as actors:
        _say("ray", [known_after_s(Case("ray", 2), None, actors) for _ in range(20)])


def _say(name: str, took_s: list[float]) -> None:
    ms = sorted(1000 * each for each in took_s)
    print(
        f"{name}: median {statistics.median(ms):.1f} ms, {ms[0]:.1f} to {ms[-1]:.1f} ms "
        f"({len(ms)} kills)",
        flush=True,
    )


if __name__ == "__main__":
    main()
