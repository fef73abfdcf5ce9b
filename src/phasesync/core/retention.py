"""Which files of a journal are kept: the last epochs, within so many bytes. It touches no file.

A file holds a quarter of what is kept, so that little more than that is there at any time. What is
being written is never let go of, whatever its size.
"""

import math
from typing import NamedTuple

from phasesync.errors import PlanError

__all__ = ("Part", "Retention")

_QUARTERS = 4


class Part(NamedTuple):
    """A file of a journal that is written to no more; `seq` numbers its first line."""

    name: str
    seq: int
    epochs: int
    size: int


class Retention:
    """The files of one journal, as they come and go; without limits all is one file.

    Raises:
        PlanError: a limit is less than 1.
    """

    def __init__(self, keep_epochs: int | None, max_bytes: int | None) -> None:
        for name, value in (("keep_epochs", keep_epochs), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; it must be 1 or more, or left out")
        self._epochs_max = keep_epochs
        self._bytes_max = max_bytes
        self._parts: list[Part] = []
        self.epochs = 0  # in the open file

    def is_due(self, size: int) -> bool:
        """Whether the open file, of `size` bytes, has enough in it."""
        if not self.epochs:
            return False
        if self._epochs_max is not None and self.epochs >= math.ceil(self._epochs_max / _QUARTERS):
            return True
        return self._bytes_max is not None and _QUARTERS * size >= self._bytes_max

    def turn(self, part: Part) -> tuple[int, list[str]]:
        """Close the open file: which line is the first that is kept then, and what to delete."""
        self.epochs = 0
        self._parts.append(part)
        gone = []
        while len(self._parts) > 1 and self._is_spare(self._parts[0]):
            gone.append(self._parts.pop(0).name)
        return self._parts[0].seq, gone

    def _is_spare(self, oldest: Part) -> bool:
        size = sum(part.size for part in self._parts)
        if self._bytes_max is not None and _QUARTERS * size > (_QUARTERS - 1) * self._bytes_max:
            return True
        epochs = sum(part.epochs for part in self._parts)
        return self._epochs_max is not None and epochs - oldest.epochs >= self._epochs_max
