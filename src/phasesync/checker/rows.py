"""What the tables of a block are made of: a rank's row, its moves, and numbers for fences.

A row says where the rank of a unit stands and what it may do; a move of it is a handful of
functions from unit to unit that are worked out once. Fence instances are bits of two masks.
"""

from collections.abc import Callable
from typing import NamedTuple

from phasesync.core.kernel import Kind, RankState, Stage
from phasesync.core.plan import Act, Wait

__all__ = ("NEVER", "Around", "Bits", "Facts", "Go", "Memo", "Move", "Row", "Rows")

#: Later than every epoch: from then on a rank that lives is missing.
NEVER = 1 << 30


class Memo(dict[int, int]):
    """A function of one number that is worked out once."""

    __slots__ = ("work",)

    def __init__(self, work: Callable[[int], int]) -> None:
        super().__init__()
        self.work = work

    def __missing__(self, key: int) -> int:
        value = self[key] = self.work(key)
        return value


class Rows(dict[int, "Row"]):
    """Where the rank of a unit stands, seen from one slot."""

    __slots__ = ("work",)

    def __init__(self, work: "Callable[[int], Row]") -> None:
        super().__init__()
        self.work = work

    def __missing__(self, unit: int) -> "Row":
        row = self[unit] = self.work(unit)
        return row


class Move(NamedTuple):
    """One step of a block, and what it does to what the blocks share."""

    kind: Kind
    slot: int
    name: str
    block: int
    arrives: int = 0  # the bit of a world fence
    breaks: int = 0  # bits of world fences, where they are shut
    faults: int = 0
    bad: bool = False
    earlier: bool = False  # all epochs were renumbered, one down


class Around(NamedTuple):
    """What a block sees of the rest: world fences, whether faults are left, and of the dead."""

    open: int
    broken: int
    awaited: int
    may_fault: bool
    missing: int  # the epoch from which on somebody dead is missing
    orphaned: int = 0  # world fences, of recoveries, that a notice of a death decides


class Facts(NamedTuple):
    """What a rank's state says of fences: bits it awaits, and bits it has arrived at."""

    awaits: int
    awaits_world: int
    arrived: int
    arrived_world: int
    came: int  # to fences of a recovery, in person: dead or alive, and whether they are open or not
    came_world: int
    gone: bool
    missing: int  # the epoch from which on the dead is missing
    leads: int
    leads_world: int


class Bits:
    """Numbers for fence instances: (epoch, stage, scope, fence), shared by blocks of a shape."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, Stage, object, str], int] = {}
        self._order: dict[int, tuple[int, Stage, int]] = {}
        self._first: dict[int, tuple[int, ...]] = {}

    def __getitem__(self, key: tuple[int, Stage, object, str]) -> int:
        return 1 << self.of.setdefault(key, len(self.of))

    def place(self, bit: int, at: int) -> None:
        """Says where in a program the fence of `bit` stands."""
        epoch, stage, _, _ = self.key(bit)
        self._order.setdefault(bit, (epoch, stage, at))

    def key(self, bit: int) -> tuple[int, Stage, object, str]:
        """Which fence instance a bit is."""
        return list(self.of)[bit.bit_length() - 1]

    def earlier(self, mask: int) -> int:
        """The same fences, one epoch before."""
        moved = 0
        for bit in self.each(mask):
            epoch, stage, scope, fence = self.key(bit)
            moved |= self[(epoch - 1, stage, scope, fence)]
        return moved

    def each(self, mask: int) -> tuple[int, ...]:
        """The bits of a mask."""
        return tuple(1 << n for n in range(mask.bit_length()) if mask >> n & 1)

    def lowest(self, shut: int, broken: int) -> tuple[int, ...]:
        """Of the shut fences, the next one of each scope, unless one before it is broken."""
        key = shut | broken << 256
        found = self._first.get(key)
        if found is None:
            lowest: dict[object, int] = {}
            for bit in self.each(shut):
                scope = self.key(bit)[2]
                best = lowest.get(scope)
                if best is None or self._order[bit] < self._order[best]:
                    lowest[scope] = bit
            fallen = {self.key(bit)[:3] for bit in self.each(broken)}
            found = self._first[key] = tuple(
                bit for bit in lowest.values() if self.key(bit)[:3] not in fallen
            )
        return found


class Row:
    """A rank's state as its slot sees it: where it stands, and what it may do."""

    __slots__ = (
        "act",
        "again",
        "bit",
        "bit_world",
        "breaks",
        "breaks_world",
        "facts",
        "first",
        "first_name",
        "first_world",
        "go",
        "hears",
        "judges",
        "members",
        "misses",
        "misses_world",
        "recovers",
        "state",
        "status",
        "wait",
    )

    def __init__(self, state: RankState, facts: Facts) -> None:
        self.state = state
        self.status = state.status
        self.facts = facts
        self.act: Act | None = None
        self.wait: Wait | None = None
        self.bit = self.bit_world = 0
        self.breaks = self.breaks_world = 0
        self.misses = self.misses_world = 0  # of the dead: fences that it has not come to
        self.first = self.first_world = 0
        self.first_name = ""
        self.again = ""
        self.hears = self.recovers = False
        self.members: tuple[int, ...] = ()
        #: Fences of recoveries that a notice of its death may decide: bits, and slots of members.
        self.judges: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
        self.go: dict[Kind, Go] = {}


class Go(NamedTuple):
    """A move of one rank: what becomes of its own unit and of the others that it touches."""

    own: Memo
    others: tuple[tuple[int, Memo], ...] = ()
    wants: tuple[tuple[int, Memo], ...] = ()
    checked: tuple[tuple[int, Memo], ...] = ()
    agrees: tuple[tuple[tuple[int, Memo], ...], ...] = ()
