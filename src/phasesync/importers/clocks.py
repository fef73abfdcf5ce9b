"""When a line was written, as far as it says so, and the lines of many files in one order.

Loggers write local times of different precision. Two lines of one file keep their order whatever
they say; lines of two files are ordered by what their clocks say, and by how finely.
"""

import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

__all__ = ("Stamp", "Stamps", "in_order")

# verl "INFO:2026-11-30 22:13:14,007:", Ray "2026-11-30 22:12:43,106 INFO", SGLang "[2026-... TP0]".
_FULL: Final = re.compile(
    r"(?<!\d)(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(?!\d)"
)
# vLLM "INFO 11-30 22:13:14 [abstract.py:331]", glog "I1130 22:13:14.250": no year.
_SHORT: Final = re.compile(
    r"(?:^|\b[A-Z]+\s|\s)(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(?!\d)"
)
_T = TypeVar("_T")
_LEAP: Final = 2000  # a year that has every day
_YEAR_S: Final = 366 * 86400
_HEAD: Final = 120  # a time further inside a line is part of what it says


class Stamp(NamedTuple):
    """A time in seconds, and how coarse it is: the latest that its last digit allows, so that what
    a line tells is not put before what it tells of.
    """

    at: float
    within_s: float


class Stamps:
    """Reads the times of one file. Years are left out, as short times have none; a January after a
    December is of the next one.
    """

    def __init__(self) -> None:
        self._month = 0
        self._years = 0

    def of(self, text: str) -> Stamp | None:
        head = text[:_HEAD]
        full = _FULL.search(head)
        found = full or _SHORT.search(head)
        if found is None:
            return None
        parts = found.groups()[1:] if full is not None else found.groups()
        month, day, hour, minute, second = (int(part) for part in parts[:5])
        digits = parts[5] or ""
        try:
            when = datetime(_LEAP, month, day, hour, minute, second)
        except ValueError:
            return None
        if month == 1 and self._month == 12:
            self._years += 1
        self._month = month
        fraction = int(digits) / 10 ** len(digits) if digits else 0.0
        # The zone does not matter: times are only compared.
        at = (when - datetime(_LEAP, 1, 1)).total_seconds() + fraction
        within = 10.0 ** -len(digits)
        return Stamp(at + self._years * _YEAR_S + within, within)


def in_order(files: Iterable[Iterable[tuple[float, _T]]]) -> Iterator[_T]:
    """What `files` hold, each in its own order, merged by time."""
    streams = [_rising(file, index) for index, file in enumerate(files)]
    for _, _, _, value in heapq.merge(*streams, key=lambda each: each[:3]):
        yield value


def _rising(file: Iterable[tuple[float, _T]], index: int) -> Iterator[tuple[float, int, int, _T]]:
    """Times that never fall: a line is not before the one above it."""
    now = float("-inf")
    for number, (at, value) in enumerate(file):
        now = max(now, at)
        yield now, index, number, value
