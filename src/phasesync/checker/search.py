"""Breadth first over a space, so that the first path to a broken rule is a shortest one.

The search ends with one of three answers; an exhausted budget is `Undecided`, never a pass. Where
a level is wide, and numpy is there, the rest is searched as rows of numbers (`wide`), which gives
the same answer, sooner.
"""

from collections.abc import Callable
from importlib.util import find_spec

from phasesync.checker.bounds import (
    NO_BUDGET,
    TIME,
    Budget,
    Found,
    Label,
    Parents,
    trail_of,
)
from phasesync.checker.orbits import product_of
from phasesync.checker.space import Space, State

__all__ = ("NO_BUDGET", "TIME", "WIDE", "Budget", "Found", "Label", "search")

_LOOK_EVERY = 256
#: From so many states in a level on, rows are faster than one state after the other; of blocks of
#: more than two ranks, which are asked rank by rank, from so many times as many.
WIDE = 300
_LARGE = 3


def search(
    space: Space,
    budget: Budget = NO_BUDGET,
    *,
    deadlocks: bool = True,
    rules: bool = True,
    stop: Callable[[State], bool] | None = None,
    wide: int | None = WIDE,
) -> Found:
    """Every state, level by level, until a rule breaks, nothing is left or the budget ends.

    `rules` and `deadlocks` say which of the two to look for; a state at which `stop` is true ends
    the search too. A level of at least `wide` states is searched as rows; without it none is.
    """
    first = space.initial()
    parents: Parents = {first: None}
    found = Found(states=1)
    level = [first]
    while level:
        if stop is None and _rows_pay(space, len(level), wide):
            from phasesync.checker.wide import go_on  # noqa: PLC0415 - numpy may not be there.

            return go_on(space, budget, found, parents, level, deadlocks=deadlocks, rules=rules)
        following: list[State] = []
        for at, state in enumerate(level):
            if at % _LOOK_EVERY == 0 and (bound := budget.over(len(parents))) is not None:
                found.bound = bound
                found.states = len(parents)
                return found
            steps = space.successors(state)
            found.transitions += len(steps)
            moved = False
            for kind, name, after, bad, faulty in steps:
                moved = moved or not faulty
                found.reached.add((kind, name))
                if bad and rules:
                    found.states = len(parents)
                    found.trail = (*trail_of(parents, state), ((kind, name), after))
                    return found
                if after not in parents:
                    parents[after] = (state, (kind, name))
                    following.append(after)
                    if stop is not None and stop(after):
                        found.states = len(parents)
                        found.trail = trail_of(parents, after)
                        return found
            if not moved and deadlocks and space.stuck(state):
                found.states = len(parents)
                found.deadlock = True
                found.trail = trail_of(parents, state)
                return found
        found.depth += bool(following)
        level = following
    found.states = len(parents)
    found.product = product_of(space, parents)
    return found


def _rows_pay(space: Space, states: int, wide: int | None) -> bool:
    """Whether a level of so many states is searched as rows, sooner than one by one."""
    if wide is None or states < wide:
        return False
    if any(len(moves.tables.slots) > 2 for moves in space.moves) and states < _LARGE * wide:
        return False
    return space.fits_columns and find_spec("numpy") is not None
