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
from phasesync.importers.clocks import Stamp, Stamps, in_order

__all__ = ("Course", "Imported", "LogLine", "read_lines")

_LINE_MAX: Final = 16384
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray writes "(WorkerDict pid=4711, ip=10.0.0.2) text [repeated 3x across cluster] (Ray dedup...)".
_RAY: Final = re.compile(
    r"^\((?P<actor>[^()]*?)\s*pid=(?P<pid>\d+)(?:,\s*ip=(?P<ip>[^)\s]+))?\)\s?"
)
_REPEATED: Final = re.compile(r"\s*\[repeated (?P<times>\d+)x across cluster\].*$")
# torch writes "[rank3]: text", torchrun --tee "[default3]:text" and mpirun "[1,3]<stderr>:text"
# before what the rank says of itself.
_RANK: Final = re.compile(r"^\[(?:(?:rank|default)(?P<rank>\d+)\]:?\s?|1,(?P<mpi>\d+)\]<std\w+>:)")
# Ray's own files: worker-<id>-<job>-<pid>.err, whose first lines name the actor.
_WORKER: Final = re.compile(r"worker-[0-9a-f]+-(?:[0-9a-f]+-)?(?P<pid>\d+)\.(?:out|err)(?:\.gz)?$")
_ACTOR: Final = re.compile(r"^:actor_name:(?P<actor>.*)$")
_NOT_TEXT: Final = (".jsonl", ".json", ".pkl", ".zst", ".tar", ".pack", ".pyc", ".so")
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
    stamp: Stamp | None = None
    said: str = ""  # what the line itself calls its rank

    @property
    def who(self) -> str:
        """The process that wrote it: host and pid where Ray says so, the rank that it says it is,
        else the file.
        """
        return f"{self.ip}:{self.pid}" if self.pid else self.said or self.file


def read_lines(path: Path) -> Iterator[LogLine]:
    """The lines of a log file, plain or .gz.

    Raises:
        InputError: it cannot be read.
    """
    worker = _WORKER.search(path.name)
    rank_in_name = None if worker is not None else _IN_NAME.search(path.name)
    rank = (
        next((int(each) for each in rank_in_name.groups() if each), None) if rank_in_name else None
    )
    actor, pid = "", worker["pid"] if worker is not None else ""
    stamps = Stamps()
    try:
        opener = gzip.open if path.name.endswith(".gz") else open
        with opener(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                line = _line(str(path), number, raw, rank)
                if (named := _ACTOR.match(line.text)) is not None:
                    actor = named["actor"].strip()[:200]
                if pid and not line.pid:
                    line = line._replace(actor=actor, pid=pid)
                yield line._replace(stamp=stamps.of(line.text))
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
    said = ""
    while (found := _RANK.match(text)) is not None:
        # Of two, the inner one is the job's: a launcher may count on each host from 0.
        rank = int(found["rank"] or found["mpi"])
        said, text = f"rank{rank}", text[found.end() :]
    return LogLine(file, number, text, actor, pid, ip, rank, times, said=said)


@dataclass(slots=True)
class Imported:
    """A trace in the making: its events, and how many lines could not be used."""

    header: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0


class Course:
    """Writes events and keeps each process's number, epoch and open phases."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers: dict[str, int] = {}
        self._taken: set[int] = set()
        self._roles: dict[int, str] = {}
        self._epochs: dict[int, int] = {}
        self._open: dict[int, list[str]] = {}
        self._written: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        self._workers: dict[int, None] = {}
        self._cores: dict[int, None] = {}
        self._coarse_s = 0.0
        self._hosts: set[str] = set()
        self._files: set[str] = set()
        self.capacity: float | None = None
        self.errors: list[dict[str, Any]] = []  # those that no line gives to a process
        self.out = Imported({})

    def process(self, line: LogLine, role: str = "") -> int:
        """The process that wrote `line`: by its rank where it says one, else known by its pid."""
        rank = self.rank(line.who, line.rank, role)
        if line.rank is None and line.pid:
            self._labels.setdefault(rank, f"{line.ip}:{line.pid}" if line.ip else f"pid{line.pid}")
        return rank

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

    def engine(self, rank: int, process: str | None) -> None:
        """Note what an engine's process is called: a worker of it, or its core."""
        if process is not None and process.startswith("Worker"):
            self._workers.setdefault(rank, None)
        elif process is not None:
            self._cores.setdefault(rank, None)

    def moved_by(self, line: LogLine) -> tuple[int, ...]:
        """The workers for which a core speaks; none where there are several cores."""
        name = f"{line.actor} {line.text[:80]}"
        return tuple(self._workers) if "EngineCore" in name and len(self._cores) == 1 else ()

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
        self._files.add(line.file)
        if line.ip:
            self._hosts.add(line.ip)
        if line.stamp is not None:
            kept["clock_s"] = round(line.stamp.at, 6)
            kept["clock_within_s"] = line.stamp.within_s
            self._coarse_s = max(self._coarse_s, line.stamp.within_s)
        if line.times > 1:
            kept["repeated"] = line.times
        self._written[rank] = self.written(rank) + 1
        self.out.events.append(
            {
                "rank": rank,
                "epoch": self._epochs.setdefault(rank, 1),
                "phase": phase,
                "event": event,
                "attrs": kept,
            }
        )

    def fail(self, rank: int, line: LogLine, error: str, event: str = "fail", **attrs: Any) -> None:
        """An error of a process ends what it was in."""
        opened = self._open.get(rank)
        phase = opened[-1] if opened else "worker"
        self.put(rank, phase, event, line, error=error[:500], **attrs)

    def epoch(self, rank: int, number: int) -> None:
        """From here on the events of `rank` are of that epoch."""
        self._epochs[rank] = number

    def is_open(self, rank: int, phase: str) -> bool:
        return phase in self._open.get(rank, ())

    def written(self, rank: int) -> int:
        """How many events of that process there are."""
        return self._written.get(rank, 0)

    def known(self) -> frozenset[str]:
        """The processes that have said anything."""
        return frozenset(self._numbers)

    def opened(self, rank: int) -> str | None:
        opened = self._open.get(rank)
        return opened[-1] if opened else None

    def _label(self, header: dict[str, Any]) -> None:
        """Call processes by what the log calls them."""
        if not self._labels:
            return
        names = {rank: self._labels.get(rank, rank) for rank in header["ranks"]}
        header["ranks"] = list(names.values())
        if "roles" in header:
            header["roles"] = {
                str(names[int(rank)]): role for rank, role in header["roles"].items()
            }
        for event in self.out.events:
            event["rank"] = names[event["rank"]]
            for key in ("gpus", "members"):
                if key in event["attrs"]:
                    event["attrs"][key] = [names.get(rank, rank) for rank in event["attrs"][key]]

    def done(self, ranks: Sequence[int] = ()) -> Imported:
        """The finished trace."""
        known = sorted({*self._taken, *ranks})
        header: dict[str, Any] = {"trace": 1, "name": self._name, "ranks": known}
        if self._roles:
            header["roles"] = {str(rank): role for rank, role in sorted(self._roles.items())}
        if self.capacity is not None:
            header["memory"] = {"capacity_gib": self.capacity, "initial_gib": {}}
        if self._coarse_s and len(self._files) > 1:
            hosts = max(1, len(self._hosts))
            header["clock"] = {"within_ms": self._coarse_s * 1000, "hosts": hosts}
        if self.errors:
            header["errors"] = self.errors
        self._label(header)
        self.out.header = header
        return self.out


def all_lines(paths: Iterable[Path]) -> Iterator[LogLine]:
    """The lines of all files, in the order of their times where they have any.

    Of a process that has files of its own, what its driver repeats is left out.
    """
    files = [path for path in paths if not path.name.endswith(_NOT_TEXT)]
    own = {found["pid"] for path in files if (found := _WORKER.search(path.name)) is not None}
    return in_order(_timed(path, own) for path in files)


def _timed(path: Path, own: set[str]) -> Iterator[tuple[float, LogLine]]:
    mine = _WORKER.search(path.name) is not None
    for line in read_lines(path):
        if not mine and line.pid in own:
            continue
        yield (line.stamp.at if line.stamp is not None else float("-inf")), line
