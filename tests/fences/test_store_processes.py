"""The store fence between real processes, and what is left of it when things die."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from phasesync.core.model import Broken, RootCause
from phasesync.errors import FenceBroken
from phasesync.fences.store import StoreFences
from tests.fences.faults.ranks import (
    Life,
    Report,
    Started,
    endpoint_of,
    listen,
    lives_of,
    play,
    started,
    until_entered,
)
from tests.fences.processes import Host, hosted, rank_of, store_client

SIZE = 4
VICTIM = 2
WITHIN_S = 40.0


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosted() as host:
        yield host


def lives(
    host: Host, common: Mapping[str, Any] | None = None, **bad: Any
) -> AbstractContextManager[list[Life]]:
    """Four ranks with what they have in `common`; the victim also gets what is `bad`."""
    here = {"transport": "store", "address": host.address, **(common or {})}
    return lives_of(SIZE, VICTIM, bad, **here)


def survivors(begun: Sequence[Started]) -> list[Report]:
    return [each.report for each in begun if each.report.life.number != VICTIM]


def cause_of(reports: Sequence[Report]) -> RootCause:
    """The one root cause of all."""
    assert {report.came_to[-1].kind for report in reports} == {"broken"}, reports
    (cause,) = {report.cause for report in reports}
    assert cause is not None
    return cause


def last_end(reports: Sequence[Report]) -> float:
    return max(report.came_to[-1].ended_at for report in reports)


def longest_wait(reports: Sequence[Report]) -> float:
    return max(report.came_to[-1].waited_s for report in reports)


def max_lag(reports: Sequence[Report]) -> float:
    """What a busy machine adds."""
    return max(report.ending.lag_s if report.ending else 0.0 for report in reports)


def no_lag(reports: Sequence[Report]) -> None:
    assert max_lag(reports) < 1.0, reports


def test_ranks_pass_together_and_leave_no_key(host: Host) -> None:
    with lives(host, {"generations": 30}) as ranks:
        reports = play(ranks, WITHIN_S)
    for generation in range(30):
        assert len({report.records[generation].verdict for report in reports}) == 1
    assert {record.kind for report in reports for record in report.records} == {"open"}
    assert [len(report.records) for report in reports] == [30] * SIZE
    no_lag(reports)
    assert host.keys() == []


def test_a_late_rank_does_not_pass_alone(host: Host) -> None:
    with lives(host, {"deadline_s": 0.6}, act="late", late_s=1.5) as ranks:
        reports = play(ranks, WITHIN_S)
    cause = cause_of(reports)
    assert (cause.kind, cause.missing) == ("deadline", (rank_of(VICTIM),))
    no_lag(reports)
    assert host.keys() == []


@pytest.mark.parametrize(
    ("act", "kind"), [("fails", "failed"), ("options", "digest"), ("epoch", "disagreement")]
)
def test_what_one_rank_brings_reaches_all(host: Host, act: str, kind: str) -> None:
    with lives(host, act=act) as ranks:
        reports = play(ranks, WITHIN_S)
    cause = cause_of(reports)
    assert (cause.kind, cause.ranks) == (kind, (rank_of(VICTIM),))
    assert longest_wait(reports) < 2
    assert host.keys() == []


def test_a_killed_rank_is_known_as_soon_as_it_is_reported(host: Host) -> None:
    """Where the ranks cannot see each other's processes."""
    cause = RootCause(kind="dead", ranks=(rank_of(VICTIM),), error="killed by signal 9")

    async def launcher(life: Life, process: Any) -> float:
        """Connects first, as a launcher does, and then tells what it sees."""
        observer = StoreFences.observer(store_client(("tcp", host.port)), run=life.run)
        await observer.connect()
        until_entered(life, SIZE - 1)
        process.join(WITHIN_S)
        assert process.exitcode == -signal.SIGKILL
        reported = time.monotonic()
        await observer.report_lost(cause, incarnation=0)
        await observer.close()
        return reported

    slow = {"deadline_s": 30.0, "is_lonely": True}
    with lives(host, slow, act="killed") as ranks, started(ranks) as begun:
        reported = asyncio.run(launcher(ranks[0], begun[VICTIM].process))
        assert listen(begun, WITHIN_S) == []
    reports = survivors(begun)
    assert cause_of(reports) == cause
    assert last_end(reports) - reported < 0.5 + max_lag(reports)
    no_lag(reports)
    asyncio.run(sweep(host, ranks[0].run))
    assert host.keys() == []


def test_a_killed_neighbour_is_known_without_a_launcher(host: Host) -> None:
    with lives(host, {"deadline_s": 30.0}, act="killed") as ranks, started(ranks) as begun:
        begun[VICTIM].process.join(WITHIN_S)
        died = time.monotonic()
        assert listen(begun, WITHIN_S) == []
    reports = survivors(begun)
    cause = cause_of(reports)
    assert (cause.kind, cause.ranks) == ("dead", (rank_of(VICTIM),))
    assert last_end(reports) - died < 1 + max_lag(reports)
    asyncio.run(sweep(host, ranks[0].run))
    assert host.keys() == []


async def sweep(host: Host, run: str) -> None:
    observer = StoreFences.observer(store_client(("tcp", host.port)), run=run)
    await observer.connect()
    await observer.close()


def test_a_frozen_rank_is_named_at_the_deadline_and_does_not_pass_when_it_wakes(
    host: Host,
) -> None:
    with lives(host, {"deadline_s": 1.0}, act="frozen") as ranks:
        reports = play(ranks, WITHIN_S)
    cause = cause_of(reports)
    assert cause.missing == (rank_of(VICTIM),)
    assert f"{rank_of(VICTIM)} is stopped (process" in (cause.error or "")


def test_a_rank_that_slept_through_many_fences_passes_none_and_leaves_no_key(host: Host) -> None:
    """The others go on without it, break after break, and leave; by then its fence is tidied up."""
    common = {"deadline_s": 0.4, "generations": 24, "comes_back": True}
    with lives(host, common, act="frozen") as ranks:
        reports = play(ranks, WITHIN_S)
    for report in reports:
        assert report.ending is not None, report.records
        came_to = [record.kind for record in report.came_to]
        assert came_to[0] == "open"
        assert "open" not in came_to[1:], report.records
        assert set(came_to[1:]) <= {"broken", "stale"}, report.records
    assert host.keys() == []


def test_a_store_that_stood_still_for_less_than_a_deadline_changes_no_root_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One waits, one fails while the store stands still, and another fails there too: each is told
    the first failure, however much else a store is given less time for."""
    monkeypatch.setattr("phasesync.fences.store.ANSWER_S", 0.2)

    async def check(host: Host) -> None:
        ranks = [
            Life(
                number=n,
                size=3,
                run="stood-still",
                transport="store",
                address=host.address,
                board="",
                deadline_s=9.0,
            )
            for n in range(3)
        ]
        ends = [endpoint_of(life) for life in ranks]
        await asyncio.gather(*(end.connect() for end in ends))
        call = ranks[0].call(0)
        causes = [RootCause(kind="failed", ranks=(rank_of(n),), error="no") for n in range(3)]
        arrivals = [life.arrival(call) for life in ranks]
        waiting = asyncio.ensure_future(ends[0].arrive(call, arrivals[0]))
        while len(await ends[1].missing(call)) > 2:
            await asyncio.sleep(0.01)
        os.kill(host.process.pid, signal.SIGSTOP)
        failing = []
        for n in (1, 2):
            failed = replace(arrivals[n], cause=causes[n])
            failing.append(asyncio.ensure_future(ends[n].fail(call, failed)))
            await asyncio.sleep(0.6)
        assert not any(each.done() for each in (waiting, *failing))
        os.kill(host.process.pid, signal.SIGCONT)
        verdicts = await asyncio.gather(*failing)
        with pytest.raises(FenceBroken) as broken:
            await waiting
        told = {broken.value.cause, *(each.cause for each in verdicts if isinstance(each, Broken))}
        assert len(told) == 1, told
        assert told <= set(causes[1:])
        await asyncio.gather(*(end.close() for end in ends))

    with hosted() as host:
        asyncio.run(check(host))


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_gone_is_lost_within_a_second_of_the_deadline(signal_number: int) -> None:
    with (
        hosted() as host,
        lives(host, {"deadline_s": 2.0}, act="late", late_s=30.0) as ranks,
        started(ranks) as begun,
    ):
        until_entered(ranks[0], SIZE - 1)
        os.kill(host.process.pid, signal_number)
        listen([each for each in begun if each.report.life.number != VICTIM], WITHIN_S)
    reports = survivors(begun)
    assert {report.came_to[-1].kind for report in reports} == {"lost"}, reports
    assert longest_wait(reports) < 2.0 + 1.0 + 0.3 + max_lag(reports)
