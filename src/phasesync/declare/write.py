"""A declaration as the text that declares it: what `loads` reads back is equal to what was written.

For protocols that were changed in code and are to be kept, shown or tested as files.
"""

import re
from collections.abc import Iterator

from phasesync.core.condition import write
from phasesync.core.protocol import (
    DEVICE,
    Evidence,
    FenceDecl,
    Invariant,
    InvariantKind,
    OptionDecl,
    PhaseDecl,
    Protocol,
    ResourceDecl,
    Retry,
    RoleDecl,
    StepDecl,
    Verb,
)

__all__ = ("written",)

_BARE = re.compile(r"[A-Za-z(][A-Za-z0-9_ ()=!<>]*[A-Za-z0-9_)]")


def written(protocol: Protocol) -> str:
    """The YAML text of a protocol."""
    return "".join(f"{line}\n" for line in _lines(protocol))


def _lines(protocol: Protocol) -> Iterator[str]:
    yield "phasesync: 1"
    yield f"protocol: {protocol.name}"
    if protocol.summary:
        yield f"summary: {_quoted(protocol.summary)}"
    yield from _section("options", {each.name: _option(each) for each in protocol.options})
    yield from _section(
        "groups",
        {each.name: f"{{of: {each.of}, size: {each.size}}}" for each in protocol.groups},
    )
    yield from _section("roles", {each.name: _role(each) for each in protocol.roles})
    yield from _section("resources", {each.name: _resource(each) for each in protocol.resources})
    for kind in InvariantKind:
        own = [each for each in protocol.invariants if each.kind is kind]
        if own:
            yield from ("", f"{kind}:")
            yield from (f"  - {_invariant(each)}" for each in own)
    yield from _program(protocol, "phases", protocol.steps)
    yield from _program(protocol, "recover", protocol.recover)


def _section(title: str, entries: dict[str, str]) -> Iterator[str]:
    if entries:
        yield from ("", f"{title}:")
        width = max(map(len, entries)) + 1
        yield from (f"  {f'{name}:':<{width}} {says}" for name, says in entries.items())


def _program(protocol: Protocol, title: str, steps: tuple[StepDecl, ...]) -> Iterator[str]:
    roles = protocol.active_roles
    if not steps:
        return
    yield from ("", f"{title}:")
    if len(roles) == 1:
        yield from (f"  - {_step(step)}" for step in steps)
        return
    for role in roles:
        own = [step for step in steps if step.role == role]
        if own:
            yield f"  {role}:"
            yield from (f"    - {_step(step)}" for step in own)


def _braces(*parts: str) -> str:
    return "{" + ", ".join(part for part in parts if part) + "}"


def _option(option: OptionDecl) -> str:
    default = str(option.default).lower() if option.type == "bool" else str(option.default)
    return _braces(
        f"type: {option.type}",
        f"of: [{', '.join(option.choices)}]" if option.choices else "",
        f"default: {default}",
        f"min: {option.least}" if option.least is not None else "",
        f"max: {option.most}" if option.most is not None else "",
    )


def _role(role: RoleDecl) -> str:
    driven = f"driven_by: {role.driven_by}" if role.driven_by else ""
    return _braces(f"place: one per {role.per}", driven)


def _resource(resource: ResourceDecl) -> str:
    start = resource.start
    return _braces(
        f"owner: {resource.owner}",
        "content: version" if resource.content else "",
        "dies: freed" if resource.freed else "",
        f"start: {{mapped: {_quoted(write(start))}}}" if start is not None else "",
    )


def _invariant(invariant: Invariant) -> str:
    names, on = f"[{', '.join(invariant.resources)}]", invariant.on
    match invariant.kind:
        case InvariantKind.NEVER:
            says = (f"together: {names}", f"on: {on}")
        case InvariantKind.ALWAYS:
            says = (f"together: {names}", f"during: {on}" if on else "")
        case InvariantKind.AGREE:
            says = (f"content: {names}", f"across: {on}")
        case InvariantKind.MONOTONE:
            says = (f"content: {names}", "")
    return _braces(*says, _when(invariant))


def _when(decl: StepDecl | Invariant) -> str:
    return f"when: {_quoted(write(decl.when))}" if decl.when is not None else ""


def _step(step: StepDecl) -> str:
    match step:
        case PhaseDecl():
            return f"{step.name}: {_phase(step)}"
        case FenceDecl():
            return _fence(step)


def _phase(phase: PhaseDecl) -> str:
    verbs = dict.fromkeys(effect.verb for effect in phase.effects)
    return _braces(
        f"by: {phase.by}" if phase.by else "",
        *(f"{verb}: {_effects(phase, verb)}" for verb in verbs),
        _when(phase),
        "outside: true" if phase.outside else "",
        "enqueued: true" if phase.enqueued else "",
        f"retry: {phase.retry}" if phase.retry is not Retry.NEVER else "",
        f"deadline_s: {phase.deadline_s:.15g}" if phase.deadline_s else "",
    )


def _effects(phase: PhaseDecl, verb: Verb) -> str:
    own = [effect for effect in phase.effects if effect.verb is verb]
    if verb is Verb.ENSURES:
        return _braces(*(f"{effect.resource}: start" for effect in own))
    if all(effect.reach == DEVICE for effect in own):
        return f"[{', '.join(effect.resource for effect in own)}]"
    return _braces(*(f"{effect.resource}: {effect.reach}" for effect in own))


def _fence(fence: FenceDecl) -> str:
    requires = [*fence.established, *map(_evidence, fence.evidence)]
    return _braces(
        f"fence: {fence.name}",
        f"scope: {fence.scope}",
        f"deadline_s: {fence.deadline_s:.15g}",
        f"first_deadline_s: {fence.first_deadline_s:.15g}" if fence.first_deadline_s else "",
        f"requires: [{', '.join(requires)}]" if requires else "",
        "joined: outside" if fence.joined else "",
        _when(fence),
    )


def _evidence(evidence: Evidence) -> str:
    return f"{evidence.name} {evidence.op} {evidence.value}"


def _quoted(text: str) -> str:
    """`text` as YAML that is one line whatever it holds."""
    if _BARE.fullmatch(text):
        return text
    return "'" + text.replace("'", "''") + "'"
