"""The peak over all interleavings, and the phase that is it."""

import pytest

from phasesync.checker.memory import figures_of, peak
from phasesync.core.plan import Plan, resolve
from phasesync.errors import PlanError
from phasesync.spec import load

GIB = {
    "trainer_params": 30,
    "train_cache": 25,
    "staging": 4,
    "rollout_weights": 15,
    "kv_cache": 40,
}


def plan(**options: bool) -> Plan:
    return resolve(load("colocated"), 2, options)


def test_the_peak_is_in_training_where_all_is_released_in_between() -> None:
    found = peak(plan(), figures_of(plan(), {"gib": GIB, "capacity_gib": 80}))
    assert (found.gib, found.phase, found.fits) == (55.0, "train", True)
    assert found.says() == (
        "peak 55 GiB of 80 GiB in train: fits; held: trainer_params 30, train_cache 25"
    )


def test_without_releases_it_does_not_fit() -> None:
    kept = plan(free_cache_engine=False)
    found = peak(kept, figures_of(kept, {"gib": GIB, "capacity_gib": 80}))
    assert (found.gib, found.phase, found.fits) == (110.0, "train", False)
    assert len(found.path) == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "'gib' is missing"),
        ([1], "memory figures are"),
        ({"gib": GIB}, "capacity_gib is None"),
        ({"capacity_gib": 80, "gib": GIB, "capacity": 8}, "no other keys"),
        ({"capacity_gib": 80, "gib": {**GIB, "kv_cache": -1}}, "gib of kv_cache is -1"),
        ({"capacity_gib": "80", "gib": GIB}, "capacity_gib is '80'"),
        ({"capacity_gib": 80, "gib": {**GIB, "kv": 1}}, "no resource 'kv'"),
        ({"capacity_gib": 80, "gib": {"kv_cache": 1}}, "no figure for: trainer_params"),
    ],
)
def test_figures_are_doubted(body: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        figures_of(plan(), body)
