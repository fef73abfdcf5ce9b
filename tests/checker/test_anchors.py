"""The models that other checkers were measured on: same counts, same smallest failures."""

from dataclasses import replace
from math import comb

import pytest

from phasesync.bench.check import MODELS
from phasesync.checker import Settings, check
from phasesync.checker.mutants import without_fence
from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load

FENCE = load(MODELS / "fence_pml.yaml")
ABORT = load(MODELS / "fence_pml_abort.yaml")
CRASH = Faults(most=1, crash=True)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_the_product_is_spins(ranks: int) -> None:
    """As `check --ranks N --faults none --epochs 1 --no-symmetry --no-por --atomic` counts."""
    plainly = Settings(any_n=False, symmetry=False, reduction=False, atomic=True)
    report = check(FENCE, ranks=ranks, faults="none", epochs=1, settings=plainly)
    assert isinstance(report.verdict, Holds)
    assert report.verdict.states == 5**ranks + 3**ranks - 1


@pytest.mark.parametrize("reduction", [False, True])
def test_without_the_fence_it_is_broken_also_where_ranks_go_first_alone(reduction: bool) -> None:
    one = Settings(any_n=False, reduction=reduction)
    report = check(FENCE, ranks=3, faults="none", mutate=without_fence("at_fence"), settings=one)
    assert isinstance(report.verdict, Violated)
    assert len(report.verdict.path) == 9


@pytest.mark.parametrize("ranks", [2, 3])
def test_orbits_stand_for_the_product(ranks: int) -> None:
    folded = Space(resolve(ABORT, ranks), CRASH, 1, reduction=False)
    plain = Space(resolve(ABORT, ranks), CRASH, 1, symmetry=False, reduction=False)
    assert search(folded).product == search(plain).states


@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_the_orbits_are_counted(ranks: int) -> None:
    space = Space(resolve(FENCE, ranks), Faults(), 1, reduction=False, whole=True)
    assert search(space).states == comb(ranks + 4, 4) + comb(ranks + 2, 2) - 1


def test_many_ranks_take_few_states() -> None:
    assert search(Space(resolve(FENCE, 64), Faults(), 1, whole=True)).states == 385


def rollback(ranks: int) -> Plan:
    return replace(resolve(ABORT, ranks), defects=frozenset({Defect.ABORT_TAKES}))


@pytest.mark.parametrize(("ranks", "steps"), [(2, None), (3, 27), (4, 34)])
def test_an_abort_that_takes_weights_back_needs_three_ranks(ranks: int, steps: int | None) -> None:
    found = search(Space(rollback(ranks), CRASH, 1))
    assert (len(found.trail) if found.trail else None) == steps


def test_the_sound_abort_takes_nothing_back() -> None:
    assert search(Space(resolve(ABORT, 3), CRASH, 1)).trail is None


def without_wait(ranks: int) -> Plan:
    plan = resolve(FENCE, ranks)
    return replace(plan, programs=tuple((*p[:3], *p[4:]) for p in plan.programs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_without_the_fence_the_shortest_run_is_as_long_at_any_size(ranks: int) -> None:
    found = search(Space(without_wait(ranks), Faults(), 1, reduction=False, whole=True))
    assert found.trail is not None
    assert len(found.trail) == 4
