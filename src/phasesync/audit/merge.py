"""Journals of many ranks as one order that their tickets allow.

Within a rank the order is certain, within a host one clock gives it, and between hosts a fence
does: nobody passes before all who were judged have arrived. Clocks between hosts only break ties.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from phasesync.audit.traces import RawLine

__all__ = ("Merge", "Stream", "instance_of", "wall_ns")

_FAR: Final = (
    5_000_000_000  # ns; a host whose clocks disagree by more was restarted between two files
)

NOBODY: Final[Mapping[str, int]] = MappingProxyType({})

_Instance = tuple[object, object, object]


class Stream(NamedTuple):
    """One journal file: how it is called in answers, and its lines."""

    name: str
    lines: Iterable[RawLine]


class Merge:
    """Iterate over it for (file, line number, line); `bad` is told of lines that are none.

    `absent` says how many members of a scope have no stream here, where that is on purpose.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        bad: Callable[[str, RawLine], None],
        absent: Mapping[str, int] = NOBODY,
    ) -> None:
        self._absent = absent
        self._names = [stream.name for stream in streams]
        self._sources = [iter(stream.lines) for stream in streams]
        self._bad = bad
        self._offsets: dict[str, int] = {}
        self._own: list[int | None] = [None] * len(streams)
        self._came: dict[_Instance, dict[tuple[object, object], None]] = {}
        self._went: dict[_Instance, int] = {}
        self._parked: dict[_Instance, list[tuple[int, int]]] = {}
        self._heads: list[tuple[int, dict[str, Any], str] | None] = [None] * len(streams)
        self._unproven: dict[_Instance, None] = {}

    def __iter__(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        heap: list[tuple[int, int]] = []
        for index in range(len(self._sources)):
            key = self._advance(index)
            if key is not None:
                heap.append((key, index))
        heapify(heap)
        heads = self._heads
        while heap or self._parked:
            key, index = heappop(heap) if heap else self._give_up()
            while True:
                head = heads[index]
                assert head is not None
                number, line, file = head
                event = line.get("event")
                if event == "fence.pass" and not self._proven(line, key, index):
                    break
                if event == "fence.arrive":
                    for released in self._arrived(line):
                        heappush(heap, released)
                yield file, number, line
                following = self._advance(index)
                if following is None:
                    break
                key = following
                if heap and heap[0] < (key, index):
                    heappush(heap, (key, index))
                    break

    def _advance(self, index: int) -> int | None:
        """Read the next line of one file into its head; its key, or None at the end."""
        for raw in self._sources[index]:
            if raw.data is None:
                self._bad(raw.file or self._names[index], raw)
                continue
            file = raw.file or self._names[index]
            before = self._heads[index]
            if before is not None and before[2] != file:
                self._own[index] = None  # Another process, and it may be of another boot.
            self._heads[index] = (raw.number, raw.data, file)
            return self._key(index, raw.data)
        self._heads[index] = None
        return None

    def _key(self, index: int, line: Mapping[str, Any]) -> int:
        mono = line.get("mono_ns")
        if type(mono) is not int:
            return 0
        offset = self._own[index]
        if offset is None:
            offset = self._own[index] = self._offset(line, mono)
        return mono + offset

    def _offset(self, line: Mapping[str, Any], mono: int) -> int:
        """What turns this file's monotonic clock into wall time: its host's, as first seen."""
        own = wall_ns(line.get("timestamp")) - mono
        host = str(line.get("host", ""))
        known = self._offsets.setdefault(host, own)
        return known if abs(known - own) < _FAR else own

    def _proven(self, line: Mapping[str, Any], key: int, index: int) -> bool:
        """Whether all who were judged at this fence have been seen to arrive; else it waits."""
        count = _count_on(line)
        instance = instance_of(line)
        if type(count) is not int or instance in self._unproven:
            return True
        count -= self._absent.get(str(instance[1]), 0)
        if len(self._came.get(instance, ())) >= count:
            went = self._went[instance] = self._went.get(instance, 0) + 1
            if went >= count:
                self._came.pop(instance, None)
                self._went.pop(instance, None)
                self._unproven[instance] = None
                if len(self._unproven) > 4096:
                    self._unproven.pop(next(iter(self._unproven)))
            return True
        self._parked.setdefault(instance, []).append((key, index))
        return False

    def _arrived(self, line: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Count an arrival; who may go on because of it."""
        instance = instance_of(line)
        came = self._came.setdefault(instance, {})
        came[(str(line.get("role")), str(line.get("rank")))] = None
        if len(self._came) > 65536:
            self._came.pop(next(iter(self._came)))
        waiting = self._parked.get(instance)
        if not waiting:
            return []
        head = self._heads[waiting[0][1]]
        needed = _count(head) - self._absent.get(str(instance[1]), 0)
        return self._parked.pop(instance) if len(came) >= needed else []

    def _give_up(self) -> tuple[int, int]:
        """Nobody else can go on: let the earliest pass go unproven, for a log is missing."""
        instance, waiting = min(self._parked.items(), key=lambda item: min(item[1]))
        first = min(waiting)
        waiting.remove(first)
        if not waiting:
            del self._parked[instance]
        self._unproven[instance] = None
        return first


def _count_on(line: Mapping[str, Any]) -> object:
    """How many arrivals a pass claims: its ticket's, or those that the caller's own join covers."""
    ticket = line.get("ticket")
    return ticket.get("count") if type(ticket) is dict else line.get("joined")


def instance_of(line: Mapping[str, Any]) -> _Instance:
    """The fence instance that a line is about, whatever its fields hold."""
    attempt, scope, generation = line.get("attempt"), line.get("scope"), line.get("generation")
    if type(scope) is not str or type(generation) is not int or type(attempt) is not int:
        return (str(attempt), str(scope), str(generation))
    return (attempt, scope, generation)


def wall_ns(text: object) -> int:
    if isinstance(text, str):
        try:
            return int(datetime.fromisoformat(text).timestamp() * 1e9)
        except (ValueError, OverflowError):
            return 0
    return 0


def _count(head: tuple[int, dict[str, Any], str] | None) -> int:
    """How many arrivals the pass in `head` was judged on."""
    count = _count_on(head[1]) if head else 0
    assert isinstance(count, int)
    return count
