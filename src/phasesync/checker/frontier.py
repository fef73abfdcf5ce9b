"""A level of the search at a time, as rows of numbers: what `Space` says of one state, of many.

A row is a state: its world fences and faults as one number, then its blocks. What a block may do
in given surroundings is still asked of `Moves`, once; here it is put together with what the blocks
share. Whatever this file says of a step `Space.successors` says too: the one is the measure of the
other, and every test of the one asks the other.
"""

from collections.abc import Mapping
from math import factorial
from typing import Any, NamedTuple

import numpy as np

from phasesync.checker.keys import Column, Ids, Keys, Rows, masked
from phasesync.checker.many import Many
from phasesync.checker.moves import Moves
from phasesync.checker.orbits import within
from phasesync.checker.rows import Around, Move
from phasesync.checker.space import ON_MEMORY, Space, State
from phasesync.core.kernel import Kind

__all__ = ("Edges", "Frontier", "orders")

_UNKNOWN = -1


class Edges(NamedTuple):
    """The steps from some rows: the row that each is from, the row after it, what it is called
    (by number), whether it breaks a rule, and whether it is a fault."""

    source: Ids
    after: Rows
    label: Ids
    bad: Rows
    faulty: Rows


class _Labels:
    """Numbers for what a step is called."""

    def __init__(self) -> None:
        self.all: list[tuple[Kind, str]] = []
        self._of: dict[tuple[Kind, str], int] = {}

    def number(self, kind: Kind, name: str) -> int:
        key = (kind, name)
        found = self._of.setdefault(key, len(self.all))
        if found == len(self.all):
            self.all.append(key)
        return found


_MASKS = ("awaits", "arrived", "came", "leads")
_FACTS = ("missing", "gone", "stuck", "private", "resting")


class _Sums:
    """What the rest sees of blocks of one shape, as columns by the number of the block."""

    def __init__(self, moves: Moves, pairs: int) -> None:
        self.moves = moves
        self.awaits = Column(np.int64)
        self.arrived = Column(np.int64)
        self.came = Column(np.int64)
        self.leads = Column(np.int64)
        self.missing = Column(np.int64)
        self.gone = Column(np.bool_)
        self.stuck = Column(np.bool_)
        self.private = Column(np.bool_)
        self.resting = Column(np.bool_)
        self.held = Column(np.int64, 3 * pairs) if pairs else None

    def take(self, columns: Mapping[str, Any]) -> None:
        """Takes in more blocks, column by column."""
        for name, values in columns.items():
            getattr(self, name).extend(values)

    def learn(self) -> None:
        """Takes in the blocks that were numbered since."""
        more = self.moves.summaries[len(self.awaits) :]
        if not more:
            return
        masks = {name: [masked(getattr(each, name)) for each in more] for name in _MASKS}
        facts = _FACTS if self.held is None else (*_FACTS, "held")
        self.take(masks | {name: [getattr(each, name) for each in more] for name in facts})


class _Spans(NamedTuple):
    """For each context, where its moves stand in the list of all, and how many there are."""

    start: Column
    size: Column

    def grow(self, many: int) -> None:
        more = many - len(self.start)
        if more > 0:
            self.start.extend(np.full(more, _UNKNOWN))
            self.size.extend(np.zeros(more))


class _Kind:
    """The moves of blocks of one shape; each context (block, surroundings) is asked once."""

    def __init__(self, moves: Moves, labels: _Labels, pairs: int, only: bool) -> None:
        self.moves = moves
        self.only = only
        self.labels = labels
        self.sums = _Sums(moves, pairs)
        self.contexts = Keys(2)
        self.of = _Spans(Column(np.int64), Column(np.int64))
        self.alone = _Spans(Column(np.int64), Column(np.int64))
        self.block = Column(np.int64)
        self.arrives = Column(np.int64)
        self.breaks = Column(np.int64)
        self.faults = Column(np.int64)
        self.label = Column(np.int64)
        self.bad = Column(np.bool_)
        self.on_memory = Column(np.bool_)

    def known(self, parts: Rows, around: Ids) -> Ids:
        """The contexts of these blocks."""
        contexts = np.stack((parts, around.astype(np.uint32)), axis=1)
        if self.only:
            self._forget()
            self.contexts.rows.extend(contexts)
            return np.arange(len(contexts))
        ids, _ = self.contexts.add(contexts)
        return ids

    def ask(
        self, spans: _Spans, contexts: Ids, arounds: list[Around], *, alone: bool = False
    ) -> tuple[Ids, Ids]:
        """Where the moves of each context stand, and how many there are."""
        spans.grow(len(self.contexts.rows))
        new = np.unique(contexts[spans.start.all[contexts] == _UNKNOWN])
        if len(new):
            begin = len(self.block)
            count = self._ask(self.contexts.rows.all[new], arounds, alone)
            spans.start.all[new] = begin + np.cumsum(count) - count
            spans.size.all[new] = count
        return spans.start.all[contexts], spans.size.all[contexts]

    def _ask(self, contexts: Rows, arounds: list[Around], alone: bool) -> Ids:
        """Learns the moves of new contexts, in their order; how many each has."""
        asked = self.moves.alone if alone else self.moves.of
        found = [asked(part, arounds[around]) for part, around in contexts.tolist()]
        self._learn([move for moves in found for move in moves])
        return np.array([len(moves) for moves in found], dtype=np.int64)

    def _forget(self) -> None:
        """Where a block is all there is, no context comes again."""
        self.contexts.rows.clear()
        for column in (self.block, self.arrives, self.breaks, self.faults, self.label):
            column.clear()
        for column in (self.bad, self.on_memory, *self.of, *self.alone):
            column.clear()

    def parts(self, numbers: Rows) -> Rows:
        """Blocks by their numbers here, of those that `Moves` has given them."""
        self.sums.learn()
        return numbers

    def numbers(self, part: int) -> int:
        """And back."""
        return part

    def inner(self) -> Rows:
        """In how many ways the ranks of each block can be told apart."""
        return np.array([within(self.moves, part) for part in range(len(self.moves.blocks))])

    def _learn(self, moves: list[Move]) -> None:
        if not moves:
            return
        assert not any(move.earlier for move in moves)
        self.block.extend([move.block for move in moves])
        self.arrives.extend([move.arrives for move in moves])
        self.breaks.extend([masked(move.breaks) for move in moves])
        self.faults.extend([move.faults for move in moves])
        self.label.extend([self.labels.number(move.kind, move.name) for move in moves])
        self.bad.extend([move.bad for move in moves])
        self.on_memory.extend([move.kind in ON_MEMORY for move in moves])
        self.sums.learn()


class _LargeKind(_Kind):
    """The same of blocks of many ranks, which are numbered here and asked all at once."""

    def __init__(self, moves: Moves, labels: _Labels, only: bool) -> None:
        super().__init__(moves, labels, 0, only)
        self.many = Many(moves, labels.number, ON_MEMORY)

    def _ask(self, contexts: Rows, arounds: list[Around], alone: bool) -> Ids:
        asked = self.many.alone if alone else self.many.of
        moved = asked(contexts[:, 0], contexts[:, 1].astype(np.int64), arounds)
        self.block.extend(self._numbered(moved.block))
        self.arrives.extend(moved.arrives)
        self.breaks.extend(moved.breaks)
        self.faults.extend(moved.faults)
        self.label.extend(moved.label)
        self.bad.extend(moved.bad)
        self.on_memory.extend(moved.on_memory)
        return np.bincount(moved.source, minlength=len(contexts))

    def _numbered(self, blocks: Rows) -> Ids:
        ids, more = self.many.number(blocks)
        if len(more):
            self.sums.take(self.many.summaries(more))
        return ids

    def parts(self, numbers: Rows) -> Rows:
        blocks = [self.moves.blocks[number] for number in numbers.tolist()]
        shape = (len(blocks), self.many.blocks.width)
        return self._numbered(np.array(blocks, dtype=np.int64).reshape(shape))

    def numbers(self, part: int) -> int:
        return self.moves.number(tuple(self.many.blocks.rows.all[part].tolist()))

    def inner(self) -> Rows:
        blocks = self.many.blocks.rows.all
        found = np.ones(len(blocks), dtype=np.int64)
        for group in self.moves.groups:
            found *= orders(blocks[:, [2 + slot for slot in group]])
        return found


def orders(numbers: Rows) -> Ids:
    """For each row of sorted numbers, in how many orders they can be told apart."""
    many = numbers.shape[1]
    alike = np.ones(len(numbers), dtype=np.int64)
    run = alike.copy()
    for at in range(1, many):
        run = np.where(numbers[:, at] == numbers[:, at - 1], run + 1, 1)
        alike *= run
    return factorial(many) // alike


class _Seen(NamedTuple):
    """What is so of each row as a whole."""

    opened: Ids
    broken: Ids
    faults: Ids
    around: Ids
    awaits: list[Ids]
    stuck: Rows
    resting: Rows


class Frontier:
    """The steps of a space from many states at once."""

    def __init__(self, space: Space) -> None:
        assert space.fits_columns
        self.space = space
        self.labels = _Labels()
        one = len(space.of) == 1
        self.kinds = [
            _LargeKind(moves, self.labels, one)
            if Many.fits(moves)
            else _Kind(moves, self.labels, space.pairs, one)
            for moves in space.moves
        ]
        self.of = [self.kinds[number] for number in space.kind]
        self.world = Keys(3, np.int64)
        self._around = Keys(4, np.int64)
        self.arounds: list[Around] = []
        self.group_of = {at: group for group in space.alike for at in group}

    # ------------------------------------------------------------------------ states and rows

    def rows(self, states: list[State]) -> Rows:
        """The rows of these states."""
        all_ = np.array(states, dtype=np.int64).reshape(len(states), len(self.of) + 3)
        world, _ = self.world.add(all_[:, :3])
        found = all_[:, 2:].astype(np.uint32)
        found[:, 0] = world
        for at, kind in enumerate(self.of):
            found[:, at + 1] = kind.parts(found[:, at + 1])
        return found

    def state(self, row: Rows) -> State:
        """The state of one row."""
        world, *parts = row.tolist()
        numbers = (kind.numbers(part) for kind, part in zip(self.of, parts, strict=True))
        return (*self.world.rows.all[world].tolist(), *numbers)

    # ------------------------------------------------------------------------------- steps

    def stuck(self, rows: Rows) -> Rows:
        """Whether somebody alive stands before or at a step that it has not done."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for at, kind in enumerate(self.of):
            found |= kind.sums.stuck.all[rows[:, at + 1]]
        return found

    def steps(self, rows: Rows) -> Edges:
        """Every step from every row."""
        seen = self._see(rows)
        left = np.arange(len(rows))
        found: list[Edges] = []
        if self.space.reduction:
            left = self._by_one(rows, seen, left, found)
        if len(left):
            self._by_all(rows, seen, left, found)
        return _joined(found, rows)

    def _see(self, rows: Rows) -> _Seen:
        """What the blocks see of each other."""
        many = len(rows)
        opened, broken, faults = self.world.rows.all[rows[:, 0]].T
        awaited = np.zeros(many, dtype=np.int64)
        arrived = np.full(many, masked(-1), dtype=np.int64)
        came, led = awaited.copy(), awaited.copy()
        gone = np.zeros(many, dtype=np.bool_)
        stuck, resting = gone.copy(), gone.copy()
        missing: Any = None
        awaits = []
        for at, kind in enumerate(self.of):
            part, sums = rows[:, at + 1], kind.sums
            awaits.append(sums.awaits.all[part])
            awaited |= awaits[-1]
            arrived &= sums.arrived.all[part]
            came |= sums.came.all[part]
            led |= sums.leads.all[part]
            gone |= sums.gone.all[part]
            resting |= sums.resting.all[part]
            late = sums.missing.all[part]
            missing = late if missing is None else np.minimum(missing, late)
        orphaned = np.where(gone, (arrived | led) & came, 0) & awaited & ~(opened | broken)
        key = np.stack((rows[:, 0].astype(np.int64), awaited, missing, orphaned), axis=1)
        around, new = self._around.add(key)
        if new.any():
            self._look_around()
        return _Seen(opened, broken, faults, around, awaits, stuck, resting)

    def _look_around(self) -> None:
        for world, awaited, missing, orphaned in self._around.rows.all[
            len(self.arounds) :
        ].tolist():
            opened, broken, faults = self.world.rows.all[world].tolist()
            left = faults < self.space.faults.most
            self.arounds.append(Around(opened, broken, awaited, left, missing, orphaned))

    def _by_one(self, rows: Rows, seen: _Seen, left: Ids, found: list[Edges]) -> Ids:
        """The rows from which one block may go first, alone; it leaves the others."""
        rests = seen.resting[left]
        waiting, left = left[rests], left[~rests]
        for at, kind in enumerate(self.of):
            contexts = kind.known(rows[left, at + 1], seen.around[left])
            start, count = kind.ask(kind.alone, contexts, self.arounds, alone=True)
            left = self._taken(rows, seen, left, at, start, count, found)
        for at, kind in enumerate(self.of):
            mine = kind.sums.private.all[rows[left, at + 1]] | self.space.calm
            may, others = left[mine], left[~mine]
            contexts = kind.known(rows[may, at + 1], seen.around[may])
            start, count = kind.ask(kind.of, contexts, self.arounds)
            left = np.concatenate((others, self._taken(rows, seen, may, at, start, count, found)))
        return np.concatenate((waiting, left))

    def _taken(
        self,
        rows: Rows,
        seen: _Seen,
        left: Ids,
        at: int,
        start: Ids,
        count: Ids,
        found: list[Edges],
    ) -> Ids:
        """Goes on with the rows from which block `at` has moves; the others stay."""
        goes = count > 0
        if goes.any():
            found.append(self._moved(rows, seen, left[goes], at, start[goes], count[goes]))
        return left[~goes]

    def _by_all(self, rows: Rows, seen: _Seen, left: Ids, found: list[Edges]) -> None:
        """The moves of every block; of blocks that are alike and at the same, of the first."""
        for at, kind in enumerate(self.of):
            here = left
            if self.space.symmetry:
                for other in range(at):
                    if self.space.kind[other] == self.space.kind[at]:
                        here = here[rows[here, other + 1] != rows[here, at + 1]]
            if len(here):
                contexts = kind.known(rows[here, at + 1], seen.around[here])
                start, count = kind.ask(kind.of, contexts, self.arounds)
                found.append(self._moved(rows, seen, here, at, start, count))

    def _moved(self, rows: Rows, seen: _Seen, here: Ids, at: int, start: Ids, count: Ids) -> Edges:
        """The steps that block `at` takes from these rows."""
        kind = self.of[at]
        source = np.repeat(here, count)
        before = np.repeat(np.cumsum(count) - count, count)
        move = np.repeat(start, count) + (np.arange(len(source)) - before)
        block = kind.block.all[move]
        after = rows[source]
        opened, broken = seen.opened[source], seen.broken[source]
        faults = kind.faults.all[move]
        bad = kind.bad.all[move]
        arrives, breaks = kind.arrives.all[move], kind.breaks.all[move]
        self._decide(after, at, block, arrives, opened, broken)
        if self.space.late:
            bad = bad | ((breaks & opened) != 0)
            opened &= ~breaks
        broken |= breaks & ~opened
        self._forget(seen, source, at, block, breaks, opened, broken)
        if self.space.pairs:
            bad = bad | (kind.on_memory.all[move] & self._elsewhere(after, at, block))
        self._new_world(after, seen, source, opened, broken, faults)
        after[:, at + 1] = block
        if (group := self.group_of.get(at)) is not None:
            columns = [each + 1 for each in group]
            after[:, columns] = np.sort(after[:, columns], axis=1)
        return Edges(source, after, kind.label.all[move], bad, faults > 0)

    def _decide(
        self, rows: Rows, at: int, block: Ids, arrives: Ids, opened: Ids, broken: Ids
    ) -> None:
        """What arrivals at fences of the world decide; `opened` and `broken` are changed."""
        come = np.flatnonzero(arrives & ~(opened | broken))
        if not len(come):
            return
        bit, mine = arrives[come], self.of[at].sums
        leads = mine.leads.all[block[come]]
        arrived = mine.arrived.all[block[come]]
        for other, kind in enumerate(self.of):
            if other != at:
                part = rows[come, other + 1]
                leads = leads | kind.sums.leads.all[part]
                arrived = arrived & kind.sums.arrived.all[part]
        breaks = (leads & bit) != 0
        opens = ~breaks & ((arrived & bit) != 0)
        broken[come] |= np.where(breaks, bit, 0)
        opened[come] |= np.where(opens, bit, 0)

    def _forget(
        self,
        seen: _Seen,
        source: Ids,
        at: int,
        block: Ids,
        breaks: Ids,
        opened: Ids,
        broken: Ids,
    ) -> None:
        """Fences that nobody comes to any more are of no account."""
        awaits = self.of[at].sums.awaits.all[block]
        changed = np.flatnonzero((awaits != seen.awaits[at][source]) | (breaks != 0))
        if not len(changed):
            return
        awaits, where = awaits[changed], source[changed]
        for other, each in enumerate(seen.awaits):
            if other != at:
                awaits = awaits | each[where]
        opened[changed] &= awaits
        broken[changed] &= awaits

    def _elsewhere(self, rows: Rows, at: int, block: Ids) -> Rows:
        """Whether one of a pair is held while the other is held on another device."""
        held = self._held(at)[block].copy()
        for other, _ in enumerate(self.of):
            if other != at:
                held += self._held(other)[rows[:, other + 1]]
        found = np.zeros(len(rows), dtype=np.bool_)
        for pair in range(self.space.pairs):
            one, two, both = held[:, 3 * pair : 3 * pair + 3].T
            found |= (one > 0) & (two > 0) & ~((one == 1) & (two == 1) & (both == 1))
        return found

    def _held(self, at: int) -> Rows:
        held = self.of[at].sums.held
        assert held is not None
        return held.all

    def _new_world(
        self, after: Rows, seen: _Seen, source: Ids, opened: Ids, broken: Ids, faults: Ids
    ) -> None:
        changed = np.flatnonzero(
            (opened != seen.opened[source]) | (broken != seen.broken[source]) | (faults != 0)
        )
        if len(changed):
            spent = seen.faults[source[changed]] + faults[changed]
            world = np.stack((opened[changed], broken[changed], spent), axis=1)
            after[changed, 0] = self.world.add(world)[0]


def _joined(found: list[Edges], rows: Rows) -> Edges:
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return Edges(none, rows[:0], none, none > 0, none > 0)
    return Edges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
