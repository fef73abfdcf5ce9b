"""The process of an engine dies: its memory is lost, and the next call to it fails."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.anyn import counts
from phasesync.checker.explicit import explore
from phasesync.checker.plainly import search_plainly
from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Event, Faults, Kind, Mapped, enabled, initial, mapped_of, step
from phasesync.core.options import assignments
from phasesync.core.plan import Plan, resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load, loads

from . import chance
from .pushed import replica

DIES = Faults(most=1, engine=True)
TEXT = replica("""\
phases:
  - load:  {by: leader, writes: {weights: replica}}
  - fence: loaded
    deadline_s: 60
  - serve: {needs: weights}
  - fence: served
    deadline_s: 60
""")


def pushed(last: str = "") -> Plan:
    return resolve(loads(TEXT + last), 2)


def test_what_was_mapped_is_lost_and_the_next_call_fails() -> None:
    plan = pushed()
    system = step(plan, initial(plan), Event(Kind.ENGINE, 0, "engine/0"))
    assert [mapped_of(value) for value in system.cells] == [Mapped.LOST, Mapped.LOST]
    system = step(plan, system, Event(Kind.START, 0, "load"))
    kinds = {event.kind for event in enabled(plan, system, DIES) if event.rank == 0}
    assert kinds == {Kind.FAIL}
    assert step(plan, system, Event(Kind.FAIL, 0, "load")).faults == 1


def test_everybody_learns_of_it() -> None:
    assert isinstance(explore(pushed(), DIES, 2)[0], Holds)


def test_who_fails_behind_the_last_fence_is_waited_for() -> None:
    """Found with `engine` alone: without faults the same protocol holds."""
    late = pushed("  - tidy: {by: leader, uses: {weights: replica}}\n")
    assert isinstance(explore(late, Faults(), 2)[0], Holds)
    verdict, _ = explore(late, DIES, 2)
    assert isinstance(verdict, Violated)
    assert verdict.property == "deadlock"
    assert any(event.kind is Kind.ENGINE for event in verdict.path)


@pytest.mark.parametrize("name", ["basic", "colocated", "colocated_each", "disagg_broadcast"])
def test_shipped_protocols_survive_it(name: str) -> None:
    assert isinstance(explore(resolve(load(name), 2), DIES, 2)[0], Holds)


def counted(plan: Plan, faults: Faults) -> tuple[object, ...]:
    """What the tables find, after the kernel, asked for every step, has found the same."""
    plain, lifted = search_plainly(plan, faults, 1)
    found = search(Space(plan, faults, 1, symmetry=False))
    assert (found.trail is None) is (lifted is None)
    if found.trail is None:
        assert found.states == plain.states
        assert found.transitions == plain.transitions
    assert (found.depth, found.deadlock) == (plain.depth, plain.deadlock)
    return found.states, found.deadlock, found.trail is None


def test_the_tables_have_the_kernels_own_states() -> None:
    both = Faults(most=2, engine=True, crash=True, fail=True)
    assert counted(resolve(load("basic"), 2), both) == (1589, False, True)
    assert counted(resolve(load("colocated_controller"), 2), DIES) == (1927, False, True)


@pytest.mark.parametrize("seed", range(8))
def test_the_tables_and_the_kernel_agree_on_protocols_by_chance(seed: int) -> None:
    dice = random.Random(seed)
    protocol = chance.protocol(dice)
    options = {**dice.choice(assignments(protocol)), "replica_size": dice.choice([1, 2])}
    plan = resolve(protocol, counts(protocol, 2), options)
    counted(plan, Faults(most=1, engine=True, fail=dice.random() < 0.5))


def test_symmetry_changes_no_verdict_and_sees_less() -> None:
    plan = resolve(load("basic"), 3, {"replica_size": 3})
    all_, few = (explore(plan, DIES, 1, symmetry=each) for each in (False, True))
    assert isinstance(all_[0], Holds)
    assert isinstance(few[0], Holds)
    assert few[1].states < 0.6 * all_[1].states


def test_a_recovery_that_no_fence_closes_leaves_a_controller_waiting() -> None:
    """The leader cannot put its part back; its peer, who hears of nothing, begins without it."""
    plan = resolve(load("disagg_broadcast"), 2)
    opened = replace(plan, recover=tuple(steps[:-1] for steps in plan.recover))
    verdict, _ = explore(opened, DIES, 2)
    assert isinstance(verdict, Violated)
    assert verdict.property == "deadlock"
