"""The models that other checkers were measured on: same counts, same smallest failures."""

from dataclasses import replace
from math import comb

import pytest

from phasesync.bench.check import MODELS
from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.spec import load

FENCE = load(MODELS / "fence_pml.yaml")
ABORT = load(MODELS / "fence_pml_abort.yaml")
CRASH = Faults(most=1, crash=True)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_product_is_spins(ranks: int) -> None:
    plan = resolve(FENCE, ranks)
    space = Space(plan, Faults(), 1, symmetry=False, reduction=False, whole=True)
    assert search(space).states == 5**ranks + 3**ranks - 1


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
