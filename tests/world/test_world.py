"""Real coroutines on simulated ranks: order by schedule, time for nothing, faults by name."""

import asyncio
import gc
import itertools
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from phasesync.errors import EpochFailed, FenceBroken, PhasesyncError, PlanError
from phasesync.spec import load
from phasesync.world import Injected, InTurn, Outcome, SimFailed, SimRank, SimWorld
from phasesync.world import loop as loop_module
from phasesync.world.schedule import read_schedule, write_schedule


async def fenced(rank: SimRank) -> float:
    await rank.at("offload", takes_s=10.0 * rank.number)
    await rank.fence("memory_released")
    await rank.at("resume_kv")
    return asyncio.get_running_loop().time()


def test_sleep_costs_nothing_and_all_pass_together() -> None:
    began = time.perf_counter()
    outcome = SimWorld(4).run(fenced)
    assert set(outcome.results.values()) == {30.0}
    assert time.perf_counter() - began < 5


def test_a_seed_is_one_run() -> None:
    first, again = SimWorld(3, seed=5).run(fenced), SimWorld(3, seed=5).run(fenced)
    assert first.events == again.events
    assert first.schedule == again.schedule != SimWorld(3, seed=6).run(fenced).schedule


def test_a_schedule_replays_exactly() -> None:
    first = SimWorld(3, seed=5).run(fenced)
    again = SimWorld(3, seed=99).run(fenced, schedule=first.schedule)
    assert again.events == first.events


def test_schedules_are_written_and_read() -> None:
    choices = (0, 0, 0, 1, 2, 2, 0)
    assert write_schedule(choices) == "0*3.1.2*2.0"
    assert read_schedule("0*3.1.2*2.0") == choices


class Device:
    """A device on which two things do not fit together."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def take(self, name: str) -> None:
        self.held.add(name)
        assert self.held != {"params", "kv"}, "out of memory"


def colocated(fence: bool, takes_s: float = 0.0) -> Any:
    """A leader maps KV on every device; `fence` says whether it waits for its peers."""
    devices: dict[int, Device] = {}

    async def main(rank: SimRank) -> None:
        if rank.number == 0:
            devices.clear()
            devices.update({number: Device() for number in range(rank.ranks)})
        await rank.fence("start")
        devices[rank.number].take("params")
        await rank.at("train", takes_s)
        devices[rank.number].held.discard("params")
        await rank.at("offload")
        if fence:
            await rank.fence("memory_released")
        if rank.number == 0:
            for device in devices.values():
                device.take("kv")

    return main


def test_exploring_finds_the_missing_fence_and_replays_it() -> None:
    world = SimWorld(2)
    assert world.explore(colocated(fence=True), runs=50) == 50
    with pytest.raises(SimFailed, match="out of memory") as failed:
        world.explore(colocated(fence=False), runs=50)
    schedule = failed.value.outcome.schedule
    assert f"schedule={schedule!r}" in str(failed.value)
    with pytest.raises(SimFailed, match="out of memory") as again:
        SimWorld(2).run(colocated(fence=False), schedule=schedule)
    assert again.value.outcome.events == failed.value.outcome.events


@pytest.mark.parametrize("strategy", ["seed", "pct", "exhaustive"])
def test_every_strategy_finds_it_also_where_places_take_their_time(strategy: str) -> None:
    """Ranks that are all as fast as each other would hide it, whatever the schedule."""
    world = SimWorld(2)
    with pytest.raises(SimFailed, match="out of memory") as failed:
        world.explore(colocated(fence=False, takes_s=5.0), strategy=strategy, runs=500)
    outcome = failed.value.outcome
    assert outcome.schedule.startswith("~") == (strategy == "exhaustive")
    again = SimWorld(2, seed=outcome.seed, spread=outcome.spread)
    with pytest.raises(SimFailed) as same:
        again.run(colocated(fence=False, takes_s=5.0), schedule=outcome.schedule)
    assert same.value.outcome.events == outcome.events
    SimWorld(2).run(colocated(fence=False, takes_s=5.0))


def test_a_fault_at_a_place_that_is_none_fails() -> None:
    with pytest.raises(SimFailed, match="never struck: no rank came to 'offlaod', but to offload"):
        SimWorld(2, faults=["crash:1@offlaod"]).run(fenced)


def test_a_fault_at_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"crash:9@offload: there is no rank 9; there are 2"):
        SimWorld(2, faults=["crash:9@offload"])


def test_an_arrival_that_is_lost_ends_at_the_deadline() -> None:
    world = SimWorld(2, faults=["drop:arrive@memory_released:1"])
    outcome = world.run(fenced, allow=(FenceBroken,))
    assert outcome.time_s == 300.0
    assert set(outcome.raised) == {"trainer/0", "trainer/1"}
    assert "trainer/1 did not come at fence" in str(outcome.raised["trainer/0"])
    said = [event.text for event in outcome.events if event.rank == "trainer/1"]
    assert "loses its arrival at memory_released" in said
    with pytest.raises(SimFailed, match="no rank came to 'later', but to memory_released"):
        SimWorld(2, faults=["drop:arrive@later"]).run(fenced)


def test_a_rank_dies_at_a_fence() -> None:
    outcome = SimWorld(3, faults=["crash:1@memory_released"]).run(fenced, allow=(FenceBroken,))
    assert outcome.crashed == ["trainer/1"]
    assert set(outcome.raised) == {"trainer/0", "trainer/2"}


def test_a_fault_without_a_place_strikes_once() -> None:
    async def main(rank: SimRank) -> int:
        failed = 0
        for name in ("offload", "empty_cache"):
            try:
                await rank.at(name)
            except Injected:
                failed += 1
        return failed

    outcome = SimWorld(2, faults=["fail:1"]).run(main)
    assert outcome.results == {"trainer/0": 0, "trainer/1": 1}


def test_one_rank_with_another_option_is_told_at_the_plan_fence(tmp_path: Path) -> None:
    async def main(rank: SimRank) -> None:
        async with rank.runner("colocated", actions=actions([])) as runner:
            await runner.run_epoch()

    fault = "mixed:param_offload=false@1"
    outcome = SimWorld(2, faults=[fault], runs=tmp_path).run(main, allow=(PhasesyncError,))
    assert set(outcome.raised) == {"trainer/0", "trainer/1"}
    assert "param_offload" in str(outcome.raised["trainer/0"])
    with pytest.raises(SimFailed, match="no rank 1 asked for rank"):
        SimWorld(2, faults=[fault]).run(fenced)


def test_in_turn_alone_does_not_find_it() -> None:
    SimWorld(2).run(colocated(fence=False), schedule=InTurn())


def test_exhaustive_ends_by_itself() -> None:
    runs = SimWorld(2).explore(colocated(fence=True), strategy="exhaustive", preemptions=1)
    assert runs == 12
    with pytest.raises(SimFailed, match=r"undecided after 5 runs: \d+ more to try, up to 1 "):
        SimWorld(2).explore(colocated(True), strategy="exhaustive", preemptions=1, runs=5)


def test_a_crash_breaks_the_fence_for_the_others() -> None:
    world = SimWorld(3, faults=["crash:1@offload"])
    outcome = world.run(fenced, allow=(FenceBroken,))
    assert outcome.crashed == ["trainer/1"]
    assert set(outcome.raised) == {"trainer/0", "trainer/2"}
    assert "trainer/1" in str(outcome.raised["trainer/0"])


def test_a_crashed_rank_cleans_up_nothing() -> None:
    cleaned: list[int] = []

    async def main(rank: SimRank) -> None:
        try:
            await rank.at("work")
        finally:
            cleaned.append(rank.number)

    SimWorld(2, faults=["crash:0@work"]).run(main, check=lambda _: _only(cleaned, [1]))


def _only(found: list[int], expected: list[int]) -> None:
    assert found == expected


def test_who_waits_for_ever_is_named() -> None:
    async def main(rank: SimRank) -> None:
        if rank.number == 0:
            rank.record("awaits a reply")
            await asyncio.get_running_loop().create_future()

    with pytest.raises(SimFailed, match=r"waits for ever: trainer/0 \(last: awaits a reply\)"):
        SimWorld(2).run(main)


def test_a_hang_ends_the_others_wait_at_the_deadline() -> None:
    outcome = SimWorld(2, faults=["hang:1@offload"]).run(fenced, allow=(FenceBroken,))
    assert outcome.hung == ["trainer/1"]
    assert isinstance(outcome.raised["trainer/0"], FenceBroken)
    assert outcome.time_s == 300.0


def test_who_waits_for_a_rank_that_hangs_waits_for_ever() -> None:
    """Nothing like a deadline ends it: the fault is planted, what comes of it is the code's."""
    over: list[asyncio.Event] = []

    async def main(rank: SimRank) -> None:
        if rank.number == 0:
            over.append(asyncio.Event())
        await rank.at("offload")
        if rank.number == 1:
            over[-1].set()
        await over[-1].wait()

    with pytest.raises(SimFailed, match=r"waits for ever: trainer/0 \(last: offload\)"):
        SimWorld(2, seed=1, faults=["hang:1@offload"]).run(main, schedule=InTurn())


def test_a_rank_that_is_called_back_from_a_hang_goes_on() -> None:
    async def main(rank: SimRank) -> str:
        try:
            async with asyncio.timeout(5):
                await rank.at("offload")
        except TimeoutError:
            return "gave up"
        return "done"

    outcome = SimWorld(2, faults=["hang:1@offload"]).run(main)
    assert outcome.results == {"trainer/0": "done", "trainer/1": "gave up"}
    assert outcome.hung == []


def test_blocking_calls_are_named() -> None:
    async def main(rank: SimRank) -> None:
        time.sleep(0.01)

    with pytest.raises(SimFailed, match=r"trainer/\d called time.sleep\(0.01\)"):
        SimWorld(2).run(main)
    time.sleep(0)


def test_busy_code_is_named() -> None:
    async def main(rank: SimRank) -> None:
        end = time.perf_counter() + 0.4
        while time.perf_counter() < end:
            pass

    with pytest.raises(SimFailed, match=r"blocked the event loop for .* in test_world\.py:\d+: "):
        SimWorld(1, blocking_s=0.1).run(main)


def test_what_the_collector_takes_is_not_called_a_block() -> None:
    """A long session leaves much to look through, and any allocation may begin it."""
    many = [[number] for number in range(3_000_000)]

    async def main(rank: SimRank) -> None:
        gc.collect()

    SimWorld(1, blocking_s=0.02).run(main)
    assert len(many) == 3_000_000


def test_a_machine_that_gives_a_rank_no_time_is_not_called_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All the time that the callback took is time for which the kernel let its thread wait."""
    asked = itertools.count()
    monkeypatch.setattr(loop_module, "_delayed_s", lambda thread: next(asked) * 0.5)

    async def main(rank: SimRank) -> None:
        select.select([], [], [], 0.45)

    SimWorld(1).run(main)
    monkeypatch.setattr(loop_module, "_delayed_s", lambda thread: 0.0)
    with pytest.raises(SimFailed, match="blocked the event loop"):
        SimWorld(1).run(main)


def test_a_call_that_sleeps_is_named_by_its_line() -> None:
    async def main(rank: SimRank) -> None:
        subprocess.run(["sleep", "0.5"], check=True)

    with pytest.raises(
        SimFailed, match=r'test_world\.py:\d+: subprocess\.run\(\["sleep", "0\.5"\]'
    ):
        SimWorld(1).run(main)


def actions(log: list[str]) -> dict[str, Any]:
    protocol = load("colocated")
    names = [phase.name for phase in protocol.phases]
    names += [step.name for step in protocol.recover if not hasattr(step, "scope")]
    return {name: (lambda name=name: log.append(name)) for name in names}


@pytest.mark.parametrize("seed", range(5))
def test_the_real_runner_in_the_world(seed: int, tmp_path: Path) -> None:
    log: list[str] = []

    async def main(rank: SimRank) -> int:
        async with rank.runner("colocated", actions=actions(log)) as runner:
            return (await runner.run_epoch()).version

    outcome = SimWorld(2, seed=seed, runs=tmp_path).run(main)
    assert list(outcome.results.values()) == [1, 1]
    assert log.count("resume_kv") == 1
    assert log.index("resume_kv") > max(n for n, name in enumerate(log) if name == "empty_cache")


def test_a_failure_in_the_real_runner_is_the_same_on_every_rank(tmp_path: Path) -> None:
    async def main(rank: SimRank) -> None:
        async with rank.runner("colocated", actions=actions([])) as runner:
            await runner.run_epoch()

    world = SimWorld(2, faults=["fail:1@stage"], runs=tmp_path)
    outcome = world.run(main, allow=(EpochFailed,))
    causes = [error.cause for error in outcome.raised.values() if isinstance(error, EpochFailed)]
    assert len(causes) == 2
    assert causes[0] == causes[1]
    assert causes[0].phase == "stage"


def test_outcome_lines_show_lanes() -> None:
    lines = "\n".join(Outcome(seed=1).lines())
    assert "SimWorld(..., seed=1)" in lines
