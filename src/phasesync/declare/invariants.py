"""What must hold of memory: `never`, `always`, `agree` and `monotone`.

They are read after the phases, whose names `during` refers to.
"""

from collections.abc import Iterator, Mapping

from phasesync.core.model import ResourceName
from phasesync.core.protocol import (
    DEVICE,
    ELSEWHERE,
    WORLD,
    Invariant,
    InvariantKind,
    PhaseDecl,
    StepDecl,
)
from phasesync.declare.draft import Draft
from phasesync.nodes import Items, Node, Table

__all__ = ("read_invariants",)

_NEVER = "write {together: [A, B], on: device}"
#: For each kind: the shape of an item, the key of its resources, the key beside `when`.
_SHAPES: dict[InvariantKind, tuple[str, str, str]] = {
    InvariantKind.NEVER: (_NEVER, "together", "on"),
    InvariantKind.ALWAYS: ("write {together: [A, B], during: PHASE}", "together", "during"),
    InvariantKind.AGREE: ("write {content: A, across: GROUP}", "content", "across"),
    InvariantKind.MONOTONE: ("write {content: A}", "content", ""),
}


def read_invariants(
    draft: Draft, own: Mapping[str, Node], steps: tuple[StepDecl, ...]
) -> Iterator[Invariant]:
    """All invariants, kind by kind; what is wrong with one does not hide the others."""
    phases: dict[str, object] = {step.name: step for step in steps if isinstance(step, PhaseDecl)}
    for kind in InvariantKind:
        node = own.get(kind)
        if node is None:
            continue
        shape = _SHAPES[kind][0]
        for item in draft.complaints.items(node, kind, f"write a list of {shape[6:]}"):
            table = draft.complaints.table(item, f"an item of {kind}", shape)
            if table is not None:
                yield _invariant(draft, kind, table, phases)


def _invariant(
    draft: Draft, kind: InvariantKind, table: Table, phases: Mapping[str, object]
) -> Invariant:
    say = draft.complaints
    _, names, beside = _SHAPES[kind]
    needed = (names, beside) if kind is InvariantKind.AGREE else (names,)
    keys = tuple(key for key in (names, beside, "when") if key)
    own = say.fields(table, f"an item of {kind}", keys, needed)
    on = own.get(beside)
    match kind:
        case InvariantKind.NEVER:
            where = say.choice(on, "'on' of never", (DEVICE, ELSEWHERE), DEVICE) or DEVICE
        case InvariantKind.ALWAYS:
            where = (say.reference(on, "phase", phases) or "") if on is not None else ""
        case InvariantKind.AGREE:
            known = {WORLD: None, **draft.groups}
            where = (say.reference(on, "group", known) or WORLD) if on is not None else WORLD
        case InvariantKind.MONOTONE:
            where = DEVICE
    return Invariant(
        kind=kind,
        resources=_resources(draft, kind, names, own[names]) if names in own else (),
        on=where,
        when=draft.condition(own.get("when"), "when"),
        place=table.place,
    )


def _resources(
    draft: Draft, kind: InvariantKind, what: str, node: Node
) -> tuple[ResourceName, ...]:
    """The resources that an invariant names; one that needs no list may be written without."""
    say = draft.complaints
    many = kind is InvariantKind.NEVER or isinstance(node, Items)
    found: dict[str, None] = {}
    for item in say.items(node, what, "write [A, B]") if many else (node,):
        name = say.reference(item, "resource", draft.resources)
        if name in found:
            say.say(item, f"{name!r} is given twice", "name different resources")
        elif name is not None:
            found[name] = None
    if kind is InvariantKind.NEVER and isinstance(node, Items) and len(node.items) == 1:
        say.say(node, "never speaks of fewer than two resources", "name two or more")
    return tuple(map(ResourceName, found))
