"""The moves of one block, as they are found: what each does to it, and whether it is wrong."""

from typing import TYPE_CHECKING

from phasesync.checker.handlers import Draft
from phasesync.checker.rows import Around, Go, Move, Row
from phasesync.checker.tables import BlockState
from phasesync.checker.units import LOST
from phasesync.core.kernel import Kind, Status

if TYPE_CHECKING:
    from phasesync.checker.moves import Moves

__all__ = ("BlockDraft",)

_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))
_LEFT = frozenset((Status.STOPPED, Status.ABORTED))
_GOES_ON = frozenset((Kind.END, Kind.PASS, Kind.BEGIN, Kind.RECOVER))


class BlockDraft(Draft):
    """The moves found so far from one block, and what a new one needs to be made."""

    def __init__(
        self,
        moves: "Moves",
        opened: int,
        broken: int,
        units: BlockState,
        rows: list[Row],
        around: Around,
    ) -> None:
        super().__init__(opened, broken, around, moves.faults, moves.epochs, endless=moves.endless)
        self.moves = moves
        self.tables = moves.tables
        self.units = units
        self.rows = rows
        self.found: list[Move] = []

    def move(
        self,
        kind: Kind,
        slot: int,
        name: str,
        go: Go | None,
        *,
        arrives: int = 0,
        opens: int = 0,
        breaks: int = 0,
        breaks_world: int = 0,
        faults: int = 0,
        bad: bool = False,
    ) -> None:
        """Adds the move whose effect on units is `go`."""
        units = list(self.units)
        if go is not None:
            units[slot] = go.own[units[slot]]
            for at, memo in go.others:
                units[at] = memo[units[at]]
            for at, memo in go.checked:
                bad = bad or bool(memo[units[at]])
        opened = self.opened | (opens & ~self.broken)
        if self.tables.late:
            bad = bad or bool(breaks & opened)
            opened &= ~breaks
        broken = self.broken | (breaks & ~opened)
        if self.moves.whole and kind in _GOES_ON:
            opened, broken, arrives, worse = self._on(slot, units, opened, broken, arrives)
            bad = bad or worse
        units, awaits = self.moves.settled(units)
        opened, broken = opened & awaits, broken & awaits
        earlier = kind is Kind.BEGIN and self.moves.endless and self._all_later(units)
        if earlier:
            units = self.moves.canonical([self.tables.earlier[unit] for unit in units])
            opened, broken = self.tables.own.earlier(opened), self.tables.own.earlier(broken)
        block = self.moves.number((opened, broken, *units))
        if self.moves.endless:
            faults = 0
        self.found.append(
            Move(kind, slot, name, block, arrives, breaks_world, faults, bad, earlier)
        )

    def _all_later(self, units: list[int]) -> bool:
        """Whether every rank, dead ones too, has left the first epoch."""
        slots = self.tables.slots
        rows = (self.tables.row(at, unit) for at, unit in enumerate(units) if slots[at].rank >= 0)
        return all(row.state.epoch > 1 for row in rows)

    def _on(
        self, slot: int, units: list[int], opened: int, broken: int, arrives: int
    ) -> tuple[int, int, int, bool]:
        """Goes on to the rank's next step at once: its start, or its arrival."""
        row = self.tables.row(slot, units[slot])
        if row.status is not Status.READY:
            return opened, broken, arrives, False
        if (go := row.go.get(Kind.START)) is not None:
            bad = self.wrong(slot, row, units)
            units[slot] = go.own[units[slot]]
            for at, memo in go.others:
                units[at] = memo[units[at]]
            for at, memo in go.checked:
                bad = bad or bool(memo[units[at]])
            return opened, broken, arrives, bad
        go = row.go[Kind.ARRIVE]
        units[slot] = go.own[units[slot]]
        for at, memo in go.others:
            units[at] = memo[units[at]]
        opens, breaks = self.decided(row, units, opened, broken)
        return opened | opens, broken | breaks, arrives | row.bit_world, False

    def starts_wrongly(self, slot: int, row: Row) -> bool:
        return self.wrong(slot, row, list(self.units))

    def lost(self, go: Go) -> bool:
        return any(memo[self.units[at]] for at, memo in go.wants)

    def arrival(self, slot: int, row: Row, go: Go) -> tuple[int, int]:
        units = list(self.units)
        units[slot] = go.own[units[slot]]
        return self.decided(row, units, self.opened, self.broken)

    def awaited(self) -> int:
        awaits = 0
        for row in self.rows:
            awaits |= row.facts.awaits
        return awaits

    def wrong(self, slot: int, row: Row, units: list[int]) -> bool:
        """Whether the start of the row's action breaks a rule before it does anything."""
        go = row.go[Kind.START]
        if any(memo[units[at]] for at, memo in go.wants):
            return True
        for part in go.agrees:
            held = {memo[units[at]] for at, memo in part}
            if len(held - {LOST}) > 1:
                return True
        tables, dead = self.tables, self.tables.dead(units)
        return any(
            (other.status in _BUSY and tables.races(slot, units[slot], at, units[at], dead))
            or (other.status in _LEFT and tables.poisons(slot, units[slot], at, units[at], dead))
            for at, other in enumerate(tables.row(n, u) for n, u in enumerate(units))
            if at != slot
        )

    def aborts_wrongly(self, slot: int) -> bool:
        """Whether an abort touches memory that somebody is at work on."""
        units = self.units
        return any(
            other.status in _BUSY and self.tables.abort_races(slot, units[slot], at, units[at])
            for at, other in enumerate(self.rows)
            if at != slot
        )

    def decided(self, row: Row, units: list[int], opened: int, broken: int) -> tuple[int, int]:
        """What an arrival decides of the block's own fence: (opens, breaks)."""
        bit = row.bit
        if not bit or (opened | broken) & bit:
            return 0, 0
        facts = [self.tables.row(at, units[at]).facts for at in row.members]
        if any(fact.leads & bit for fact in facts):
            return 0, bit
        if self.moves.open_ended(row.members):
            return 0, 0
        return (bit, 0) if all(fact.arrived & bit for fact in facts) else (0, 0)

    def others(self) -> None:
        """The untracked members of the block's scopes: all have arrived, or one has failed.

        They come last, once every tracked member is in; and only the next fence of a scope can
        break by them, since nobody gets to a later one without passing it.
        """
        shut = self.awaited() & ~(self.opened | self.broken)
        bits = self.tables.own
        heeded = 0
        for row in self.rows:
            heeded |= row.first if row.hears else 0
        for bit in bits.lowest(shut & heeded, self.broken):
            _, _, scope, name = bits.key(bit)
            assert isinstance(scope, frozenset)
            if not self.moves.open_ended(scope):
                continue
            members = [self.rows[at].facts for at in scope]
            led = any(facts.leads & bit for facts in members)
            if not led and all(facts.arrived & bit for facts in members):
                self.move(Kind.ARRIVE, 0, f"others at {name}", None, opens=bit)
            self.move(Kind.DEADLINE, 0, f"others at {name}", None, breaks=bit)

    def engines(self) -> None:
        """The death of each engine that lives."""
        for name, slot, bits, go in self.tables.engines:
            if not self.tables.dead_at(self.units[slot]) & bits:
                self.move(Kind.ENGINE, slot, name, go, faults=1)

    def orphan(self, row: Row) -> tuple[int, int, int]:
        """The fence of a recovery that a notice of the rank's death decides, as the kernel does it:
        (opens, breaks, the bit of a world fence). Somebody came, somebody waits for it, and only
        dead ones are missing, or one of them had a part in it that is never done."""
        for own, world, members in row.judges:
            if world & self.around.orphaned:
                return 0, 0, world
            if not own or own & (self.opened | self.broken):
                continue
            facts = [self.rows[at].facts for at in members]
            if not any(fact.awaits & own for fact in facts):
                continue
            if not any(fact.came & own for fact in facts):
                continue
            if any(fact.leads & own for fact in facts):
                return 0, own, 0
            if all(fact.arrived & own for fact in facts):
                return own, 0, 0
        return 0, 0, 0
