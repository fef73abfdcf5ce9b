"""The journal: one JSON line a fact, written before it is told to anybody.

Each rank and incarnation has a file of its own, append-only, whole lines a `write`, so that what a
crash leaves is whole lines and at most one torn one. A line may be held back for one that follows
at once; what a peer can have seen, and what is about to be done, is on disk before. A full disk or
a read-only folder never takes the sync down: the journal warns once and counts what it lost, and
the gap in `seq` shows it.
structlog runs with processors of its own; `structlog.configure` belongs to the application.

A long run may keep its last epochs only. The journal goes on in a new file between two epochs,
never within one, and the first line of that file says from which line on the journal is still
there, before anything older is deleted.
"""

import errno
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import structlog

from phasesync.core import wire
from phasesync.core.model import Rank
from phasesync.core.retention import Part, Retention
from phasesync.errors import PlanError

__all__ = (
    "ERROR_BYTES_MAX",
    "FORMAT",
    "FSYNC",
    "Journal",
    "JournalWarning",
    "Stands",
    "check_run",
    "line_cut",
)

FORMAT = 1
FSYNC = ("none", "epoch", "line")
ERROR_BYTES_MAX = 2048


class JournalWarning(UserWarning):
    """Lines of the journal are lost; the sync goes on."""


class Stands(NamedTuple):
    """Where a rank stands, by the last line of its journal that says so; `marked_ns` is its last
    mark of progress there."""

    event: str
    name: str
    since_ns: int
    marked_ns: int | None = None


# The lines that say where a rank stands, and what each names.
_STANDS: Mapping[str, str] = {
    "phase.start": "phase",
    "phase.end": "phase",
    "phase.fail": "phase",
    "fence.arrive": "fence",
    "fence.pass": "fence",
    "fence.break": "fence",
}


class _File:
    """An append-only file that takes whole lines and never raises for the disk's sake."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self.lost = self.size = 0
        self._fsync = fsync
        self._torn = False
        self._held: list[bytes] = []
        self._warned = False
        self._tried = False
        self._fd: int | None = None

    def msg(self, line: bytes, held: bool = False) -> None:
        """Write one line and those held before it, or hold it back for the next."""
        self._held.append(line)
        if self._fsync or not held:
            self.write_held()

    def write_held(self) -> None:
        """Write what was held back; count as lost what cannot be written."""
        if not self._held:
            return
        data = b"".join(self._held)
        self._held.clear()
        if not self._tried:
            self._open()
        if self._fd is None:
            self.lost += data.count(b"\n")
            return
        data = b"\n" + data if self._torn else data
        written = 0
        try:
            written = os.write(self._fd, data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, "a line was cut short")
            self.size += written
            if self._fsync:
                os.fsync(self._fd)
        except OSError as error:
            self.lost += max(data.count(b"\n", written), 1)
            self._warn(error)

    def turn_to(self, path: Path) -> None:
        """Go on in another file."""
        self.close()
        self.path, self.size = path, 0
        self._tried = self._torn = False

    def drop(self, name: str) -> None:
        """Delete a file beside it that is no longer kept."""
        try:
            self.path.with_name(name).unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def _open(self) -> None:
        self._tried = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
        except OSError as error:
            self._warn(error)

    def flush(self) -> None:
        """Make sure of what was written, as far as the disk does."""
        self.write_held()
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._warn(error)

    def close(self) -> None:
        self.write_held()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        reason = error.strerror or str(error)
        warnings.warn(
            f"journal {self.path}: {reason}; the sync goes on, lines are lost and counted",
            JournalWarning,
            stacklevel=2,
        )


class _Facts(structlog.BoundLoggerBase):
    """A logger that has no context of its own: the journal's is rendered already."""

    def fact(self, event: str, level: str, fields: dict[str, Any], held: bool) -> None:
        """Run one fact through the processors, and hand the line to the file."""
        fields["event"] = event
        entry: Any = fields
        for processor in self._processors:
            entry = processor(self._logger, level, entry)
        self._logger.msg(entry, held)


class Journal:
    """What one rank did, as lines in `<runs>/<run>/<role>-<rank>.<incarnation>.jsonl`.

    `wall` gives UTC seconds and `mono_ns` nanoseconds; simulated ranks bring clocks of their own.
    Any thread may write; `stands` may be read by any.

    With `keep_epochs` or `max_bytes` (else $PHASESYNC_KEEP_EPOCHS and $PHASESYNC_MAX_BYTES, else
    all is kept) the journal goes on in `<role>-<rank>.<incarnation>.part1.jsonl` and so on, and
    what is older is deleted. At least `keep_epochs` whole epochs are there, in `max_bytes` a rank
    and incarnation as far as the open file allows.

    Raises:
        PlanError: `fsync` is not one of FSYNC, `run` cannot be a folder's name, or a limit is none.
    """

    def __init__(
        self,
        runs: Path | str,
        *,
        run: str,
        rank: Rank,
        ranks: int,
        incarnation: int = 0,
        device: str = "",
        fsync: str = "none",
        keep_epochs: int | None = None,
        max_bytes: int | None = None,
        host: str | None = None,
        wall: Callable[[], float] = time.time,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if fsync not in FSYNC:
            raise PlanError(f"fsync is {fsync!r}; it must be one of: {', '.join(FSYNC)}")
        check_run(run)
        path = Path(runs) / run / f"{rank.role}-{rank.number}.{incarnation}.jsonl"
        self._file = _File(path, fsync=fsync == "line")
        self._epochs = fsync == "epoch"
        self._retention = Retention(
            _limit("PHASESYNC_KEEP_EPOCHS", keep_epochs), _limit("PHASESYNC_MAX_BYTES", max_bytes)
        )
        self._stem = path.name.removesuffix(".jsonl")
        self._part = self._part_seq = 0
        self._epoch: object = None
        self._plan: dict[str, Any] = {}
        self._wall = wall
        self._mono_ns = mono_ns
        self._seq = 0
        self._writing = threading.Lock()
        self._stands: tuple[str, str, int, int | None] | None = None
        self.rank = rank
        self._common: dict[str, Any] = {
            "run": run,
            "role": rank.role,
            "rank": rank.number,
            "incarnation": incarnation,
            "host": host or socket.gethostname(),
            "pid": os.getpid(),
            "device": device,
            "ranks": ranks,
        }
        self._common_text = b""  # Of `_common`, rendered; made again when that has changed.
        self._heads: dict[tuple[str, str], bytes] = {}
        self._second = (-1, b"")
        self._written_ns = 0
        self._log: _Facts = structlog.wrap_logger(
            self._file,
            processors=[self._render],
            wrapper_class=_Facts,
        ).bind()  # Once: left to itself, the proxy makes a new logger for every line.

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def lost(self) -> int:
        """How many lines could not be written."""
        return self._file.lost

    @property
    def seq(self) -> int:
        """The number that the next line will have."""
        return self._seq

    def name_run(self, run: str) -> None:
        """Give the run its name, before the first line is written."""
        assert not self._seq, "the run has its name"
        check_run(run)
        self._file.path = self._file.path.parent.parent / run / self._file.path.name
        self.bind(run=run)

    def bind(self, **fields: Any) -> None:
        """Put `fields` on every line from now on."""
        self._common.update(fields)
        self._common_text = b""

    def write(self, event: str, *, level: str = "info", **fields: Any) -> int:
        """Write one fact; None fields are left out. The line's `seq`."""
        return self._put(event, level, fields, False)

    def hold(self, event: str, **fields: Any) -> int:
        """Write one fact together with the next one, or on `push`.

        For what comes right before another line, with nothing awaited, done or told between.
        """
        return self._put(event, "info", fields, True)

    def _put(self, event: str, level: str, fields: dict[str, Any], held: bool) -> int:
        if (named := _STANDS.get(event)) is not None:
            named = fields.get(named)
        with self._writing:
            if event == "epoch.begin":
                self._turn()
            elif event == "plan":
                self._plan = {**fields}
            seq = self._seq
            self._log.fact(event, level, fields, held)
            now = self._written_ns
        if named is not None:
            self._stands = event, str(named), now, None
        elif event == "phase.progress":
            self._marked(now)
        if self._epochs and event in ("epoch.end", "rank.exit"):
            self._file.flush()
        return seq

    @property
    def stands(self) -> Stands | None:
        """Where the rank stands, by the last line that says so."""
        return None if self._stands is None else Stands(*self._stands)

    def _marked(self, now: int) -> None:
        if self._stands is not None:
            self._stands = *self._stands[:3], now

    def push(self) -> None:
        """Write what is held back, before something that takes long, may fail or is told."""
        with self._writing:
            self._file.write_held()

    def _turn(self) -> None:
        """An epoch begins: go on in a new file where the open one has enough in it."""
        retention, file = self._retention, self._file
        file.write_held()
        if retention.is_due(file.size):
            part = Part(file.path.name, self._part_seq, retention.epochs, file.size)
            kept, gone = retention.turn(part)
            self._part, self._part_seq = self._part + 1, self._seq
            file.turn_to(file.path.with_name(f"{self._stem}.part{self._part}.jsonl"))
            said = {"part": self._part, "after_epoch": self._epoch, "kept_seq": kept}
            self._log.fact("journal.part", "info", {"epoch": self._epoch, **said}, False)
            if self._plan:
                self._log.fact("plan", "info", {**self._plan}, False)
            for name in gone:
                file.drop(name)
        retention.epochs += 1
        self._epoch = self._common.get("epoch")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _render(self, _logger: object, level: str, fields: MutableMapping[str, Any]) -> bytes:
        """The line: what is the same on every line is rendered once, and so is a second's time."""
        event = fields.pop("event")
        if None in fields.values():
            fields = {key: value for key, value in fields.items() if value is not None}
        if "error" in fields and isinstance(fields["error"], str):
            fields["error"] = line_cut(fields["error"])
        head = self._heads.get((event, level)) or self._head(event, level)
        if fields.keys().isdisjoint(self._common):
            common = self._common_text or self._shared()
            rest = b"%b,%b" % (common, wire.encode(fields)[1:]) if fields else common + b"}"
        else:
            rest = wire.encode({**self._common, **fields})[1:]
        second, micros = divmod(round(self._wall() * 1e6), 1_000_000)
        if self._second[0] != second:
            self._second = second, datetime.fromtimestamp(second, UTC).isoformat()[:19].encode()
        self._written_ns = now = self._mono_ns()
        seq = self._seq
        self._seq = seq + 1
        line = b'%b%b.%06dZ","mono_ns":%d,"seq":%d,%b\n'
        return line % (head, self._second[1], micros, now, seq, rest)

    def _head(self, event: str, level: str) -> bytes:
        text = wire.encode({"event": event, "level": level, "journal": FORMAT})
        head = self._heads[event, level] = text[:-1] + b',"timestamp":"'
        return head

    def _shared(self) -> bytes:
        self._common_text = wire.encode(self._common)[1:-1]
        return self._common_text


def _limit(variable: str, given: int | None) -> int | None:
    """A limit as given, else as the environment has it.

    Raises:
        PlanError: what the environment has is no number.
    """
    text = os.environ.get(variable, "")
    if given is not None or not text:
        return given
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"{variable} is {text!r}; it must be a number, as in 200") from None


def check_run(run: str) -> None:
    """Refuse what cannot be the name of a folder.

    Raises:
        PlanError: it says what may be.
    """
    if not run or "/" in run or run in (".", "..") or "\0" in run:
        raise PlanError(f"run {run!r} cannot name a folder; use letters, digits, '-' and '.'")


def line_cut(text: str) -> str:
    """`text` within ERROR_BYTES_MAX bytes of UTF-8."""
    data = text.encode(errors="replace")
    if len(data) <= ERROR_BYTES_MAX:
        return data.decode()
    return data[: ERROR_BYTES_MAX - 3].decode(errors="ignore") + "..."
