"""What is declared and does nothing: an accepted word without effect misleads its reader."""

from collections.abc import Iterable

from phasesync.core.condition import names
from phasesync.core.options import ASSIGNMENTS_MAX, conditions, count
from phasesync.core.protocol import (
    FenceDecl,
    Invariant,
    PhaseDecl,
    Place,
    Protocol,
    Retry,
    StepDecl,
    Verb,
)
from phasesync.lint.finding import Finding, Findings, Severity
from phasesync.lint.view import View

__all__ = ("idle_rules", "step_rules")


def step_rules(protocol: Protocol) -> Findings:
    """Words of a phase that contradict it."""
    for step in (*protocol.steps, *protocol.recover):
        if not isinstance(step, PhaseDecl):
            continue
        releases = any(effect.verb is Verb.RELEASES for effect in step.effects)
        if step.enqueued and not releases:
            wrong = f"phase {step.name!r} is enqueued and releases nothing"
            yield _finding(protocol, step.place, wrong, "drop enqueued:, or say what it releases")
        if step.outside and step.retry is not Retry.NEVER:
            wrong = f"phase {step.name!r} is outside and has retry: {step.retry}"
            yield _finding(protocol, step.place, wrong, "drop retry:; your program repeats it")


def idle_rules(protocol: Protocol, views: Iterable[View]) -> Findings:
    """What no assignment of the options brings to life."""
    seen = list(views)
    if count(protocol) <= ASSIGNMENTS_MAX:
        for step in (*protocol.steps, *protocol.recover):
            yield from _turns(protocol, step, [view.true(step.when, absent=True) for view in seen])
        for invariant in protocol.invariants:
            yield from _idle_invariant(protocol, invariant, seen)
    else:
        wrong = f"the options have {count(protocol)} assignments; lint looked at {ASSIGNMENTS_MAX}"
        right = "use fewer options, or check the assignments that you run"
        place = protocol.options[0].place
        yield _finding(protocol, place, wrong, right, Severity.WARNING)
    yield from _unused(protocol)


def _turns(protocol: Protocol, step: StepDecl, found: list[bool]) -> Findings:
    kind = "fence" if isinstance(step, FenceDecl) else "phase"
    if not any(found):
        rule = "nobody reaches" if kind == "fence" else "nobody ever performs"
        right = "its when: is false for all options; change or drop it"
        yield _finding(protocol, step.place, f"{rule} {kind} {step.name!r}", right)
    elif step.when is not None and all(found):
        wrong = f"when: of {kind} {step.name!r} is true for all options"
        yield _finding(protocol, step.place, wrong, "drop it, or change it", Severity.WARNING)


def _idle_invariant(protocol: Protocol, invariant: Invariant, views: list[View]) -> Findings:
    if not any(view.true(invariant.when, absent=True) for view in views):
        wrong = f"this {invariant.kind}: is false for all options, so it forbids nothing"
        yield _finding(protocol, invariant.place, wrong, "change its when:, or drop it")
    elif invariant.when is not None and all(
        view.true(invariant.when, absent=True) for view in views
    ):
        wrong = f"when: of this {invariant.kind} is true for all options"
        yield _finding(protocol, invariant.place, wrong, "drop it, or change it", Severity.WARNING)


def _unused(protocol: Protocol) -> Findings:
    steps = (*protocol.steps, *protocol.recover)
    read = {name for condition in conditions(protocol) for name in names(condition)}
    read |= {group.size for group in protocol.groups if isinstance(group.size, str)}
    scopes = {step.scope for step in steps if isinstance(step, FenceDecl)}
    for option in protocol.options:
        if option.name not in read | scopes:
            yield _warning(protocol, option.place, f"option {option.name!r} changes nothing")
    effects = [effect for step in steps if isinstance(step, PhaseDecl) for effect in step.effects]
    touched = {effect.resource for effect in effects}
    for resource in protocol.resources:
        if resource.name not in touched:
            yield _warning(protocol, resource.place, f"no phase touches resource {resource.name!r}")
    yield from _unused_groups(protocol, scopes | {effect.reach for effect in effects})


def _unused_groups(protocol: Protocol, reached: set[str]) -> Findings:
    reached |= {role.per for role in protocol.roles}
    reached |= {word for option in protocol.options for word in option.choices}
    for group in protocol.groups:
        if group.name not in reached:
            yield _warning(protocol, group.place, f"nothing speaks of group {group.name!r}")
    owners = {resource.owner for resource in protocol.resources}
    acting = {step.role for step in protocol.steps}
    for role in protocol.roles:
        if role.name not in owners | acting:
            yield _warning(protocol, role.place, f"role {role.name!r} owns and does nothing")
        elif not role.passive and role.name not in acting:
            wrong = f"role {role.name!r} acts, and has no phases"
            yield _finding(protocol, role.place, wrong, "give it phases, or driven_by: leader")


def _warning(protocol: Protocol, place: Place, wrong: str) -> Finding:
    return _finding(protocol, place, wrong, "use it, or drop it", Severity.WARNING)


def _finding(
    protocol: Protocol, place: Place, wrong: str, right: str, severity: Severity = Severity.ERROR
) -> Finding:
    return Finding(
        rule="idle", wrong=wrong, right=right, place=place, severity=severity, file=protocol.file
    )
