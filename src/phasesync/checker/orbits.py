"""What a search with symmetry stands for: each of its states is all that differ by who is who.

The number is exact: with the reduction off, it is how many states a search that tells
interchangeable ranks apart would see.
"""

from collections import Counter
from collections.abc import Iterable
from math import factorial

from phasesync.checker.moves import Moves
from phasesync.checker.space import Space, State

__all__ = ("product_of", "within")


def product_of(space: Space, states: Iterable[State]) -> int:
    """How many states these stand for."""
    if not space.symmetry:
        return sum(1 for _ in states)
    inner: dict[tuple[int, int], int] = {}
    total = 0
    for state in states:
        parts = state[3:]
        size = 1
        for at, part in enumerate(parts):
            key = (space.kind[at], part)
            if key not in inner:
                inner[key] = within(space.of[at], part)
            size *= inner[key]
        for group in space.alike:
            size *= _orders([parts[at] for at in group])
        total += size
    return total


def within(moves: Moves, part: int) -> int:
    """In how many ways the siblings of one block can be told apart."""
    units = moves.blocks[part][2:]
    size = 1
    for group in moves.groups:
        size *= _orders([units[slot] for slot in group])
    return size


def _orders(values: list[int]) -> int:
    """The different orders of these values."""
    count = factorial(len(values))
    for same in Counter(values).values():
        count //= factorial(same)
    return count
