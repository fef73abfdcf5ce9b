"""Rows of numbers in columns of numpy: each row seen once, and known again by its number.

A row is never taken for another one: its hash says where to look, and what is found there is
compared in full. Of equal rows in one batch the first one counts.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ("Column", "Ids", "Keys", "Rows", "masked")

Rows: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_EMPTY = -1
_STEP = 0x9E3779B97F4A7C15  # Odd multipliers that have little to do with each other.
_WORD = (1 << 64) - 1
#: So many bits of fences a column takes, and what stands for all of them.
_MASK = (1 << 62) - 1


def masked(bits: int) -> int:
    """A mask as a column holds it; all that lie beyond are of fences that nobody has."""
    return bits & _MASK


class Column:
    """One number for each of a list that grows at its end."""

    def __init__(self, kind: Any, width: int = 1) -> None:
        self._held = np.zeros((64, width) if width > 1 else 64, dtype=kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Any) -> None:
        more = np.asarray(values, dtype=self._held.dtype)
        if not len(more):
            return
        self.room(len(more))
        self._held[self._count : self._count + len(more)] = more
        self._count += len(more)

    def clear(self) -> None:
        """Forgets all, and keeps the room."""
        self._count = 0

    def room(self, many: int) -> None:
        """Room for so many more."""
        size = len(self._held)
        while size < self._count + many:
            size *= 2
        if size > len(self._held):
            grown = np.zeros((size, *self._held.shape[1:]), dtype=self._held.dtype)
            grown[: self._count] = self._held[: self._count]
            self._held = grown

    @property
    def all(self) -> Rows:
        return self._held[: self._count]


class Keys:
    """Numbers for rows, from 0 in the order in which they came."""

    def __init__(self, width: int, kind: Any = np.uint32) -> None:
        assert width > 1
        self.width = width
        self.rows = Column(kind, width)
        self._hashes = Column(np.uint64)
        self._places = np.full(1 << 10, _EMPTY, dtype=np.int64)
        self._factors = [
            np.uint64(((at + 1) * _STEP ^ (at * 0x5851F42D4C957F2D)) & _WORD | 1)
            for at in range(width)
        ]

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, rows: Rows) -> tuple[Ids, Flags]:
        """The numbers of these rows, and which of them are new, each once."""
        many = len(rows)
        ids = np.empty(many, dtype=np.int64)
        new = np.zeros(many, dtype=np.bool_)
        self._room(many)
        hashes = self._hash(rows)
        most = np.int64(len(self._places) - 1)
        at = hashes.astype(np.int64) & most
        left = np.arange(many)
        while len(left):
            here = at[left]
            self._claim(rows, hashes, left, here, new)
            found = self._places[here]
            same = self._hashes.all[found] == hashes[left]
            same[same] = self._equal(found[same], rows[left[same]])
            ids[left[same]] = found[same]
            left = left[~same]
            at[left] = at[left] + 1 & most
        return ids, new

    def _claim(self, rows: Rows, hashes: Rows, left: Ids, here: Ids, new: Flags) -> None:
        """Whoever comes to an empty place first has it."""
        empty = self._places[here] == _EMPTY
        if not empty.any():
            return
        come, to = left[empty], here[empty]
        self._places[to[::-1]] = -2 - come[::-1]  # The last one written stays: the first to come.
        first = self._places[to] == -2 - come
        winners = come[first]
        new[winners] = True
        self._places[to[first]] = len(self) + np.arange(len(winners))
        self._hashes.extend(hashes[winners])
        self.rows.extend(rows[winners])

    def _equal(self, found: Ids, rows: Rows) -> Flags:
        held = self.rows.all[found]
        same: Flags = held[:, 0] == rows[:, 0]
        for column in range(1, self.width):
            same &= held[:, column] == rows[:, column]
        return same

    def _room(self, many: int) -> None:
        """Half of all places stay empty; who is known is put into the larger table again."""
        size = len(self._places)
        while size < 2 * (len(self) + many):
            size *= 2
        if size == len(self._places):
            return
        self._places = np.full(size, _EMPTY, dtype=np.int64)
        at = self._hashes.all.astype(np.int64) & np.int64(size - 1)
        left = np.arange(len(self))
        while len(left):
            free = self._places[at[left]] == _EMPTY
            self._places[at[left[free]]] = left[free]
            left = left[self._places[at[left]] != left]
            at[left] = at[left] + 1 & np.int64(size - 1)

    def _hash(self, rows: Rows) -> Rows:
        total = np.zeros(len(rows), dtype=np.uint64)
        for column, factor in enumerate(self._factors):
            total += rows[:, column].astype(np.uint64) * factor
        total ^= total >> np.uint64(32)
        total *= np.uint64(_STEP)
        total ^= total >> np.uint64(29)
        return total
