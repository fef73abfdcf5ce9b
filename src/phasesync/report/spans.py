"""Logs as spans: who was in what from when to when, for pictures of any kind.

A trace has an order and no clock, so its events are one step apart; a journal has both. What never
ended is open to the end of the log, and is marked so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from phasesync import logs
from phasesync.audit.events import number, text_of
from phasesync.audit.merge import Merge, Stream, wall_ns
from phasesync.audit.traces import RawLine, Trace
from phasesync.audit.vocabulary import meaning

__all__ = ("Moment", "Span", "Spans", "moments_of")

_STEP_US: Final = 1000.0
_FENCES: Final = {"fence.arrive": "start", "fence.pass": "end", "fence.break": "fail"}
_PHASES: Final = {"phase.start": "start", "phase.end": "end", "phase.fail": "fail"}


class Moment(NamedTuple):
    """One event on the way to a picture. `us` counts from the start of the log."""

    us: float
    rank: str
    epoch: int | None
    name: str
    kind: str
    fence: str
    file: str
    line: int
    memory: tuple[tuple[str, float], ...]
    says: str
    held: bool = False  # what `memory` is: GiB held on a device, else GiB free


@dataclass(slots=True)
class Span:
    """A phase or a wait of one rank."""

    rank: str
    name: str
    began_us: float
    ended_us: float
    fence: str
    how: str
    file: str
    line: int
    epoch: int | None
    says: str = ""


@dataclass(slots=True)
class Spans:
    """Turns moments into spans as they come; `finish` closes what is left open."""

    now_us: float = 0.0
    _open: dict[tuple[str, str], list[Span]] = field(default_factory=dict)

    def see(self, moment: Moment) -> Iterator[Span]:
        """The span that `moment` ends, if any."""
        self.now_us = max(self.now_us, moment.us)
        key = (moment.rank, moment.name)
        if moment.kind == "start":
            opened = self._open.setdefault(key, [])
            opened.append(
                Span(
                    moment.rank,
                    moment.name,
                    moment.us,
                    moment.us,
                    moment.fence,
                    "open",
                    moment.file,
                    moment.line,
                    moment.epoch,
                    moment.says,
                )
            )
            del opened[:-64]
        elif moment.kind == "exit":
            for (rank, _), opened in self._open.items():
                while rank == moment.rank and opened:
                    yield _ended(opened.pop(), moment)
        elif moment.kind != "progress":
            stack = self._open.get(key)
            if stack:
                yield _ended(stack.pop(), moment)

    def oldest_us(self, rank: str) -> float:
        """When the longest open span of `rank` began; now where none is open."""
        began = [
            opened[0].began_us
            for (owner, _), opened in self._open.items()
            if opened and owner == rank
        ]
        return min(began, default=self.now_us)

    def finish(self) -> Iterator[Span]:
        """What never ended, up to the end of the log."""
        for opened in self._open.values():
            for span in opened:
                span.ended_us = self.now_us
                yield span
        self._open.clear()


def _ended(span: Span, moment: Moment) -> Span:
    span.ended_us = max(moment.us, span.began_us)
    span.how = "ended" if moment.kind == "end" else moment.kind
    if moment.kind != "end":
        span.says = moment.says
    return span


def moments_of(paths: Iterable[str | Path]) -> Iterator[Moment]:
    """All events of the logs at `paths`, in their order, one run after the other."""
    with logs.unpacked(paths) as here:
        found = logs.sources(here)
        for each in found:
            if each.kind == "trace":
                yield from _trace(each.name, logs.lines(each.path))
        journals = [each for each in found if each.kind == "journal"]
        for files in logs.by_run(journals).values():
            streams = [Stream(each.name, logs.lines(each.path)) for each in files]
            yield from _journals(streams)


def _trace(file: str, lines: Iterable[RawLine]) -> Iterator[Moment]:
    trace = Trace(file, lines)
    held = {text_of(device, 40): gib for device, gib in trace.header.initial_gib.items()}
    changed = list(held.items())  # What was there before the first event is part of the picture.
    began: float | None = None
    now = 0.0
    for event in trace.events():
        deltas = event.attrs.get("delta_gib")
        for device, value in deltas.items() if isinstance(deltas, dict) else ():
            if (change := number(value)) is not None:
                name = text_of(device, 40)
                held[name] = held.get(name, 0.0) + change
                changed.append((name, held[name]))
        figure = _held(event.attrs, trace.header.capacity(str(event.rank)))
        if figure is not None and not isinstance(deltas, dict):
            held[str(event.rank)] = figure
            changed.append((str(event.rank), figure))
        at = number(event.attrs.get("clock_s"))
        began = at if began is None else began
        now = now + _STEP_US if at is None or began is None else max(now, (at - began) * 1e6)
        yield Moment(
            now,
            str(event.rank),
            event.epoch,
            text_of(event.phase, 80),
            event.kind,
            _fence(event.action, event.phase, event.epoch, event.attrs),
            event.file,
            event.line,
            tuple(changed),
            _says(event.attrs),
            True,
        )
        changed = []


def _held(attrs: Any, capacity: float | None) -> float | None:
    """GiB held on a rank's own device, where an event says so or says what is free."""
    used, free = number(attrs.get("used_gib")), number(attrs.get("free_gib"))
    if used is not None:
        return used
    return None if capacity is None or free is None else capacity - free


def _fence(action: str, phase: str, epoch: int | None, attrs: Any) -> str:
    if action != "fence":
        return ""
    parts = [attrs.get(name) for name in ("group", "epoch", "call", "key", "ticket")]
    return " ".join(text_of(each, 40) for each in (phase, epoch, *parts) if each is not None)


def _says(attrs: Any) -> str:
    return text_of(", ".join(f"{key}={text_of(attrs[key], 60)}" for key in list(attrs)[:12]), 400)


def _journals(streams: list[Stream]) -> Iterator[Moment]:
    first: int | None = None
    for file, line_number, line in Merge(streams, lambda _file, _line: None):
        event = line.get("event")
        if not isinstance(event, str):
            continue
        kind = _PHASES.get(event) or _FENCES.get(event)
        if kind is None and event != "rank.exit":
            continue
        at = wall_ns(line.get("timestamp"))
        first = at if first is None else first
        rank = f"{text_of(line.get('role'), 40)}/{text_of(line.get('rank'), 20)}"
        is_fence = event in _FENCES
        name = text_of(line.get("fence" if is_fence else "phase"), 80)
        free = number(line.get("free_bytes"))
        device = text_of(line.get("device"), 60)
        epoch = line.get("epoch")
        yield Moment(
            max(0.0, (at - first) / 1000),
            rank,
            epoch if isinstance(epoch, int) else None,
            name if event != "rank.exit" else "exit",
            kind or "exit",
            f"{line.get('scope')} {line.get('generation')}" if is_fence else "",
            file,
            line_number,
            ((device, free / 2**30),) if free is not None else (),
            text_of(line.get("error") or "", 400),
        )


def action_of(name: str) -> str:
    """What a phase does, for its colour."""
    return meaning(name).action
