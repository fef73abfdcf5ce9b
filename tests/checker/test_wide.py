"""A search as rows of numbers against the search of one state after the other."""

import random
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import pytest

import phasesync.checker.search
from phasesync.bench.check import MODELS
from phasesync.checker.anyn import counts
from phasesync.checker.frontier import Frontier
from phasesync.checker.keys import Keys
from phasesync.checker.many import Many
from phasesync.checker.mutants import mutations
from phasesync.checker.paths import lift
from phasesync.checker.search import Budget, Found, search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.options import assignments
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.errors import PlanError
from phasesync.spec import load, loads, shipped

from . import chance

ONE = Faults(most=1, crash=True, fail=True)
ALL = Faults(
    most=1,
    crash=True,
    fail=True,
    hang=True,
    deadlines=True,
    lost=True,
    again=True,
    mixed=True,
)
FEW = Budget(states_max=4_000)


def said(found: Found) -> tuple[object, ...]:
    """All that two searches of one space must agree on."""
    if found.trail is not None:
        return found.depth, len(found.trail), found.deadlock
    return found.states, found.product, found.transitions, found.depth, found.reached, found.bound


class How(TypedDict, total=False):
    """How a space is to be searched."""

    symmetry: bool
    reduction: bool
    whole: bool


def both(plan: Plan, faults: Faults, epochs: int = 1, **how: Unpack[How]) -> Found:
    """One state after the other, and as rows from the first state on; the answer, once it is one.

    Where the reduction picks one of two blocks that symmetry takes as alike, which of them is
    first is by their numbers, and these are given as they are met.
    """
    alone = search(Space(plan, faults, epochs, **how), FEW, wide=None)
    space = Space(plan, faults, epochs, **how)
    rows = search(space, FEW, wide=1)
    if alone.bound is None:
        by_number = how.get("symmetry", True) and space.reduction and alone.trail is None
        pick = (lambda found: found.reached) if by_number else said
        assert pick(rows) == pick(alone)
    if rows.trail is not None and not rows.deadlock:
        assert lift(space, rows.trail).violations
    return rows


SPACES: tuple[How, ...] = (
    {"symmetry": False, "reduction": False},
    {"symmetry": True, "reduction": False},
    {"symmetry": True, "reduction": True},
)


@pytest.mark.parametrize("how", SPACES, ids=["product", "orbits", "reduced"])
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_protocol_has_the_same_states(name: str, how: How) -> None:
    protocol = load(name)
    assert both(resolve(protocol, counts(protocol, 2), {}), ONE, **how).trail is None


@pytest.mark.parametrize("name", ["basic", "disagg_broadcast"])
def test_every_fault_has_the_same_states(name: str) -> None:
    protocol = load(name)
    plan = resolve(protocol, counts(protocol, 2), {})
    assert both(plan, ALL, symmetry=False, reduction=False).trail is None


@pytest.mark.parametrize("name", ["basic"])
def test_every_mistake_is_found_by_a_run_of_the_same_length(name: str) -> None:
    protocol = load(name)
    plan = resolve(protocol, counts(protocol, 2), {})
    broken = 0
    for mutation in mutations(protocol):
        try:
            planted = mutation.mutate(plan)
        except PlanError:
            continue
        broken += both(planted, ONE, reduction=False).trail is not None
    assert broken >= 3


@pytest.mark.parametrize("how", SPACES, ids=["product", "orbits", "reduced"])
@pytest.mark.parametrize("name", ["basic", "verl_stock"])
def test_a_block_of_many_ranks_is_asked_rank_by_rank(name: str, how: How) -> None:
    plan = resolve(load(name), 3, {"replica_size": 3})
    assert Many.fits(Space(plan, ONE, 1).moves[0])
    assert both(plan, ONE, **how).trail is None


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_many_ranks_by_chance(seed: int) -> None:
    dice = random.Random(seed)
    protocol = chance.protocol(dice)
    options = {**dice.choice(assignments(protocol)), "replica_size": 3}
    plan = resolve(protocol, counts(protocol, 3), options)
    both(plan, dice.choice([ONE, ALL]), symmetry=dice.random() < 0.5, reduction=dice.random() < 0.5)


@pytest.mark.parametrize("defect", list(Defect), ids=lambda d: d.name.lower())
def test_every_defect_has_the_same_states(defect: Defect) -> None:
    plan = resolve(load("basic"), 2, {})
    both(replace(plan, defects=frozenset({defect})), ONE, 2, symmetry=False, reduction=False)


@pytest.mark.parametrize("seed", range(5))
def test_protocols_by_chance(seed: int) -> None:
    dice = random.Random(seed)
    protocol = chance.protocol(dice)
    options = dice.choice(assignments(protocol))
    plan = resolve(protocol, counts(protocol, 2), {**options, "replica_size": dice.choice([1, 2])})
    how: How = {"symmetry": dice.random() < 0.5, "reduction": dice.random() < 0.5}
    both(plan, dice.choice([ONE, ALL]), dice.choice([1, 2]), **how)


@pytest.mark.parametrize("atomic", [True, False])
def test_what_excludes_another_on_other_devices(atomic: bool) -> None:
    """The model that is asked beside Spin, where a failure is learned at the end."""
    plan = resolve(loads(Path(MODELS / "fence_pml_abort.yaml").read_text()), 4, {})
    found = both(plan, Faults(most=1, crash=True), whole=atomic)
    assert found.states == {True: 593, False: 2953}[atomic]


def test_without_numpy_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(load("colocated_controller"), 3, {})
    asked = search(Space(plan, ONE, 1, symmetry=False))
    monkeypatch.setattr(phasesync.checker.search, "find_spec", lambda name: None)
    alone = search(Space(plan, ONE, 1, symmetry=False))
    assert said(asked) == said(alone)
    assert asked.states == 7802


def test_a_budget_ends_it() -> None:
    plan = resolve(load("colocated"), 4, {})
    found = search(Space(plan, ONE, 2), Budget(states_max=30_000))
    assert found.bound == "30,000 states"
    assert 30_000 < found.states < 300_000
    ticks = iter(range(10**9))
    late = Budget(now=lambda: float(next(ticks)), until_s=20.0)
    assert search(Space(plan, ONE, 2), late, wide=1).bound == "time"


def test_a_row_is_known_again_and_never_taken_for_another() -> None:
    """Of one hash for all rows too, which is what a collision is."""

    class Blind(Keys):
        def _hash(self, rows: np.ndarray) -> np.ndarray:
            return np.zeros(len(rows), dtype=np.uint64)

    dice = random.Random(0)
    for keys in (Keys(2), Blind(2)):
        numbers: dict[tuple[int, int], int] = {}
        for _ in range(20):
            batch = [(dice.randrange(9), dice.randrange(9)) for _ in range(50)]
            ids, new = keys.add(np.array(batch, dtype=np.uint32))
            for row, number, first in zip(batch, ids.tolist(), new.tolist(), strict=True):
                assert first is (row not in numbers)
                assert numbers.setdefault(row, number) == number
        assert [tuple(row) for row in keys.rows.all.tolist()] == sorted(numbers, key=numbers.get)  # type: ignore[arg-type]


def test_rows_are_states_and_back() -> None:
    space = Space(resolve(load("colocated"), 4, {}), ONE, 1)
    frontier = Frontier(space)
    first = space.initial()
    rows = frontier.rows([first])
    assert frontier.state(rows[0]) == first
    edges = frontier.steps(rows)
    states = [frontier.state(row) for row in edges.after]
    assert states == [after for _, _, after, _, _ in space.successors(first)]
