"""What a block may do next: one handler a status, each reading the row that the tables hold.

A move changes the block and says what it does to what blocks share: it arrives at a world fence,
or breaks some. Whether that fence opens is for the product of all blocks to say.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from phasesync.checker.alike import Alike
from phasesync.checker.apart import Apart
from phasesync.checker.rows import NEVER, Go, Move, Row
from phasesync.checker.tables import BlockState, Tables
from phasesync.checker.units import LOST
from phasesync.core.kernel import Faults, Kind, Stage, Status
from phasesync.core.plan import PLAN

__all__ = ("Around", "Moves", "Summary")


class Around(NamedTuple):
    """What a block sees of the rest: world fences, whether faults are left, and of the dead."""

    open: int
    broken: int
    awaited: int
    may_fault: bool
    missing: int  # the epoch from which on somebody dead is missing
    orphaned: int = 0  # world fences, of recoveries, that a notice of a death decides


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


_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))
_LEFT = frozenset((Status.STOPPED, Status.ABORTED))
_STUCK = frozenset((Status.READY, Status.WAITING, Status.CUT))


def _steady(row: Row, block: BlockState, around: Around, epochs: int) -> bool:
    """Whether what this rank may do next is fixed, whatever else happens."""
    match row.status:
        case Status.ACTING:
            return True
        case Status.READY:
            if not (row.first or row.first_world):
                return True
            return row.hears and bool(row.first & block[1] or row.first_world & around.broken)
        case Status.WAITING:
            decided = row.bit & (block[0] | block[1]) or row.bit_world & around.open
            return bool(decided)
        case Status.FINISHED:
            return row.state.epoch < epochs
        case _:
            return False


def _resting(row: Row, epochs: int) -> bool:
    """Whether the rank may have to wait, recovered, for the dead to be replaced."""
    state = row.state
    rests = row.status is Status.FINISHED and state.stage is Stage.RECOVER
    return rests and state.epoch < epochs


def _private(row: Row) -> bool:
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
        gone = stuck = resting = False
        missing = NEVER
        private = True
        for row in rows:
            facts = row.facts
            awaits |= facts.awaits_world
            heeds |= row.first_world if row.hears else 0
            leads |= facts.leads_world
            arrived &= facts.arrived_world
            came |= facts.came_world
            gone = gone or facts.gone
            missing = min(missing, facts.missing)
            stuck = stuck or row.status in _STUCK
            private = private and _private(row)
            resting = resting or _resting(row, self.epochs)
        return Summary(
            awaits,
            arrived,
            came,
            gone,
            missing,
            leads,
            stuck,
            private,
            resting,
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
            if row.recovers and row.status in _LEFT:
                # Its death now and its death just after leave the same behind.
                draft = _Draft(self, block[0], block[1], units, rows, around)
                _stopped(draft, slot, row)
                return tuple(draft.found)
            calm = self.endless or row.state.stage is Stage.EPOCH
            if not (calm and _steady(row, block, around, self.epochs)):
                continue
            if all(self.apart.ask(slot, units[slot], at, units[at]) for at in self._but(slot)):
                draft = _Draft(self, block[0], block[1], units, rows, around)
                self._rank(draft, slot, row)
                if draft.found:
                    return tuple(draft.found)
        return ()

    def _but(self, slot: int) -> list[int]:
        return [at for at in range(len(self.classes)) if at != slot]

    def _rank(self, draft: "_Draft", slot: int, row: Row) -> None:
        if (handler := _HANDLERS.get(row.status)) is not None:
            handler(draft, slot, row)
        if draft.around.may_fault and self.faults.again and row.again:
            draft.move(Kind.AGAIN, slot, row.again, None, faults=1)
        if draft.around.may_fault and self.faults.crash and (go := row.go.get(Kind.CRASH)):
            draft.move(Kind.CRASH, slot, "", go, faults=1)

    def _of(self, block: BlockState, around: Around) -> list[Move]:
        units = block[2:]
        rows = [rows[unit] for rows, unit in zip(self.tables.rows, units, strict=True)]
        draft = _Draft(self, block[0], block[1], units, rows, around)
        seen: set[tuple[int, int]] = set()
        for slot, row in enumerate(rows):
            if self.groups:
                same = (self.classes[slot], units[slot])
                if same in seen:
                    continue
                seen.add(same)
            self._rank(draft, slot, row)
        if self.others:
            draft.others()
        if around.may_fault:
            draft.engines()
        return draft.found


class _Draft:
    """The moves found so far from one block, and what a new one needs to be made."""

    def __init__(
        self,
        moves: Moves,
        opened: int,
        broken: int,
        units: BlockState,
        rows: list[Row],
        around: Around,
    ) -> None:
        self.moves = moves
        self.tables = moves.tables
        self.opened = opened
        self.broken = broken
        self.units = units
        self.rows = rows
        self.around = around
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
        awaits = 0
        for row in self.rows:
            awaits |= row.facts.awaits
        shut = awaits & ~(self.opened | self.broken)
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

    def opens_now(self, row: Row) -> bool:
        return bool(row.bit & self.opened or row.bit_world & self.around.open)


_GOES_ON = frozenset((Kind.END, Kind.PASS, Kind.BEGIN, Kind.RECOVER))


def _ready(draft: _Draft, slot: int, row: Row) -> None:
    if (go := row.go.get(Kind.START)) is not None and row.act is not None:
        bad = draft.wrong(slot, row, list(draft.units))
        draft.move(Kind.START, slot, row.act.phase, go, bad=bad)
    elif (go := row.go.get(Kind.ARRIVE)) is not None and row.wait is not None:
        units = list(draft.units)
        units[slot] = go.own[units[slot]]
        opens, breaks = draft.decided(row, units, draft.opened, draft.broken)
        name = row.wait.fence
        draft.move(Kind.ARRIVE, slot, name, go, arrives=row.bit_world, opens=opens, breaks=breaks)
        _not_arriving(draft, slot, row)
    _abort(draft, slot, row)


def _not_arriving(draft: _Draft, slot: int, row: Row) -> None:
    """An arrival that is lost on the way, or one under another plan."""
    assert row.wait is not None
    faults, name = draft.moves.faults, row.wait.fence
    if not draft.around.may_fault:
        return
    if faults.lost:
        draft.move(Kind.LOSE, slot, name, row.go[Kind.LOSE], faults=1)
    if faults.mixed and name == PLAN:
        breaks, world = row.breaks, row.breaks_world
        go = row.go[Kind.REFUSE]
        draft.move(Kind.REFUSE, slot, name, go, breaks=breaks, breaks_world=world, faults=1)


def _abort(draft: _Draft, slot: int, row: Row) -> None:
    """Who learns of a break leaves, and arrives as failed wherever it has not passed."""
    heard = row.first & draft.broken or row.first_world & draft.around.broken
    if not (draft.moves.faults.aborts and row.hears and heard):
        return
    draft.move(
        Kind.ABORT,
        slot,
        row.first_name,
        row.go[Kind.ABORT],
        breaks=row.breaks,
        breaks_world=row.breaks_world,
        bad=draft.aborts_wrongly(slot),
    )


def _acting(draft: _Draft, slot: int, row: Row) -> None:
    assert row.act is not None
    name, faults = row.act.phase, draft.moves.faults
    end, fail = row.go[Kind.END], row.go[Kind.FAIL]
    lost = any(memo[draft.units[at]] for at, memo in end.wants)
    if not lost:
        draft.move(Kind.END, slot, name, end)
    may_fail = not row.act.outside or draft.moves.endless
    if lost or (draft.around.may_fault and faults.fail and may_fail):
        draft.move(
            Kind.FAIL,
            slot,
            name,
            fail,
            breaks=row.breaks,
            breaks_world=row.breaks_world,
            faults=0 if lost else 1,
        )
    if draft.around.may_fault and faults.hang:
        draft.move(Kind.HANG, slot, name, row.go[Kind.HANG], faults=1)


def _waiting(draft: _Draft, slot: int, row: Row) -> None:
    assert row.wait is not None
    name = row.wait.fence
    if draft.opens_now(row):
        draft.move(Kind.PASS, slot, name, row.go[Kind.PASS])
    else:
        _deadline(draft, slot, row)
    _abort(draft, slot, row)


def _deadline(draft: _Draft, slot: int, row: Row) -> None:
    """The patience of a rank at a fence that is still shut."""
    assert row.wait is not None
    if not draft.moves.faults.deadlines:
        return
    if row.bit & ~draft.broken or row.bit_world & ~draft.around.broken:
        bits, world, name = row.bit, row.bit_world, row.wait.fence
        draft.move(Kind.DEADLINE, slot, name, None, breaks=bits, breaks_world=world)


def _cut(draft: _Draft, slot: int, row: Row) -> None:
    """It waits like the others, at a fence that cannot open."""
    _deadline(draft, slot, row)
    _abort(draft, slot, row)


def _stopped(draft: _Draft, slot: int, row: Row) -> None:
    if (go := row.go.get(Kind.RECOVER)) is not None:
        draft.move(Kind.RECOVER, slot, "", go)


def _finished(draft: _Draft, slot: int, row: Row) -> None:
    state = row.state
    follows = state.stage is Stage.EPOCH or draft.around.missing > state.epoch
    if state.epoch < draft.moves.epochs and follows:
        draft.move(Kind.BEGIN, slot, "", row.go[Kind.BEGIN])


def _dead(draft: _Draft, slot: int, row: Row) -> None:
    if row.act is not None and (go := row.go.get(Kind.LAND)) is not None:
        draft.move(Kind.LAND, slot, row.act.phase, go)
    if not draft.moves.faults.notices:
        return
    awaits = 0
    for other in draft.rows:
        awaits |= other.facts.awaits
    around = draft.around
    unnoticed = row.misses & ~(draft.opened | draft.broken) & awaits
    far = row.misses_world & ~(around.open | around.broken) & around.awaited
    opens, breaks, waits = draft.orphan(row)
    if unnoticed or far or opens or breaks or waits:
        # What is judged is not failed beside: it was shut, whatever the order.
        draft.move(
            Kind.NOTICE,
            slot,
            "",
            None,
            opens=opens,
            breaks=(row.breaks & ~opens) | breaks,
            arrives=waits,
            breaks_world=row.breaks_world & ~waits,
        )


_HANDLERS: dict[Status, Callable[[_Draft, int, Row], None]] = {
    Status.READY: _ready,
    Status.ACTING: _acting,
    Status.WAITING: _waiting,
    Status.CUT: _cut,
    Status.STOPPED: _stopped,
    Status.ABORTED: _stopped,
    Status.FINISHED: _finished,
    Status.DEAD: _dead,
    Status.DEAD_ACTING: _dead,
}
