"""Reductions lose nothing, and any N never promises what explicit ranks break."""

import random
from collections.abc import Mapping

import pytest

from phasesync.checker.anyn import sized, tracked, unclosed
from phasesync.checker.explicit import explore
from phasesync.checker.search import Found, search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.plan import Plan, resolve, settle
from phasesync.core.verdict import Violated

from . import chance

SEEDS = range(24)
ONE = Faults(most=1, crash=True, fail=True)


def kind(found: Found) -> str:
    if found.trail is None:
        return "holds"
    return "deadlock" if found.deadlock else "broken"


def same(plan: Plan) -> Plan:
    return plan


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


@pytest.mark.parametrize("seed", SEEDS)
def test_any_n_holds_only_where_explicit_ranks_do(seed: int) -> None:
    dice = random.Random(1000 + seed)
    protocol = chance.protocol(dice)
    options: Mapping[str, OptionValue] = settle(protocol)
    if unclosed(protocol, options, same) is not None:
        return
    found = tracked(protocol, options, mutate=same)
    broken = [
        ranks
        for ranks, size, epochs in ((2, 2, 2), (3, 3, 1), (4, 2, 1))
        for faults in (ONE._replace(most=2) if ranks == 2 else ONE,)
        if isinstance(
            explore(
                resolve(protocol, ranks, sized(protocol, options, size)),
                faults,
                epochs,
                deadlocks=False,
            )[0],
            Violated,
        )
    ]
    if broken:
        assert found.trail is not None, f"any N holds, but {broken} ranks break a rule"
