"""A device of the demo: a memory budget that all processes share and that really refuses.

The file lock is what makes it safe: the kernel drops it when its holder is killed. The table is
written beside the present one and then switched to by one byte, so that a holder who dies while
it writes leaves the table that was.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from phasesync.core import wire
from phasesync.errors import DeviceOutOfMemory, Refused

__all__ = ("MIB", "DeviceBudget", "Holding", "device_path")

MIB = 2**20
TABLE_BYTES = 4096
SLOTS = (TABLE_BYTES, 2 * TABLE_BYTES)


def device_path(scratch: Path, number: int) -> Path:
    """Where the budget of a device is kept."""
    return scratch / f"device-{number}"


class Holding(NamedTuple):
    """Memory that somebody holds on a device."""

    who: str
    what: str
    size: int


class DeviceBudget:
    """One device: its name, its capacity, and who holds what on it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._threads = threading.Lock()
        head = wire.decode(os.pread(self._fd, TABLE_BYTES, 1).split(b"\0", 1)[0])
        self.name: str = head["name"]
        self.capacity: int = head["capacity"]

    @classmethod
    def create(cls, path: Path, *, name: str, capacity: int) -> Self:
        """A new device with nothing on it."""
        head = wire.encode({"name": name, "capacity": capacity})
        path.write_bytes((b"\0" + head).ljust(SLOTS[-1] + TABLE_BYTES, b"\0"))
        return cls(path)

    def take(self, who: str, what: str, size: int) -> None:
        """Hold `size` bytes.

        Raises:
            DeviceOutOfMemory: the device has no room for them.
            Refused: `who` holds `what` already.
        """
        with self._table() as held:
            if any(holding[:2] == (who, what) for holding in held):
                raise Refused(f"{who} holds {what} on {self.name} already; release it first")
            free = self._free(held)
            if size > free:
                holders = tuple((each.who, each.what, each.size) for each in sorted(held))
                raise DeviceOutOfMemory(self.name, who, what, size, free, self.capacity, holders)
            held.append(Holding(who, what, size))

    def give(self, who: str, what: str | None = None) -> int:
        """Let go of `what`, or of everything that `who` holds; the bytes that came free."""
        with self._table() as held:
            gone = [each for each in held if each.who == who and what in (None, each.what)]
            held[:] = [each for each in held if each not in gone]
            return sum(each.size for each in gone)

    def free_bytes(self) -> int:
        with self._table() as held:
            return self._free(held)

    def held(self) -> tuple[Holding, ...]:
        with self._table() as held:
            return tuple(held)

    def close(self) -> None:
        os.close(self._fd)

    def _free(self, held: list[Holding]) -> int:
        return self.capacity - sum(holding.size for holding in held)

    @contextmanager
    def _table(self) -> Iterator[list[Holding]]:
        """The table of holdings under lock; what the block made of it is written back."""
        with self._threads:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                active = os.pread(self._fd, 1, 0)[0]
                text = os.pread(self._fd, TABLE_BYTES, SLOTS[active]).split(b"\0", 1)[0]
                before = [Holding(*each) for each in wire.decode(text)] if text else []
                held = list(before)
                yield held
                if held != before:
                    self._write(1 - active, held)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _write(self, slot: int, held: list[Holding]) -> None:
        table = wire.encode([list(each) for each in held]).ljust(TABLE_BYTES, b"\0")
        assert len(table) == TABLE_BYTES, "the table of one device outgrew its place"
        os.pwrite(self._fd, table, SLOTS[slot])
        os.pwrite(self._fd, bytes([slot]), 0)
