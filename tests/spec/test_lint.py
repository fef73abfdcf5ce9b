"""Lint: what it says when something is taken away from what is right."""

from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import pytest

from phasesync import spec
from phasesync.core.condition import Name
from phasesync.core.model import GroupName, OptionName, ResourceName, RoleName
from phasesync.core.protocol import (
    Effect,
    FenceDecl,
    GroupDecl,
    PhaseDecl,
    Protocol,
    ResourceDecl,
    RoleDecl,
    StepDecl,
    Verb,
)
from phasesync.errors import ProtocolError
from phasesync.lint import Severity, lint, refuse

RIGHT = {path.stem: spec.load(path) for path in (Path(__file__).parent / "right").glob("*.yaml")}
SHIPPED = {name: spec.load(name) for name in spec.shipped()}
#: Protocols of one controller: their last fence parts nobody from anybody, it tells of failures.
ALONE = [name for name, one in SHIPPED.items() if all(group.size == 1 for group in one.groups)]
FENCES = [
    (name, fence.name)
    for name, protocol in SHIPPED.items()
    for fence in protocol.fences
    if name not in ALONE
]


def without(protocol: Protocol, name: str) -> Protocol:
    return replace(protocol, steps=tuple(step for step in protocol.steps if step.name != name))


def _is(step: StepDecl, name: str) -> TypeGuard[FenceDecl]:
    return isinstance(step, FenceDecl) and step.name == name


@pytest.mark.parametrize(("name", "fence"), FENCES)
def test_no_fence_is_decoration(name: str, fence: str) -> None:
    found = lint(without(SHIPPED[name], fence))
    rules = {each.rule for each in found}
    assert rules & {"unprotected", "unprotected-acquire"}, [str(each) for each in found]


@pytest.mark.parametrize("name", ALONE)
def test_one_controller_ends_with_a_fence_too(name: str) -> None:
    (fence,) = SHIPPED[name].fences
    assert "last-fence" in {each.rule for each in lint(without(SHIPPED[name], fence.name))}


@pytest.mark.parametrize("fence", ["ready_for_weights", "memory_released"])
def test_what_a_fence_requires_is_required(fence: str) -> None:
    protocol = RIGHT["colocated"]
    steps = tuple(
        replace(step, established=())
        if step.name == fence and isinstance(step, FenceDecl)
        else step
        for step in protocol.steps
    )
    assert steps != protocol.steps
    assert "unsynchronised" in {found.rule for found in lint(replace(protocol, steps=steps))}


@pytest.mark.parametrize(("name", "fence"), FENCES)
def test_a_fence_within_a_rank_is_no_fence(name: str, fence: str) -> None:
    """A group of one is the rank alone: such a scope protects from nobody."""
    protocol = SHIPPED[name]
    alone = GroupDecl(name=GroupName("alone"), of=RoleName("trainer"), size=1)
    steps = tuple(
        replace(step, scope="alone") if _is(step, fence) else step for step in protocol.steps
    )
    found = lint(replace(protocol, steps=steps, groups=(*protocol.groups, alone)))
    assert any(each.rule.startswith("unprotected") for each in found)


@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, phase.name) for name, protocol in SHIPPED.items() for phase in protocol.phases],
)
def test_no_phase_that_touches_mapped_memory_can_be_left_out(name: str, phase: str) -> None:
    protocol = SHIPPED[name]
    step = next(each for each in protocol.phases if each.name == phase)
    moves = {Verb.ACQUIRES, Verb.RELEASES, Verb.WRITES}
    if moves & {effect.verb for effect in step.effects}:
        assert lint(without(protocol, phase)) != ()


def test_recovery_takes_nothing_before_the_engine_gave_back() -> None:
    """An engine that keeps its memory, where trainers take theirs back without waiting."""
    protocol = RIGHT["colocated"]
    recover = tuple(step for step in protocol.recover if step.name != "reclaimed")
    start = replace(protocol.resources[2], start=Name("free_cache_engine"))
    resources = (*protocol.resources[:2], start, *protocol.resources[3:])
    found = lint(replace(protocol, recover=recover, resources=resources))
    assert any(each.rule == "unprotected" and "reset" in each.wrong for each in found)


def _code(steps: tuple[StepDecl, ...], **fields: object) -> Protocol:
    trainer = RoleDecl(name=RoleName("trainer"))
    params = ResourceDecl(name=ResourceName("params"), owner=RoleName("trainer"))
    protocol = Protocol(name="code", roles=(trainer,), resources=(params,), steps=steps)
    return replace(protocol, **fields)  # type: ignore[arg-type]


def _phase(name: str, *effects: Effect, **fields: object) -> PhaseDecl:
    phase = PhaseDecl(name=name, role=RoleName("trainer"), effects=effects)  # type: ignore[arg-type]
    return replace(phase, **fields)  # type: ignore[arg-type]


def _fence(name: str, **fields: object) -> FenceDecl:
    return replace(FenceDecl(name=name, role=RoleName("trainer")), **fields)  # type: ignore[arg-type]


TAKE = _phase("take", Effect(Verb.ACQUIRES, ResourceName("params")))
GIVE = _phase("give", Effect(Verb.RELEASES, ResourceName("params")))
OVER = _fence("over")


def test_a_protocol_made_in_code_needs_no_file() -> None:
    assert lint(_code((TAKE, GIVE, OVER))) == ()
    refuse(_code((TAKE, GIVE, OVER)))


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        (_code((TAKE, TAKE, GIVE, OVER)), "'take' is declared twice"),
        (_code((TAKE, GIVE, replace(OVER, scope="nowhere"))), "unknown scope 'nowhere'"),
        (_code((TAKE, GIVE, replace(OVER, role=RoleName("x")))), "unknown active role 'x'"),
        (_code((TAKE, replace(GIVE, when=Name("fast")), OVER)), "unknown option 'fast'"),
        (_code((TAKE, replace(GIVE, by="leader"), OVER)), "by a leader, and trainer has no"),
        (_code((TAKE, GIVE, OVER), resources=()), "unknown resource 'params'"),
        (_code((TAKE, GIVE, OVER), roles=()), "unknown active role 'trainer'"),
        (
            _code((_phase("take", Effect(Verb.ACQUIRES, ResourceName("params"), "nearby")), OVER)),
            "unknown place 'nearby'",
        ),
        (
            _code((TAKE, GIVE, OVER), groups=(
                GroupDecl(name=GroupName("g"), of=RoleName("trainer"), size=OptionName("n")),
            )),
            "unknown option 'n'",
        ),
        (
            _code((TAKE, GIVE, OVER), groups=(
                GroupDecl(name=GroupName("g"), of=RoleName("trainer"), size=0),
            )),
            "size of group 'g' may be less than 1",
        ),
        (_code((TAKE, GIVE)), "the epoch of trainer has no fence"),
        (_code((TAKE, OVER)), "params starts the epoch not mapped and ends it mapped"),
        (_code((TAKE, OVER, GIVE)), "phase 'give' can fail after the last fence 'over'"),
        (
            _code((TAKE, replace(GIVE, deadline_s=5.0), replace(OVER, deadline_s=4.0))),
            "fence 'over' waits 4 s, less than the phases before it may take (give 5 s)",
        ),
        (
            _code((TAKE, GIVE, replace(OVER, deadline_s=9.0, first_deadline_s=8.0))),
            "fence 'over' waits 8 s in the first epoch, less than the 9 s later",
        ),
    ],
)  # fmt: skip
def test_what_lint_says(protocol: Protocol, says: str) -> None:
    found = [each for each in lint(protocol) if each.severity is Severity.ERROR]
    assert any(says in each.wrong for each in found), [str(each) for each in found]
    with pytest.raises(ProtocolError):
        refuse(protocol)


def test_a_fence_of_the_world_is_every_roles_and_in_one_order() -> None:
    judge = RoleDecl(name=RoleName("judge"))
    roles = (RoleDecl(name=RoleName("trainer")), judge)
    early = _fence("early")
    theirs = [replace(step, role=judge.name) for step in (early, OVER)]
    ours = (TAKE, GIVE, early, OVER)
    assert lint(_code((*ours, *theirs), roles=roles)) == ()
    lonely = lint(_code((*ours, theirs[1]), roles=roles))
    assert [e.wrong for e in lonely] == ["fence 'early' waits for judge, which never comes to it"]
    crossed = lint(_code((*ours, theirs[1], theirs[0]), roles=roles))
    assert {each.rule for each in crossed} == {"fence-members"}


def test_under_which_options() -> None:
    protocol = RIGHT["colocated"]
    steps = tuple(
        replace(step, when=None) if step.name == "load_back" else step for step in protocol.steps
    )
    found = [str(each) for each in lint(replace(protocol, steps=steps))]
    assert [each.rpartition("/")[2] for each in found] == [
        "colocated.yaml:41:5: phase 'load_back' acquires trainer_params, which is mapped already "
        "(with param_offload=false); release it before [once]"
    ]


def test_more_options_than_can_be_looked_at_is_said() -> None:
    text = spec.find("basic").read_text("utf-8")
    many = ", ".join(f"o{n}: {{type: bool, default: true}}" for n in range(12))
    when = " or ".join(f"o{n}" for n in range(12))
    text = text.replace("min: 1}", f"min: 1}}, {many}")
    text = text.replace("{uses: params}", f"{{uses: params, when: {when}}}")
    found = [each for each in lint(spec.loads(text)) if "assignments" in each.wrong]
    assert [each.severity for each in found] == [Severity.WARNING]
    assert "8192" in found[0].wrong


def test_options_that_are_compared_with_each_other() -> None:
    text = spec.find("basic").read_text("utf-8")
    text = text.replace("min: 1}", "min: 1}, most: {type: int, default: 4, min: 1}")
    text = text.replace("{uses: params}", "{uses: params, when: replica_size > most}")
    assert lint(spec.loads(text)) == ()


def test_two_roles_that_move_what_may_not_meet_between_the_same_fences() -> None:
    protocol = spec.loads(
        """
phasesync: 1
protocol: pair
groups: {replica: {of: trainer, size: 2}}
roles: {trainer: {place: one per device}, judge: {place: one per device}}
resources: {a: {owner: judge}, b: {owner: trainer}}
never: [{together: [a, b]}]
phases:
  trainer:
    - {fence: first, deadline_s: 9}
    - {fence: ours, scope: replica, deadline_s: 9}
    - take_b: {acquires: b}
    - give_b: {releases: b}
    - {fence: last, deadline_s: 9}
  judge:
    - take_a: {acquires: a}
    - {fence: first, deadline_s: 9}
    - give_a: {releases: a}
    - {fence: last, deadline_s: 9}
"""
    )
    assert [(each.rule, each.phases) for each in lint(protocol)] == [
        ("unprotected-acquire", ("give_a", "take_b"))
    ]
