"""What a plan's fences alone order, and what they leave to luck.

Where a fence stands between any two actions that may not meet, an epoch in which every rank kept to
its program under sound tickets cannot break a property, whatever its clocks say.
"""

from collections.abc import Iterator
from itertools import combinations, islice
from typing import NamedTuple

from phasesync.core.kernel import SHARED
from phasesync.core.plan import Act, Plan, Wait

__all__ = ("Unordered", "is_separate", "unordered")


class Unordered(NamedTuple):
    """Two actions that may not meet, and between which no fence stands."""

    one: int
    act: Act
    other: int
    other_act: Act


def unordered(plan: Plan, most: int = 8) -> list[Unordered]:
    """Pairs of actions, this epoch's or the next one's, that luck alone keeps apart."""
    found: list[Unordered] = []
    checked: set[tuple[tuple[str, ...], ...]] = set()
    for part in (part for _, groups in plan.groups for part in groups):
        alike = tuple(tuple(step[0] for step in plan.programs[member]) for member in part)
        if alike in checked:
            continue
        checked.add(alike)
        for one, other in combinations(part, 2):
            found += islice(_loose(plan, one, other), most - len(found))
            if len(found) >= most:
                return found
    return found


def is_separate(plan: Plan) -> bool:
    """Whether no device is touched by two groups, so that each can be judged alone."""
    owner: dict[int, int] = {}
    width = len(plan.protocol.resources)
    parts = [part for _, groups in plan.groups for part in groups]
    loose = set(range(len(plan.members))).difference(*parts)
    for number, part in enumerate([*parts, *((member,) for member in loose)]):
        for member in part:
            for act, _ in _acts(plan, member):
                for touch in act.touches:
                    if owner.setdefault(touch.cell // width, number) != number:
                        return False
    return True


def _acts(plan: Plan, member: int) -> Iterator[tuple[Act, int]]:
    """The actions of two epochs of a rank, with their places."""
    steps = plan.programs[member]
    for epoch in range(2):
        for at, step in enumerate(steps):
            if isinstance(step, Act) and step.touches:
                yield step, epoch * len(steps) + at


def _fences(plan: Plan, member: int) -> dict[int, list[int]]:
    """Where in two epochs a rank comes to the fences of each scope."""
    places: dict[int, list[int]] = {}
    steps = plan.programs[member]
    for epoch in range(2):
        for at, step in enumerate(steps):
            if isinstance(step, Wait):
                places.setdefault(step.scope, []).append(epoch * len(steps) + at)
    return places


def _loose(plan: Plan, one: int, other: int) -> Iterator[Unordered]:
    """The pairs of actions of two ranks that may not meet and have no fence between them."""
    mine, theirs = _fences(plan, one), _fences(plan, other)
    common = [
        pair
        for scope, places in mine.items()
        if scope in theirs
        for pair in zip(places, theirs[scope], strict=False)
    ]
    for a, p in _acts(plan, one):
        for b, q in _acts(plan, other):
            if _conflict(plan, a, b) and not any(
                (p < f and g < q) or (q < g and f < p) for f, g in common
            ):
                yield Unordered(one, a, other, b)


def _conflict(plan: Plan, a: Act, b: Act) -> bool:
    """Whether two actions may not be in progress at once, or in the wrong order."""
    width = len(plan.protocol.resources)
    cells = {touch.cell: touch.verb for touch in b.touches}
    for touch in a.touches:
        verb = cells.get(touch.cell)
        if verb is not None and not (verb in SHARED and touch.verb in SHARED):
            return True
        for pair in plan.never_on[touch.cell // width]:
            if touch.cell in pair.cells and any(
                cell in cells for cell in pair.cells if cell != touch.cell
            ):
                return True
    return False
