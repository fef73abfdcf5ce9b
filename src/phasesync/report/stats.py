"""Statistics over epochs: how long phases take, who is late, what each fence costs and to whom.

Durations go into histograms of fixed width on a log scale, so that memory does not grow with the
run; a quantile is right to 5 percent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from phasesync import logs
from phasesync.audit.events import number, text_of
from phasesync.audit.merge import Merge, Stream
from phasesync.errors import LogError

__all__ = ("Stats", "as_json", "as_text", "stats_of")

_STEP: Final = math.log(1.05)
_FENCES_KEPT: Final = 4096
_SHOWN: Final = 12


@dataclass(slots=True)
class Histogram:
    """Seconds on a log scale."""

    count: int = 0
    total_s: float = 0.0
    most_s: float = 0.0
    _bins: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        if not 0 <= seconds < 1e12:
            return
        self.count += 1
        self.total_s += seconds
        self.most_s = max(self.most_s, seconds)
        at = math.floor(math.log(max(seconds, 1e-9)) / _STEP)
        self._bins[at] = self._bins.get(at, 0) + 1

    def quantile(self, part: float) -> float:
        left = part * self.count
        for at in sorted(self._bins):
            left -= self._bins[at]
            if left <= 0:
                return min(math.exp((at + 0.5) * _STEP), self.most_s)
        return self.most_s


@dataclass(slots=True)
class Stats:
    """What one pass over journals adds up to."""

    phases: dict[str, Histogram] = field(default_factory=dict)
    waits: dict[str, Histogram] = field(default_factory=dict)
    last: dict[str, dict[str, int]] = field(default_factory=dict)
    cost_s: dict[str, float] = field(default_factory=dict)
    hosts_s: dict[str, float] = field(default_factory=dict)
    residue: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    epochs: int = 0
    ranks: int = 0


def stats_of(paths: Iterable[str | Path]) -> Stats:
    """The statistics of the journals at `paths`.

    Raises:
        LogError: there is no journal; traces carry no times.
    """
    stats = Stats()
    ranks: set[str] = set()
    with logs.unpacked(paths) as here:
        journals = [each for each in logs.sources(here) if each.kind == "journal"]
        if not journals:
            raise LogError("--stats needs journals: traces carry no times")
        for files in logs.by_run(journals).values():
            streams = [Stream(each.name, logs.lines(each.path)) for each in files]
            _read(streams, stats, ranks)
    stats.ranks = len(ranks)
    return stats


def _read(streams: list[Stream], stats: Stats, ranks: set[str]) -> None:
    arrived: dict[tuple[str, ...], tuple[str, str, dict[str, float]]] = {}
    for _, _, line in Merge(streams, lambda _file, _line: None):
        event = line.get("event")
        rank = f"{text_of(line.get('role'), 40)}/{text_of(line.get('rank'), 20)}"
        ranks.add(rank)
        epoch = line.get("epoch")
        if isinstance(epoch, int):
            stats.epochs = max(stats.epochs, epoch)
        seconds = number(line.get("duration_s"))
        if event == "phase.end":
            phase = text_of(line.get("phase"), 80)
            if seconds is not None:
                stats.phases.setdefault(phase, Histogram()).add(seconds)
            _residue(stats, rank, phase, line)
        elif event == "fence.arrive":
            key = _key(line)
            if len(arrived) > _FENCES_KEPT:
                arrived.pop(next(iter(arrived)))
            arrived[key] = (rank, text_of(line.get("host"), 80), {})
        elif event == "fence.pass" and seconds is not None:
            fence = text_of(line.get("fence"), 80)
            stats.waits.setdefault(fence, Histogram()).add(seconds)
            late = arrived.get(_key(line))
            if late is not None and late[0] != rank:
                stats.cost_s[late[0]] = stats.cost_s.get(late[0], 0.0) + seconds
                stats.hosts_s[late[1]] = stats.hosts_s.get(late[1], 0.0) + seconds
                if rank not in late[2] and not late[2]:
                    counts = stats.last.setdefault(fence, {})
                    counts[late[0]] = counts.get(late[0], 0) + 1
                late[2][rank] = seconds


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(line.get(name)) for name in ("attempt", "scope", "generation"))


def _residue(stats: Stats, rank: str, phase: str, line: dict[str, Any]) -> None:
    """Free memory at the end of the same phase, first and last: what drifts."""
    free = number(line.get("free_bytes"))
    if free is None:
        return
    series = stats.residue.setdefault((rank, phase), [free, free, 0.0])
    series[1] = free
    series[2] += 1


def as_json(stats: Stats) -> dict[str, Any]:
    """The statistics for programs."""
    return {
        "epochs": stats.epochs,
        "ranks": stats.ranks,
        "phases": {name: _histogram(each) for name, each in sorted(stats.phases.items())},
        "fences": {
            name: {**_histogram(each), "last": stats.last.get(name, {})}
            for name, each in sorted(stats.waits.items())
        },
        "waited_for_s": _most(stats.cost_s),
        "waited_for_hosts_s": _most(stats.hosts_s),
        "residue": [
            {"rank": rank, "phase": phase, "lost_bytes": lost}
            for rank, phase, lost in _drift(stats)
        ],
    }


def _histogram(each: Histogram) -> dict[str, Any]:
    return {
        "count": each.count,
        "p50_s": round(each.quantile(0.5), 6),
        "p99_s": round(each.quantile(0.99), 6),
        "most_s": round(each.most_s, 6),
        "total_s": round(each.total_s, 3),
    }


def _most(table: dict[str, float]) -> dict[str, float]:
    ranked = sorted(table.items(), key=lambda item: -item[1])[:_SHOWN]
    return {name: round(seconds, 6) for name, seconds in ranked}


def _drift(stats: Stats) -> list[tuple[str, str, int]]:
    """Where free memory at the end of a phase fell over the run, the worst first."""
    lost = [
        (rank, phase, int(first - last))
        for (rank, phase), (first, last, count) in stats.residue.items()
        if count >= 3 and first - last > 64 << 20
    ]
    return sorted(lost, key=lambda each: -each[2])[:_SHOWN]


def as_text(stats: Stats) -> list[str]:
    """The statistics for people, a list of lines."""
    rows = [f"{stats.epochs} epochs, {stats.ranks} ranks"]
    rows.append(f"{'phase':24} {'count':>8} {'p50':>10} {'p99':>10} {'most':>10}")
    rows += [_row(name, each) for name, each in sorted(stats.phases.items())]
    rows.append(f"{'fence':24} {'count':>8} {'p50':>10} {'p99':>10} {'most':>10}  last to come")
    for name, each in sorted(stats.waits.items()):
        last = sorted(stats.last.get(name, {}).items(), key=lambda item: -item[1])[:3]
        rows.append(_row(name, each) + "  " + ", ".join(f"{rank} x{n}" for rank, n in last))
    waited = _most(stats.cost_s)
    if waited:
        rows.append("waited for: " + ", ".join(f"{r} {s:.3f} s" for r, s in waited.items()))
    for rank, phase, lost in _drift(stats):
        rows.append(f"free memory after {phase} on {rank} fell by {lost / 2**20:.0f} MiB")
    return rows


def _row(name: str, each: Histogram) -> str:
    p50, p99 = each.quantile(0.5), each.quantile(0.99)
    return f"{name[:24]:24} {each.count:8} {p50:9.4f}s {p99:9.4f}s {each.most_s:9.4f}s"
