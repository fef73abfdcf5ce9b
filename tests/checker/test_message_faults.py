"""Arrivals that are lost or come twice, and ranks with other options, at the fences of a plan."""

import pytest

from phasesync.checker import check
from phasesync.checker.explicit import behind_plan_fence, explore
from phasesync.checker.plainly import search_plainly
from phasesync.core.kernel import (
    Event,
    Faults,
    Kind,
    Status,
    System,
    enabled,
    initial,
    next_step,
    step,
)
from phasesync.core.plan import PLAN, Plan, Wait, resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load

LOST = Faults(most=1, lost=True, deadlines=True)
AGAIN = Faults(most=1, again=True)
MIXED = Faults(most=1, mixed=True)


def basic(faults: Faults) -> Plan:
    plan = resolve(load("basic"), 2)
    return behind_plan_fence(plan) if faults.mixed else plan


def walked(plan: Plan, faults: Faults, *kinds: Kind) -> System:
    """A run that prefers these kinds of steps, until the first of them has been taken."""
    system = initial(plan)
    while True:
        events = list(enabled(plan, system, faults, 1))
        wanted = [event for event in events if event.kind in kinds]
        system = step(plan, system, (wanted or events)[0])
        if wanted:
            return system


@pytest.mark.parametrize("faults", [LOST, AGAIN, MIXED], ids=["lost", "again", "mixed"])
def test_tables_and_kernel_see_the_same_states(faults: Faults) -> None:
    plan = basic(faults)
    plain, lifted = search_plainly(plan, faults, 1)
    verdict, found = explore(plan, faults, 1, symmetry=False, reduction=False)
    assert lifted is None
    assert isinstance(verdict, Holds)
    assert (found.states, found.transitions) == (plain.states, plain.transitions)


def test_whose_arrival_is_lost_waits_at_a_fence_that_its_deadline_ends() -> None:
    plan = basic(LOST)
    system = walked(plan, LOST, Kind.LOSE)
    rank = next(at for at, state in enumerate(system.ranks) if state.status is Status.CUT)
    assert isinstance(next_step(plan, rank, system.ranks[rank]), Wait)
    kinds = {event.kind for event in enabled(plan, system, LOST, 1) if event.rank == rank}
    assert kinds == {Kind.DEADLINE}
    verdict, _ = explore(plan, LOST._replace(deadlines=False), 1)
    assert isinstance(verdict, Violated)
    assert verdict.property == "deadlock"


def test_an_arrival_that_comes_twice_changes_nothing() -> None:
    plan = basic(AGAIN)
    system, changed = initial(plan), 0
    while events := list(enabled(plan, system, AGAIN, 2)):
        for event in events:
            if event.kind is Kind.AGAIN:
                after = step(plan, system, event)
                assert after._replace(faults=0) == system
                changed += 1
        system = step(plan, system, next(e for e in events if e.kind is not Kind.AGAIN))
    assert changed > 20


def test_a_rank_with_other_options_breaks_the_plan_fence_before_anything_is_done() -> None:
    plan = basic(MIXED)
    after = walked(plan, MIXED, Kind.REFUSE)
    assert after.cells == initial(plan).cells
    refused = next(
        event for event in enabled(plan, initial(plan), MIXED) if event.kind is Kind.REFUSE
    )
    assert refused == Event(Kind.REFUSE, 0, PLAN)
    other = [event for event in enabled(plan, after, MIXED, 1) if event.rank == 1]
    assert Kind.PASS not in {event.kind for event in other}


@pytest.mark.parametrize("faults", ["lost", "again", "mixed", "lost,crash"])
def test_check_takes_them(faults: str) -> None:
    report = check(load("basic"), faults=faults)
    assert isinstance(report.verdict, Holds)
    assert faults.replace(",", " or ") in {case.faults for case in report.cases}


def test_a_death_after_all_others_stopped_holds_up_no_recovery() -> None:
    """Two faults: one fails and waits for everybody to stop, and its peer dies."""
    plan = resolve(load("disagg_broadcast"), 2)
    verdict, _ = explore(plan, Faults(most=2, crash=True, fail=True), 2)
    assert isinstance(verdict, Holds)
