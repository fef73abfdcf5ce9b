"""`check` on the shipped protocols, and every mistake planted in them."""

import itertools
import time
from dataclasses import replace

import pytest

from phasesync.checker import Settings, check
from phasesync.checker.explicit import never_reached, smooth
from phasesync.checker.growth import grows
from phasesync.checker.mutants import mutations, rescoped, survey, swapped, without_fence
from phasesync.checker.report import NOT_NEEDED, Report
from phasesync.core.kernel import initial, step
from phasesync.core.model import OptionValue
from phasesync.core.plan import Wait, resolve
from phasesync.core.properties import Violation, violations
from phasesync.core.verdict import SOMETIMES, Holds, Undecided, Violated
from phasesync.errors import PlanError
from phasesync.report.check_text import report_lines, survey_lines
from phasesync.spec import load, shipped

COLOCATED = load("colocated")
QUICK = Settings(any_n=False)
FENCES = [fence.name for fence in COLOCATED.fences]


def reach(report: Report, name: str) -> tuple[str, str]:
    found = next(each for each in report.summaries if each.property == name)
    return found.verdict, found.reach


def test_colocated_holds_for_any_n_and_cannot_deadlock_up_to_four() -> None:
    pinned: dict[str, OptionValue] = {
        "param_offload": True,
        "free_cache_engine": True,
        "fence_scope": "replica",
    }
    report = check(COLOCATED, options=pinned)
    assert isinstance(report.verdict, Holds)
    assert reach(report, "safety") == ("holds", "any N, 2 option assignments")
    assert reach(report, "deadlock") == ("holds", "up to N = 4")
    assert "pass memory_released" in report.reached
    assert "recover" in report.reached


@pytest.mark.parametrize(
    ("name", "many"),
    [
        ("basic", 2),
        ("colocated", 16),
        ("colocated_controller", 2),
        ("colocated_each", 192),
        ("disagg_broadcast", 2),
        ("verl_stock", 8),
    ],
)
def test_every_shipped_protocol_is_safe_for_any_n_under_every_option(name: str, many: int) -> None:
    """In one search for each plan that no other one covers, of a few thousand states at most."""
    report = check(load(name), ranks=1, faults="none", settings=Settings())
    assert reach(report, "safety") == ("holds", f"any N, {many} option assignments")
    assert all(case.verdict.states < 5_000 for case in report.cases)


def test_without_memory_it_is_undecided() -> None:
    full = Settings(any_n=False, held=lambda: 3 << 30)
    report = check(COLOCATED, ranks=2, settings=full)
    assert isinstance(report.verdict, Undecided)
    assert report.verdict.bound == "2 GiB of memory"


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_protocol_holds_at_two(name: str) -> None:
    report = check(load(name), ranks=2, settings=QUICK)
    assert isinstance(report.verdict, Holds), "\n".join(report_lines(report))


@pytest.mark.parametrize(
    ("fence", "rule", "steps"),
    [
        ("ready_for_weights", "never", 12),
        ("staged", "mapped", 22),
        ("transfer_done", "race", 32),
        ("memory_released", "never", 38),
        ("ready_to_serve", "mapped", 46),
        ("rollout_over", "mapped", 56),
        ("asleep", "never", 61),
    ],
)
def test_no_fence_is_decoration(fence: str, rule: str, steps: int) -> None:
    report = check(COLOCATED, ranks=2, faults="none", mutate=without_fence(fence), settings=QUICK)
    case = report.counterexample
    assert case is not None
    assert isinstance(case.verdict, Violated)
    assert (case.verdict.property, len(case.verdict.path)) == (rule, steps)


def test_a_counterexample_replays_on_the_kernel() -> None:
    report = check(COLOCATED, ranks=4, mutate=without_fence("staged"), settings=QUICK)
    case = report.counterexample
    assert case is not None
    assert case.plan is not None
    assert isinstance(case.verdict, Violated)
    system = initial(case.plan)
    broken: tuple[Violation, ...] = ()
    for event in case.verdict.path:
        assert broken == ()
        after = step(case.plan, system, event)
        broken = violations(case.plan, system, event, after)
        system = after
    assert broken == case.verdict.violations


def test_the_leader_maps_kv_while_a_peer_still_holds() -> None:
    """verl 7851: the world barrier before resume(tags=["kv_cache"]) was not there."""
    report = check(COLOCATED, ranks=2, mutate=without_fence("memory_released"), settings=QUICK)
    assert isinstance(report.verdict, Violated)
    assert report.verdict.path[-1].name == "resume_kv"
    assert report.verdict.path[-1].rank == 0
    assert {"staging"} <= {name for each in report.verdict.violations for name in each.resources}
    text = "\n".join(report_lines(report))
    assert "broken: never: trainer/0 on device/1: kv_cache and staging together" in text
    assert "steps 1 to 30, in any order that the fences allow:" in text


def test_a_barrier_with_one_rank_raising_is_a_deadlock() -> None:
    """A bare world barrier: the others never hear of the failure."""
    no_abort = next(each for each in mutations(COLOCATED) if each.name == "no abort")
    report = check(COLOCATED, ranks=2, faults="fail", mutate=no_abort.mutate, settings=QUICK)
    assert isinstance(report.verdict, Violated)
    assert report.verdict.property == "deadlock"
    assert "waits for ever at fence" in report.verdict.says


def test_any_n_needs_explicit_ranks_to_call_a_rule_broken() -> None:
    report = check(
        COLOCATED,
        options={"replica_size": 2, "param_offload": True, "free_cache_engine": True},
        mutate=without_fence("staged"),
    )
    assert reach(report, "safety") == ("violated", "at N = 2")


def test_an_exhausted_budget_is_no_pass() -> None:
    clock = itertools.count(0.0, 0.001)
    limited = Settings(any_n=False, time_limit_s=0.05, now=lambda: next(clock))
    report = check(COLOCATED, ranks=4, settings=limited)
    assert isinstance(report.verdict, Undecided)
    few = check(COLOCATED, ranks=4, settings=Settings(any_n=False, states_max=1000))
    assert isinstance(few.verdict, Undecided)
    assert few.verdict.bound == "1,000 states"
    assert few.to_json()["verdict"] == "undecided"


def test_swap_and_scope() -> None:
    report = check(COLOCATED, ranks=2, mutate=swapped("stage", "staged"), settings=QUICK)
    assert isinstance(report.verdict, Violated)
    wider = check(COLOCATED, ranks=2, mutate=rescoped("staged", "world"), settings=QUICK)
    assert isinstance(wider.verdict, Holds)
    with pytest.raises(PlanError, match="no phase or fence 'stagd'"):
        check(COLOCATED, ranks=2, mutate=without_fence("stagd"), settings=QUICK)


def test_no_mutant_of_colocated_survives() -> None:
    found = survey(COLOCATED)
    assert [mutant.mutation for mutant in found.survivors] == []
    assert survey_lines(found)[-1] == "no survivor"


def test_json_is_plain() -> None:
    report = check(load("basic"), settings=Settings(now=time.monotonic))
    body = report.to_json()
    assert body["check"] == 1
    assert body["verdict"] == "holds"
    assert isinstance(body["cases"], list)
    assert body["cases"][0]["ranks"] == "any"


@pytest.mark.parametrize(
    ("name", "rule", "last"),
    [("no floor", "never", "wake"), ("restart in mid-epoch", "deadlock", "arrive")],
)
def test_old_incarnations_are_found_where_nothing_stops_them(
    name: str, rule: str, last: str
) -> None:
    """The frozen old leader that wakes after its replacement; a rank that comes back too early."""
    planted = next(each for each in mutations(COLOCATED) if each.name == name)
    report = check(COLOCATED, ranks=2, faults="restart", mutate=planted.mutate, settings=QUICK)
    assert isinstance(report.verdict, Violated)
    assert report.verdict.property == rule
    assert report.verdict.path[-1].kind == last


def test_replaced_ranks_and_a_floor_are_sound() -> None:
    report = check(COLOCATED, ranks=2, faults="restart", settings=QUICK)
    assert isinstance(report.verdict, Holds)
    assert report.verdict.states == 5100
    assert {"restart", "wake"} <= set(report.reached)


def test_how_the_length_grows_with_n() -> None:
    report = check(
        COLOCATED, ranks=2, faults="none", mutate=without_fence("staged"), settings=QUICK
    )
    assert report.lengths[0] == (2, 22)
    assert {size for size, _ in report.lengths} >= {2, 3, 4}
    assert grows([(2, 22), (4, 22), (6, 22)]) == "22 steps whatever N"
    assert grows([(2, None), (3, 27), (4, 34), (5, 41)]) == "7N + 6 steps from N = 3 on"
    assert grows([(2, 5), (3, 9), (4, 7)]) == "5 steps at N = 2, 9 steps at N = 3, 7 steps at N = 4"


@pytest.mark.parametrize("any_n", [True, False])
def test_many_ranks_do_what_goes_wrong_on_two(any_n: bool) -> None:
    """Eight are too many to count out in time: the shortest run is of two, and eight follow it."""
    report = check(
        load("colocated"),
        ranks=8,
        options={"replica_size": 8},
        faults="none",
        mutate=without_fence("staged"),
        settings=Settings(any_n=any_n, states_max=5_000),
    )
    broken = {c.ranks: c.verdict for c in report.cases if c.asks != (SOMETIMES,)}
    two, eight = broken[2], broken[8]
    assert isinstance(two, Violated)
    assert isinstance(eight, Violated)
    assert (two.shortest, eight.shortest) == (True, False)
    assert two.property == eight.property == "mapped"
    assert len(two.path) < len(eight.path)
    assert report.counterexample is not None
    assert report.counterexample.ranks == 2


@pytest.mark.parametrize(
    "fence",
    [
        "ready_for_weights",
        "transfer_done",
        "memory_released",
        "ready_to_serve",
        "rollout_over",
        "asleep",
    ],
)
def test_each_fence_removed_is_found_whatever_size_is_asked(fence: str) -> None:
    report = check(
        load("colocated"),
        ranks=8,
        options={"replica_size": 8},
        faults="none",
        mutate=without_fence(fence),
        settings=Settings(states_max=5_000),
    )
    eight = next(case.verdict for case in report.cases if case.ranks == 8)
    assert isinstance(eight, Violated)


def test_what_should_happen_is_looked_for_also_where_only_who_waits_was_asked() -> None:
    report = check(load("basic"), ranks=3)
    assert isinstance(report.verdict, Holds)
    assert reach(report, "sometimes") == ("holds", "up to N = 3")
    seen = [case for case in report.cases if SOMETIMES in case.asks]
    assert [(case.ranks, case.faults, case.epochs) for case in seen] == [(3, "none", 1)]


def test_one_run_without_faults_shows_a_fence_that_can_never_open() -> None:
    basic = load("basic")
    plan = resolve(basic, {str(role): 3 for role in basic.active_roles}, {"replica_size": 3})
    assert never_reached(plan, smooth(plan)) == ()
    first, *others = plan.programs
    fence = next(step for step in first if isinstance(step, Wait))
    lonely = [tuple(step for step in each if step != fence) for each in others]
    missing = never_reached(plan, smooth(replace(plan, programs=(first, *lonely))))
    assert f"fence {fence.fence!r} never opens" in missing


def test_once_a_rule_is_broken_the_rest_is_left_out_and_told() -> None:
    clock = iter(range(10**9))
    few = Settings(any_n=False, rest_s=0.0, now=lambda: float(next(clock)))
    report = check(COLOCATED, mutate=without_fence("memory_released"), settings=few)
    first, *rest = [case for case in report.cases if case.asks != (SOMETIMES,)]
    assert isinstance(first.verdict, Violated)
    assert first.verdict.shortest
    assert first.ranks == 2
    assert report.counterexample is first
    assert rest
    for case in rest:
        assert isinstance(case.verdict, Undecided)
        assert (case.verdict.bound, case.extra) == (NOT_NEEDED, True)
    text = report_lines(report)
    assert any(line.startswith("not reached: N = 2") for line in text)
    assert any(line.endswith("more; a rule is broken already") for line in text)
    assert not any(line.startswith("undecided") for line in text)
    said = {each.property: each.reach for each in report.summaries}
    assert said["deadlock"] == "its searches ended where another property broke"


def test_nobody_waits_for_a_rank_that_rests_beside_the_dead() -> None:
    report = check(load("disagg_broadcast"), ranks=3, faults="crash,fail", faults_most=2)
    assert reach(report, "deadlock") == ("holds", "up to N = 3")
