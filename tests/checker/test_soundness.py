"""Reductions lose nothing, and any N never promises what explicit ranks break."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.anyn import Closure, closure, sized, tracked, unclosed
from phasesync.checker.mutants import mutations
from phasesync.checker.search import Found, search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.plan import resolve, settle
from phasesync.core.protocol import ELSEWHERE
from phasesync.spec import load, loads

from . import chance
from .soundness import decided, same, survey

SEEDS = range(16)
ONE = Faults(most=1, crash=True, fail=True)


def kind(found: Found) -> str:
    if found.trail is None:
        return "holds"
    return "deadlock" if found.deadlock else "broken"


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_change_no_verdict(seed: int) -> None:
    dice = random.Random(seed)
    protocol = chance.protocol(dice)
    options = sized(protocol, settle(protocol), dice.choice([1, 2, 2]))
    faults = dice.choice([Faults(), ONE, ONE, Faults(most=1, hang=True, deadlines=True)])
    plan = resolve(protocol, 2, options)
    for rules in (True, False):
        plain = Space(plan, faults, 2, symmetry=False, reduction=False)
        full = search(plain, rules=rules, deadlocks=not rules)
        reduced = search(Space(plan, faults, 2), rules=rules, deadlocks=not rules)
        assert kind(reduced) == kind(full)


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_any_n_holds_only_where_explicit_ranks_do(first: int) -> None:
    """The short form of `python -m tests.checker.soundness 1000`."""
    tally, wrong = survey(first, 3)
    assert wrong == []
    assert decided(tally) >= 0.8


@pytest.mark.parametrize(
    ("group", "states"), [(1, 23), (2, 394)], ids=["alone", "leader and member"]
)
def test_any_n_takes_few_states(group: int, states: int) -> None:
    protocol = load("basic")
    found = tracked(protocol, sized(protocol, settle(protocol), group), mutate=same)
    assert (found.trail, found.states) == (None, states)


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_that_a_fence_does_without_is_tracked_beside_the_others(place: int) -> None:
    protocol = load("colocated")
    name = f"fence memory_released without trainer/{place}"
    mutation = next(each for each in mutations(protocol) if each.name == name)
    found = closure(protocol, settle(protocol), mutation.mutate)
    assert isinstance(found, Closure)
    assert len(found.plan.members) == (2 if place == 0 else 3)
    assert tracked(protocol, settle(protocol), mutate=mutation.mutate).trail is not None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_where_groups_of_one_rank_differ_each_sort_is_tracked(place: int) -> None:
    """A fence of the world that does without one rank: it by itself, and one of the others."""
    protocol = load("basic")
    alone = sized(protocol, settle(protocol), 1)
    name = f"fence rollout_over without trainer/{place}"
    mutation = next(each for each in mutations(protocol) if each.name == name)
    found = closure(protocol, alone, mutation.mutate)
    assert isinstance(found, Closure)
    assert len(found.blocks) == 2
    assert tracked(protocol, alone, mutate=mutation.mutate).trail is None
    plan = mutation.mutate(resolve(protocol, 3, alone))
    assert search(Space(plan, ONE, 1), deadlocks=False).trail is None


def test_where_no_part_is_closed_any_n_says_why() -> None:
    protocol = load("colocated")
    far = tuple(replace(each, on=ELSEWHERE) for each in protocol.invariants[:1])
    reason = unclosed(replace(protocol, invariants=far), settle(protocol), same)
    assert reason == "a never speaks of other devices, so that no finite part is closed"


AGREES = """
phasesync: 1
protocol: agrees
options:
  replica_size: {type: int, default: 2, min: 1}
groups:
  replica: {of: trainer, size: replica_size}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  weights: {owner: engine, content: version, start: {mapped: true}}
agree: [{content: weights, across: replica}]
phases:
  - load:  {writes: weights}
  - fence: loaded
    deadline_s: 60
  - serve: {uses: weights}
  - fence: over
    deadline_s: 60
"""


@pytest.mark.parametrize("fenced", [True, False])
def test_what_agrees_in_pairs_is_tracked_by_those_who_may_differ(fenced: bool) -> None:
    """The leader, one who asks, and the two whose contents differ; explicit ranks say the same."""
    protocol = loads(
        AGREES if fenced else AGREES.replace("  - fence: loaded\n    deadline_s: 60\n", "")
    )
    two = sized(protocol, settle(protocol), 2)
    found = closure(protocol, two, same)
    assert isinstance(found, Closure)
    assert len(found.plan.members) == 4
    assert (tracked(protocol, two, mutate=same).trail is None) is fenced
    for ranks in (2, 3, 5):
        plan = resolve(protocol, ranks, sized(protocol, two, ranks))
        assert (search(Space(plan, ONE, 1), deadlocks=False).trail is None) is fenced


def test_what_agrees_across_all_ranks_is_counted_out_only() -> None:
    protocol = loads(AGREES.replace("across: replica", "across: world"))
    reason = unclosed(protocol, settle(protocol), same)
    assert reason == "an agree speaks of the devices of all ranks, so that no finite part is closed"
