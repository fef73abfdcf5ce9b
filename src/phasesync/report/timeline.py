"""Journals as pictures in text: a lane a rank, a bar a device, and who was waited for.

Everything here comes from journal lines and from nothing else, so that it can be drawn again
from the files, by anybody. One column is one slice of time for all lanes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from rich.text import Text

__all__ = (
    "Block",
    "Lane",
    "Run",
    "Waited",
    "lanes_of",
    "legend",
    "memory_of",
    "read",
    "waited_for",
)

Line: TypeAlias = Mapping[str, Any]

ROWS_MAX = 8  # Ranks and devices beyond are counted, not drawn.
LABEL = 11
PLAN = "plan"
WAIT, FAILED, CUT, DEAD = "·", "✗", "!", "†"
BARS = " ▁▂▃▄▅▆▇█"
ASCII = str.maketrans(
    {WAIT: ".", FAILED: "X", DEAD: "#", **dict(zip(BARS, " .:-=+*%@", strict=True))}
)
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green",
           "bright_yellow", "bright_magenta", "bright_blue")  # fmt: skip
NOTICEABLE_S = 0.5


class Block(NamedTuple):
    """A stretch of one rank's time: a phase, or a wait at a fence."""

    began_s: float
    ended_s: float
    name: str
    waiting: bool


@dataclass
class Lane:
    """One rank over time. `marks` are the moments at which it failed or died."""

    rank: str
    device: str
    blocks: list[Block] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)


class Waited(NamedTuple):
    """A rank that others waited for: for how long in all, and where longest."""

    rank: str
    total_s: float
    fence: str
    longest_s: float


@dataclass
class Run:
    """A run as drawn: its lanes in rank order, its span of time, its phases in order."""

    lanes: list[Lane]
    epochs: dict[int, float]
    began_s: float
    ended_s: float
    phases: list[str]
    lines: Sequence[Line]

    def column(self, at_s: float, width: int) -> int:
        span = max(self.ended_s - self.began_s, 1e-9)
        return min(max(int((at_s - self.began_s) / span * width), 0), width - 1)


def read(lines: Iterable[Line]) -> Run:
    """The run that journal lines tell of; they may come in any order."""
    known = [line for line in lines if "event" in line and "rank" in line]
    clock = _Clock(known)
    by_rank: dict[tuple[str, int, int], list[Line]] = {}
    for line in known:
        key = (str(line.get("role", "")), int(line["rank"]), int(line.get("incarnation", 0)))
        by_rank.setdefault(key, []).append(line)
    lanes = []
    for (role, number, _), own in sorted(by_rank.items()):
        own.sort(key=lambda line: line.get("seq", 0))
        lanes.append(_lane(f"{role}/{number}", own, clock))
    epochs: dict[int, float] = {}
    for line in known:
        if line["event"] == "epoch.begin":
            epoch, at = int(line.get("epoch", 0)), clock(line)
            epochs[epoch] = min(epochs.get(epoch, at), at)
    times = [clock(line) for line in known] or [0.0]
    began = min(epochs.values(), default=min(times))
    return Run(lanes, dict(sorted(epochs.items())), began, max(times), _phases(lanes), known)


def _phases(lanes: Sequence[Lane]) -> list[str]:
    """All phases, in the order of whoever does most of them: a leader."""
    orders = [
        list(dict.fromkeys(block.name for block in lane.blocks if not block.waiting))
        for lane in lanes
    ]
    longest = sorted(orders, key=len, reverse=True)
    return list(dict.fromkeys(phase for order in longest for phase in order))


class _Clock:
    """Seconds of a line. Monotonic clocks compare on one host only; else it is the wall's."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._mono = len({line.get("host") for line in lines}) <= 1

    def __call__(self, line: Line) -> float:
        if self._mono:
            return float(line.get("mono_ns", 0)) / 1e9
        return datetime.fromisoformat(str(line["timestamp"])).timestamp()


def _lane(rank: str, own: Sequence[Line], clock: _Clock) -> Lane:
    lane = Lane(rank, str(own[0].get("device", "")))
    opened: tuple[float, str, bool] | None = None
    for line in own:
        at, event = clock(line), line["event"]
        if event in _OPENS and line.get("status", "ok") == "ok":
            opened = (at, str(line[_OPENS[event]]), event == "fence.arrive")
        elif event in _CLOSES and opened is not None and line.get(_CLOSES[event]) == opened[1]:
            lane.blocks.append(Block(opened[0], at, opened[1], opened[2]))
            opened = None
        if event == "phase.fail":
            lane.marks.append((at, CUT if line.get("error_type") == "Cancelled" else FAILED))
    if own[-1]["event"] != "rank.exit":
        at = clock(own[-1])
        lane.marks.append((at, DEAD))
        if opened is not None:
            lane.blocks.append(Block(opened[0], at, opened[1], opened[2]))
    return lane


_OPENS = {"phase.start": "phase", "fence.arrive": "fence"}
_CLOSES = {
    "phase.end": "phase",
    "phase.fail": "phase",
    "fence.pass": "fence",
    "fence.break": "fence",
}


# ---------------------------------------------------------------------------------- lanes


def symbols(phases: Sequence[str]) -> dict[str, str]:
    """A letter for each phase: an initial of it where that is free."""
    taken: dict[str, str] = {}
    for phase in phases:
        initials = [part[0] for part in phase.split("_") if part]
        wanted = [*initials, *phase, *phase.upper(), *"0123456789"]
        letter = next((c for c in wanted if c.isalnum() and c not in taken.values()), "?")
        taken[phase] = letter
    return taken


def lanes_of(run: Run, *, width: int = 80) -> list[Text]:
    """The lanes under a ruler of epochs, one column a slice of time."""
    room = width - LABEL
    letters = symbols(run.phases)
    colour = {phase: COLOURS[at % len(COLOURS)] for at, phase in enumerate(run.phases)}
    rows = [_ruler(run, room)]
    for lane in run.lanes[:ROWS_MAX]:
        row = Text(lane.rank.ljust(LABEL)[:LABEL])
        cells = _cells(run, lane, room)
        for at in range(room):
            block = cells[at]
            if block is None:
                row.append(" ")
            elif block.waiting:
                row.append(WAIT, style="dim")
            else:
                row.append(letters.get(block.name, "?"), style=f"reverse {colour[block.name]}")
        rows.append(_marked(run, lane.marks, row, room))
    if len(run.lanes) > ROWS_MAX:
        rows.append(Text(f"... and {len(run.lanes) - ROWS_MAX} more ranks", style="dim"))
    return rows


def legend(run: Run, *, width: int = 80) -> list[Text]:
    """What the letters stand for."""
    parts = [f"{letter} {phase}" for phase, letter in symbols(run.phases).items()]
    parts.append(f"{WAIT} waits")
    marks = {mark for lane in run.lanes for _, mark in lane.marks}
    parts += [f"{mark} {word}" for mark, word in _MARKS.items() if mark in marks]
    rows = [""]
    for part in parts:
        if len(rows[-1]) + len(part) + 2 > width and rows[-1]:
            rows.append("")
        rows[-1] += part if not rows[-1] else f"  {part}"
    return [Text(row, style="dim") for row in rows]


_MARKS = {FAILED: "fails", CUT: "cut off", DEAD: "dies"}


def _ruler(run: Run, room: int) -> Text:
    row = [" "] * room
    for epoch, at in run.epochs.items():
        column = run.column(at, room)
        for offset, letter in enumerate(f"|epoch {epoch}"):
            if column + offset < room:
                row[column + offset] = letter
    return Text(" " * LABEL + "".join(row), style="bold")


def _cells(run: Run, lane: Lane, room: int) -> list[Block | None]:
    """What each column shows: the phase that fills most of it, else a wait.

    A wait gives way to any phase, so that short phases are seen.
    """
    best: list[tuple[bool, float, Block] | None] = [None] * room
    slice_s = max(run.ended_s - run.began_s, 1e-9) / room
    for block in lane.blocks:
        if block.ended_s < run.began_s:
            continue
        for at in range(run.column(block.began_s, room), run.column(block.ended_s, room) + 1):
            left = run.began_s + at * slice_s
            overlap = min(block.ended_s, left + slice_s) - max(block.began_s, left)
            if overlap <= 0 and block.ended_s > block.began_s:
                continue  # It only touches this slice.
            score = (not block.waiting, overlap, block)
            held = best[at]
            if held is None or score[:2] > held[:2]:
                best[at] = score
    return [held[2] if held else None for held in best]


def _marked(run: Run, marks: Iterable[tuple[float, str]], row: Text, room: int) -> Text:
    plain = list(row.plain)
    for at, mark in marks:
        column = LABEL + run.column(at, room)
        plain[column] = mark
        row.stylize("bold red not reverse", column, column + 1)
    row.plain = "".join(plain)
    return row


# --------------------------------------------------------------------------------- memory


def memory_of(run: Run, *, width: int = 80) -> list[Text]:
    """A row a device: how full it is, as far as journal lines say; nothing where they do not."""
    room = width - LABEL
    clock = _Clock(run.lines)
    samples: dict[str, list[tuple[float, int]]] = {}
    capacity: dict[str, int] = {}
    refused: dict[str, list[tuple[float, str]]] = {}
    for line in sorted(run.lines, key=clock):
        for device, free in _figures(line):
            samples.setdefault(device, []).append((clock(line), free))
            capacity[device] = max(capacity.get(device, 0), free)
        if isinstance(line.get("refused"), Mapping):
            device = str(line["refused"].get("device"))
            refused.setdefault(device, []).append((clock(line), FAILED))
        if "capacity_bytes" in line:
            device = str(line.get("device"))
            capacity[device] = max(capacity.get(device, 0), int(line["capacity_bytes"]))
    rows = []
    for device in [lane.device for lane in run.lanes][:ROWS_MAX]:
        if device in samples and capacity[device]:
            label = device.rpartition("/")[2].ljust(LABEL)[:LABEL]
            bars = _bars(run, samples[device], capacity[device], room)
            row = Text(label).append(bars, style="green")
            rows.append(_marked(run, refused.get(device, ()), row, room))
    return rows


def _figures(line: Line) -> Iterable[tuple[str, int]]:
    if isinstance(line.get("free_bytes"), int):
        yield str(line.get("device")), line["free_bytes"]
    several = line.get("free_by_device")
    if isinstance(several, Mapping):
        yield from ((str(device), int(free)) for device, free in several.items())


def _bars(run: Run, samples: Sequence[tuple[float, int]], capacity: int, room: int) -> str:
    """The fullest that each column saw; between samples the last one holds."""
    least: list[int | None] = [None] * room
    last = [capacity] * room
    for at, free in samples:
        column = run.column(at, room)
        before = least[column]
        least[column] = free if before is None else min(before, free)
        last[column:] = [free] * (room - column)
    row = ""
    held = capacity
    for column in range(room):
        seen = least[column]
        free = held if seen is None else min(seen, held)
        held = last[column]
        row += BARS[round((1 - free / capacity) * (len(BARS) - 1))]
    return row


# ---------------------------------------------------------------------------------- waits


class _Fence(NamedTuple):
    """One fence instance: when the first came, and when and who came last or never."""

    name: str
    first_s: float
    last_s: float
    last: str


def waited_for(run: Run) -> list[Waited]:
    """Whom others waited for, longest first.

    It is the last to come to a fence, or who never came; but who itself waits elsewhere passes
    that on. Waits for one rank at several fences at the same time count once.
    """
    fences = _fences(run)
    at = {
        (name, lane.rank, round(block.began_s, 6)): fence
        for name, fence, arrived in fences
        for lane in run.lanes
        for block in lane.blocks
        if block.waiting and block.name == name and (lane.rank, round(block.began_s, 6)) in arrived
    }
    lanes = {lane.rank: lane for lane in run.lanes}
    blamed: dict[str, list[tuple[float, float, str]]] = {}

    def blame(rank: str, since: float, until: float, fence: str, depth: int = 0) -> None:
        free = since
        for block in lanes[rank].blocks if rank in lanes else ():
            began, ended = max(block.began_s, free), min(block.ended_s, until)
            other = at.get((block.name, rank, round(block.began_s, 6)))
            if not block.waiting or ended <= began or other is None or depth > len(lanes):
                continue
            if other.last != rank:
                blamed.setdefault(rank, []).append((free, began, fence))
                blame(other.last, began, ended, other.name, depth + 1)
                free = ended
        blamed.setdefault(rank, []).append((free, until, fence))

    for _, fence, _ in fences:
        blame(fence.last, fence.first_s, fence.last_s, fence.name)
    found = [_waited(rank, spans) for rank, spans in blamed.items()]
    return sorted(found, key=lambda waited: -waited.total_s)


def _waited(rank: str, spans: list[tuple[float, float, str]]) -> Waited:
    total, reached = 0.0, 0.0
    for began, ended, _ in sorted(spans):
        total += max(ended - max(began, reached), 0.0)
        reached = max(reached, ended)
    began, ended, fence = max(spans, key=lambda span: span[1] - span[0])
    return Waited(rank, total, fence, ended - began)


def _fences(run: Run) -> list[tuple[str, _Fence, frozenset[tuple[str, float]]]]:
    """All fence instances that somebody came to, with who came when."""
    clock = _Clock(run.lines)
    came: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    names: dict[tuple[str, ...], str] = {}
    absent: dict[tuple[str, ...], tuple[float, str]] = {}
    for line in run.lines:
        if line.get("fence") in (None, PLAN):
            continue
        key: tuple[str, ...] = (
            str(line["scope"]),
            str(line["generation"]),
            str(line.get("attempt", 0)),
        )
        names[key] = str(line["fence"])
        if line["event"] == "fence.arrive" and line.get("status") == "ok":
            came.setdefault(key, []).append((clock(line), f"{line['role']}/{line['rank']}"))
        elif line["event"] == "fence.break" and line.get("missing"):
            absent.setdefault(key, (clock(line), str(line["missing"][0])))
    found = []
    for key, arrivals in came.items():
        until, last = absent.get(key, max(arrivals))
        arrived = frozenset((rank, round(at, 6)) for at, rank in arrivals)
        found.append((names[key], _Fence(names[key], min(arrivals)[0], until, last), arrived))
    return found
