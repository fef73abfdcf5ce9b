"""The moves of many blocks of one shape at once, rank by rank, for blocks of many ranks.

There are too many of these to ask for each what it may do. What a rank may do depends on its unit,
on the fences, and on what the others answer to a few questions (`handlers.Draft`): may it start,
does its arrival decide a fence, what is awaited. The answers are worked out for all blocks at once;
then each rank is asked once for each different set of them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from phasesync.checker.handlers import Draft, stopped
from phasesync.checker.keys import Column, Ids, Keys, Rows, masked
from phasesync.checker.moves import LEFT, STUCK, Moves, private, resting, steady
from phasesync.checker.rows import Around, Go, Memo, Row
from phasesync.checker.units import LOST
from phasesync.core.kernel import Kind, Stage, Status

__all__ = ("Many", "Moved")

_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))
#: What a table says of a unit in a slot.
(
    _STATUS,
    _STATE,
    _AWAITS,
    _ARRIVED,
    _CAME,
    _LEADS,
    _AWAITS_WORLD,
    _ARRIVED_WORLD,
    _CAME_WORLD,
    _LEADS_WORLD,
    _GONE,
    _MISSING,
    _STUCK,
    _PRIVATE,
    _RESTING,
) = range(15)


class Moved(NamedTuple):
    """Moves of blocks: of which of those asked for, and what `rows.Move` says of each."""

    source: Ids
    block: Ids
    arrives: Ids
    breaks: Ids
    faults: Ids
    label: Ids
    bad: Rows
    on_memory: Rows


class _Table:
    """unit -> a number, or some, worked out when it is first asked for."""

    def __init__(self, work: Callable[[int], Any], width: int = 0) -> None:
        self._work = work
        self._values = np.zeros((0, width) if width else 0, dtype=np.int64)
        self._known = np.zeros(0, dtype=np.bool_)

    def __call__(self, units: Rows) -> Rows:
        if not len(units):
            return np.zeros((0, *self._values.shape[1:]), dtype=np.int64)
        most = int(units.max())
        if most >= len(self._known):
            grown = 2 * most + 64
            values = np.zeros((grown, *self._values.shape[1:]), dtype=np.int64)
            values[: len(self._values)] = self._values
            known = np.zeros(grown, dtype=np.bool_)
            known[: len(self._known)] = self._known
            self._values, self._known = values, known
        there = self._known[units]
        if not there.all():
            for unit in np.unique(units[~there]).tolist():
                self._values[unit] = self._work(unit)
                self._known[unit] = True
        found: Rows = self._values[units]
        return found


class _Batch(NamedTuple):
    """Blocks to be gone on from: two masks and units each, what is around, and what the tables say
    of each slot's units."""

    blocks: Rows
    around: Ids
    facts: list[Rows]

    def of(self, some: Ids) -> "_Batch":
        """So many of them; all, if that is how many there are."""
        if len(some) == len(self.blocks):
            return self
        return _Batch(self.blocks[some], self.around[some], [each[some] for each in self.facts])


class _Effect(NamedTuple):
    """A move of one rank: its unit after it, the block's fences and those that the rank awaits,
    what it says to other blocks, and what it does to other units (by number)."""

    own: int
    opened: int
    broken: int
    awaits: int
    go: int
    bad: int
    arrives: int
    breaks: int
    faults: int
    label: int
    on_memory: int


class _Local:
    """What one slot has been asked, and where its moves are in the list of all."""

    def __init__(self) -> None:
        self.keys = Keys(5, np.int64)
        self.start = Column(np.int64)
        self.count = Column(np.int64)
        self.first = Column(np.int64)  # 0: waits for others; 1: its moves may go first; 2: recovers
        self.recovery = Column(np.int64)


class Many:
    """Blocks of one shape by number, their moves, and what the rest sees of them."""

    def __init__(
        self, moves: Moves, labels: Callable[[Kind, str], int], on_memory: frozenset[Kind]
    ) -> None:
        self.moves = moves
        self.tables = moves.tables
        self.labels = labels
        self.memory_kinds = on_memory
        self.slots = range(len(self.tables.slots))
        self.blocks = Keys(2 + len(self.slots), np.int64)
        self.facts = [_Table(self._facts_at(slot), 15) for slot in self.slots]
        self._memos: dict[int, _Table] = {}
        self._beside: dict[tuple[int, int, int], _Table] = {}
        self._apart: dict[tuple[int, int, int], _Table] = {}
        self._local = [_Local() for _ in self.slots]
        self._deaths = Keys(4, np.int64)
        self._gos: list[Go] = []
        self._go_of: dict[int, int] = {}
        self._effects = Column(np.int64, len(_Effect._fields))
        self.found: list[_Effect] = []
        self.twins = {
            slot: group[at - 1] for group in moves.groups for at, slot in enumerate(group) if at
        }

    @staticmethod
    def fits(moves: Moves) -> bool:
        """Whether the blocks are large, and nothing is asked of them that is not asked here."""
        tables = moves.tables
        return (
            len(tables.slots) > 2
            and not (moves.whole or moves.others or moves.endless or tables.dying)
            and not (tables.plan.defects or tables.plan.elsewhere)
            and len(tables.own.of) <= 62
        )

    # ------------------------------------------------------------------------------ blocks

    def number(self, blocks: Rows) -> tuple[Ids, Rows]:
        """The numbers of blocks, and those of them that are new."""
        before = len(self.blocks)
        ids, _ = self.blocks.add(blocks)
        return ids, self.blocks.rows.all[before:]

    def summaries(self, blocks: Rows) -> dict[str, Rows]:
        """What the rest sees of blocks, column by column."""
        facts = self._facts(blocks)

        def any_of(what: int) -> Rows:
            found: Rows = np.bitwise_or.reduce([each[:, what] for each in facts])
            return found

        def all_of(what: int) -> Rows:
            found: Rows = np.bitwise_and.reduce([each[:, what] for each in facts])
            return found

        return {
            "awaits": any_of(_AWAITS_WORLD),
            "arrived": all_of(_ARRIVED_WORLD),
            "came": any_of(_CAME_WORLD),
            "leads": any_of(_LEADS_WORLD),
            "missing": np.minimum.reduce([each[:, _MISSING] for each in facts]),
            "gone": any_of(_GONE),
            "stuck": any_of(_STUCK),
            "private": all_of(_PRIVATE),
            "resting": any_of(_RESTING),
        }

    def _facts(self, blocks: Rows) -> list[Rows]:
        return [self.facts[slot](blocks[:, 2 + slot]) for slot in self.slots]

    def _facts_at(self, slot: int) -> Callable[[int], tuple[int, ...]]:
        def work(unit: int) -> tuple[int, ...]:
            row = self.tables.row(slot, unit)
            facts = row.facts
            return (
                row.status,
                self.tables.unit_of[unit][0],
                masked(facts.awaits),
                masked(facts.arrived),
                masked(facts.came),
                masked(facts.leads),
                masked(facts.awaits_world),
                masked(facts.arrived_world),
                masked(facts.came_world),
                masked(facts.leads_world),
                facts.gone,
                facts.missing,
                row.status in STUCK,
                private(row),
                resting(row, self.moves.epochs),
            )

        return work

    # ------------------------------------------------------------------------------- moves

    def of(self, parts: Rows, around: Ids, arounds: list[Around]) -> Moved:
        """All moves of these blocks."""
        batch = self._batch(parts, around)
        found: list[Moved] = []
        for slot in self.slots:
            here = np.arange(len(parts))
            if (twin := self.twins.get(slot)) is not None:
                here = here[batch.blocks[:, 2 + slot] != batch.blocks[:, 2 + twin]]
            some = batch.of(here)
            local = self._asked(slot, some, arounds)
            of = self._local[slot]
            start, count = of.start.all[local], of.count.all[local]
            found.append(self._moved(slot, some, here, start, count))
        return _joined(found)

    def alone(self, parts: Rows, around: Ids, arounds: list[Around]) -> Moved:
        """The moves of one rank of each block that may go first, whatever anybody else does."""
        batch, left = self._batch(parts, around), np.arange(len(parts))
        found: list[Moved] = []
        for slot in self.slots:
            if not len(left):
                break
            some = batch.of(left)
            local = self._asked(slot, some, arounds)
            of = self._local[slot]
            first, start, count = of.first.all[local], of.start.all[local], of.count.all[local]
            recovers = first == 2
            start = np.where(recovers, of.recovery.all[local], start)
            count = np.where(recovers, 1, count)
            goes = recovers | ((first == 1) & (count > 0))
            may = np.flatnonzero(goes & ~recovers)
            goes[may] = self._all_apart(slot, some, may)
            took = np.flatnonzero(goes)
            moved = self._moved(slot, some.of(took), left[took], start[took], count[took])
            found.append(moved)
            left = left[~goes]
        return _joined(found)

    def _batch(self, parts: Rows, around: Ids) -> _Batch:
        blocks = self.blocks.rows.all[parts]
        return _Batch(blocks, around, self._facts(blocks))

    def _moved(self, slot: int, some: _Batch, source: Ids, start: Ids, count: Ids) -> Moved:
        """The moves of one rank, as what they do to the block."""
        here = np.repeat(np.arange(len(source)), count)
        before = np.repeat(np.cumsum(count) - count, count)
        move = np.repeat(start, count) + (np.arange(len(here)) - before)
        after = some.blocks[here]
        effects = self._effects.all[move].T
        own, opened, broken, awaits, goes, bad, arrives, breaks, faults, label, on_memory = effects
        after[:, 2 + slot] = own
        for number in np.unique(goes[goes >= 0]).tolist():
            at = np.flatnonzero(goes == number)
            go = self._gos[number]
            for other, memo in go.others:
                after[at, 2 + other] = self._memo(memo)(after[at, 2 + other])
            for other, memo in go.checked:
                bad[at] |= self._memo(memo)(after[at, 2 + other])
        for other in self.slots:
            if other != slot:
                awaits |= some.facts[other][here, _AWAITS]
        after[:, 0] = opened & awaits
        after[:, 1] = broken & awaits
        for group in self.moves.groups:
            columns = [2 + each for each in group]
            after[:, columns] = np.sort(after[:, columns], axis=1)
        return Moved(
            source[here],
            after,
            arrives,
            breaks,
            faults,
            label,
            bad != 0,
            on_memory != 0,
        )

    # --------------------------------------------------------------------------- one rank

    def _asked(self, slot: int, some: _Batch, arounds: list[Around]) -> Ids:
        """The number of what the rank of a slot is asked, for each of the blocks."""
        blocks = some.blocks
        answers = self._answers(slot, some, arounds)
        asked = (blocks[:, 2 + slot], blocks[:, 0], blocks[:, 1], some.around, answers)
        local = self._local[slot]
        before = len(local.keys)
        ids, _ = local.keys.add(np.stack(asked, axis=1))
        more = [
            self._ask(slot, unit, (opened, broken), arounds[around], answer)
            for unit, opened, broken, around, answer in local.keys.rows.all[before:].tolist()
        ]
        if more:
            columns = (local.start, local.count, local.first, local.recovery)
            for column, values in zip(columns, zip(*more, strict=True), strict=True):
                column.extend(values)
            self._effects.extend(self.found)
            self.found.clear()
        return ids

    def _ask(
        self, slot: int, unit: int, fences: tuple[int, int], around: Around, answer: int
    ) -> tuple[int, int, int, int]:
        """Where the moves of one rank stand, how many there are, whether they may go first (2: as
        a recovery, which stands there)."""
        row, begin = self.tables.row(slot, unit), len(self._effects) + len(self.found)
        draft = _SlotDraft(self, unit, fences, around, answer)
        draft.rank(slot, row)
        end = len(self._effects) + len(self.found)
        if row.recovers and row.status in LEFT:
            stopped(draft, slot, row)
            return begin, end - begin, 2, end
        calm = row.state.stage is Stage.EPOCH
        first = calm and steady(row, fences, around, self.moves.epochs)
        return begin, end - begin, int(first), 0

    def _states(
        self, slot: int, some: _Batch, statuses: Iterable[Status]
    ) -> Iterable[tuple[Row, Ids]]:
        """For each row of a slot that is at one of these: which of the blocks are there."""
        facts = some.facts[slot]
        there = np.flatnonzero(np.isin(facts[:, _STATUS], [int(each) for each in statuses]))
        states = facts[there, _STATE]
        for state in np.unique(states).tolist():
            at = there[states == state]
            yield self.tables.row(slot, int(some.blocks[at[0], 2 + slot])), at

    def _answers(self, slot: int, some: _Batch, arounds: list[Around]) -> Ids:
        """What the others of a block answer to what the rank of a slot may ask."""
        answers = np.zeros(len(some.blocks), dtype=np.int64)
        for row, at in self._states(slot, some, (Status.READY,)):
            if (start := row.go.get(Kind.START)) is not None:
                answers[at] = self._wrong(slot, row, start, some, at)
            elif row.bit:
                answers[at] = self._decides(slot, row, some, at)
        for row, at in self._states(slot, some, (Status.ACTING,)):
            for other, memo in row.go[Kind.END].wants:
                answers[at] |= self._memo(memo)(some.blocks[at, 2 + other])
        if self.moves.faults.notices:
            for row, at in self._states(slot, some, (Status.DEAD, Status.DEAD_ACTING)):
                answers[at] = self._missed(row, some.of(at), arounds)
        return answers

    def _wrong(self, slot: int, row: Row, go: Go, some: _Batch, at: Ids) -> Rows:
        """Whether the start of an action breaks a rule before it does anything."""
        blocks = some.blocks[at]
        bad = np.zeros(len(at), dtype=np.bool_)
        for other, memo in go.wants:
            bad |= self._memo(memo)(blocks[:, 2 + other]) != 0
        for part in go.agrees:
            held = np.stack([self._memo(memo)(blocks[:, 2 + o]) for o, memo in part], axis=1)
            least = np.where(held == LOST, np.iinfo(np.int64).max, held).min(axis=1)
            bad |= np.where(held == LOST, least[:, None], held).max(axis=1) != least
        unit, state = int(blocks[0, 2 + slot]), int(some.facts[slot][at[0], _STATE])
        for other in self.slots:
            if other != slot:
                bad |= self._next_to(slot, unit, state, other)(blocks[:, 2 + other]) != 0
        return bad

    def _next_to(self, slot: int, unit: int, state: int, other: int) -> _Table:
        """other's unit -> whether the start of the action beside it breaks a rule."""
        key = (slot, state, other)
        if key not in self._beside:
            tables = self.tables

            def work(theirs: int) -> int:
                status = tables.row(other, theirs).status
                return (status in _BUSY and tables.races(slot, unit, other, theirs)) or (
                    status in LEFT and tables.poisons(slot, unit, other, theirs)
                )

            self._beside[key] = _Table(work)
        return self._beside[key]

    def _decides(self, slot: int, row: Row, some: _Batch, at: Ids) -> Rows:
        """1: the arrival opens the fence; 2: it breaks it."""
        bit = row.bit
        own = row.go[Kind.ARRIVE].own[int(some.blocks[at[0], 2 + slot])]
        mine = self.tables.row(slot, own).facts
        leads = np.full(len(at), mine.leads & bit)
        arrived = np.full(len(at), mine.arrived & bit)
        for member in row.members:
            if member != slot:
                leads |= some.facts[member][at, _LEADS]
                arrived &= some.facts[member][at, _ARRIVED]
        shut = ((some.blocks[at, 0] | some.blocks[at, 1]) & bit) == 0
        breaks = shut & ((leads & bit) != 0)
        opens = shut & ~breaks & ((arrived & bit) != 0)
        found: Rows = opens + 2 * breaks
        return found

    def _missed(self, row: Row, some: _Batch, arounds: list[Around]) -> Ids:
        """What a notice of a death finds awaited, and what it decides of a recovery's fence."""
        many = len(some.blocks)
        awaited = np.bitwise_or.reduce([each[:, _AWAITS] for each in some.facts])
        opens, breaks, waits = (np.zeros(many, dtype=np.int64) for _ in range(3))
        orphaned = np.array([each.orphaned for each in arounds], dtype=np.int64)[some.around]
        decided = some.blocks[:, 0] | some.blocks[:, 1]
        left = np.ones(many, dtype=np.bool_)
        for own, world, members in row.judges:
            far = left & ((orphaned & world) != 0)
            waits[far] = world
            left &= ~far
            if own and members:
                facts = [some.facts[member] for member in members]
                any_ = (np.bitwise_or.reduce([f[:, w] for f in facts]) & own != 0 for w in _ANY)
                awaits, came, leads = any_
                arrived = np.bitwise_and.reduce([f[:, _ARRIVED] for f in facts]) & own != 0
                judged = left & (decided & own == 0) & awaits & came & (leads | arrived)
                breaks[judged & leads] = own
                opens[judged & ~leads] = own
                left &= ~judged
        ids, _ = self._deaths.add(np.stack((awaited, opens, breaks, waits), axis=1))
        return ids

    def death(self, answer: int) -> tuple[int, int, int, int]:
        """What `_missed` found, by its number."""
        awaited, opens, breaks, waits = self._deaths.rows.all[answer].tolist()
        return awaited, opens, breaks, waits

    def _all_apart(self, slot: int, some: _Batch, may: Ids) -> Rows:
        """Whether the rank may move before any other one of its block does anything."""
        apart = np.ones(len(may), dtype=np.bool_)
        states = some.facts[slot][may, _STATE]
        for state in np.unique(states).tolist():
            at = np.flatnonzero(states == state)
            unit = int(some.blocks[may[at[0]], 2 + slot])
            for other in self.slots:
                if other != slot and len(at):
                    table = self._far(slot, unit, state, other)
                    apart[at] &= table(some.blocks[may[at], 2 + other]) != 0
        return apart

    def _far(self, slot: int, unit: int, state: int, other: int) -> _Table:
        key = (slot, state, other)
        if key not in self._apart:
            ask = self.moves.apart.ask
            self._apart[key] = _Table(lambda theirs: ask(slot, unit, other, theirs))
        return self._apart[key]

    def _memo(self, memo: Memo) -> _Table:
        found = self._memos.get(id(memo))
        if found is None:
            found = self._memos[id(memo)] = _Table(memo.__getitem__)
        return found

    def go_number(self, go: Go) -> int:
        """The number of what a move does to other units, or -1 where it does nothing to them."""
        if not go.others and not go.checked:
            return -1
        found = self._go_of.setdefault(id(go), len(self._gos))
        if found == len(self._gos):
            self._gos.append(go)
        return found


_ANY = (_AWAITS, _CAME, _LEADS)


def _joined(found: list[Moved]) -> Moved:
    """All moves, those of one block together."""
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Moved(*(column[order] for column in columns))


class _SlotDraft(Draft):
    """The moves of one rank, given what the others answer."""

    def __init__(
        self, many: Many, unit: int, fences: tuple[int, int], around: Around, answer: int
    ) -> None:
        moves = many.moves
        super().__init__(*fences, around, moves.faults, moves.epochs, endless=moves.endless)
        self.many = many
        self.unit = unit
        self.answer = answer

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
        many = self.many
        own = self.unit if go is None else go.own[self.unit]
        opened = self.opened | (opens & ~self.broken)
        many.found.append(
            _Effect(
                own,
                opened,
                self.broken | masked(breaks & ~opened),
                masked(many.tables.row(slot, own).facts.awaits),
                -1 if go is None else many.go_number(go),
                bad,
                arrives,
                masked(breaks_world),
                faults,
                many.labels(kind, name),
                kind in many.memory_kinds,
            )
        )

    def starts_wrongly(self, slot: int, row: Row) -> bool:
        return bool(self.answer)

    def lost(self, go: Go) -> bool:
        return bool(self.answer)

    def arrival(self, slot: int, row: Row, go: Go) -> tuple[int, int]:
        return (row.bit if self.answer & 1 else 0), (row.bit if self.answer & 2 else 0)

    def awaited(self) -> int:
        return self.many.death(self.answer)[0]

    def orphan(self, row: Row) -> tuple[int, int, int]:
        return self.many.death(self.answer)[1:]

    def aborts_wrongly(self, slot: int) -> bool:
        return False
