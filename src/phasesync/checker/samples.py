"""More than one run: ways in which a plan works, and further ways in which it breaks.

A search ends with its first counterexample. Whoever mends a protocol wants to see another one, of
another shape; and whoever is told that all is well wants to see what well looks like.
"""

import random
from collections.abc import Iterator

from phasesync.checker.paths import Lifted, lift
from phasesync.checker.search import NO_BUDGET, Budget, Label
from phasesync.checker.space import Space, State
from phasesync.core.kernel import NO_FAULTS, Event, Faults, enabled, initial, step
from phasesync.core.plan import Plan

__all__ = ("more_broken", "sample_runs")

_Parents = dict[State, tuple[State, Label] | None]


def sample_runs(
    plan: Plan, faults: Faults, epochs: int, many: int, *, seed: int = 0
) -> tuple[tuple[Event, ...], ...]:
    """So many different runs to the end, each step by chance; the same seed, the same runs.

    The first is one in which nothing fails: what all others differ from.
    """
    chance = random.Random(seed)
    found: dict[tuple[Event, ...], None] = {_walk(plan, NO_FAULTS, epochs, chance): None}
    for _ in range(4 * many):
        if len(found) == many:
            break
        found[_walk(plan, faults, epochs, chance)] = None
    return tuple(found)


def _walk(plan: Plan, faults: Faults, epochs: int, chance: random.Random) -> tuple[Event, ...]:
    system, path = initial(plan), []
    while events := list(enabled(plan, system, faults, epochs)):
        path.append(event := chance.choice(events))
        system = step(plan, system, event)
    return tuple(path)


def more_broken(
    plan: Plan, faults: Faults, epochs: int, many: int, *, budget: Budget = NO_BUDGET
) -> tuple[Lifted, ...]:
    """Shortest runs that break a rule, each in another step or another way than those before."""
    space = Space(plan, faults, epochs, reduction=False)
    found: dict[object, Lifted] = {}
    for trail in _trails(space, budget):
        lifted = lift(space, trail)
        shape = (lifted.path[-1][::2], *((v.property, v.resources) for v in lifted.violations))
        found.setdefault(shape, lifted)
        if len(found) == many:
            break
    return tuple(found.values())


def _trails(space: Space, budget: Budget) -> Iterator[tuple[tuple[Label, State], ...]]:
    """The way to each step that breaks a rule, level by level; nothing is sought behind one."""
    parents: _Parents = {space.initial(): None}
    level = list(parents)
    while level and budget.over(len(parents)) is None:
        following: list[State] = []
        for state in level:
            for kind, name, after, bad, _ in space.successors(state):
                if after in parents:
                    continue
                parents[after] = (state, (kind, name))
                if bad:
                    yield _way(parents, after)
                else:
                    following.append(after)
        level = following


def _way(parents: _Parents, state: State) -> tuple[tuple[Label, State], ...]:
    way: list[tuple[Label, State]] = []
    while (came := parents[state]) is not None:
        way.append((came[1], state))
        state = came[0]
    return tuple(reversed(way))
