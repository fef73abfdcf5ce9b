"""Statistics over epochs: how long phases take, who is late, what each fence costs and to whom.

Durations go into histograms of fixed width on a log scale, so that memory does not grow with the
run; a quantile is right to 5 percent.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from phasesync import logs
from phasesync.audit.clocks import Clocks
from phasesync.audit.events import number, text_of
from phasesync.audit.merge import Merge, Stream
from phasesync.errors import LogError

__all__ = ("Stats", "as_json", "as_text", "skew_lines", "stats_of")

_STEP: Final = math.log(1.05)
_FENCES_KEPT: Final = 4096
_SHOWN: Final = 12
_DRIFT: Final = 64 << 20  # bytes; less is what allocators do
_SLOW: Final = 1.5  # times the median of the ranks, and by so many seconds:
_SLOW_S: Final = 0.005


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
    lost_s: dict[str, dict[str, float]] = field(default_factory=dict)
    by_rank: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)
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
                ranks_of = stats.by_rank.setdefault(phase, {})
                count, total = ranks_of.get(rank, (0, 0.0))
                ranks_of[rank] = (count + 1, total + seconds)
            _residue(stats, rank, phase, line)
        elif event == "fence.arrive":
            key = _key(line)
            stats.clocks.arrive(key, line)
            if len(arrived) > _FENCES_KEPT:
                arrived.pop(next(iter(arrived)))
            arrived[key] = (rank, text_of(line.get("host"), 80), {})
        elif event == "fence.pass" and seconds is not None:
            stats.clocks.passed(_key(line), line)
            fence = text_of(line.get("fence"), 80)
            stats.waits.setdefault(fence, Histogram()).add(seconds)
            late = arrived.get(_key(line))
            if late is not None and late[0] != rank:
                stats.cost_s[late[0]] = stats.cost_s.get(late[0], 0.0) + seconds
                stats.hosts_s[late[1]] = stats.hosts_s.get(late[1], 0.0) + seconds
                lost = stats.lost_s.setdefault(fence, {})
                lost[late[0]] = lost.get(late[0], 0.0) + seconds
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
            name: {
                **_histogram(each),
                "last": stats.last.get(name, {}),
                "lost_s": _most(stats.lost_s.get(name, {})),
            }
            for name, each in sorted(stats.waits.items())
        },
        "waited_for_s": _most(stats.cost_s),
        "waited_for_hosts_s": _most(stats.hosts_s),
        "slow": [
            {
                "rank": rank,
                "phase": phase,
                "mean_s": round(mean, 6),
                "times_median": round(times, 2),
            }
            for rank, phase, mean, times in _slow(stats)
        ],
        "clocks": [each.to_json() for each in stats.clocks.skews()],
        "residue": [
            {"rank": rank, "phase": phase, "lost_bytes": lost, "bytes_an_epoch": slope}
            for rank, phase, lost, slope in _drift(stats)
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


def _drift(stats: Stats) -> list[tuple[str, str, int, int]]:
    """Where free memory at the end of a phase fell, in all and an epoch; the worst first."""
    lost = [
        (rank, phase, int(first - last), int((first - last) / (count - 1)))
        for (rank, phase), (first, last, count) in stats.residue.items()
        if count >= 3 and first - last > _DRIFT
    ]
    return sorted(lost, key=lambda each: -each[2])[:_SHOWN]


def _slow(stats: Stats) -> list[tuple[str, str, float, float]]:
    """Ranks whose mean in a phase is far above that of their peers: rank, phase, mean, times."""
    found = []
    for phase, ranks in stats.by_rank.items():
        means = {rank: total / count for rank, (count, total) in ranks.items()}
        usual = median(means.values())
        found += [
            (rank, phase, mean, mean / usual)
            for rank, mean in means.items()
            if len(means) > 2 and usual > 0 and mean > _SLOW * usual and mean - usual > _SLOW_S
        ]
    return sorted(found, key=lambda each: -each[2])[:_SHOWN]


def as_text(stats: Stats) -> list[str]:
    """The statistics for people, a list of lines."""
    rows = [f"{stats.epochs} epochs, {stats.ranks} ranks"]
    rows.append(f"{'phase':24} {'count':>8} {'p50':>10} {'p99':>10} {'most':>10}")
    rows += [_row(name, each) for name, each in sorted(stats.phases.items())]
    rows.append(f"{'fence':24} {'count':>8} {'p50':>10} {'p99':>10} {'most':>10}  last to come")
    for name, each in sorted(stats.waits.items()):
        last = sorted(stats.last.get(name, {}).items(), key=lambda item: -item[1])[:3]
        rows.append(_row(name, each) + "  " + ", ".join(f"{rank} x{n}" for rank, n in last))
    for name, table in sorted(stats.lost_s.items()):
        rows.append(f"lost at {name}: {_told(table)}")
    if stats.cost_s:
        rows.append(f"waited for: {_told(stats.cost_s)}")
    if len(stats.hosts_s) > 1:
        rows.append(f"waited for hosts: {_told(stats.hosts_s)}")
    for rank, phase, mean, times in _slow(stats):
        rows.append(
            f"slow: {rank} in {phase}, {mean:.3f} s on average, {times:.1f} times its peers"
        )
    for rank, phase, lost, slope in _drift(stats):
        rows.append(
            f"free memory after {phase} on {rank} fell by {lost / 2**20:.0f} MiB, "
            f"{slope / 2**20:.1f} MiB an epoch"
        )
    rows += skew_lines(each.to_json() for each in stats.clocks.skews())
    return rows


def _told(table: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in _most(table).items())


def skew_lines(skews: Iterable[Mapping[str, Any]]) -> list[str]:
    """What fences prove of the clocks of hosts, for people: those that surely differ, then all."""
    rows = []
    most = 0.0
    pairs = 0
    for each in skews:
        pairs += 1
        most = max(most, abs(each["least_ms"]), abs(each["most_ms"]))
        if each["least_ms"] > 0:
            rows.append(
                f"the clock of {text_of(each['ahead'], 80)} is {each['least_ms']:.3f} to "
                f"{each['most_ms']:.3f} ms ahead of that of {text_of(each['behind'], 80)}"
            )
    if pairs and not rows:
        rows.append(f"clocks of hosts: no fence proves a difference; at most {most:.3f} ms")
    return rows


def _row(name: str, each: Histogram) -> str:
    p50, p99 = each.quantile(0.5), each.quantile(0.99)
    return f"{name[:24]:24} {each.count:8} {p50:9.4f}s {p99:9.4f}s {each.most_s:9.4f}s"
