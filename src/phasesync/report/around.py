"""The moments around a fault as text: what each rank did last, who waited, what devices held.

Guilty ranks come first, then those that wait. A phase that never ended says so.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from phasesync.audit import Answer
from phasesync.report.spans import Moment, moments_of

__all__ = ("around",)

_RANKS: Final = 10
_STEPS: Final = 5
_AFTER: Final = 2  # Moments after the fault, for each rank: what it led to, not all that followed.
_MARKS: Final = {"end": "", "fail": " FAILED", "timeout": " TIMED OUT", "exit": " EXITED"}


@dataclass(slots=True)
class _Step:
    name: str
    began_us: float
    how: str = " ..."
    took_us: float = 0.0
    fence: bool = False


@dataclass(slots=True)
class _Row:
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def take(self, moment: Moment) -> None:
        if moment.kind == "start":
            self.steps.append(_Step(moment.name, moment.us, fence=bool(moment.fence)))
            return
        if moment.kind == "progress":
            return
        for step in reversed(self.steps):
            if step.how == " ..." and (step.name == moment.name or moment.kind == "exit"):
                step.how = _MARKS.get(moment.kind, "")
                step.took_us = moment.us - step.began_us
                return


def around(paths: Sequence[str | Path], answer: Answer) -> list[str]:
    """Lines for people; none where the fault has no line of its own."""
    if not answer.evidence:
        return []
    fault = (answer.evidence[0].file, answer.evidence[0].line)
    rows: dict[str, _Row] = {}
    memory: dict[str, float] = {}
    moments = moments_of(paths)
    now = 0.0
    seen = False
    word = "free"
    for moment in moments:
        now = _take(moment, rows, memory)
        if (moment.file, moment.line) == fault:
            seen = True
            word = "held" if moment.held else "free"
            break
    if not seen:
        return []
    held = dict(memory)
    # Where somebody waits for ever, the picture is the end of the log.
    for moment in islice(moments, None if answer.verdict == "hang" else _AFTER * len(rows)):
        now = _take(moment, rows, memory)
    guilty, waiting = _short(answer.guilty), _short(answer.waiting)
    names = {rank: _short([rank]) for rank in rows}
    ranks = sorted(
        rows, key=lambda rank: (not names[rank] & guilty, not names[rank] & waiting, natural(rank))
    )
    text = [_lane(rank, rows[rank], now, bool(names[rank] & guilty)) for rank in ranks[:_RANKS]]
    if len(ranks) > _RANKS:
        text.append(f"  ... and {len(ranks) - _RANKS} more ranks")
    if held:
        shown = sorted(held.items(), key=lambda each: natural(each[0]))[:_RANKS]
        figures = ", ".join(
            f"{device}: {gib:.{1 if abs(gib) >= 1 or not gib else 3}f}" for device, gib in shown
        )
        more = f", and {len(held) - _RANKS} more devices" if len(held) > _RANKS else ""
        text.append(f"  GiB {word} at the fault, by device: {figures}{more}")
    return text


def natural(rank: str) -> tuple[str, int, str]:
    """A key that puts trainer/10 behind trainer/9."""
    role, _, number = rank.rpartition("/")
    return (role, int(number) if number.isascii() and number.isdigit() else 1 << 30, number)


def _short(names: Iterable[object]) -> set[str]:
    """Ranks by number alone, as a trace's own lines have them."""
    return {str(name).rpartition("/")[2] for name in names}


def _take(moment: Moment, rows: dict[str, _Row], memory: dict[str, float]) -> float:
    rows.setdefault(moment.rank, _Row()).take(moment)
    memory.update(moment.memory)
    return moment.us


def _lane(rank: str, row: _Row, now: float, guilty: bool) -> str:
    steps = []
    for step in row.steps:
        waited = step.took_us if step.how != " ..." else now - step.began_us
        long = f" {waited / 1e6:.1f}s" if waited >= 500_000 else ""
        steps.append(f"{step.name}{step.how}{long}")
    return f"  {'>' if guilty else ' '} {rank:12} {' | '.join(steps)}"
