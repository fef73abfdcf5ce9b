"""Names that nothing bears. A file's own are found with line and column when it is read; this is
for declarations made in code, and it runs first, since the other rules rely on names."""

from collections import Counter
from collections.abc import Collection

from phasesync.core.condition import Condition, names
from phasesync.core.options import doubt, suggest
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    WORLD,
    FenceDecl,
    GroupDecl,
    Invariant,
    InvariantKind,
    OptionDecl,
    PhaseDecl,
    Place,
    Protocol,
    StepDecl,
    Verb,
)
from phasesync.lint.finding import Finding, Findings

__all__ = ("references",)


def references(protocol: Protocol) -> Findings:
    """Every name that is declared twice or not at all, and every condition that makes no sense."""
    roles = [role.name for role in protocol.roles]
    groups = [group.name for group in protocol.groups]
    options: dict[str, OptionDecl] = {option.name: option for option in protocol.options}
    yield from _twice(protocol)
    yield from _shadows(protocol)
    for group in protocol.groups:
        yield from _known("role", group.of, roles, group.place)
        yield from _size(group, options)
    for role in protocol.roles:
        yield from _known("place", role.per, [DEVICE, *groups], role.place)
    for resource in protocol.resources:
        yield from _known("role", resource.owner, roles, resource.place)
        yield from _condition(protocol, resource.start, resource.place)
    resources = [resource.name for resource in protocol.resources]
    for invariant in protocol.invariants:
        yield from _condition(protocol, invariant.when, invariant.place)
        for name in invariant.resources:
            yield from _known("resource", name, resources, invariant.place)
        yield from _invariant(protocol, invariant)
    for step in (*protocol.steps, *protocol.recover):
        yield from _condition(protocol, step.when, step.place)
        yield from _known("active role", step.role, protocol.active_roles, step.place)
        yield from _step(protocol, step, resources)


def _size(group: GroupDecl, options: dict[str, OptionDecl]) -> Findings:
    if isinstance(group.size, int):
        least: int | None = group.size
    elif group.size in options:
        least = options[group.size].least
    else:
        yield from _known("option", group.size, options, group.place)
        return
    if least is None or least < 1:
        wrong = f"size of group {group.name!r} may be less than 1"
        yield _finding(group.place, wrong, "make it at least 1")


def _invariant(protocol: Protocol, invariant: Invariant) -> Findings:
    """What an invariant names beside resources, and whether these are of the kind it speaks of."""
    place, kind = invariant.place, invariant.kind
    if kind is InvariantKind.ALWAYS and invariant.on:
        phases = [s.name for s in (*protocol.steps, *protocol.recover) if isinstance(s, PhaseDecl)]
        yield from _known("phase", invariant.on, phases, place)
    if kind is InvariantKind.AGREE:
        groups = [WORLD, *(group.name for group in protocol.groups)]
        yield from _known("group", invariant.on, groups, place)
    if kind not in (InvariantKind.AGREE, InvariantKind.MONOTONE):
        return
    content = {each.name for each in protocol.resources if each.content}
    filled = {
        effect.resource
        for step in (*protocol.steps, *protocol.recover)
        if isinstance(step, PhaseDecl)
        for effect in step.effects
        if effect.verb is Verb.FILLS
    }
    for name in invariant.resources:
        if name not in content:
            right = "give it `content: version`, or drop it here"
            yield _finding(place, f"{kind} speaks of {name!r}, which has no content", right)
        elif kind is InvariantKind.AGREE and name in filled:
            right = "agree is for what is written; drop it here"
            yield _finding(place, f"agree speaks of {name!r}, which is filled while used", right)


def _step(protocol: Protocol, step: StepDecl, resources: Collection[str]) -> Findings:
    groups: dict[str, GroupDecl] = {group.name: group for group in protocol.groups}
    match step:
        case FenceDecl(scope=scope):
            options = [option.name for option in protocol.options]
            yield from _known("scope", scope, [WORLD, *groups, *options], step.place)
        case PhaseDecl(effects=effects):
            for effect in effects:
                yield from _known("resource", effect.resource, resources, step.place)
                yield from _known("place", effect.reach, [DEVICE, EVERYWHERE, *groups], step.place)
                group = groups.get(effect.reach)
                if group is not None and group.of != step.role:
                    wrong = f"phase {step.name!r} of {step.role} reaches {group.name!r}"
                    right = f"that is a group of {group.of}; reach a group of {step.role}"
                    yield _finding(step.place, wrong, right)
            if step.by is not None and all(group.of != step.role for group in groups.values()):
                wrong = f"phase {step.name!r} is by a leader, and {step.role} has no group"
                yield _finding(step.place, wrong, "declare one in groups, or drop by:")


def _shadows(protocol: Protocol) -> Findings:
    """An option that is also a word elsewhere: a condition or a scope could mean either."""
    words = {
        word: f"a choice of {each.name!r}" for each in protocol.options for word in each.choices
    }
    words |= {group.name: "a group" for group in protocol.groups}
    for option in protocol.options:
        if option.name in words:
            wrong = f"option {option.name!r} is also {words[option.name]}"
            yield _finding(option.place, wrong, "rename one, so that conditions are clear")


def _twice(protocol: Protocol) -> Findings:
    for kind, declared in (
        ("option", protocol.options),
        ("group", protocol.groups),
        ("role", protocol.roles),
        ("resource", protocol.resources),
    ):
        count = Counter(decl.name for decl in declared)
        for decl in declared:
            if count[decl.name] > 1:
                count[decl.name] = 0
                yield _finding(decl.place, f"{kind} {decl.name!r} is declared twice", "rename one")
    steps = Counter((step.role, step.name) for step in (*protocol.steps, *protocol.recover))
    for step in (*protocol.steps, *protocol.recover):
        if steps[step.role, step.name] > 1:
            steps[step.role, step.name] = 0
            yield _finding(step.place, f"{step.name!r} is declared twice", "rename one")


def _known(kind: str, name: str, known: Collection[str], place: Place) -> Findings:
    if name not in known:
        yield _finding(place, f"unknown {kind} {name!r}", suggest(name, [*known], f"{kind}s"))


def _condition(protocol: Protocol, condition: Condition | None, place: Place) -> Findings:
    if condition is None:
        return
    options: dict[str, OptionDecl] = {option.name: option for option in protocol.options}
    for name in sorted(names(condition) - options.keys()):
        yield _finding(place, f"unknown option {name!r}", suggest(name, [*options], "options"))
        return
    mistake = doubt(condition, options)
    if mistake is not None:
        yield _finding(place, f"when: {mistake.wrong}", mistake.right)


def _finding(place: Place, wrong: str, right: str) -> Finding:
    return Finding(rule="reference", wrong=wrong, right=right, place=place)
