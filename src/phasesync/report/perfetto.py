"""Chrome JSON traces for Perfetto: a track a rank, fences as flows with both ends, memory as
counters.

Written as the log is read. Time never goes back within a track: clocks of hosts may, and are held.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any, Final

from phasesync.core.wire import encode
from phasesync.errors import LogError
from phasesync.report.spans import Span, Spans, moments_of

__all__ = ("write_perfetto",)

_PID: Final = 1
_COUNTERS: Final = 2
_FLOWS_KEPT: Final = 65536


def write_perfetto(paths: Iterable[str | Path], out: str | Path) -> int:
    """Write the logs at `paths` to `out`; how many events it has.

    Raises:
        LogError: there is no log, or `out` cannot be written.
    """
    try:
        with Path(out).open("wb") as stream:
            return _Writer(stream).write(paths)
    except OSError as error:
        raise LogError(f"{out}: cannot be written ({error.strerror})") from error


class _Writer:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._count = 0
        self._tracks: dict[str, int] = {}
        self._held: dict[int, list[tuple[float, int, dict[str, Any]]]] = {}
        self._order = 0
        self._counted: dict[str, float] = {}
        self._flows: dict[str, tuple[int, set[str]]] = {}
        self._next_flow = 1

    def write(self, paths: Iterable[str | Path]) -> int:
        self._stream.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._put({"ph": "M", "name": "process_name", "pid": _PID, "tid": 0,
                   "args": {"name": "ranks"}})  # fmt: skip
        self._put({"ph": "M", "name": "process_name", "pid": _COUNTERS, "tid": 0,
                   "args": {"name": "devices"}})  # fmt: skip
        spans = Spans()
        for moment in moments_of(paths):
            for device, value in moment.memory:
                self._counter(moment.us, device, value, "held" if moment.held else "free")
            for span in spans.see(moment):
                self._span(span)
            track = self._tracks.get(moment.rank)
            if track is not None:
                self._flush(track, spans.oldest_us(moment.rank))
        for span in spans.finish():
            self._span(span)
        for track in self._held:
            self._flush(track, float("inf"))
        self._stream.write(b"]}\n")
        return self._count

    def _hold(self, track: int, event: dict[str, Any]) -> None:
        """Keep an event until nothing earlier can come on its track."""
        self._order += 1
        heappush(self._held.setdefault(track, []), (event["ts"], self._order, event))

    def _flush(self, track: int, before_us: float) -> None:
        held = self._held.get(track)
        while held and held[0][0] <= before_us:
            self._put(heappop(held)[2])

    def _put(self, event: dict[str, Any]) -> None:
        self._stream.write((b"," if self._count else b"") + encode(event))
        self._count += 1

    def _track(self, rank: str) -> int:
        track = self._tracks.get(rank)
        if track is None:
            track = self._tracks[rank] = len(self._tracks) + 1
            for name, args in (
                ("thread_name", {"name": rank}),
                ("thread_sort_index", {"sort_index": track}),
            ):
                self._put({"ph": "M", "name": name, "pid": _PID, "tid": track, "args": args})
        return track

    def _counter(self, us: float, device: str, value: float, what: str) -> None:
        us = self._counted[device] = max(us, self._counted.get(device, 0.0))
        self._put(
            {
                "ph": "C",
                "name": f"GiB {what} {device}",
                "pid": _COUNTERS,
                "tid": 0,
                "ts": round(us, 3),
                "args": {"GiB": round(value, 3)},
            }
        )

    def _span(self, span: Span) -> None:
        """A slice is known when it ends; it is written in the order of its start."""
        track = self._track(span.rank)
        began = max(0.0, span.began_us)
        event: dict[str, Any] = {
            "ph": "X",
            "name": span.name,
            "cat": "fence" if span.fence else "phase",
            "pid": _PID,
            "tid": track,
            "ts": round(began, 3),
            "dur": round(max(0.0, span.ended_us - began), 3),
            "args": {
                "epoch": span.epoch,
                "how": span.how,
                "line": f"{span.file}:{span.line}",
                **({"says": span.says} if span.says else {}),
            },
        }
        self._hold(track, event)
        if span.fence:
            self._flow(span, track)

    def _flow(self, span: Span, track: int) -> None:
        """One flow a fence: it starts at the first who came and finishes at each who went on."""
        known = self._flows.get(span.fence)
        if known is None:
            if len(self._flows) > _FLOWS_KEPT:
                self._flows.pop(next(iter(self._flows)))
            number = self._next_flow
            self._next_flow += 1
            self._flows[span.fence] = (number, {span.rank})
            ends = [("s", span.began_us), ("f", span.ended_us)]
        else:
            number, members = known
            members.add(span.rank)
            ends = [("t", span.ended_us)]
        for ph, us in ends:
            flow: dict[str, Any] = {
                "ph": ph,
                "name": "fence",
                "cat": "fence",
                "id": number,
                "pid": _PID,
                "tid": track,
                "ts": round(max(0.0, us), 3),
            }
            if ph == "f":
                flow["bp"] = "e"
            self._hold(track, flow)
