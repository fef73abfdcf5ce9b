"""What importers share: lines without their prefixes, and a trace that is being written.

Lines come from other people's programs: they are cut to a bound, freed of control sequences, and
never executed or unpickled into anything but plain values.
"""

import gzip
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from phasesync.errors import InputError

__all__ = ("Course", "Imported", "LogLine", "read_lines")

_LINE_MAX: Final = 16384
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray writes "(WorkerDict pid=4711, ip=10.0.0.2) text [repeated 3x across cluster] (Ray dedup...)".
_RAY: Final = re.compile(
    r"^\((?P<actor>[^()]*?)\s*pid=(?P<pid>\d+)(?:,\s*ip=(?P<ip>[^)\s]+))?\)\s?"
)
_REPEATED: Final = re.compile(r"\s*\[repeated (?P<times>\d+)x across cluster\].*$")
# torch and some launchers write "[rank3]: text".
_RANK: Final = re.compile(r"^\[rank(?P<rank>\d+)\]:?\s?")
_IN_NAME: Final = re.compile(r"rank[_-]?(\d+)|[._-](\d+)(?=\.[a-z]+$|$)", re.IGNORECASE)


class LogLine(NamedTuple):
    """One line of a log, freed of what launchers put before it."""

    file: str
    number: int
    text: str
    actor: str
    pid: str
    ip: str
    rank: int | None
    times: int

    @property
    def who(self) -> str:
        """The process that wrote it: host and pid where Ray says so, else the file."""
        return f"{self.ip}:{self.pid}" if self.pid else self.file


def read_lines(path: Path) -> Iterator[LogLine]:
    """The lines of a log file, plain or .gz.

    Raises:
        InputError: it cannot be read.
    """
    rank_in_name = _IN_NAME.search(path.name)
    rank = (
        next((int(each) for each in rank_in_name.groups() if each), None) if rank_in_name else None
    )
    try:
        opener = gzip.open if path.name.endswith(".gz") else open
        with opener(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                yield _line(str(path), number, raw, rank)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


def _line(file: str, number: int, raw: bytes, rank: int | None) -> LogLine:
    text = _ANSI.sub("", raw[:_LINE_MAX].decode("utf-8", "replace")).rstrip("\r\n")
    actor = pid = ip = ""
    if (found := _RAY.match(text)) is not None:
        actor, pid, ip = found["actor"].strip(), found["pid"], found["ip"] or ""
        text = text[found.end() :]
    times = 1
    if (found := _REPEATED.search(text)) is not None:
        times = int(found["times"])
        text = text[: found.start()]
    if (found := _RANK.match(text)) is not None:
        rank = int(found["rank"])
        text = text[found.end() :]
    return LogLine(file, number, text, actor, pid, ip, rank, times)


@dataclass(slots=True)
class Imported:
    """A trace in the making: its events, and what could not be used."""

    header: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


class Course:
    """Writes events and keeps each process's number, epoch and open phases."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers: dict[str, int] = {}
        self._taken: set[int] = set()
        self._roles: dict[int, str] = {}
        self._epochs: dict[int, int] = {}
        self._open: dict[int, list[str]] = {}
        self.capacity: float | None = None
        self.out = Imported({})

    def rank(self, who: str, wanted: int | None = None, role: str = "") -> int:
        """The number of a process: the one that it says, else the next that is free."""
        number = self._numbers.get(who)
        if number is None:
            number = wanted if wanted is not None and wanted not in self._taken else 0
            while number in self._taken:
                number += 1
            self._numbers[who] = number
            self._taken.add(number)
        if role:
            self._roles.setdefault(number, role)
        return number

    def turn(self, rank: int, phase: str) -> None:
        """A phase that begins the cycle begins a new epoch of that rank."""
        if phase in self._open.get(rank, ()) or rank not in self._epochs:
            self._epochs.setdefault(rank, 1)
            return
        self._epochs[rank] += 1

    def put(self, rank: int, phase: str, event: str, line: LogLine, **attrs: Any) -> None:
        """Write one event; an end without its start gets one."""
        opened = self._open.setdefault(rank, [])
        if event == "start":
            opened.append(phase)
        elif event != "progress":
            if phase in opened:
                opened.remove(phase)
            elif event in ("end", "fail"):
                self._write(rank, phase, "start", line, {})
        self._write(rank, phase, event, line, attrs)

    def _write(
        self, rank: int, phase: str, event: str, line: LogLine, attrs: dict[str, Any]
    ) -> None:
        kept = {key: value for key, value in attrs.items() if value is not None}
        kept["from"] = f"{line.file}:{line.number}"
        if line.times > 1:
            kept["repeated"] = line.times
        self.out.events.append(
            {
                "rank": rank,
                "epoch": self._epochs.setdefault(rank, 1),
                "phase": phase,
                "event": event,
                "attrs": kept,
            }
        )

    def fail(self, rank: int, line: LogLine, error: str, event: str = "fail") -> None:
        """An error of a process ends what it was in."""
        opened = self._open.get(rank)
        phase = opened[-1] if opened else "worker"
        self.put(rank, phase, event, line, error=error[:500])

    def opened(self, rank: int) -> str | None:
        opened = self._open.get(rank)
        return opened[-1] if opened else None

    def done(self, ranks: Sequence[int] = ()) -> Imported:
        """The finished trace."""
        known = sorted({*self._taken, *ranks})
        header: dict[str, Any] = {"trace": 1, "name": self._name, "ranks": known}
        if self._roles:
            header["roles"] = {str(rank): role for rank, role in sorted(self._roles.items())}
        if self.capacity is not None:
            header["memory"] = {"capacity_gib": self.capacity, "initial_gib": {}}
        self.out.header = header
        if not self.out.events:
            self.out.notes.append("no line was recognised; is this the right importer?")
        return self.out


def all_lines(paths: Iterable[Path]) -> Iterator[LogLine]:
    for path in paths:
        yield from read_lines(path)
