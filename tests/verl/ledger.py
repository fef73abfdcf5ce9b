"""Device memory that really refuses, shared by processes: GiB held, by device and holder."""

import multiprocessing as mp
from typing import Any

__all__ = ("GIB", "Ledger", "OutOfMemory")

#: What each holder takes on a device. Weights, KV and parameters do not fit together.
GIB = {"params": 34, "cache": 10, "staging": 6, "weights": 16, "kv_cache": 48}
CAPACITY = 80
_NAMES = tuple(GIB)


class OutOfMemory(RuntimeError):
    """The device refused."""


class Ledger:
    """The memory of all devices of a run; `refused` counts what it refused."""

    def __init__(self, context: Any, devices: int) -> None:
        self._held = context.Array("i", devices * len(_NAMES))

    @classmethod
    def of(cls, held: Any) -> "Ledger":
        """A ledger over an array with a lock that is there already."""
        made = cls.__new__(cls)
        made._held = held
        return made

    def take(self, device: int, what: str) -> None:
        """Map `what`, or refuse it and say who is in the way."""
        with self._held.get_lock():
            held = self._of(device)
            if held[what]:
                raise RuntimeError(f"{what} is mapped on device {device} already")
            used = sum(held.values())
            if used + GIB[what] > CAPACITY:
                there = ", ".join(f"{name} {size}" for name, size in held.items() if size)
                raise OutOfMemory(
                    f"device {device}: {what} {GIB[what]} GiB beside {there} of {CAPACITY}"
                )
            self._held[self._at(device, what)] = GIB[what]

    def give(self, device: int, what: str) -> None:
        """Give `what` back; giving what is not held changes nothing."""
        self._held[self._at(device, what)] = 0

    def has(self, device: int, what: str) -> bool:
        return bool(self._held[self._at(device, what)])

    def free_bytes(self, device: int) -> int:
        return (CAPACITY - sum(self._of(device).values())) << 30

    def _of(self, device: int) -> dict[str, int]:
        return {what: self._held[self._at(device, what)] for what in _NAMES}

    def _at(self, device: int, what: str) -> int:
        return device * len(_NAMES) + _NAMES.index(what)


def context() -> Any:
    """Processes that are forked from one that has imported verl: importing it takes seconds."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(["tests.verl.rank"])
    return found
