"""A trace's lines as a header and events; whatever is odd about a line is a finding, never an
error.

An unknown attribute is kept. A line that names no rank or no event cannot be ordered, so it is
reported and left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Protocol

from phasesync.audit.answer import NOTE, SUSPECTED, Evidence, Finding
from phasesync.audit.events import EMPTY, KINDS, Event, Header, Name, number, text_of

__all__ = ("RawLine", "Trace", "header_of")

_VERSION: Final = 1
_FAR: Final = 1 << 53
_JOINT_MAX: Final = 4096
# What engines and trainers call the version of the weights.
_VERSIONS: Final = ("weight_version", "weights_version", "model_version", "policy_version")
_SUCCESS: Final = ("success", "returned", "ok")
_NO_ERROR: Final = ("", "none", "null", "ok", "0", "no", "success")
_STATUS: Final = ("http", "http_status", "status", "status_code")
_ANSWERS: Final = ("admit", "serve", "poll")
_SYNONYMS: Final = {
    "begin": "start",
    "started": "start",
    "enter": "start",
    "finish": "end",
    "done": "end",
    "complete": "end",
    "ended": "end",
    "error": "fail",
    "failed": "fail",
    "exception": "fail",
    "crash": "exit",
    "died": "exit",
    "killed": "exit",
    "timed_out": "timeout",
}


class RawLine(Protocol):
    """A line as a reader hands it over: its number, its object, or why there is none, and its file
    where a stream goes over several.
    """

    @property
    def number(self) -> int: ...
    @property
    def data(self) -> dict[str, Any] | None: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def file(self) -> str: ...


def header_of(data: Mapping[str, Any], vocabulary: Mapping[str, str] | None = None) -> Header:
    """The header that the first line of a trace gives."""
    ranks = tuple(
        dict.fromkeys(
            rank for value in _list(data.get("ranks")) if (rank := rank_name(value)) is not None
        )
    )
    memory = data.get("memory")
    memory = memory if isinstance(memory, Mapping) else {}
    roles = data.get("roles")
    roles = roles if isinstance(roles, Mapping) else {}
    by_text = {str(rank): rank for rank in ranks}
    initial = memory.get("initial_gib")
    capacity = memory.get("capacity_gib")
    clock = data.get("clock")
    own = data.get("vocabulary", data.get("phases"))
    words = {str(key): str(value) for key, value in own.items()} if isinstance(own, Mapping) else {}
    return Header(
        name=text_of(data.get("name", "")),
        ranks=ranks,
        roles={
            by_text.get(str(rank), str(rank)): text_of(role)
            for rank, role in roles.items()
            if role is not None
        },
        capacity_gib=_figures(capacity) if isinstance(capacity, Mapping) else number(capacity),
        initial_gib=_figures(initial) if isinstance(initial, Mapping) else {},
        vocabulary={**words, **(vocabulary or {})},
        by_clock=isinstance(clock, Mapping),
        hosts=int(number(clock.get("hosts")) or 1) if isinstance(clock, Mapping) else 1,
        record_next=tuple(text_of(more, 300) for more in _list(data.get("record_next")))[:8],
        errors=tuple(
            (
                text_of(each.get("file", ""), 300),
                int(number(each.get("line")) or 0),
                text_of(each.get("error", ""), 300),
            )
            for each in _list(data.get("errors"))
            if isinstance(each, Mapping)
        )[:8],
    )


def rank_name(value: object) -> Name | None:
    """How a trace's rank is known from here on: an integer where it is one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if abs(value) < _FAR else text_of(value, 120)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e15 else None
    if isinstance(value, str):
        text = text_of(value, 120)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
    return None


def _list(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else ()


def _figures(value: Mapping[Any, Any]) -> dict[str, float]:
    figures = ((str(key), number(figure)) for key, figure in value.items())
    return {key: figure for key, figure in figures if figure is not None}


def _source(said: object) -> tuple[str, int] | None:
    """The line of a foreign log that an importer made an event of."""
    if not isinstance(said, str) or len(said) > 4096:
        return None
    file, _, line = said.rpartition(":")
    return (
        (file, int(line)) if file and line.isascii() and line.isdigit() and len(line) < 10 else None
    )


def _says_failed(attrs: Mapping[str, Any], action: str) -> bool:
    """Whether an end says itself that it is none: no success, an error, a status that is one.

    To turn a request away is an answer too, and no failure of who gives it.
    """
    if any(attrs.get(name) is False for name in _SUCCESS):
        return True
    error = attrs.get("error")
    if isinstance(error, str) and error.strip().lower() not in _NO_ERROR:
        return True
    if action in _ANSWERS:
        return False
    return any(400 <= (number(attrs.get(name)) or 0) < 600 for name in _STATUS)


def _one_name(attrs: dict[str, Any]) -> dict[str, Any]:
    """With the weights' version under the name by which rules ask for it."""
    if "version" not in attrs:
        for name in _VERSIONS:
            if name in attrs:
                return {**attrs, "version": attrs[name]}
    return attrs


class Trace:
    """The events of one run in a trace file, read as they come; `problems` grows beside them.

    A file may hold several runs, each with its first line. One of the same name begins another run
    only where a rank speaks again that has spoken: else the files of one run's ranks were put
    together. `rest` is what is left for the next run.
    """

    def __init__(
        self, file: str, lines: Iterable[RawLine], vocabulary: Mapping[str, str] | None = None
    ) -> None:
        self.file = file
        self.problems: list[Finding] = []
        self._lines = iter(lines)
        self._vocabulary = vocabulary
        self._first: RawLine | None = None
        self._counts: dict[str, int] = {}
        self._torn: Evidence | None = None
        self._joint: set[str] = set()
        self._said: Mapping[str, Any] = {}
        self.rest: Iterable[RawLine] | None = None
        self.header = self._header()

    def _header(self) -> Header:
        for line in self._lines:
            if line.data is None:
                self._note(line, line.problem or "unreadable")
                continue
            if "trace" not in line.data:
                self._first = line
                self._note(line, "no header: ranks, roles and memory are not known")
                return Header(vocabulary=dict(self._vocabulary or {}))
            version = line.data.get("trace")
            if not isinstance(version, int) or isinstance(version, bool) or version != _VERSION:
                self._note(
                    line, f"trace format {text_of(version, 20)}; this reader knows {_VERSION}"
                )
            self._said = line.data
            return header_of(line.data, self._vocabulary)
        return Header(vocabulary=dict(self._vocabulary or {}))

    def events(self) -> Iterator[Event]:
        """The events, in the order of the file."""
        at = 0
        known = set(self.header.ranks)
        spoke: set[Name] = set()
        again: RawLine | None = None
        means = self.header.means
        for line in self._rest():
            data = line.data
            if data is None:
                self._note(line, line.problem or "unreadable")
                continue
            if "trace" in data and "event" not in data:
                if self._is_another(data):
                    self._leave(line)
                    return
                again = line
                continue
            event = self._event(at, line, data, means)
            if event is None:
                continue
            if again is not None:
                if event.rank in spoke:
                    self._leave(again, line)
                    return
                self._note(again, "the first line once more: several files of one run in one")
                again = None
            spoke.add(event.rank)
            if known and event.rank not in known:
                known.add(event.rank)
                self._note(line, f"rank {event.rank} is not in the header")
            at += 1
            yield event

    def _is_another(self, said: Mapping[str, Any]) -> bool:
        """Whether a first line is of a run that this one is not."""
        return any(said.get(name) != self._said.get(name) for name in ("name", "run"))

    def _leave(self, *lines: RawLine) -> None:
        """Leave `lines`, and all that comes after them, to the next run."""
        self._note(lines[0], "another run begins here, and is judged apart")
        self.rest = chain(lines, self._lines)

    def _rest(self) -> Iterator[RawLine]:
        """The lines after the first. (No generator: closing one would close what is left.)"""
        return chain(() if self._first is None else (self._first,), self._lines)

    def _event(
        self, at: int, line: RawLine, data: dict[str, Any], means: Callable[[str], Any]
    ) -> Event | None:
        rank = rank_name(data.get("rank"))
        phase = data.get("phase")
        kind = data.get("event")
        if rank is None or not isinstance(phase, str) or not isinstance(kind, str):
            self._note(line, "no rank, phase or event")
            return None
        if kind not in KINDS:
            other = _SYNONYMS.get(kind.lower())
            if other is None:
                self._note(line, f"unknown event {text_of(kind, 40)}")
                return None
            kind = other
        attrs = data.get("attrs")
        epoch = data.get("epoch")
        if isinstance(epoch, bool) or not isinstance(epoch, int) or abs(epoch) > _FAR:
            figure = number(epoch)
            whole = figure is not None and figure.is_integer() and abs(figure) < 1e15
            epoch = int(figure) if figure is not None and whole else None
        attrs = _one_name(attrs) if isinstance(attrs, dict) else EMPTY
        meant = means(phase)
        if kind == "end" and attrs and _says_failed(attrs, meant.action):
            kind = "fail"  # It came to an end, and says that it did not do its work.
        if meant.action == "other":
            # A phase that nobody knows, on a communicator: whatever it is, ranks meet in it.
            if ("group" in attrs or "members" in attrs) and len(self._joint) < _JOINT_MAX:
                self._joint.add(phase)
            if phase in self._joint:
                meant = meant._replace(action="collective")
        file, number_ = _source(attrs.get("from")) or (self.file, line.number)
        return Event(at, file, number_, rank, epoch, phase, kind, attrs, meant)

    def _note(self, line: RawLine, what: str) -> None:
        count = self._counts[what] = self._counts.get(what, 0) + 1
        if count > 1 or len(self.problems) > 64:
            return
        lost = line.data is None
        self.problems.append(
            Finding(
                rule=None,
                strength=SUSPECTED if lost else NOTE,
                at=1 << 60,
                because=f"{self.file}:{line.number}: {what}",
                evidence=(Evidence(self.file, line.number),),
                record_next=("the whole file",) if lost else (),
            )
        )
