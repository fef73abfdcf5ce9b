"""Runs by seed: what they cost, what faults do to them, what they answer."""

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasesync import logs
from phasesync.checker import Settings, check
from phasesync.checker.explicit import explore
from phasesync.checker.mutants import without_fence
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.protocol import PhaseDecl
from phasesync.core.verdict import Violated
from phasesync.errors import PlanError, Refused
from phasesync.simulator import (
    Profile,
    Span,
    compare,
    events_of,
    fit,
    parse_fault,
    parse_faults,
    profile_of,
    replay,
    simulate,
)
from phasesync.simulator.replay import stuck
from phasesync.spec import load
from phasesync.world import SimRank, SimWorld

COLOCATED = load("colocated")


def plan(ranks: int, **options: OptionValue) -> Plan:
    return resolve(COLOCATED, ranks, options)


def test_one_seed_is_one_run() -> None:
    first = simulate(plan(4), seed=7, epochs=2, record=True)
    again = simulate(plan(4), seed=7, epochs=2, record=True)
    assert first.moments == again.moments
    assert first.moments != simulate(plan(4), seed=8, epochs=2, record=True).moments
    assert (first.epochs_done, first.broken, first.waiting) == (2, [], [])


def test_without_chance_the_time_is_the_sum_of_the_longest() -> None:
    steady = Profile(default=Span(1.0), fence_s=0.0)
    assert simulate(plan(2), profile=steady).total_s == 11.0


def test_thousands_of_ranks_in_seconds() -> None:
    began = time.perf_counter()
    found = simulate(plan(2048), seed=1)
    assert found.epochs_done == 1
    assert time.perf_counter() - began < 60


def test_a_world_scope_waits_longer_when_one_rank_is_slow() -> None:
    slow = [parse_fault("slow:2@empty_cache*20")]
    runs = {
        scope: simulate(plan(16, fence_scope=scope), seed=3, faults=slow)
        for scope in ("replica", "world")
    }
    waits = {name: run.waits_s["memory_released"] for name, run in runs.items()}
    assert waits["world"] > 3 * waits["replica"]
    first, second, *fences = compare(runs)
    assert first.startswith("replica  ")
    assert "s an epoch" in second
    assert any(each.startswith("  fence memory_released: ") for each in fences)


def test_a_crash_breaks_and_the_others_recover() -> None:
    found = simulate(plan(2), faults=[parse_fault("crash:1@offload")], epochs=1, record=True)
    assert found.broken == ["trainer/1 died"]
    kinds = [(m.kind, m.name) for m in found.moments if m.rank == 0]
    assert ("abort", "memory_released") in kinds
    assert ("end", "reset") in kinds


def test_a_failure_reaches_the_other_replica_at_the_last_fence() -> None:
    found = simulate(plan(4), faults=[parse_fault("fail:1@stage")], record=True)
    assert found.broken == ["trainer/1 failed in stage"]
    other = [(m.kind, m.name) for m in found.moments if m.rank == 2]
    assert ("end", "serve") in other
    assert ("abort", "asleep") in other


def test_a_hang_ends_at_the_deadline_and_names_who_is_missing() -> None:
    found = simulate(plan(2), faults=[parse_fault("hang:1@offload")])
    assert found.broken == [
        "fence memory_released: trainer/1 did not come in 300 s",
        "fence stopped: trainer/1 did not come in 7200 s",
    ]
    assert found.total_s > 7500


def test_a_lost_arrival_ends_at_the_deadline() -> None:
    found = simulate(plan(2), faults=[parse_fault("drop:arrive@staged:1")])
    assert found.broken == ["fence staged: trainer/1 did not come in 300 s"]


def test_one_arrival_is_lost_and_the_next_epoch_is_whole() -> None:
    """Whoever is meant: the first arrival at all. The other replica hears of it at the last fence,
    and only waits for nothing where it is in the same one."""
    found = simulate(plan(2), faults=[parse_fault("drop:arrive")], epochs=3)
    assert found.broken == ["fence ready_for_weights: trainer/1 did not come in 600 s"]
    assert (found.epochs_done, found.waiting, found.missed) == (2, [], [])


def test_nobody_begins_an_epoch_beside_the_dead() -> None:
    """They have recovered, and leave it to their supervisor, as real ranks do."""
    found = simulate(plan(4), faults=[parse_fault("crash:3@offload")], epochs=3, record=True)
    assert found.broken == ["trainer/3 died"]
    assert found.notes == ["the run ends here, to be started again with another trainer/3"]
    assert (found.epochs_done, found.waiting) == (0, [])
    assert {m.rank for m in found.moments if (m.kind, m.name) == ("end", "reset")} == {0, 1, 2}
    assert "begin" not in {moment.kind for moment in found.moments}
    assert found.total_s < 60


def test_a_fault_without_a_place_strikes_once() -> None:
    found = simulate(plan(2), faults=[parse_fault("fail:1")], epochs=3)
    assert found.broken == ["trainer/1 failed in load_back"]
    assert found.epochs_done == 2


def test_mixed_options_stop_at_the_plan_fence() -> None:
    found = simulate(plan(4), faults=[parse_fault("mixed:param_offload=false@2")])
    assert found.broken == ["plan: trainer/2 holds another plan: param_offload=false"]
    assert found.total_s == 0


def test_memory_and_the_phase_that_is_the_peak() -> None:
    gib = {
        "trainer_params": 30,
        "train_cache": 25,
        "staging": 4,
        "rollout_weights": 15,
        "kv_cache": 40,
    }
    found = simulate(plan(2), profile=Profile(gib=gib))
    assert (found.peak_gib, found.peak_phase) == (55, "train")
    kept = simulate(plan(2, free_cache_engine=False), profile=Profile(gib=gib))
    assert kept.peak_gib == 110


def test_a_profile_is_fitted_from_journal_lines() -> None:
    lines = [
        {"event": "phase.end", "phase": "load", "duration_s": value} for value in (2.0, 4.0, 3.0)
    ]
    lines += [{"event": "phase.start", "phase": "load"}, {"event": "phase.end", "phase": "x"}]
    span = fit(lines).span("load")
    assert span.mean_s == 3.0
    assert span.spread == pytest.approx(1 / 3)
    assert fit(lines).span("x") == Profile().default


def test_profiles_are_doubted() -> None:
    assert profile_of({"phases": {"load": 3}}, plan(2)).span("load") == Span(3.0)
    spread = profile_of({"phases": {"load": {"mean_s": 2, "spread": 0.5}}})
    assert spread.span("load") == Span(2.0, 0.5)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"phase": {}}, "the profile has no key 'phase'"),
        ({"phases": {"load": "long"}}, "phase load is 'long'; a profile is made of numbers"),
        ({"phases": {"load": -3}}, "phase load is -3"),
        ({"phases": {"load": math.nan}}, "phase load is nan"),
        ({"phases": {"load": True}}, "phase load is True"),
        ({"phases": {"load": {"mean": 3}}}, "the phase load has no key 'mean'"),
        ({"phases": {"load": {"spread": 3}}}, "mean_s of phase load is None"),
        ({"phases": [3]}, "phases of a profile is an object"),
        ({"phases": {"laod": 3}}, "the protocol has no phase 'laod'; it has: empty_cache"),
        ({"phases": {"staged": 3}}, "the protocol has no phase 'staged'"),
        ({"gib": {"kv": 3}}, "the protocol has no resource 'kv'; it has: kv_cache"),
        ({"fence_s": math.inf}, "fence_s is inf"),
    ],
)
def test_profiles_that_are_none(body: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        profile_of(body, plan(2))


def test_a_profile_is_fitted_from_the_journals_of_a_run(tmp_path: Path) -> None:
    """A run of real runners, in virtual time, in which loading takes 7 seconds."""

    async def main(rank: SimRank) -> None:
        async def act(name: str) -> None:
            await asyncio.sleep(7.0 if name == "load" else 0.5)

        names = [s.name for s in (*COLOCATED.steps, *COLOCATED.recover) if isinstance(s, PhaseDecl)]
        bodies: dict[str, Callable[[], Any]] = {str(each): partial(act, each) for each in names}
        async with rank.runner("colocated", actions=bodies) as runner:
            await runner.run_epoch()

    SimWorld(2, runs=tmp_path).run(main)
    lines = [
        line.data
        for source in logs.sources([tmp_path])
        for line in logs.lines(source.path)
        if line.data is not None
    ]
    fitted = fit(lines, plan=plan(2))
    assert fitted.span("load") == Span(7.0)
    assert fitted.span("stage").mean_s == pytest.approx(0.5)
    quick = simulate(plan(2), profile=fitted)
    assert quick.phases_s["load"] == pytest.approx(7.0)


def test_memory_is_fitted_where_free_memory_was_written_down() -> None:
    def line(event: str, name: str, gib: int, rank: int = 0) -> dict[str, object]:
        body = {"event": event, "phase": name, "role": "trainer", "rank": rank, "incarnation": 0}
        return {**body, "free_bytes": gib << 30}

    lines = [
        line("phase.end", "load_back", 50),
        line("phase.end", "train", 25),
        line("phase.end", "train", 9, rank=1),
        line("fence.arrive", "", 60),
        line("phase.end", "resume_kv", 20),
    ]
    fitted = fit(lines, plan=plan(2))
    assert fitted.gib == {"train_cache": 25.0, "kv_cache": 40.0}
    assert fit(lines).gib == {}


def test_a_fault_that_cannot_strike_is_said() -> None:
    with pytest.raises(PlanError, match="there is no rank 9; there are 4"):
        simulate(plan(4), faults=[parse_fault("slow:9@load*8")])
    with pytest.raises(PlanError, match="no phase or fence 'offlaod'"):
        simulate(plan(4), faults=[parse_fault("crash:1@offlaod")])
    with pytest.raises(PlanError, match="no fence 'offload'; it has: ready_for_weights"):
        simulate(plan(4), faults=[parse_fault("drop:arrive@offload")])
    with pytest.raises(PlanError, match="no phase 'staged'; it has: load_back"):
        simulate(plan(4), faults=[parse_fault("fail:1@staged")])
    found = simulate(plan(4), faults=[parse_fault("fail:1@resume_weights")])
    assert found.missed == [
        "fail:1@resume_weights never struck; resume_weights is done by trainer/0, trainer/2"
    ]
    assert simulate(plan(4), faults=[parse_fault("fail:2@resume_weights")]).missed == []


def test_one_slow_node_costs_the_step_what_its_slowest_phase_loses() -> None:
    steady = Profile(default=Span(1.0), fence_s=0.0)
    node = parse_faults("slow:8-15@train*5")
    assert [each.rank for each in node] == list(range(8, 16))
    whole = simulate(plan(1024), profile=steady)
    slow = simulate(plan(1024), profile=steady, faults=node)
    assert (whole.total_s, slow.total_s) == (11.0, 15.0)
    with pytest.raises(PlanError, match="3 comes before 7"):
        parse_faults("slow:7-3")


def test_who_waits_for_ever_is_seen_when_a_run_is_taken_again() -> None:
    bare = replace(plan(2), defects=frozenset({Defect.NO_ABORT}))
    verdict, _ = explore(bare, Faults(most=1, fail=True), 1)
    assert isinstance(verdict, Violated)
    systems, broken = replay(bare, verdict.path)
    assert broken == ()
    assert [str(rank) for rank in stuck(bare, systems[-1], 1)] == ["trainer/0", "trainer/1"]
    assert stuck(bare, systems[0], 1) == ()


def test_a_counterexample_replays_from_its_json() -> None:
    report = check(
        COLOCATED,
        ranks=2,
        mutate=without_fence("staged"),
        settings=Settings(any_n=False),
    )
    case = report.counterexample
    assert case is not None
    assert case.plan is not None
    path = case.to_json()["path"]
    assert isinstance(path, list)
    systems, broken = replay(case.plan, events_of(case.plan, path))
    assert len(systems) == len(path) + 1
    assert [each.property for each in broken] == ["mapped"]
    with pytest.raises(Refused):
        replay(plan(2), events_of(plan(2), path))
    with pytest.raises(PlanError, match="this is no run of 'colocated'"):
        events_of(plan(2), [{"event": "leap", "rank": "trainer/0", "name": ""}])


@pytest.mark.parametrize(
    "text",
    [
        *("", "crash", "crash:x", "slow:1*", "mixed:a@1", "melt:1@offload", "slow:1*0"),
        *("crash:1@offload#0", "crash:1*2", "slow:1@load#2", "drop:leave", "drop:arrive@"),
    ],
)
def test_faults_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="is no fault"):
        parse_fault(text)
