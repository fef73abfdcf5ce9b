"""Recoveries that begin beside the dead: the compiled steps are the kernel's, on a small protocol
whose chance walks get there soon, with every planted defect and faults of every kind."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.explicit import explore
from phasesync.checker.mutants import mutations
from phasesync.checker.space import Space
from phasesync.core.kernel import Event, Faults, Kind, Stage, System, enabled, initial, step
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.properties import violations
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import loads

SMALL = """
phasesync: 1
protocol: small
options:
  replica_size: {type: int, default: 2, min: 1}
groups:
  replica: {of: trainer, size: replica_size}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  kv: {owner: engine}
phases:
  - work:  {by: leader, acquires: {kv: replica}}
  - fence: over
    scope: replica
    deadline_s: 60
  - fence: out
    deadline_s: 60
recover:
  - quiesce: {by: leader, retry: safe}
  - fence: quiet
    scope: replica
    deadline_s: 60
  - reclaim: {by: leader, ensures: {kv: start}, retry: safe}
  - fence: done
    scope: replica
    deadline_s: 60
"""
FAULTS = frozenset((Kind.CRASH, Kind.FAIL, Kind.HANG, Kind.LOSE))
GOES_ON = frozenset((Kind.ABORT, Kind.RECOVER, Kind.NOTICE))
SMALLEST = """
phasesync: 1
protocol: smallest
roles: {trainer: {place: one per device}}
resources: {params: {owner: trainer}}
phases:
  - work:  {acquires: params}
  - rest:  {releases: params}
  - fence: over
    deadline_s: 60
recover:
  - reset: {ensures: {params: start}}
"""


def late(plan: Plan) -> Plan:
    return replace(plan, defects=frozenset({Defect.LATE_ABORT}))


def agrees(space: Space, system: System) -> dict[Event, System]:
    """What may follow, after comparing it with what the search takes."""
    after = {
        event: step(space.plan, system, event)
        for event in enabled(space.plan, system, space.faults, space.epochs)
    }
    expected = {
        (kind, name, space.encode(then), bool(violations(space.plan, system, event, then)))
        for event, then in after.items()
        for kind, _, name in [event]
    }
    assert {found[:4] for found in space.successors(space.encode(system))} == expected
    return after


def walk(space: Space, dice: random.Random) -> None:
    """Faults come late, where others recover already."""
    system = initial(space.plan)
    for _ in range(60):
        after = agrees(space, system)
        if not after:
            return
        recovers = any(rank.stage is Stage.RECOVER for rank in system.ranks)
        fault = 2.0 if recovers else 0.04
        weights = [fault if e.kind in FAULTS else 1 + 2 * (e.kind in GOES_ON) for e in after]
        system = after[dice.choices(list(after), weights)[0]]


@pytest.mark.parametrize("seed", [0, 3])
def test_compiled_steps_are_the_kernels_where_ranks_die_in_recoveries(seed: int) -> None:
    dice = random.Random(seed)
    protocol = loads(SMALL)
    planted = [each.mutate for each in mutations(protocol)]
    for ranks, size in ((2, 2), (4, 2), (3, 3), (2, 1)):
        plan = resolve(protocol, ranks, {"replica_size": size})
        for found in (plan, dice.choice(planted)(plan), late(plan)):
            faults = Faults(
                most=dice.choice([1, 2, 3]),
                crash=True,
                fail=True,
                lost=dice.random() < 0.3,
                deadlines=dice.random() < 0.3,
            )
            space = Space(found, faults, 2, symmetry=dice.random() < 0.5, reduction=False)
            for _ in range(3):
                walk(space, dice)


@pytest.mark.parametrize(
    ("ranks", "most", "planted"),
    [(2, 2, True), (2, 2, False), (3, 1, False)],
    ids=["abort after opening", "two die", "one begins anew and the others recover"],
)
def test_every_step_of_the_smallest_is_the_kernels(ranks: int, most: int, planted: bool) -> None:
    plan = resolve(loads(SMALLEST), ranks, {})
    faults = Faults(most=most, crash=True, fail=True)
    space = Space(late(plan) if planted else plan, faults, 2, reduction=False)
    first = initial(plan)
    seen, level = {space.encode(first)}, [first]
    while level:
        following = []
        for system in level:
            for after in agrees(space, system).values():
                if (state := space.encode(after)) not in seen:
                    seen.add(state)
                    following.append(after)
        level = following
    assert len(seen) > 1000


def test_a_fence_that_a_death_opens_is_not_broken_by_its_notice() -> None:
    """What follows is a planted mistake: a rank that fails breaks the fence that it has passed."""
    plan = resolve(loads(SMALLEST), 2, {})
    faults = Faults(most=2, crash=True, fail=True)
    verdict, _ = explore(late(plan), faults, 2, deadlocks=False)
    assert isinstance(verdict, Violated)
    assert verdict.says == "fence stopped was open and is broken"
    assert verdict.path[-1].kind is Kind.FAIL
    assert isinstance(explore(plan, faults, 2, deadlocks=False)[0], Holds)
