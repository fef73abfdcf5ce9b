"""Slow is told from silent, progress extends patience, and the report says where to look."""

import asyncio
import ctypes
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.fence_beats import Ask, Beat, Sign, patience, told
from phasesync.core.model import Rank, RoleName, RootCause
from phasesync.errors import EpochFailed
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.runtime import EpochReport, RankRunner
from phasesync.spec import loads
from tests.fences.faults.ranks import Life, board, play
from tests.fences.processes import SERVER, end, hosted, rank_of, store_client
from tests.fences.test_conformance import tcp_store

T0, T1 = (Rank(RoleName("trainer"), n) for n in range(2))
SLOWLY = """
phasesync: 1
protocol: slowly
summary: One fence behind a phase that may take long, and one at the end.
roles:
  trainer: {place: one per device}
phases:
  - step: {}
  - fence: stepped
    scope: world
    deadline_s: DEADLINE
  - rest: {}
  - fence: rested
    scope: world
    deadline_s: 60
"""


# --- The words ---------------------------------------------------------------------------------


def test_a_report_says_last_phase_since_when_alive_or_not_and_where() -> None:
    beat = Beat(7, "phase", "offload", 12.0, 3.0, "/x/train.py:9 in offload")
    assert told(Sign(beat, 0.5), "stopped (process 4)") == (
        "alive, in phase 'offload' for 12.5 s, last progress 3.5 s ago, "
        "at /x/train.py:9 in offload (stopped (process 4))"
    )
    assert told(Sign(beat, 9.0)) == (
        "silent for 9.0 s (stopped, in native code, or out of reach), "
        "last in phase 'offload' for 21.0 s"
    )
    assert told(None, "not connected") == "not connected"
    assert told(None) == "not heard of"
    assert told(Sign(None)) == "silent, never heard of"
    assert told(Sign(None), "alive (process 4)") == "silent, never heard of; alive (process 4)"


def test_patience_lasts_as_long_as_all_who_are_missing_make_progress() -> None:
    marked = {T0: Sign(Beat(1, marked_s=1.0), 0.5), T1: Sign(Beat(1, marked_s=4.0), 0.0)}
    assert patience(10.0, [T0], marked) == pytest.approx(8.5)
    assert patience(10.0, [T0, T1], marked) == pytest.approx(6.0)
    assert patience(3.0, [T0, T1], marked) == 0.0
    assert patience(10.0, [T0, T1], {T0: marked[T0]}) == 0.0, "one is not heard of"
    silent = {T0: Sign(Beat(1, marked_s=1.0), 2.5)}
    assert patience(10.0, [T0], silent) == 0.0, "marks of a silent rank are worth nothing"
    assert patience(10.0, [], {}) == 0.0


@pytest.mark.parametrize("text", [b"", b"no json", b"[1,2]", b'["x",1,2,3,4,5]', None])
def test_what_is_no_beat_is_none(text: bytes | None) -> None:
    assert Beat.decode(text) is None
    beat = Beat(3, "fence", "plan", 1.5, None, None)
    assert Beat.decode(beat.encode()) == beat
    ask = Ask("world", 3, "plan", "break")
    assert Ask.lines(ask.line() + ask.line()) == [ask, ask]


# --- Ranks that keep others waiting --------------------------------------------------------------

Make = Callable[[Rank], Any]


@asynccontextmanager
async def over_tcp(run: str) -> AsyncIterator[Make]:
    coordinator = TcpCoordinator(token="t")
    await coordinator.start()
    yield lambda rank: TcpFences(coordinator.address, rank=rank, run=run, token="t")
    await coordinator.close()


@asynccontextmanager
async def over_store(run: str) -> AsyncIterator[Make]:
    store = tcp_store()
    yield lambda rank: StoreFences(store, rank=rank, run=run, heartbeat_s=0.2)


OVER = {"tcp": over_tcp, "store": over_store}


async def epoch_of_two(
    over: str, runs: Path, deadline_s: float, slow: Callable[..., None]
) -> list[EpochReport | EpochFailed]:
    """An epoch of two ranks, of which the second does `slow` before the first fence."""
    protocol = loads(SLOWLY.replace("DEADLINE", str(deadline_s)))
    run = f"{over}-{slow.__name__}"

    async def rank_of(rank: Rank, make: Make) -> EpochReport | EpochFailed:
        async with RankRunner(
            protocol,
            rank=rank,
            ranks=2,
            fences=make(rank),
            actions={"step": slow if rank == T1 else lambda: None, "rest": lambda: None},
            run=run,
            runs=runs,
            unchecked=True,
        ) as runner:
            try:
                return await runner.run_epoch()
            except EpochFailed as error:
                return error

    async with OVER[over](run) as make:
        return list(await asyncio.gather(rank_of(T0, make), rank_of(T1, make)))


def lingers() -> None:
    time.sleep(2.6)


def makes_progress(turn: Any) -> None:
    for bucket in range(7):
        time.sleep(0.4)
        turn.progress(bucket=bucket)


def lines_of(runs: Path, run: str, event: str) -> list[Any]:
    lines = (runs / run / "trainer-1.0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def over_both(runs: Path, deadline_s: float, slow: Callable[..., None]) -> Any:
    """The same over both transports, side by side: it takes seconds."""

    async def both() -> Any:
        return await asyncio.gather(*(epoch_of_two(o, runs, deadline_s, slow) for o in OVER))

    return zip(OVER, asyncio.run(both()), strict=True)


def test_who_lingers_is_told_with_its_stacks(tmp_path: Path) -> None:
    for over, (first, second) in over_both(tmp_path, 1.6, lingers):
        assert isinstance(first, EpochFailed)
        assert isinstance(second, EpochFailed)
        assert first.cause == second.cause
        assert (first.cause.kind, first.cause.missing) == ("deadline", (T1,))
        said = first.cause.error or ""
        assert "trainer/1 is alive, in phase 'step' for" in said
        assert f"at {__file__}:" in said, said
        assert " in lingers" in said, said
        stacks = lines_of(tmp_path, f"{over}-lingers", "rank.stacks")
        assert [line["why"] for line in stacks][:1] == ["deadline"]
        assert {line["fence"] for line in stacks} == {"stepped"}
        assert stacks[0]["where"].endswith(" in lingers")
        assert any("lingers" in f for each in stacks[0]["stacks"] for f in each["frames"])


def test_who_makes_progress_is_waited_for(tmp_path: Path) -> None:
    for _, reports in over_both(tmp_path, 2.0, makes_progress):
        assert all(isinstance(report, EpochReport) for report in reports), reports
        assert reports[0].waits_s["stepped"] > 2.0, "it waited beyond its deadline"


def stuck_rank(address: Any, runs: Path) -> None:
    """A rank that comes to native code which keeps every other thread of it from running."""

    def stuck() -> None:
        time.sleep(1.5)  # Its heart is heard first, however long a connection takes here.
        ctypes.PyDLL(None).sleep(60)

    async def live() -> None:
        fences = StoreFences(store_client(address), rank=T1, run="stuck")
        protocol = loads(SLOWLY.replace("DEADLINE", "5"))
        actions = {"step": stuck, "rest": lambda: None}
        async with RankRunner(
            protocol,
            rank=T1,
            ranks=2,
            fences=fences,
            actions=actions,
            run="stuck",
            runs=runs,
            unchecked=True,
        ) as runner:
            await runner.run_epoch()

    asyncio.run(live())


def test_a_rank_stuck_in_native_code_is_told_as_silent(tmp_path: Path) -> None:
    async def wait_for_it(address: Any) -> RootCause:
        fences = StoreFences(store_client(address), rank=T0, run="stuck")
        runner = RankRunner(
            loads(SLOWLY.replace("DEADLINE", "5")),
            rank=T0,
            ranks=2,
            fences=fences,
            actions={"step": lambda: None, "rest": lambda: None},
            run="stuck",
            runs=tmp_path,
            unchecked=True,
        )
        async with runner:
            with pytest.raises(EpochFailed) as failed:
                await runner.run_epoch()
        return failed.value.cause

    with hosted() as host:
        address = ("tcp", host.address)
        stuck = SERVER.Process(target=stuck_rank, args=(address, tmp_path), daemon=True)
        stuck.start()
        try:
            cause = asyncio.run(wait_for_it(address))
        finally:
            end(stuck)
    assert (cause.kind, cause.missing) == ("deadline", (T1,))
    assert "trainer/1 is silent for " in (cause.error or ""), cause.error
    assert "stopped, in native code, or out of reach" in (cause.error or "")


# --- A death on another host -----------------------------------------------------------------


def test_a_rank_killed_on_another_host_is_known_at_once_and_one_that_leaves_is_not_dead() -> None:
    """Each of the ranks is on a host of its own, as far as it and the others can tell."""
    with hosted() as host, board() as name, board() as other_name:
        base = Life(
            number=0,
            size=4,
            hosts=4,
            run="abroad",
            transport="store",
            address=host.address,
            board=name,
            deadline_s=30.0,
            at=2,
        )
        lives = [replace(base, number=n, act="killed" if n == 2 else "well") for n in range(4)]
        reports = [report for report in play(lives) if report.life.number != 2]
        for report in reports:
            assert [record.kind for record in report.came_to] == ["open", "open", "broken"]
            assert report.cause is not None
            assert (report.cause.kind, report.cause.ranks) == ("dead", (rank_of(2),))
            assert "closed its connection to another host" in (report.cause.error or "")
            assert report.came_to[-1].waited_s < 5.0, "far from the deadline"
        well = [replace(life, run="left", act="well", board=other_name) for life in lives]
        assert {report.last.kind for report in play(well)} == {"open"}
        keys = host.keys()
    assert not [key for key in keys if "/left/" in key], "nothing is left of that run"
