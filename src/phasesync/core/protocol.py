"""What a protocol file declares, as frozen values, before options and members are known.

`spec` makes these from YAML, `lint` doubts them, `plan` resolves them. A declaration keeps its
place in the file, so that every later complaint can name it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from phasesync.core.condition import Condition
from phasesync.core.model import (
    FenceName,
    GroupName,
    OptionName,
    OptionValue,
    Phase,
    ResourceName,
    RoleName,
)

__all__ = (
    "DEVICE",
    "ELSEWHERE",
    "EVERYWHERE",
    "IMPLIED",
    "WORLD",
    "Effect",
    "Evidence",
    "FenceDecl",
    "GroupDecl",
    "Invariant",
    "InvariantKind",
    "OptionDecl",
    "PhaseDecl",
    "Place",
    "Protocol",
    "ResourceDecl",
    "Retry",
    "RoleDecl",
    "Row",
    "StepDecl",
    "Verb",
)

WORLD = "world"
DEVICE = "device"
ELSEWHERE = "elsewhere"
EVERYWHERE = "all"


class Place(NamedTuple):
    """Where in the file a declaration stands; lines and columns count from 1."""

    line: int
    column: int


NOWHERE = Place(1, 1)


class Verb(StrEnum):
    """What a phase does to a resource. What an invariant makes of a phase it only reads:
    `holds` and `agrees`, which no phase says itself."""

    ACQUIRES = "acquires"
    RELEASES = "releases"
    NEEDS = "needs"
    USES = "uses"
    WRITES = "writes"
    FILLS = "fills"
    DISCARDS = "discards"
    ENSURES = "ensures"
    HOLDS = "holds"
    AGREES = "agrees"


#: Verbs that follow from invariants.
IMPLIED = frozenset((Verb.HOLDS, Verb.AGREES))


class Retry(StrEnum):
    """Whether an action may be called again after it failed."""

    NEVER = "never"
    SAFE = "safe"
    AFTER_QUERY = "after_query"


class InvariantKind(StrEnum):
    """What a declared invariant says of its resources."""

    NEVER = "never"
    ALWAYS = "always"
    AGREE = "agree"
    MONOTONE = "monotone"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionDecl:
    """An option of the plan; `choices` where it is an enum, `least` where it is an int."""

    name: OptionName
    type: str
    default: OptionValue
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecl:
    """Consecutive ranks of a role, `size` a group; the first one leads."""

    name: GroupName
    of: RoleName
    size: int | OptionName
    leader: str = "first"
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDecl:
    """Who takes part. A passive role (`driven_by`) owns memory, has no position, never arrives.

    `per` is `device`, or the group that one member of the role spans.
    """

    name: RoleName
    per: str = DEVICE
    driven_by: str | None = None
    place: Place = NOWHERE

    @property
    def passive(self) -> bool:
        return self.driven_by is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDecl:
    """Device memory with an owner, whose death loses it; `start` is its state at every epoch's
    start. `content` is true where it holds a weight version, `freed` where the owner's death is
    known to give the memory back at once."""

    name: ResourceName
    owner: RoleName
    content: bool = False
    freed: bool = False
    start: Condition | None = None
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant:
    """A declared property; `never` speaks of resources together on one device, or of two of which
    one is held while the other is held `elsewhere`, on another device. `on` is the phase during
    which `always` holds, nothing where that is at all times; of `agree` it is the group."""

    kind: InvariantKind
    resources: tuple[ResourceName, ...]
    on: str = DEVICE
    when: Condition | None = None
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True)
class Effect:
    """`verb: {resource: reach}`; `reach` is `device` (the caller's own), a group, or `all`."""

    verb: Verb
    resource: ResourceName
    reach: str = DEVICE


@dataclass(frozen=True, slots=True)
class Evidence:
    """A precondition that is measured after the established ones: `free_bytes >= 1073741824`."""

    name: str
    op: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDecl:
    """An action of a role; `by` is `leader` where only the leader of its group performs it."""

    name: Phase
    role: RoleName
    by: str | None = None
    effects: tuple[Effect, ...] = ()
    when: Condition | None = None
    outside: bool = False
    enqueued: bool = False
    retry: Retry = Retry.NEVER
    deadline_s: float | None = None
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceDecl:
    """A point that no member passes before all have arrived. `scope` is `world`, a group's name,
    or an option that holds one of these."""

    name: FenceName
    role: RoleName
    scope: str = WORLD
    deadline_s: float = 600.0
    first_deadline_s: float | None = None
    established: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    joined: bool = False
    when: Condition | None = None
    place: Place = NOWHERE


StepDecl: TypeAlias = PhaseDecl | FenceDecl


class Row(NamedTuple):
    """One transition of a role: in `source`, `event` leads to `target`; `fence` guards it."""

    role: RoleName
    source: str
    event: str
    target: str
    fence: FenceName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A whole declaration."""

    name: str
    summary: str = ""
    options: tuple[OptionDecl, ...] = ()
    groups: tuple[GroupDecl, ...] = ()
    roles: tuple[RoleDecl, ...] = ()
    resources: tuple[ResourceDecl, ...] = ()
    invariants: tuple[Invariant, ...] = ()
    steps: tuple[StepDecl, ...] = ()
    recover: tuple[StepDecl, ...] = ()
    file: str = field(default="<protocol>", compare=False)

    @property
    def active_roles(self) -> tuple[RoleName, ...]:
        return tuple(role.name for role in self.roles if not role.passive)

    @property
    def fences(self) -> tuple[FenceDecl, ...]:
        return tuple(step for step in self.steps if isinstance(step, FenceDecl))

    @property
    def phases(self) -> tuple[PhaseDecl, ...]:
        return tuple(step for step in self.steps if isinstance(step, PhaseDecl))
