"""What torch's NCCL watchdog prints of a collective that did not end: who waits in which, and how
far each rank has come.

`ProcessGroupNCCL.cpp` prints the first line on every rank that waits, the second with the group's
number, and the third on all ranks, those too that never came. Numbers count per group.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

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
# "Worker_TP2" and "VllmWorker rank=2" are members of one world.
_NUMBERED: Final = re.compile(r"(?:_[A-Z]*\d+|\s+rank=\d+)+$")

#: A world, by what its processes are called, and a rank of it.
Key: TypeAlias = tuple[str, int]


class _Caught(NamedTuple):
    line: LogLine
    call: int
    op: str
    limit_s: float


class _Stands(NamedTuple):
    line: LogLine
    enqueued: int
    completed: int


@dataclass(slots=True)
class Watchdog:
    """Sees all lines first; then writes where each rank stands, at the place of its first line."""

    folded: bool = False  # Ray put the lines of several ranks into one
    _caught: dict[Key, _Caught] = field(default_factory=dict)
    _group: dict[Key, str] = field(default_factory=dict)
    _stands: dict[tuple[str, Key], _Stands] = field(default_factory=dict)
    _lines: dict[Key, LogLine] = field(default_factory=dict)
    _written: bool = False

    def see(self, line: LogLine) -> None:
        """Note what a line says of a collective."""
        if (found := _CAUGHT.search(line.text)) is not None:
            key = self._key(line, int(found["rank"]))
            limit_s = int(found["limit"]) / 1000
            self._caught.setdefault(key, _Caught(line, int(found["call"]), found["op"], limit_s))
            self.folded = self.folded or line.times > 1
        elif (found := _GROUP.search(line.text)) is not None:
            key = self._key(line, int(found["rank"]))
            stands = _Stands(line, int(found["enqueued"]), int(found["completed"]))
            self._stands.setdefault((found["group"], key), stands)
            at = _AT.search(line.text)
            caught = self._caught.get(key)
            if at is not None and caught is not None and int(at["call"]) == caught.call:
                self._group.setdefault(key, found["group"])
        elif line.rank is not None:
            self._key(line, line.rank)

    def waits(self, line: LogLine) -> bool:
        """Whether the watchdog cut that rank off: what it says afterwards is what came of it."""
        return line.rank is not None and (_world(line), line.rank) in self._caught

    def line(self, course: Course, line: LogLine) -> bool:
        """Write all at the first line that says so; False if the line is none of these."""
        if _CAUGHT.search(line.text) is None and _GROUP.search(line.text) is None:
            return False
        if not self._written and self._caught:
            self._written = True
            self._write(course)
        return True

    def _key(self, line: LogLine, rank: int) -> Key:
        key = (_world(line), rank)
        # Where there are pids, a rank is one of several worlds, and no name for a process.
        own = None if line.pid else rank
        self._lines.setdefault(key, line._replace(rank=own, said=f"rank{rank}"))
        return key

    def _write(self, course: Course) -> None:
        worlds = {world for world, _ in self._caught}
        numbers = {
            key: course.process(line)
            for key, line in self._lines.items()
            # Of folded lines, who else waits is not known, and so not who is missing.
            if key in self._caught or (key[0] in worlds and not self.folded)
        }
        for key, caught in self._caught.items():
            attrs = self._attrs(key, numbers)
            course.put(numbers[key], _phase(caught), "start", caught.line, **attrs)
        groups = {(key[0], group) for key, group in self._group.items()}
        stood = {key: at for (group, key), at in self._stands.items() if (key[0], group) in groups}
        for key in numbers.keys() - self._caught.keys():
            at = stood.get(key)
            last = {"last_enqueued": at.enqueued, "last_completed": at.completed} if at else {}
            line = at.line if at else self._lines[key]
            course.put(numbers[key], "worker", "progress", line, **last)

    def _attrs(self, key: Key, numbers: dict[Key, int]) -> dict[str, Any]:
        world, group = key[0], self._group.get(key)
        everybody = group in (_WORLD, None) and not self.folded
        members = sorted(number for each, number in numbers.items() if each[0] == world)
        named = f"{world}/{group}" if world and group is not None else group
        return {
            "group": named,
            "members": members if everybody else None,
            "call": self._caught[key].call,
            "timeout_s": self._caught[key].limit_s,
        }


def _world(line: LogLine) -> str:
    return _NUMBERED.sub("", line.actor)


def _phase(caught: _Caught) -> str:
    return f"nccl:{caught.op.strip('_').lower()}"
