"""One search answers for assignments of the options that follow from its own."""

import random

import pytest

from phasesync.checker import Settings, check
from phasesync.checker.anyn import counts, gist, tracked_plan
from phasesync.checker.cover import covers, decided, families
from phasesync.checker.explicit import explore
from phasesync.core.kernel import Faults
from phasesync.core.options import assignments
from phasesync.core.plan import Plan, resolve, settle
from phasesync.core.protocol import Protocol
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load

from . import chance

ONE = Faults(most=1, crash=True, fail=True)


def heads(protocol: Protocol) -> tuple[int, int]:
    """How many assignments there are, and how many of them are searched."""
    different = {decided(protocol, each): each for each in assignments(protocol)}
    plans = [tracked_plan(protocol, each) for each in different.values()]
    return len(assignments(protocol)), len(set(families(plans)))


@pytest.mark.parametrize(
    ("name", "many", "searched"),
    [("basic", 2, 2), ("colocated", 16, 8), ("colocated_each", 192, 20), ("verl_stock", 8, 4)],
)
def test_few_searches_answer_for_all_assignments(name: str, many: int, searched: int) -> None:
    assert heads(load(name)) == (many, searched)


def colocated(**options: bool) -> Plan:
    return resolve(load("colocated"), 2, options)


def test_what_a_plan_lacks_must_be_nobody_elses_business() -> None:
    wide = colocated()
    assert covers(wide, colocated(param_offload=False))
    assert not covers(colocated(param_offload=False), wide)
    assert not covers(wide, colocated(free_cache_engine=False))
    assert not covers(wide, resolve(load("colocated"), 4))


@pytest.mark.parametrize("seed", range(10))
def test_what_is_broken_is_broken_in_the_plan_that_covers_it(seed: int) -> None:
    dice = random.Random(seed)
    protocol = chance.protocol(dice)
    plans = [
        resolve(protocol, counts(protocol, 2), each)
        for each in assignments(protocol)[:24]
        if each["replica_size"] == 2
    ]
    pairs = [(at, head) for at, head in enumerate(families(plans)) if at != head]
    for narrow, wide in dice.sample(pairs, min(1, len(pairs))):
        if isinstance(_verdict(plans[narrow]), Violated):
            assert isinstance(_verdict(plans[wide]), Violated)


def _verdict(plan: Plan) -> object:
    return explore(plan, ONE, 1, shortest=False)[0]


@pytest.mark.parametrize(
    ("name", "assignments_", "searches", "states"),
    [("colocated", 16, 6, 4_400), ("colocated_each", 192, 8, 9_500)],
)
def test_few_searches_answer_for_every_assignment(
    name: str, assignments_: int, searches: int, states: int
) -> None:
    """What makes any N a matter of a second: both counts are exact and have no clock in them."""
    report = check(load(name), faults="none", settings=Settings(states_max=20_000))
    asked = [case for case in report.cases if case.ranks is None]
    assert all(isinstance(case.verdict, Holds) for case in asked)
    assert len(asked) == searches
    assert sum(1 + len(case.covers) for case in asked) == assignments_
    assert sum(case.verdict.states for case in asked) < states


def test_where_a_group_goes_on_a_fence_of_it_is_one_of_the_world() -> None:
    protocol = load("colocated")
    near, far = (
        tracked_plan(protocol, settle(protocol, {"fence_scope": scope}))
        for scope in ("replica", "world")
    )
    assert near.programs != far.programs
    assert gist(near).programs == gist(far).programs
    alone, together = (
        tracked_plan(protocol, settle(protocol, {"fence_scope": scope, "replica_size": 1}))
        for scope in ("replica", "world")
    )
    assert gist(alone).programs != gist(together).programs


def test_an_action_that_is_done_twice_is_one_that_takes_longer() -> None:
    protocol = load("colocated_each")
    once, twice = (
        tracked_plan(protocol, settle(protocol, {"lora": lora})) for lora in ("none", "adapter")
    )
    assert len(once.programs[0]) + 1 == len(twice.programs[0])
    assert gist(once).programs == gist(twice).programs
