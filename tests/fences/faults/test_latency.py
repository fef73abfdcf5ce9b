"""From the signal that kills a rank to the break at the last of the others in its scope."""

import secrets
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.fences.faults.matrix import Actors, actors_if
from tests.fences.faults.ranks import Life, Report, board, listen, started, until_entered
from tests.fences.processes import hosted, rank_of, store_host, tcp_host

SIZE = 4
VICTIM = 2
# What is promised: on tcp and Ray a second, on a store two heartbeats of half a second.
PROMISED_S = 1.0
HOSTS = {"store": store_host, "tcp": tcp_host}


def known_after_s(transport: str, address: Any, actors: Actors | None = None) -> float:
    """All but the victim wait with all the time in the world; then it is killed."""
    with board() as name:
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(4),
            transport=transport,
            address=address,
            board=name,
            deadline_s=60.0,
        )
        lives = [replace(life, number=n) for n in range(SIZE)]
        lives[VICTIM] = replace(lives[VICTIM], act="late", late_s=60.0)
        if actors is not None:
            return _known(*actors.play_and_kill(lives, VICTIM))
        with started(lives) as begun:
            until_entered(life, SIZE - 1)
            killed = time.monotonic()
            begun[VICTIM].process.kill()
            others = [each for each in begun if each.report.life.number != VICTIM]
            assert listen(others, 30.0) == []
            return _known(killed, [each.report for each in others])


def _known(killed: float, others: list[Report]) -> float:
    for report in others:
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("dead", (rank_of(VICTIM),))
    return (
        max(r.ended_at for report in others for r in report.records if r.kind == "broken") - killed
    )


@pytest.mark.parametrize("transport", HOSTS)
def test_a_killed_rank_is_known_within_a_second(transport: str) -> None:
    """The median of a few: a busy machine may hold one up, and not all."""
    with hosted(HOSTS[transport]) as host:
        took = [known_after_s(transport, host.address) for _ in range(3)]
    assert statistics.median(took) < PROMISED_S, took


def main() -> None:
    """python -m tests.fences.faults.test_latency: medians over twenty kills of each transport."""
    for transport, host_of in HOSTS.items():
        with hosted(host_of) as host:
            _say(transport, [known_after_s(transport, host.address) for _ in range(20)])
    with actors_if(True) as actors:
        _say("ray", [known_after_s("ray", None, actors) for _ in range(10)])


def _say(transport: str, took_s: list[float]) -> None:
    ms = sorted(1000 * each for each in took_s)
    print(
        f"{transport}: median {statistics.median(ms):.1f} ms, {ms[0]:.1f} to {ms[-1]:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
