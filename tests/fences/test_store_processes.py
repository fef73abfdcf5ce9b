"""The store fence between real processes, and what is left of it when things die."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from phasesync.core.model import Broken, RootCause
from phasesync.errors import FenceBroken
from phasesync.fences.store import StoreFences
from tests.fences.processes import (
    Host,
    Part,
    Seen,
    arrival_of,
    call_of,
    hosted,
    lonely_store_rank,
    rank_of,
    results,
    running,
    store_client,
    store_rank,
)

SIZE = 4
VICTIM = 2
WITHIN_S = 40.0


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosted() as host:
        yield host


def parts(host: Host, **bad: Any) -> list[Part]:
    """Four ranks; the victim gets what is `bad`."""
    run = secrets.token_hex(4)
    base = Part(number=0, size=SIZE, run=run, address=("tcp", host.port))
    all_of_them = [replace(base, number=n) for n in range(SIZE)]
    all_of_them[VICTIM] = replace(all_of_them[VICTIM], **bad)
    return all_of_them


def causes(seen: dict[int, Seen]) -> set[RootCause]:
    assert {who.last[0] for who in seen.values()} == {"broken"}, seen
    return {who.last[1] for who in seen.values()}


def max_lag(seen: dict[int, Seen]) -> float:
    """What a busy machine adds."""
    return max(who.lag_s for who in seen.values())


def no_lag(seen: dict[int, Seen]) -> None:
    assert max_lag(seen) < 1.0, seen


def test_ranks_pass_together_and_leave_no_key(host: Host) -> None:
    with running(store_rank, [replace(p, generations=30) for p in parts(host)]) as started:
        seen = results(started, WITHIN_S)
    assert len(seen) == SIZE
    assert all(len(who.outcomes) == 30 for who in seen.values())
    for generation in range(30):
        assert len({who.outcomes[generation] for who in seen.values()}) == 1
    no_lag(seen)
    assert host.keys() == []


def test_a_late_rank_does_not_pass_alone(host: Host) -> None:
    late = [replace(p, deadline_s=0.6) for p in parts(host, act="late", late_s=1.5)]
    with running(store_rank, late) as started:
        seen = results(started, WITHIN_S)
    assert len(seen) == SIZE
    (cause,) = causes(seen)
    assert cause.kind == "deadline"
    assert cause.missing == (rank_of(VICTIM),)
    no_lag(seen)
    assert host.keys() == []


@pytest.mark.parametrize(
    ("act", "kind"), [("fails", "failed"), ("digest", "digest"), ("epoch", "disagreement")]
)
def test_what_one_rank_brings_reaches_all(host: Host, act: str, kind: str) -> None:
    with running(store_rank, parts(host, act=act)) as started:
        seen = results(started, WITHIN_S)
    assert len(seen) == SIZE
    (cause,) = causes(seen)
    assert (cause.kind, cause.ranks) == (kind, (rank_of(VICTIM),))
    assert max(who.waited_s[-1] for who in seen.values()) < 2
    assert host.keys() == []


def test_a_killed_rank_is_known_as_soon_as_it_is_reported(host: Host) -> None:
    slow = [replace(p, deadline_s=30.0) for p in parts(host, act="killed")]
    cause = RootCause(kind="dead", ranks=(rank_of(VICTIM),), error="killed by signal 9")

    async def launcher(process: Any) -> float:
        """Connects first, as a launcher does, and then tells what it sees."""
        observer = StoreFences.observer(store_client(("tcp", host.port)), run=slow[0].run)
        await observer.connect()
        host.wait_until_at(slow[0], 1, SIZE - 1)
        process.join(WITHIN_S)
        assert process.exitcode == -signal.SIGKILL
        reported = time.monotonic()
        await observer.report_lost(cause, incarnation=0)
        await observer.close()
        return reported

    with running(lonely_store_rank, slow) as started:
        reported = asyncio.run(launcher(started[VICTIM][0]))
        seen = results(started, WITHIN_S)
    assert sorted(seen) == [0, 1, 3]
    assert causes(seen) == {cause}
    assert max(who.ended_at[-1] for who in seen.values()) - reported < 0.5 + max_lag(seen)
    no_lag(seen)
    asyncio.run(sweep(host, slow[0].run))
    assert host.keys() == []


def test_a_killed_neighbour_is_known_without_a_launcher(host: Host) -> None:
    slow = [replace(p, deadline_s=30.0) for p in parts(host, act="killed")]
    with running(store_rank, slow) as started:
        started[VICTIM][0].join(WITHIN_S)
        died = time.monotonic()
        seen = results(started, WITHIN_S)
    assert sorted(seen) == [0, 1, 3]
    (cause,) = causes(seen)
    assert (cause.kind, cause.ranks) == ("dead", (rank_of(VICTIM),))
    assert max(who.ended_at[-1] for who in seen.values()) - died < 1 + max_lag(seen)
    asyncio.run(sweep(host, slow[0].run))
    assert host.keys() == []


async def sweep(host: Host, run: str) -> None:
    observer = StoreFences.observer(store_client(("tcp", host.port)), run=run)
    await observer.connect()
    await observer.close()


def test_a_frozen_rank_is_named_at_the_deadline_and_does_not_pass_when_it_wakes(
    host: Host,
) -> None:
    with running(store_rank, [replace(p, deadline_s=1.0) for p in parts(host, act="frozen")]) as s:
        living = {n: s[n] for n in s if n != VICTIM}
        seen = results(living, WITHIN_S)
        os.kill(s[VICTIM][0].pid, signal.SIGCONT)
        seen |= results({VICTIM: s[VICTIM]}, WITHIN_S)
    assert len(seen) == SIZE
    (cause,) = causes(seen)
    assert cause.missing == (rank_of(VICTIM),)
    assert f"{rank_of(VICTIM)} is stopped (process" in (cause.error or "")


def test_a_store_that_stood_still_for_less_than_a_deadline_changes_no_root_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One waits, one fails while the store stands still, and another fails there too: each is told
    the first failure, however much else a store is given less time for."""
    monkeypatch.setattr("phasesync.fences.store.ANSWER_S", 0.2)

    async def check(host: Host) -> None:
        base = Part(number=0, size=3, run="stood-still", address=("tcp", host.port), deadline_s=9.0)
        ends = [
            StoreFences(store_client(base.address), rank=rank_of(n), run=base.run) for n in range(3)
        ]
        await asyncio.gather(*(end.connect() for end in ends))
        call = call_of(base, 0)
        causes = [RootCause(kind="failed", ranks=(rank_of(n),), error="no") for n in range(3)]
        arrivals = [arrival_of(replace(base, number=n), call) for n in range(3)]
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
    with hosted() as host:
        waiting = [replace(p, deadline_s=2.0) for p in parts(host, act="late", late_s=30.0)]
        with running(store_rank, waiting) as started:
            host.wait_until_at(waiting[0], 1, SIZE - 1)
            os.kill(host.process.pid, signal_number)
            del started[VICTIM]
            seen = results(started, WITHIN_S)
    assert sorted(seen) == [0, 1, 3]
    assert {who.last[0] for who in seen.values()} == {"lost"}, seen
    assert max(who.waited_s[-1] for who in seen.values()) < 2.0 + 1.0 + 0.3 + max_lag(seen)
