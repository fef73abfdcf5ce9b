"""From the nodes of a protocol file to the declaration that they make.

A key that is accepted does something; what nothing implements is refused by name. All complaints
of a file are collected: a section that cannot be read still lends its names to the others, so that
one mistake is one complaint.
"""

from collections.abc import Mapping

from phasesync.core.model import RoleName
from phasesync.core.protocol import Protocol, RoleDecl, StepDecl
from phasesync.declare.draft import Draft
from phasesync.declare.invariants import read_invariants
from phasesync.declare.options import read_options
from phasesync.declare.places import read_groups, read_resources, read_roles
from phasesync.declare.steps import ESTABLISHED, MEASURED, read_steps, refuse_twins
from phasesync.declare.table import read_table
from phasesync.declare.write import written
from phasesync.errors import ProtocolError
from phasesync.nodes import Complaints, Node

__all__ = ("ESTABLISHED", "FORMAT", "MEASURED", "SECTIONS", "declare", "written")

FORMAT = "1"
SECTIONS = (
    "phasesync", "protocol", "summary", "options", "groups", "roles", "resources", "never",
    "always", "agree", "monotone", "phases", "fences", "transitions", "recover",
)  # fmt: skip


def declare(root: Node, file: str) -> tuple[Protocol | None, tuple[ProtocolError, ...]]:
    """The protocol that a file declares, or everything that is wrong with its words."""
    complaints = Complaints(file)
    protocol = _protocol(Draft(complaints), root)
    found = complaints.in_order()
    return (None if found else protocol), found


def _protocol(draft: Draft, root: Node) -> Protocol | None:
    say = draft.complaints
    table = say.table(root, "the file", "begin with `phasesync: 1`")
    if table is None:
        return None
    own = say.fields(table, "the file", SECTIONS, ("phasesync", "protocol", "roles", "phases"))
    if (version := own.get("phasesync")) is not None:
        say.choice(version, "the version of the language", (FORMAT,), FORMAT)
    sections = {
        name: say.named(own.get(name), name, f"write `{name}: {{NAME: ...}}`")
        for name in ("options", "groups", "roles", "resources")
    }
    draft.groups, draft.resources = sections["groups"], sections["resources"]
    draft.refuse_reserved(sections)
    options = tuple(read_options(draft, sections["options"]))
    draft.roles = {name: RoleDecl(name=RoleName(name)) for name in sections["roles"]}
    groups = tuple(read_groups(draft))
    draft.roles = {role.name: role for role in read_roles(draft, sections["roles"])}
    resources = tuple(read_resources(draft))
    steps = tuple(_steps(draft, own))
    recover = tuple(_recover(draft, own.get("recover"), steps))
    invariants = tuple(read_invariants(draft, own, steps + recover))
    name = say.name(own["protocol"], "the protocol's name") if "protocol" in own else None
    return Protocol(
        name=name or "",
        summary=say.line(own.get("summary"), "summary"),
        options=options,
        groups=groups,
        roles=tuple(draft.roles.values()),
        resources=resources,
        invariants=invariants,
        steps=steps,
        recover=recover,
        file=say.file,
    )


def _steps(draft: Draft, own: Mapping[str, Node]) -> list[StepDecl]:
    say = draft.complaints
    node = own.get("phases")
    if "transitions" in own:
        return read_table(draft, own)
    if "fences" in own:
        right = "put each fence where it stands, as `- fence: NAME`, in phases"
        say.say(own["fences"], "'fences' goes with 'transitions' alone", right)
    if node is None:
        return []
    return refuse_twins(draft, read_steps(draft, node, "phases"))


def _recover(draft: Draft, node: Node | None, steps: tuple[StepDecl, ...]) -> list[StepDecl]:
    if node is None:
        return []
    return refuse_twins(draft, read_steps(draft, node, "recover"), steps)
