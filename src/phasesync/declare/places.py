"""Who takes part and what lies on a device: groups, roles and resources."""

import re
from collections.abc import Iterator, Mapping

from phasesync.core.condition import Condition
from phasesync.core.model import GroupName, OptionName, ResourceName, RoleName
from phasesync.core.options import suggest
from phasesync.core.protocol import (
    DEVICE,
    GroupDecl,
    ResourceDecl,
    RoleDecl,
)
from phasesync.declare.draft import Draft
from phasesync.nodes import Node, Text, describe

__all__ = ("read_groups", "read_resources", "read_roles")

_PLACED = re.compile(r"one per ([A-Za-z][A-Za-z0-9_]*)")
_ACTIVE = "write `one per device`; only a driven role spans a group"
_PASSIVE = "write `one per GROUP`, whose leader drives it"


def read_groups(draft: Draft) -> Iterator[GroupDecl]:
    """The groups; those that are no mapping are left out, having been said."""
    say = draft.complaints
    for name, (key, node) in draft.groups.items():
        what = f"group {name!r}"
        table = say.table(node, what, "write {of: ROLE, size: 2, leader: first}")
        if table is None:
            continue
        own = say.fields(table, what, ("of", "size", "leader"), ("of", "size"))
        of = say.reference(own["of"], "role", draft.roles) if "of" in own else None
        size = _size(draft, own["size"], what) if "size" in own else None
        leader = say.choice(own.get("leader"), f"leader of {what}", ("first",), "first")
        yield GroupDecl(
            name=GroupName(name),
            of=RoleName(of or ""),
            size=size or 1,
            leader=leader,
            place=key.place,
        )


def _size(draft: Draft, node: Node, what: str) -> int | OptionName | None:
    say = draft.complaints
    if isinstance(node, Text) and node.value in draft.options:
        option = draft.options[node.value]
        if node.value in draft.broken:
            return option.name
        if option.type != "int":
            say.say(node, f"size of {what} is of type {option.type}", "give it type int")
        elif option.least is None or option.least < 1:
            say.say(node, f"size of {what} may be less than 1", f"give {node.value} min: 1")
        return option.name
    if isinstance(node, Text) and node.plain and re.fullmatch(r"[1-9][0-9]{0,5}", node.value):
        return int(node.value)
    right = "write a number, at least 1, or an int option"
    say.say(node, f"size of {what} is {describe(node)}", right)
    return None


def read_roles(draft: Draft, declared: Mapping[str, tuple[Text, Node]]) -> Iterator[RoleDecl]:
    """The roles, in order; every name stays known, whatever is wrong with it."""
    for name, (key, node) in declared.items():
        yield _role(draft, RoleName(name), key, node)


def _role(draft: Draft, name: RoleName, key: Text, node: Node) -> RoleDecl:
    say, what = draft.complaints, f"role {name!r}"
    blank = RoleDecl(name=name, place=key.place)
    table = say.table(node, what, "write {place: one per device}")
    if table is None:
        return blank
    own = say.fields(table, what, ("place", "driven_by"), ("place",))
    by = own.get("driven_by")
    driven = say.choice(by, f"driven_by of {what}", ("leader",), "leader") if by else None
    per = _per(draft, own.get("place"), what)
    if driven is None and per != DEVICE:
        say.say(own["place"], f"{what} acts, and has one rank per {per}", _ACTIVE)
    if driven is not None and per == DEVICE and "place" in own:
        say.say(own["place"], f"{what} is driven by a leader, of no group", _PASSIVE)
    return RoleDecl(name=name, per=per, driven_by=driven, place=key.place)


def _per(draft: Draft, node: Node | None, what: str) -> str:
    if node is None:
        return DEVICE
    known = (DEVICE, *draft.groups)
    match = _PLACED.fullmatch(node.value) if isinstance(node, Text) else None
    if match is None or match[1] not in known:
        right = suggest(match[1], known, "places") if match else "write `one per device`"
        draft.complaints.say(node, f"place of {what} is {describe(node)}", right)
        return DEVICE
    return match[1]


def read_resources(draft: Draft) -> Iterator[ResourceDecl]:
    """The resources, with the condition under which they are mapped at the start."""
    say = draft.complaints
    for name, (key, node) in draft.resources.items():
        what = f"resource {name!r}"
        table = say.table(node, what, "write {owner: ROLE}")
        if table is None:
            continue
        own = say.fields(table, what, ("owner", "content", "start", "dies"), ("owner",))
        owner = say.reference(own["owner"], "role", draft.roles) if "owner" in own else None
        content = own.get("content")
        if content is not None:
            say.choice(content, f"content of {what}", ("version",), "version")
        dies = own.get("dies")
        gives = say.choice(dies, f"dies of {what}", ("lost", "freed"), "lost") if dies else None
        yield ResourceDecl(
            name=ResourceName(name),
            owner=RoleName(owner or ""),
            content=content is not None,
            freed=gives == "freed",
            start=_start(draft, own.get("start"), what),
            place=key.place,
        )


def _start(draft: Draft, node: Node | None, what: str) -> Condition | None:
    if node is None:
        return None
    say = draft.complaints
    table = say.table(node, f"start of {what}", "write {mapped: true}")
    if table is None:
        return None
    own = say.fields(table, f"start of {what}", ("mapped",), ("mapped",))
    return draft.condition(own.get("mapped"), f"mapped of {what}", constant=True)
