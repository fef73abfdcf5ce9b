"""`always`, `agree` and `monotone`: every search finds a broken one, as the kernel does."""

import random
from dataclasses import replace

import pytest

from phasesync.checker.explicit import explore
from phasesync.checker.space import Space
from phasesync.core.kernel import NO_FAULTS, Faults
from phasesync.core.plan import Plan, resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.report.protocols import as_text, overview
from phasesync.spec import dumps, loads

from .test_tables import walk

HEAD = """
phasesync: 1
protocol: asks
options:
  strict: {type: bool, default: true}
groups:
  replica: {of: trainer, size: 2}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  weights: {owner: engine, content: version, start: {mapped: true}}
  cache:   {owner: engine}
"""
OVER = "  - fence: over\n    deadline_s: 60\n"
#: Each kind: the invariant, the phases that break it at two ranks, and those that keep it.
CASES = {
    "always": (
        "always: [{together: [cache, weights], during: serve, when: strict}]",
        "  - map:   {by: leader, acquires: {cache: replica}}\n"
        "  - serve: {}\n"
        "  - unmap: {by: leader, releases: {cache: replica}}\n",
        "  - map:   {by: leader, acquires: {cache: replica}}\n"
        "  - fence: mapped\n    deadline_s: 60\n"
        "  - serve: {}\n"
        "  - fence: served\n    deadline_s: 60\n"
        "  - unmap: {by: leader, releases: {cache: replica}}\n",
    ),
    "agree": (
        "agree: [{content: weights, across: replica, when: strict}]",
        "  - load:  {writes: weights}\n  - serve: {uses: weights}\n",
        "  - load:  {writes: weights}\n  - fence: loaded\n    deadline_s: 60\n"
        "  - serve: {uses: weights}\n",
    ),
    "monotone": (
        "monotone: [{content: weights, when: strict}]",
        "  - load:  {writes: {weights: replica}, by: leader}\n",
        "",
    ),
}
TWO_WRITERS = """
phasesync: 1
protocol: writers
roles:
  trainer: {place: one per device}
  pusher:  {place: one per device}
resources:
  weights: {owner: trainer, content: version, start: {mapped: true}}
monotone: [{content: weights}]
phases:
  trainer:
    - load: {fills: weights}
  pusher:
    - push: {fills: weights}
"""
_MEET = "    - fence: over\n      deadline_s: 60\n"
FENCED = TWO_WRITERS.replace("  pusher:\n    -", f"{_MEET}  pusher:\n    -") + _MEET


def plan_of(kind: str, *, sound: bool, strict: bool = True) -> Plan:
    if kind == "monotone":
        return resolve(loads(FENCED if sound else TWO_WRITERS), {"trainer": 1, "pusher": 1})
    asks, broken, kept = CASES[kind]
    text = f"{HEAD}{asks}\nphases:\n{kept if sound else broken}{OVER}"
    return resolve(loads(text), 2, {"strict": strict})


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", sorted(CASES))
def test_a_broken_one_is_found_and_a_sound_one_holds(kind: str, reduced: bool) -> None:
    def ask(plan: Plan) -> Holds | Violated:
        verdict, _ = explore(
            plan, NO_FAULTS, 2, symmetry=reduced, reduction=reduced, deadlocks=False
        )
        assert isinstance(verdict, Holds | Violated)
        return verdict

    assert isinstance(ask(plan_of(kind, sound=True)), Holds)
    verdict = ask(plan_of(kind, sound=False))
    assert isinstance(verdict, Violated)
    assert verdict.property == kind


@pytest.mark.parametrize("kind", ["always", "agree"])
def test_under_options_that_do_not_ask_nothing_is_asked(kind: str) -> None:
    plan = plan_of(kind, sound=False, strict=False)
    verdict, _ = explore(plan, NO_FAULTS, 1, deadlocks=False)
    assert not isinstance(verdict, Violated) or verdict.property != kind


def test_at_all_times() -> None:
    asks = "always: [{together: [weights]}]"
    body = "  - sleep: {by: leader, releases: {weights: replica}}\n  - fence: slept\n"
    body += "    deadline_s: 60\n  - wake: {by: leader, acquires: {weights: replica}}\n"
    for steps, found in ((body, "always"), ("  - serve: {uses: weights}\n", None)):
        verdict, _ = explore(
            resolve(loads(f"{HEAD}{asks}\nphases:\n{steps}{OVER}"), 2), NO_FAULTS, 2
        )
        assert (verdict.property if isinstance(verdict, Violated) else None) == found


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("kind", sorted(CASES))
def test_compiled_steps_are_the_kernels(kind: str, sound: bool) -> None:
    faults = Faults(most=2, crash=True, fail=True)
    space = Space(plan_of(kind, sound=sound), faults, 2, symmetry=False, reduction=False)
    for seed in range(8):
        walk(space, random.Random(seed), 60)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_written_and_shown(kind: str) -> None:
    asks = CASES[kind][0]
    protocol = loads(f"{HEAD}{asks}\nphases:\n  - serve: {{uses: weights}}\n{OVER}")
    (again,) = loads(dumps(protocol)).invariants
    assert replace(again, place=protocol.invariants[0].place) == protocol.invariants[0]
    told = {
        "always": "cache and weights are mapped during serve",
        "agree": "the version of weights agrees across each replica where it is used",
        "monotone": "the version of weights never falls",
    }
    assert any(
        told[kind] in line and "strict" in line for line in as_text(overview(protocol)).splitlines()
    )
