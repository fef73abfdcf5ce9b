"""Breadth first over a space, so that the first path to a broken rule is a shortest one.

The search ends with one of three answers; an exhausted budget is `Undecided`, never a pass. Time
and memory come in as functions, since this layer has no clock of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from phasesync.checker.orbits import product_of
from phasesync.checker.space import Space, State
from phasesync.core.kernel import Kind

__all__ = ("NO_BUDGET", "TIME", "Budget", "Found", "Label", "search")

Label: TypeAlias = tuple[Kind, str]
#: The bound of a search that time ended.
TIME = "time"
_LOOK_EVERY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far a search may go; `now` is a clock in seconds, without which time is unlimited, and
    `held` says how many bytes the process has, without which memory is."""

    states_max: int = 5_000_000
    until_s: float | None = None
    now: Callable[[], float] | None = None
    bytes_max: int = 2 << 30
    held: Callable[[], int] | None = None

    def over(self, states: int) -> str | None:
        """Which bound is reached, if one is."""
        if states > self.states_max:
            return f"{self.states_max:,} states"
        if self.now is not None and self.until_s is not None and self.now() > self.until_s:
            return TIME
        if self.held is not None and self.held() > self.bytes_max:
            return f"{self.bytes_max / 2**30:.2g} GiB of memory"
        return None


NO_BUDGET = Budget()


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search saw. `trail` are the states and labels to the broken rule, if one is broken;
    `bound` is the budget that ended it, if one did; `product` is how many states the seen ones
    stand for where ranks are told apart, of a search that saw all."""

    states: int = 0
    product: int = 0
    transitions: int = 0
    depth: int = 0
    reached: set[Label] = field(default_factory=set)
    deadlock: bool = False
    trail: tuple[tuple[Label, State], ...] | None = None
    bound: str | None = None


def search(
    space: Space,
    budget: Budget = NO_BUDGET,
    *,
    deadlocks: bool = True,
    rules: bool = True,
    stop: Callable[[State], bool] | None = None,
) -> Found:
    """Every state, level by level, until a rule breaks, nothing is left or the budget ends.

    `rules` and `deadlocks` say which of the two to look for; a state at which `stop` is true ends
    the search too.
    """
    first = space.initial()
    parents: dict[State, tuple[State, Label] | None] = {first: None}
    found = Found(states=1)
    level = [first]
    while level:
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
                    found.trail = (*_trail(parents, state), ((kind, name), after))
                    return found
                if after not in parents:
                    parents[after] = (state, (kind, name))
                    following.append(after)
                    if stop is not None and stop(after):
                        found.states = len(parents)
                        found.trail = _trail(parents, after)
                        return found
            if not moved and deadlocks and space.stuck(state):
                found.states = len(parents)
                found.deadlock = True
                found.trail = _trail(parents, state)
                return found
        found.depth += bool(following)
        level = following
    found.states = len(parents)
    found.product = product_of(space, parents)
    return found


def _trail(
    parents: dict[State, tuple[State, Label] | None], state: State
) -> tuple[tuple[Label, State], ...]:
    trail: list[tuple[Label, State]] = []
    while (came := parents[state]) is not None:
        trail.append((came[1], state))
        state = came[0]
    return tuple(reversed(trail))
