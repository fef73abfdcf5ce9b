"""What torch's NCCL watchdog prints of a collective that did not end: who waits in which, and how
far each rank has come.

`ProcessGroupNCCL.cpp` prints the first line on every rank that waits, the second with the group's
number, and the third on all ranks, those too that never came. Numbers count per group.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from phasesync.importers.base import Course, LogLine

__all__ = ("Watchdog",)

_CAUGHT: Final = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<call>\d+), OpType=(?P<op>\w+),.*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
# "[PG ID 1 PG GUID 3(dp) Rank 2] ... at work: 57, last enqueued NCCL work: 59, last completed ..."
_GROUP: Final = re.compile(
    r"\[PG (?:ID )?(?P<group>\d+)(?: PG GUID)?[^\]]*? Rank (?P<rank>\d+)\]\s.*?"
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_AT: Final = re.compile(
    r"(?:watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<call>\d+)"
)
_WORLD: Final = "0"  # the default group is the first that is made


class _Caught(NamedTuple):
    line: LogLine
    call: int
    op: str
    limit_s: float


@dataclass(slots=True)
class Watchdog:
    """Sees all lines first; then writes where each rank stands, at the place of its first line."""

    _caught: dict[int, _Caught] = field(default_factory=dict)
    _group: dict[int, str] = field(default_factory=dict)
    _stands: dict[tuple[str, int], tuple[LogLine, int, int]] = field(default_factory=dict)
    _ranks: dict[int, None] = field(default_factory=dict)
    _written: bool = False

    def see(self, line: LogLine) -> None:
        """Note what a line says of a collective."""
        if (found := _CAUGHT.search(line.text)) is not None:
            rank = int(found["rank"])
            self._ranks.setdefault(rank, None)
            limit_s = int(found["limit"]) / 1000
            self._caught.setdefault(rank, _Caught(line, int(found["call"]), found["op"], limit_s))
        elif (found := _GROUP.search(line.text)) is not None:
            rank = int(found["rank"])
            self._ranks.setdefault(rank, None)
            stands = (line, int(found["enqueued"]), int(found["completed"]))
            self._stands.setdefault((found["group"], rank), stands)
            at = _AT.search(line.text)
            caught = self._caught.get(rank)
            if at is not None and caught is not None and int(at["call"]) == caught.call:
                self._group.setdefault(rank, found["group"])
        elif line.rank is not None:
            self._ranks.setdefault(line.rank, None)

    def waits(self, rank: int | None) -> bool:
        """Whether the watchdog cut that rank off: what it says afterwards is what came of it."""
        return rank in self._caught

    def line(self, course: Course, line: LogLine) -> bool:
        """Write all at the first line that says so; False if the line is none of these."""
        if _CAUGHT.search(line.text) is None and _GROUP.search(line.text) is None:
            return False
        if not self._written and self._caught:
            self._written = True
            self._write(course)
        return True

    def _write(self, course: Course) -> None:
        numbers = {rank: course.process(self._line_of(rank)) for rank in self._ranks}
        for rank, caught in self._caught.items():
            course.put(numbers[rank], _phase(caught), "start", caught.line, **self._attrs(rank))
        for (group, rank), (line, enqueued, completed) in self._stands.items():
            if rank not in self._caught and group in self._group.values():
                stands = {"last_enqueued": enqueued, "last_completed": completed}
                course.put(numbers[rank], "worker", "progress", line, group=group, **stands)

    def _line_of(self, rank: int) -> LogLine:
        """A line of that rank, as its process is known by."""
        lines: Iterable[LogLine] = [
            *(each.line for number, each in self._caught.items() if number == rank),
            *(line for (_, number), (line, *_) in self._stands.items() if number == rank),
        ]
        found = next(iter(lines), None)
        line = found or LogLine("", 0, "", "", "", "", rank, 1)
        return line._replace(rank=rank, said=f"rank{rank}")

    def _attrs(self, rank: int) -> dict[str, Any]:
        group = self._group.get(rank)
        everybody = group == _WORLD or group is None
        return {
            "group": group,
            "members": sorted(self._ranks) if everybody else None,
            "call": self._caught[rank].call,
            "timeout_s": self._caught[rank].limit_s,
        }


def _phase(caught: _Caught) -> str:
    return f"nccl:{caught.op.strip('_').lower()}"
