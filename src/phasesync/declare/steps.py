"""Phases and fences, one by one and in the lists that put them in order."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from phasesync.core.model import FenceName, Phase, ResourceName, RoleName
from phasesync.core.options import suggest
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    IMPLIED,
    WORLD,
    Effect,
    Evidence,
    FenceDecl,
    OptionDecl,
    PhaseDecl,
    Retry,
    StepDecl,
    Verb,
)
from phasesync.declare.draft import Draft
from phasesync.nodes import Items, Node, Table, Text, describe

__all__ = (
    "ESTABLISHED",
    "FENCE_KEYS",
    "MEASURED",
    "PHASE_KEYS",
    "read_fence",
    "read_phase",
    "read_steps",
    "refuse_twins",
)

ESTABLISHED = ("device_synchronised", "ipc_collected")
MEASURED = ("free_bytes",)
FENCE_KEYS = ("scope", "deadline_s", "first_deadline_s", "requires", "joined", "when")
_VERBS = tuple(verb.value for verb in Verb if verb not in IMPLIED)
PHASE_KEYS = ("by", *_VERBS, "when", "outside", "enqueued", "retry", "deadline_s")
_EVIDENCE = re.compile(r"([a-z_]+)\s*(>=)\s*([0-9]{1,15})\s*(|KiB|MiB|GiB)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read_steps(draft: Draft, node: Node, what: str) -> list[StepDecl]:
    """A list of steps for the one active role, or a list for each role by name."""
    say, active = draft.complaints, draft.active
    if isinstance(node, Table):
        found: list[StepDecl] = []
        for name, (key, steps) in say.named(node, what, f"write `{what}: [...]`").items():
            if name not in draft.roles:
                say.unknown(key, "role", active)
            elif name not in active:
                right = f"roles that act are: {', '.join(active)}"
                say.say(key, f"role {name!r} is driven and has no {what}", right)
            else:
                found += _list(draft, steps, RoleName(name), what)
        return found
    if len(active) != 1 and draft.roles:
        right = f"write `{what}: {{ROLE: [...]}}` for: {', '.join(active)}"
        right = right if active else "drop driven_by from one role"
        say.say(node, f"{len(active)} roles act, so {what} must say whose they are", right)
    return list(_list(draft, node, active[0] if active else RoleName(""), what))


def _list(draft: Draft, node: Node, role: RoleName, what: str) -> Iterator[StepDecl]:
    for item in draft.complaints.items(node, what, "write a list of `- NAME: {...}`"):
        step = _step(draft, item, role)
        if step is not None:
            yield step


def _step(draft: Draft, node: Node, role: RoleName) -> StepDecl | None:
    say, shape = draft.complaints, "write `- NAME: {...}` or `- fence: NAME`"
    if isinstance(node, Text) and node.value:
        shape = f"write `{node.value}: {{}}`"
    table = say.table(node, "a step", shape)
    if table is None:
        return None
    if any(key.value == "fence" for key, _ in table.entries):
        own = say.fields(table, "a fence", ("fence", *FENCE_KEYS))
        if say.name(own["fence"], "the fence's name") is None:
            return None
        name = own.pop("fence")
        assert isinstance(name, Text)
        return read_fence(draft, name, own, role)
    if len(table.entries) != 1:
        beside = table.entries[1].key if table.entries else table
        wrong = "a step has a key beside its name" if table.entries else "a step has no name"
        say.say(beside, wrong, shape)
        return None
    key, body = table.entries[0]
    return read_phase(draft, key, body, role) if say.name(key, "the phase's name") else None


def read_phase(draft: Draft, key: Text, node: Node, role: RoleName) -> PhaseDecl:
    """`NAME: {...}` as a phase of `role`; nothing at all is a phase without effects."""
    say, what = draft.complaints, f"phase {key.value!r}"
    draft.reserved(key, "phase")
    own: dict[str, Node] = {}
    if node != Text("", node.place) and (table := say.table(node, what, "write {VERB: RESOURCE}")):
        own = say.fields(table, what, PHASE_KEYS)
    by = own.get("by")
    retry = say.choice(own.get("retry"), f"retry of {what}", map(str, Retry), Retry.NEVER)
    return PhaseDecl(
        name=Phase(key.value),
        role=role,
        by=say.choice(by, f"by of {what}", ("leader",), "leader") if by else None,
        effects=tuple(
            chain.from_iterable(
                _effects(draft, Verb(verb), node) for verb, node in own.items() if verb in _VERBS
            )
        ),
        when=draft.condition(own.get("when"), "when"),
        outside=say.truth(own.get("outside"), f"outside of {what}"),
        enqueued=say.truth(own.get("enqueued"), f"enqueued of {what}"),
        retry=Retry(retry),
        deadline_s=say.seconds(own.get("deadline_s"), f"deadline_s of {what}"),
        place=key.place,
    )


def _effects(draft: Draft, verb: Verb, node: Node) -> Iterator[Effect]:
    """`verb: NAME`, `verb: [NAME, NAME]` or `verb: {NAME: REACH}`."""
    say = draft.complaints
    seen: set[str] = set()
    for name_node, reach_node in _pairs(node):
        name = say.reference(name_node, "resource", draft.resources)
        if name in seen:
            say.say(name_node, f"{verb} names {name!r} twice", "keep one of them")
        if name is None:
            continue
        seen.add(name)
        yield Effect(verb, ResourceName(name), _reach(draft, verb, name_node, reach_node))
    if isinstance(node, Items | Table) and not seen:
        say.say(node, f"{verb} names no resource", "name one, or drop it")


def _reach(draft: Draft, verb: Verb, name: Node, node: Node | None) -> str:
    say = draft.complaints
    if verb is Verb.ENSURES:
        if node is None:
            say.say(name, "ensures does not say what", "write {NAME: start}")
        else:
            say.choice(node, "what ensures names", ("start",), "start")
        return DEVICE
    known = {DEVICE, EVERYWHERE, *draft.groups}
    if node is None:
        return DEVICE
    if isinstance(node, Text) and node.value in known:
        return node.value
    word = node.value if isinstance(node, Text) else ""
    right = suggest(word, [DEVICE, *draft.groups, EVERYWHERE], "places")
    say.say(node, f"{verb} cannot reach {describe(node)}", right)
    return DEVICE


def read_fence(draft: Draft, name: Text, own: Mapping[str, Node], role: RoleName) -> FenceDecl:
    """A fence as `role` comes to it; `own` are its keys but for the name."""
    say, what = draft.complaints, f"fence {name.value!r}"
    draft.reserved(name, "fence")
    if "deadline_s" not in own:
        say.say(name, f"{what} has no deadline_s", "add `deadline_s: 300`")
    joined = own.get("joined")
    if joined is not None:
        say.choice(joined, f"joined of {what}", ("outside",), "outside")
    established, evidence = _requires(draft, own.get("requires"), what)
    if joined is not None and "requires" in own:
        right = "drop requires: nobody can act before a join that the caller makes"
        say.say(own["requires"], f"{what} is joined outside", right)
    return FenceDecl(
        name=FenceName(name.value),
        role=role,
        scope=_scope(draft, own.get("scope"), what),
        deadline_s=say.seconds(own.get("deadline_s"), f"deadline_s of {what}") or 1.0,
        first_deadline_s=say.seconds(own.get("first_deadline_s"), f"first_deadline_s of {what}"),
        established=established,
        evidence=evidence,
        joined=joined is not None,
        when=draft.condition(own.get("when"), "when"),
        place=name.place,
    )


def _scope(draft: Draft, node: Node | None, what: str) -> str:
    if node is None:
        return WORLD
    say, scopes = draft.complaints, (WORLD, *draft.groups)
    word = node.value if isinstance(node, Text) else ""
    if word in scopes or word in draft.broken:
        return word
    option = draft.options.get(word)
    if option is None:
        held = [name for name, option in draft.options.items() if _holds_scopes(option, scopes)]
        known = list(dict.fromkeys((*scopes, *held)))
        right = suggest(word, known, "without another group under `groups`, scopes")
        say.say(node, f"scope of {what} cannot be {describe(node)}", right)
    elif not _holds_scopes(option, scopes):
        right = f"an option that is a scope is an enum of: {', '.join(scopes)}"
        say.say(node, f"scope of {what} is option {word!r}, which holds no scope", right)
    return word or WORLD


def _holds_scopes(option: OptionDecl, scopes: tuple[str, ...]) -> bool:
    return option.type == "enum" and set(option.choices) <= set(scopes)


def _requires(
    draft: Draft, node: Node | None, what: str
) -> tuple[tuple[str, ...], tuple[Evidence, ...]]:
    """What is established first, then what is measured, whatever the order in the file."""
    say = draft.complaints
    established: list[str] = []
    evidence: list[Evidence] = []
    items = say.items(node, f"requires of {what}", "write [device_synchronised]") if node else ()
    for item in items:
        text = item.value if isinstance(item, Text) else ""
        match = _EVIDENCE.fullmatch(text)
        if text in established or (match and match[1] in [each.name for each in evidence]):
            say.say(item, f"{what} requires {text.split()[0]!r} twice", "keep one of them")
        elif text in ESTABLISHED:
            established.append(text)
        elif match and match[1] in MEASURED:
            evidence.append(Evidence(match[1], match[2], int(match[3]) * _UNITS[match[4]]))
        else:
            known = [*ESTABLISHED, "free_bytes >= 1GiB"]
            right = suggest(text, known, "preconditions")
            say.say(item, f"{what} cannot require {describe(item)}", right)
    return tuple(established), tuple(evidence)


def refuse_twins(
    draft: Draft, steps: list[StepDecl], before: tuple[StepDecl, ...] = ()
) -> list[StepDecl]:
    """A role has a name once; a fence of several roles is the same for all of them."""
    say = draft.complaints
    seen = {(step.role, step.name): step for step in before}
    fences = {step.name: step for step in before if isinstance(step, FenceDecl)}
    for step in steps:
        other = seen.setdefault((step.role, step.name), step)
        if other is not step:
            first = f"the first is in line {other.place.line}"
            say.say(step.place, f"{step.name!r} is declared twice", f"rename one; {first}")
        elif isinstance(step, FenceDecl):
            same = fences.setdefault(step.name, step)
            if _terms(same) != _terms(step):
                right = f"make it equal to line {same.place.line}"
                wrong = f"fence {step.name!r} differs between {same.role} and {step.role}"
                say.say(step.place, wrong, right)
    return steps


def _pairs(node: Node) -> Iterator[tuple[Node, Node | None]]:
    match node:
        case Text():
            yield node, None
        case Items(items):
            for item in items:
                yield item, None
        case Table(entries):
            yield from entries


def _terms(fence: FenceDecl) -> tuple[object, ...]:
    return (
        fence.scope, fence.deadline_s, fence.first_deadline_s, fence.established, fence.evidence,
        fence.joined, fence.when,
    )  # fmt: skip
