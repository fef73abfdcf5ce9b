"""The rest of a search, level by level as rows of numbers, from a level that is wide.

It ends as the search of one state after the other does: with the same verdict at the same depth,
and, where it ends because nothing is left, with the same states and steps. Of every row it keeps
where it was first come to from, so that the way to a broken rule is there to be told.
"""

from math import factorial
from typing import NamedTuple

import numpy as np

from phasesync.checker.bounds import Budget, Found, Label, Parents, trail_of
from phasesync.checker.frontier import Edges, Frontier, orders
from phasesync.checker.keys import Column, Ids, Keys, Rows
from phasesync.checker.orbits import product_of
from phasesync.checker.space import Space, State

__all__ = ("go_on",)

#: So many rows are gone on from at once: more take memory, fewer take time.
_CHUNK = 1 << 15
#: A number of orders of this many ranks fits into a column.
_EXACT_BITS = 62


def go_on(
    space: Space,
    budget: Budget,
    found: Found,
    parents: Parents,
    level: list[State],
    *,
    deadlocks: bool,
    rules: bool,
) -> Found:
    """What `found` and `parents` have become once the search from `level` has ended."""
    search = _Wide(space, parents, level)
    search.run(budget, found, deadlocks=deadlocks, rules=rules)
    found.states = len(search.seen)
    labels = search.frontier.labels.all
    found.reached |= {labels[number] for number in np.flatnonzero(search.used.all).tolist()}
    if found.trail is None and found.bound is None:
        found.product = search.product()
    return found


class _Broken(NamedTuple):
    """The row from which a rule breaks, and the step that does it; none where nobody can go on."""

    row: int
    step: tuple[Label, State] | None


class _Wide:
    """All rows so far: first those that came from a search of single states."""

    def __init__(self, space: Space, parents: Parents, level: list[State]) -> None:
        self.parents = parents
        self.frontier = Frontier(space)
        self.seen = Keys(len(level[0]) - 2)
        self.first: dict[int, State] = {}
        here = set(level)
        for part in ([state for state in parents if state not in here], level):
            ids, _ = self.seen.add(self.frontier.rows(part))
            self.first |= zip(ids.tolist(), part, strict=True)
        self.level = (len(parents) - len(level), len(parents))
        self.source = Column(np.int64)
        self.label = Column(np.int64)
        self.used = Column(np.bool_)

    def run(self, budget: Budget, found: Found, *, deadlocks: bool, rules: bool) -> None:
        begin, end = self.level
        while begin < end:
            for at in range(begin, end, _CHUNK):
                if (bound := budget.over(len(self.seen))) is not None:
                    found.bound = bound
                    return
                broken = self._chunk(at, min(at + _CHUNK, end), found, deadlocks, rules)
                if broken is not None:
                    found.deadlock = broken.step is None
                    step = (broken.step,) if broken.step is not None else ()
                    found.trail = (*self._trail(broken.row), *step)
                    return
            begin, end = end, len(self.seen)
            found.depth += end > begin

    def _chunk(
        self, begin: int, end: int, found: Found, deadlocks: bool, rules: bool
    ) -> _Broken | None:
        rows = self.seen.rows.all[begin:end].copy()
        edges = self.frontier.steps(rows)
        found.transitions += len(edges.source)
        self._note(edges.label)
        halted = self._halted(rows, edges) if deadlocks else None
        breaks = np.flatnonzero(edges.bad) if rules else np.zeros(0, dtype=np.int64)
        if len(breaks):
            step = int(breaks[np.argmin(edges.source[breaks])])
            row = int(edges.source[step])
            if halted is None or row <= halted:
                label = self.frontier.labels.all[int(edges.label[step])]
                return _Broken(begin + row, (label, self.frontier.state(edges.after[step])))
        if halted is not None:
            return _Broken(begin + halted, None)
        self._add(begin, edges)
        return None

    def _note(self, labels: Ids) -> None:
        """Which steps there were at all."""
        more = len(self.frontier.labels.all) - len(self.used)
        self.used.extend(np.zeros(more))
        self.used.all[labels] = True

    def _halted(self, rows: Rows, edges: Edges) -> int | None:
        """The first row from which nobody can go on, though somebody is not done."""
        stays = np.ones(len(rows), dtype=np.bool_)
        stays[edges.source[~edges.faulty]] = False
        stays &= self.frontier.stuck(rows)
        return int(np.argmax(stays)) if stays.any() else None

    def _add(self, begin: int, edges: Edges) -> None:
        before = len(self.seen)
        ids, new = self.seen.add(edges.after)
        many = len(self.seen) - before
        for column, values in ((self.source, edges.source + begin), (self.label, edges.label)):
            came = np.zeros(many, dtype=np.int64)
            came[ids[new] - before] = values[new]
            column.extend(came)

    def _trail(self, row: int) -> tuple[tuple[Label, State], ...]:
        """The steps to a row."""
        steps: list[tuple[Label, State]] = []
        while row >= len(self.first):
            at = row - len(self.first)
            label = self.frontier.labels.all[int(self.label.all[at])]
            steps.append((label, self.frontier.state(self.seen.rows.all[row])))
            row = int(self.source.all[at])
        return (*trail_of(self.parents, self.first[row]), *reversed(steps))

    def product(self) -> int:
        """How many states all rows stand for."""
        space, rows = self.frontier.space, self.seen.rows.all
        if not space.symmetry:
            return len(rows)
        sizes = [np.ones(len(rows), dtype=np.int64)]
        most = 1
        for at, kind in enumerate(self.frontier.of):
            inner = kind.inner()
            sizes.append(inner[rows[:, at + 1]])
            most *= int(inner.max())
        for group in space.alike:
            most *= factorial(len(group))
            sizes.append(orders(rows[:, [at + 1 for at in group]]))
        if most.bit_length() > _EXACT_BITS:
            return product_of(space, map(self.frontier.state, rows))
        return sum(np.prod(sizes, axis=0).tolist())
