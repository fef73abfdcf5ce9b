"""Protocols made by chance, of one role and of two: lint never stumbles, and where it is silent no
interleaving breaks anything."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from phasesync import spec
from phasesync.core.model import FenceName, GroupName, Phase, ResourceName, RoleName
from phasesync.core.plan import resolve
from phasesync.core.protocol import (
    DEVICE,
    WORLD,
    Effect,
    FenceDecl,
    GroupDecl,
    Invariant,
    InvariantKind,
    PhaseDecl,
    Protocol,
    ResourceDecl,
    RoleDecl,
    StepDecl,
    Verb,
)
from phasesync.lint import Severity, lint
from tests.spec import interleavings

TRAINER, JUDGE, ENGINE = map(RoleName, ("trainer", "judge", "engine"))
STATES_MAX = 20_000


def broken(protocol: Protocol) -> str | None:
    plan = resolve(protocol, dict.fromkeys(protocol.active_roles, 2))
    return interleavings.broken(plan, STATES_MAX)[0]


@st.composite
def protocols(draw: st.DrawFn) -> Protocol:
    """A cycle of acquires, uses and releases, cut by fences that may or may not be enough."""
    roles = draw(st.sampled_from([(TRAINER,), (TRAINER,), (TRAINER, JUDGE)]))
    names = [ResourceName(name) for name in "abc"[: draw(st.integers(1, 3))]]
    led = draw(st.sets(st.sampled_from(names)))
    steps: list[StepDecl] = []
    for name in names:
        role = draw(st.sampled_from(roles))
        can_lead = role == TRAINER and name in led
        for verb in (Verb.ACQUIRES, Verb.USES, Verb.RELEASES):
            by = "leader" if can_lead and draw(st.integers(0, 3)) else None
            reach = draw(st.sampled_from(["replica"] if by else [DEVICE] * 7 + ["replica"]))
            steps.append(
                PhaseDecl(
                    name=Phase(f"{verb}_{name}"),
                    role=role if verb is not Verb.USES else draw(st.sampled_from(roles)),
                    by=by,
                    effects=(Effect(verb, name, reach if role == TRAINER else DEVICE),),
                    enqueued=verb is Verb.RELEASES and not draw(st.integers(0, 4)),
                )
            )
    for number in range(draw(st.integers(0, 6))):
        scope = draw(st.sampled_from([WORLD, WORLD, "replica"]))
        steps.insert(draw(st.integers(0, len(steps))), _fence(f"f{number}", scope))
    steps.append(_fence("last", WORLD))
    every: list[StepDecl] = []
    for role in roles:
        for step in steps:
            if isinstance(step, FenceDecl) and (step.scope == WORLD or role == TRAINER):
                every.append(replace(step, role=role))
            elif step.role == role and isinstance(step, PhaseDecl):
                reach = step.effects[0].reach if role == TRAINER else DEVICE
                every.append(
                    replace(
                        step,
                        by=step.by if role == TRAINER else None,
                        effects=(replace(step.effects[0], reach=reach),),
                    )
                )
    never = tuple(
        Invariant(kind=InvariantKind.NEVER, resources=(one, two))
        for one, two in pairwise(names)
        if draw(st.booleans())
    )
    return Protocol(
        name="chance",
        groups=(GroupDecl(name=GroupName("replica"), of=TRAINER, size=2),),
        roles=(
            *(RoleDecl(name=role) for role in roles),
            RoleDecl(name=ENGINE, per="replica", driven_by="leader"),
        ),
        resources=tuple(
            ResourceDecl(name=name, owner=ENGINE if name in led else TRAINER) for name in names
        ),
        invariants=never,
        steps=tuple(every),
    )


def _fence(name: str, scope: str) -> FenceDecl:
    established = ("device_synchronised",)
    return FenceDecl(name=FenceName(name), role=TRAINER, scope=scope, established=established)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(protocols())
def test_lint_and_kernel_agree(protocol: Protocol) -> None:
    found = [each for each in lint(protocol) if each.severity is Severity.ERROR]
    event("lint has doubts" if found else "lint is silent")
    says = broken(protocol)
    if not found:
        assert says is None
    if says is not None and says.startswith(("never", "race", "mapped", "once")):
        assert found
    assert spec.loads(spec.dumps(protocol)).name == "chance"
