"""What a block may do next: one handler a status, each reading the row that the tables hold.

A move changes the block and says what it does to what blocks share: it arrives at a world fence,
or breaks some. Whether that fence opens is for the product of all blocks to say.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from phasesync.checker.alike import Alike
from phasesync.checker.apart import Apart
from phasesync.checker.draft import BlockDraft
from phasesync.checker.handlers import stopped
from phasesync.checker.rows import NEVER, Around, Move, Row
from phasesync.checker.tables import BlockState, Tables
from phasesync.core.kernel import Faults, Stage, Status

__all__ = ("LEFT", "STUCK", "Moves", "Summary", "private", "resting", "steady")


class Summary(NamedTuple):
    """What the rest sees of a block."""

    awaits: int
    arrived: int
    came: int
    gone: bool
    missing: int
    leads: int
    stuck: bool
    private: bool
    resting: bool
    heeds: int
    held: tuple[int, ...]


LEFT = frozenset((Status.STOPPED, Status.ABORTED))
STUCK = frozenset((Status.READY, Status.WAITING, Status.CUT))


def steady(row: Row, fences: Sequence[int], around: Around, epochs: int) -> bool:
    """Whether what this rank may do next is fixed, whatever else happens."""
    match row.status:
        case Status.ACTING:
            return True
        case Status.READY:
            if not (row.first or row.first_world):
                return True
            return row.hears and bool(row.first & fences[1] or row.first_world & around.broken)
        case Status.WAITING:
            decided = row.bit & (fences[0] | fences[1]) or row.bit_world & around.open
            return bool(decided)
        case Status.FINISHED:
            return row.state.epoch < epochs
        case _:
            return False


def resting(row: Row, epochs: int) -> bool:
    """Whether the rank may have to wait, recovered, for the dead to be replaced."""
    state = row.state
    rests = row.status is Status.FINISHED and state.stage is Stage.RECOVER
    return rests and state.epoch < epochs


def private(row: Row) -> bool:
    """Whether nothing that other blocks do changes what this rank may do next.

    Its next fence is its own block's, or it hears of a break only once it gets there; it takes no
    part in a recovery, and is not dead with a notice that others have yet to see. What it does
    commutes with all that others do: it can break only fences that cannot open without it, and a
    fault elsewhere takes away its own faults alone, never its ordinary step.
    """
    state = row.state
    if state.stage is not Stage.EPOCH:
        return False
    match row.status:
        case Status.ACTING | Status.HUNG:
            return True
        case Status.READY:
            return not row.first_world or (row.act is not None and not row.hears)
        case Status.WAITING | Status.CUT:
            return not row.first_world
        case Status.FINISHED:
            return True
        case _:
            return False


class Moves:
    """The moves of a block under `tables`.

    `symmetry` sorts siblings; `whole` skips the pause between one step of a rank and its next;
    `others` are the scopes of the block, as slots, that have members who are not tracked: their
    arrival is one move of its own, and so is their failure.
    """

    def __init__(
        self,
        tables: Tables,
        faults: Faults,
        epochs: int,
        *,
        symmetry: bool,
        whole: bool,
        others: frozenset[frozenset[int]] = frozenset(),
        endless: bool = False,
    ) -> None:
        self.tables = tables
        self.faults = faults
        self.epochs = epochs
        self.whole = whole
        self.others = others
        self.ranks = sum(slot.rank >= 0 for slot in tables.slots)
        self.endless = endless
        self.classes = tables.classes
        groups: dict[int, list[int]] = {}
        for slot, number in enumerate(tables.classes):
            groups.setdefault(number, []).append(slot)
        self.groups = tuple(tuple(g) for g in groups.values() if len(g) > 1) if symmetry else ()
        self._memo: dict[tuple[int, Around], tuple[Move, ...]] = {}
        self._alone: dict[tuple[int, Around], tuple[Move, ...]] = {}
        self.apart = Apart(tables, epochs)
        self.alike = Alike(tables, self.apart)
        self._settled: dict[BlockState, tuple[list[int], int]] = {}
        self._numbers: dict[BlockState, int] = {}
        self.blocks: list[BlockState] = []
        self.summaries: list[Summary] = []

    def canonical(self, units: list[int]) -> list[int]:
        """Siblings in the order of their units."""
        for group in self.groups:
            for slot, unit in zip(group, sorted([units[at] for at in group]), strict=True):
                units[slot] = unit
        return units

    def settled(self, units: list[int]) -> tuple[list[int], int]:
        """The units that stand for these, siblings in order, and the fences that are awaited."""
        key = tuple(units)
        found = self._settled.get(key)
        if found is None:
            if self.endless:
                self.alike.settle(units)
            awaits = 0
            for rows, unit in zip(self.tables.rows, units, strict=True):
                awaits |= rows[unit].facts.awaits
            found = self._settled[key] = (self.canonical(units), awaits)
        return found

    def number(self, block: BlockState) -> int:
        """A block as one number, by which `blocks` and `summaries` are read."""
        found = self._numbers.get(block)
        if found is None:
            found = self._numbers[block] = len(self.blocks)
            self.blocks.append(block)
            self.summaries.append(self._summary(block))
        return found

    def _summary(self, block: BlockState) -> Summary:
        rows = [rows[unit] for rows, unit in zip(self.tables.rows, block[2:], strict=True)]
        awaits, heeds, leads, came, arrived = 0, 0, 0, 0, -1
        gone = stuck = rests = False
        missing = NEVER
        alone = True
        for row in rows:
            facts = row.facts
            awaits |= facts.awaits_world
            heeds |= row.first_world if row.hears else 0
            leads |= facts.leads_world
            arrived &= facts.arrived_world
            came |= facts.came_world
            gone = gone or facts.gone
            missing = min(missing, facts.missing)
            if not self.endless:  # Beside others without end nobody asks for these.
                stuck = stuck or row.status in STUCK
                alone = alone and private(row)
                rests = rests or resting(row, self.epochs)
        return Summary(
            awaits,
            arrived,
            came,
            gone,
            missing,
            leads,
            stuck,
            alone,
            rests,
            heeds,
            self._held(block),
        )

    def _held(self, block: BlockState) -> tuple[int, ...]:
        """For each pair of `elsewhere`: on how many devices the one is held, the other, both."""
        if not self.tables.plan.elsewhere:
            return ()
        counts: list[int] = []
        cells = [self.tables.unit_of[unit][1] for unit in block[2:]]
        for one, two in self.tables.plan.elsewhere:
            holds = [(bool(each[one] & 3), bool(each[two] & 3)) for each in cells if each]
            counts.append(sum(first for first, _ in holds))
            counts.append(sum(second for _, second in holds))
            counts.append(sum(first and second for first, second in holds))
        return tuple(counts)

    def of(self, number: int, around: Around) -> tuple[Move, ...]:
        """All moves of the block, faults last."""
        key = (number, around)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = tuple(self._of(self.blocks[number], around))
        return found

    def open_ended(self, members: Collection[int]) -> bool:
        """Whether a scope has members beside the tracked ones."""
        return bool(self.others) and frozenset(members) in self.others

    def alone(self, number: int, around: Around) -> tuple[Move, ...]:
        """The moves of one rank that may go first, whatever anybody else does; else none."""
        key = (number, around)
        found = self._alone.get(key)
        if found is None:
            found = self._alone[key] = self._first(self.blocks[number], around)
        return found

    def _first(self, block: BlockState, around: Around) -> tuple[Move, ...]:
        units = block[2:]
        rows = [rows[unit] for rows, unit in zip(self.tables.rows, units, strict=True)]
        for slot, row in enumerate(rows):
            if row.recovers and row.status in LEFT:
                # Its death now and its death just after leave the same behind.
                draft = BlockDraft(self, block[0], block[1], units, rows, around)
                stopped(draft, slot, row)
                return tuple(draft.found)
            calm = self.endless or row.state.stage is Stage.EPOCH
            if not (calm and steady(row, block, around, self.epochs)):
                continue
            if all(self.apart.ask(slot, units[slot], at, units[at]) for at in self._but(slot)):
                draft = BlockDraft(self, block[0], block[1], units, rows, around)
                draft.rank(slot, row)
                if draft.found:
                    return tuple(draft.found)
        return ()

    def _but(self, slot: int) -> list[int]:
        return [at for at in range(len(self.classes)) if at != slot]

    def _of(self, block: BlockState, around: Around) -> list[Move]:
        units = block[2:]
        rows = [rows[unit] for rows, unit in zip(self.tables.rows, units, strict=True)]
        draft = BlockDraft(self, block[0], block[1], units, rows, around)
        seen: set[tuple[int, int]] = set()
        for slot, row in enumerate(rows):
            if self.groups:
                same = (self.classes[slot], units[slot])
                if same in seen:
                    continue
                seen.add(same)
            draft.rank(slot, row)
        if self.others:
            draft.others()
        if around.may_fault:
            draft.engines()
        return draft.found
