"""Who waits for ever, asked of a skeleton and of its plan: one answer, in fewer states."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.anyn import counts, sized, tracked, unclosed
from phasesync.checker.search import Budget, search
from phasesync.checker.skeleton import bare
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.plan import Defect, Plan, resolve, settle
from phasesync.spec import load

from . import chance
from .soundness import same

ONE = Faults(most=1, crash=True, fail=True)


def waits(plan: Plan, epochs: int = 2) -> bool | None:
    """Whether somebody waits for ever; None if it takes too long to say."""
    found = search(Space(plan, ONE, epochs), Budget(states_max=40_000), rules=False)
    return None if found.bound else found.deadlock


def unfinished(chance_: random.Random) -> Plan | None:
    """A plan by chance that breaks no rule, whatever the number of ranks."""
    protocol = chance.protocol(chance_)
    options = settle(protocol)
    if unclosed(protocol, options, same) or tracked(protocol, options, mutate=same).trail:
        return None
    return resolve(protocol, counts(protocol, 2), sized(protocol, options, 2))


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_a_skeleton_waits_for_ever_where_its_plan_does(first: int) -> None:
    """As it is, and where nobody hears of a failure, so that others wait for ever."""
    for seed in range(first, first + 6):
        plan = unfinished(random.Random(seed))
        if plan is None or bare(plan) is None:
            continue
        for defects in (frozenset[Defect](), frozenset({Defect.NO_ABORT})):
            planted = replace(plan, defects=defects)
            skeleton = bare(planted)
            full = waits(planted, 1)
            assert skeleton is not None
            assert full is None or waits(skeleton, 1) == full


@pytest.mark.parametrize(
    ("name", "ranks", "states"),
    [("colocated", 2, 820), ("colocated", 4, 5464), ("colocated_each", 4, 8766)],
)
def test_a_skeleton_has_few_states(name: str, ranks: int, states: int) -> None:
    protocol = load(name)
    plan = resolve(protocol, ranks, sized(protocol, settle(protocol), ranks))
    skeleton = bare(plan)
    assert skeleton is not None
    found = search(Space(skeleton, ONE, 1), rules=False, wide=None)
    assert (found.deadlock, found.states) == (False, states)
