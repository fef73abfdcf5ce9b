"""The compiled tables against the kernel: same steps on chance walks, same number of states."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Event, Faults, System, enabled, initial, step
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.properties import violations
from phasesync.spec import load

ONE_OF_ALL = Faults(most=1, crash=True, fail=True, hang=True, deadlines=True)


def plan(ranks: int, defect: Defect | None = None, **options: bool | int | str) -> Plan:
    found = resolve(load("colocated"), ranks, options)
    return replace(found, defects=frozenset({defect} if defect else ()))


def everything(found: Plan, faults: Faults, epochs: int) -> set[System]:
    """All systems that the kernel itself reaches."""
    seen = {initial(found)}
    level = list(seen)
    while level:
        after = {
            step(found, system, event)
            for system in level
            for event in enabled(found, system, faults, epochs)
        }
        level = list(after - seen)
        seen |= after
    return seen


@pytest.mark.parametrize(
    ("faults", "states"),
    [
        (Faults(), 462),
        (Faults(most=1, crash=True), 3810),
        (Faults(most=1, fail=True), 3377),
        (Faults(most=1, hang=True, deadlines=True), 5954),
    ],
    ids=["none", "crash", "fail", "hang"],
)
def test_the_number_of_states_is_the_kernels_own(faults: Faults, states: int) -> None:
    found = search(Space(plan(2), faults, 2, symmetry=False, reduction=False))
    assert found.states == states == len(everything(plan(2), faults, 2))
    assert found.trail is None


@pytest.mark.parametrize("defect", list(Defect), ids=lambda d: d.name.lower())
def test_defects_have_the_same_states_too(defect: Defect) -> None:
    faults = Faults(most=1, crash=True, fail=True)
    broken = plan(2, defect)
    space = Space(broken, faults, 2, symmetry=False, reduction=False)
    found = search(space, rules=False, deadlocks=False)
    assert found.states == len(everything(broken, faults, 2))


def walk(space: Space, chance: random.Random, steps: int) -> None:
    """Takes one chance walk with both, and compares all that may follow at each step."""
    system = initial(space.plan)
    for _ in range(steps):
        expected = sorted(
            (event.kind, event.name, space.encode(after), bool(bad))
            for event in enabled(space.plan, system, space.faults, space.epochs)
            for after in [step(space.plan, system, event)]
            for bad in [violations(space.plan, system, event, after)]
        )
        found = sorted(
            (kind, name, after, bad)
            for kind, name, after, bad, _ in space.successors(space.encode(system))
        )
        assert found == expected
        events = list(enabled(space.plan, system, space.faults, space.epochs))
        if not events:
            return
        event: Event = chance.choice(events)
        system = step(space.plan, system, event)


@pytest.mark.parametrize("seed", range(12))
def test_compiled_steps_are_the_kernels(seed: int) -> None:
    chance = random.Random(seed)
    defect = chance.choice([None, None, *Defect])
    size = chance.choice([1, 2, 3])
    options: dict[str, bool | int | str] = {
        "replica_size": size,
        "param_offload": chance.random() < 0.5,
        "free_cache_engine": chance.random() < 0.5,
        "fence_scope": chance.choice(["replica", "world"]),
    }
    faults = ONE_OF_ALL._replace(most=chance.choice([1, 2, 3]))
    space = Space(
        plan(size * chance.choice([1, 2]), defect, **options),
        faults,
        3,
        symmetry=False,
        reduction=False,
    )
    for _ in range(6):
        walk(space, chance, 160)


@pytest.mark.parametrize(
    ("symmetry", "reduction", "states"),
    [(False, False, 44959), (True, False, 22587), (True, True, 721)],
    ids=["full", "symmetry", "both"],
)
def test_reductions_leave_fewer_states(symmetry: bool, reduction: bool, states: int) -> None:
    found = search(Space(plan(4), Faults(), 1, symmetry=symmetry, reduction=reduction))
    assert (found.states, found.trail) == (states, None)
