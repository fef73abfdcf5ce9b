"""The process of an engine dies: its memory is lost, and the next call to it fails."""

import pytest

from phasesync.checker import check
from phasesync.checker.explicit import explore
from phasesync.core.kernel import Event, Faults, Kind, Mapped, enabled, initial, mapped_of, step
from phasesync.core.plan import Plan, resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.errors import PlanError
from phasesync.spec import load, loads

DIES = Faults(most=1, engine=True)
TEXT = """
phasesync: 1
protocol: pushed
groups:
  replica: {of: trainer, size: 2}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  weights: {owner: engine, content: version, start: {mapped: true}}
phases:
  - load:  {by: leader, writes: {weights: replica}}
  - fence: loaded
    deadline_s: 60
  - serve: {needs: weights}
  - fence: served
    deadline_s: 60
"""


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


@pytest.mark.parametrize("name", ["basic", "colocated", "colocated_each"])
def test_shipped_protocols_survive_it(name: str) -> None:
    assert isinstance(explore(resolve(load(name), 2), DIES, 2)[0], Holds)


@pytest.mark.parametrize("name", ["lost", "again", "mixed"])
def test_faults_of_messages_are_named_with_where_they_are_covered(name: str) -> None:
    with pytest.raises(PlanError, match=f"fault '{name}' is of messages.*(checker.messages|simul)"):
        check(load("basic"), faults=f"crash,{name}")
