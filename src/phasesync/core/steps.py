"""What a plan is made of: the steps of each rank, who waits for whom, what must not be together.

Values only. `core/plan.py` makes them of a protocol; all drivers read them from there.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from phasesync.core.model import (
    Device,
    Digest,
    FenceName,
    GroupName,
    OptionValue,
    Phase,
    Rank,
    ResourceName,
)
from phasesync.core.protocol import Evidence, Protocol, Retry, Verb
from phasesync.errors import PlanError

__all__ = (
    "FIRST_FROM_S",
    "FIRST_TIMES",
    "PLAN",
    "STOPPED",
    "Act",
    "Defect",
    "Plan",
    "Scope",
    "Step",
    "Together",
    "Touch",
    "Wait",
)

#: The implicit world fences: before the first epoch of an attempt, and before a recovery.
PLAN = FenceName("plan")
STOPPED = FenceName("stopped")

# In the first epoch a deadline of at least so many seconds counts so many times.
FIRST_FROM_S = 60.0
FIRST_TIMES = 2.0


class Defect(StrEnum):
    """A mistake of a runtime, planted in a plan to see whether the checker finds it."""

    ABORT_TAKES = "abort takes memory back"
    ABORT_RELEASES = "abort releases memory"
    LATE_ABORT = "abort after opening"
    KEY_REUSED = "key reused in the next epoch"
    NO_ABORT = "no abort"
    NO_FLOOR = "no floor"
    RESTARTS_EARLY = "restart in mid-epoch"


class Touch(NamedTuple):
    """One effect of an action on one memory cell (device x resource)."""

    verb: Verb
    cell: int


class Act(NamedTuple):
    """A phase as one rank performs it."""

    phase: Phase
    touches: tuple[Touch, ...]
    outside: bool
    enqueued: bool
    led: bool
    retry: Retry
    deadline_s: float | None


class Wait(NamedTuple):
    """A fence as one rank comes to it; `scope` counts in `Plan.scopes`.

    `first_deadline_s` is what it waits in a rank's first epoch, where kernels are compiled and
    connections are made; 0 where that is no other.
    """

    fence: FenceName
    scope: int
    deadline_s: float
    established: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    joined: bool
    first_deadline_s: float = 0.0


Step: TypeAlias = Act | Wait


class Scope(NamedTuple):
    """A scope instance, `world` or `replica/3`, and its members as rank indices."""

    name: str
    members: tuple[int, ...]


class Together(NamedTuple):
    """Cells of one device that may not be mapped together."""

    device: int
    cells: tuple[int, ...]
    resources: tuple[ResourceName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all ranks of a run agree on for an epoch. `programs[i]` belongs to `members[i]`."""

    protocol: Protocol
    options: tuple[tuple[str, OptionValue], ...]
    members: tuple[Rank, ...]
    engines: tuple[Rank, ...]
    devices: tuple[Device, ...]
    place: tuple[int, ...]
    groups: tuple[tuple[GroupName, tuple[tuple[int, ...], ...]], ...]
    scopes: tuple[Scope, ...]
    programs: tuple[tuple[Step, ...], ...]
    recover: tuple[tuple[Step, ...], ...]
    start: tuple[bool, ...]
    content: tuple[bool, ...]
    owner: tuple[Rank, ...]
    never: tuple[Together, ...]
    never_on: tuple[tuple[Together, ...], ...]
    digest: Digest
    world: int = field(default=0)
    elsewhere: tuple[tuple[int, int], ...] = ()
    freed: tuple[bool, ...] = ()
    #: Cells that are mapped at all times, device by device; cells whose content agrees where it is
    #: used; and whether a cell's version never falls.
    always_on: tuple[tuple[int, ...], ...] = ()
    agree: tuple[tuple[int, ...], ...] = ()
    monotone: tuple[bool, ...] = ()
    defects: frozenset[Defect] = frozenset()

    def index(self, rank: Rank) -> int:
        """Where `rank` stands in `members`.

        Raises:
            PlanError: it is no member.
        """
        try:
            return self.members.index(rank)
        except ValueError:
            known = f"{self.members[0]} .. {self.members[-1]}"
            raise PlanError(f"{rank} is no member of this plan; members are {known}") from None

    def cell(self, device: int, resource: int) -> int:
        return device * len(self.protocol.resources) + resource

    def cell_name(self, cell: int) -> tuple[Device, ResourceName]:
        """The device and resource of a cell."""
        device, resource = divmod(cell, len(self.protocol.resources))
        return self.devices[device], self.protocol.resources[resource].name

    def option(self, name: str) -> OptionValue:
        return dict(self.options)[name]

    def leaders(self, group: GroupName) -> tuple[int, ...]:
        return tuple(members[0] for members in dict(self.groups)[group])
