"""What is where: free memory per device, and per rank which tags are mapped with which content.

A ledger holds only what lines said. What no line said is unknown, and unknown is never an
accusation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phasesync.audit.events import Event, Header, Name, number, version_number
from phasesync.audit.vocabulary import KV, WEIGHTS, tag_name

__all__ = ("ALL", "Content", "Devices", "TagState", "Tags", "tags_of")

ALL: Final = "*"
_NEAR: Final = 0.05  # GiB; figures in reports are rounded


class Devices:
    """Free GiB per device, and which ranks hold memory there."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.ranks: dict[Name, None] = dict.fromkeys(header.ranks)
        self.measured: set[Name] = set()
        self.device_of: dict[Name, str] = {}
        self._seen_free: dict[str, float] = {}
        self._changed: dict[str, float] = {}
        self._reserved: dict[tuple[Name, str], tuple[tuple[str, ...], float]] = {}
        self._figures = set(header.initial_gib.values())

    def _free(self, device: str) -> float | None:
        """GiB free on `device` by the last measurement or the header, and what changed since."""
        changed = self._changed.get(device, 0.0)
        seen = self._seen_free.get(device)
        if seen is not None:
            return seen - changed
        capacity = self.header.capacity(device)
        if capacity is None:
            return None
        initial = self.header.initial_gib
        held = next(
            (initial[str(rank)] for rank in self.holders(device) if str(rank) in initial),
            initial.get(device),
        )
        if held is None and len(self._figures) == 1:
            held = next(iter(self._figures))
        return None if held is None else capacity - held - changed

    def own(self, rank: Name) -> str:
        """The device of `rank`: the one that it was seen to use, else the one of its number."""
        return self.device_of.get(rank, str(rank))

    def holders(self, device: str) -> tuple[Name, ...]:
        """The ranks that have memory on `device`."""
        known = tuple(rank for rank in self.ranks if self.device_of.get(rank) == device)
        if known:
            return known
        if any(str(rank) == device for rank in self.ranks):
            return tuple(
                rank for rank in self.ranks if str(rank) == device and rank not in self.device_of
            )
        loose = [rank for rank in self.ranks if rank not in self.device_of]
        return tuple(loose) if len(loose) == 1 else ()

    def touched(self, event: Event) -> tuple[str, ...]:
        """The devices that a phase acts on."""
        gpus = event.attrs.get("gpus", event.attrs.get("devices"))
        if isinstance(gpus, list | tuple):
            return tuple(str(gpu) for gpu in gpus[:4096])
        for name in ("device", "gpu"):
            if event.attrs.get(name) is not None:
                return (str(event.attrs[name]),)
        return (self.own(event.rank),)

    def learn(self, event: Event) -> None:
        """Which device a rank is on, from what it says of its own memory."""
        if event.rank in self.device_of:
            return
        attrs = event.attrs
        if event.kind in ("fail", "timeout"):
            return
        said: list[str] = []
        for name in ("delta_gib", "gpus", "device"):
            value = attrs.get(name)
            if isinstance(value, Mapping | list | tuple) and len(value) == 1:
                said.append(str(next(iter(value))))
            elif value is not None and not isinstance(value, Mapping | list | tuple):
                said.append(str(value))
        if len(set(said)) == 1 and said[0] not in self.device_of.values():
            self.device_of[event.rank] = said[0]

    def delta(self, event: Event) -> dict[str, float] | None:
        """What `event` says that it changed per device; None where it says nothing."""
        deltas = event.attrs.get("delta_gib")
        if isinstance(deltas, Mapping):
            pairs = ((str(device), number(value)) for device, value in deltas.items())
            return {device: value for device, value in pairs if value is not None}
        value = number(deltas)
        return None if value is None else {self.own(event.rank): value}

    def room(self, device: str, *, but: tuple[Name, str] | None = None) -> float | None:
        """GiB free on `device` after what running phases will still map; None where unknown."""
        free = self._free(device)
        if free is None:
            return None
        for key, (devices, need) in self._reserved.items():
            if key != but and device in devices:
                free -= need
        return free

    def short(self, event: Event) -> dict[str, tuple[float, float]]:
        """The devices on which what `event` will map does not fit: device -> (room, need)."""
        need = event.attrs.get("need_gib")
        devices = self.touched(event)
        short = {}
        for device in devices:
            wanted = number(need.get(device)) if isinstance(need, Mapping) else number(need)
            if wanted is None:
                continue
            room = self.room(device, but=(event.rank, event.phase))
            if room is not None and room + _NEAR < wanted:
                short[device] = (room, wanted)
        return short

    def settle(self, event: Event) -> None:
        """Take over what `event` changed."""
        attrs = event.attrs
        if not attrs and event.kind == "start":
            return
        key = (event.rank, event.phase)
        if event.kind == "start":
            need = number(attrs.get("need_gib"))
            if need is not None:
                self._reserved[key] = (self.touched(event), need)
        elif event.kind != "progress":
            self._reserved.pop(key, None)
        for device, change in (self.delta(event) or {}).items():
            self._changed[device] = self._changed.get(device, 0.0) + change
            self.measured.add(event.rank)
        free = attrs.get("free_gib")
        if isinstance(free, Mapping):
            for device, value in free.items():
                if (figure := number(value)) is not None:
                    self._measure(str(device), figure)
        elif (figure := number(free)) is not None:
            self._measure(self.own(event.rank), figure)
            self.measured.add(event.rank)

    def _measure(self, device: str, free: float) -> None:
        self._seen_free[device] = free
        self._changed.pop(device, None)


def tags_of(event: Event) -> tuple[str, ...]:
    """The tags that `event` is about; `ALL` where none is named."""
    named = event.attrs.get("tags", event.attrs.get("tag"))
    if isinstance(named, str):
        return (tag_name(named),)
    if isinstance(named, list | tuple) and named:
        return tuple(dict.fromkeys(tag_name(tag) for tag in named[:64]))
    return event.means.tags or (ALL,)


def _several(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else (value,)


@dataclass(slots=True)
class Content:
    """What a rank's weights hold: `lost` since an event, or a version, or unknown."""

    lost: Event | None = None
    also: dict[str, Event] = field(default_factory=dict)  # other tags that were discarded
    never: Event | None = None
    version: float | None = None
    committed: float | None = None
    committed_by: Event | None = None


@dataclass(slots=True)
class TagState:
    """The tags of one rank. `every` is what was last said of all tags at once."""

    every: tuple[str, Event] | None = None
    each: dict[str, tuple[str, Event]] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    acquired_at: int = -1
    released_at: int = -1
    half: Event | None = None
    content: Content = field(default_factory=Content)

    def of(self, tag: str) -> tuple[str, Event] | None:
        return self.each.get(tag, self.every)

    def put(self, tags: Iterable[str], state: str, event: Event) -> None:
        for tag in tags:
            if tag == ALL:
                self.each.clear()
                self.every = (state, event)
            else:
                self.each[tag] = (state, event)
                self.said.add(tag)

    def released(self) -> dict[str, Event]:
        """The named tags that are released now."""
        return {tag: event for tag, (state, event) in self.each.items() if state == "released"}


class Tags:
    """Which tags are mapped, with what content, per rank."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self.of: dict[Name, TagState] = {}
        self.acquired: dict[str, dict[Name, Event]] = {}
        self.written: dict[Name, Event] = {}

    def state(self, rank: Name) -> TagState:
        state = self.of.get(rank)
        if state is None:
            state = self.of[rank] = TagState()
        return state

    def concerns(self, event: Event) -> bool:
        """Whether a release or acquire is about tags of an engine, not about a trainer's own
        memory.
        """
        means = event.means
        if means.engine or "tags" in event.attrs or "level" in event.attrs:
            return True
        return means.whole and self._devices.header.kind(event.rank) == "engine"

    def reached(self, event: Event) -> tuple[Name, ...]:
        """The ranks whose tags a phase changes: its own, and those on the devices that it names."""
        if "gpus" not in event.attrs:
            return (event.rank,)
        found = {event.rank: None}
        for device in self._devices.touched(event):
            found.update(dict.fromkeys(self._devices.holders(device)))
        return tuple(found)

    def settle(self, event: Event, start: Event | None) -> None:
        action = event.means.action
        if action == "release" and (self.concerns(event) or (start and self.concerns(start))):
            self._release(event, start)
        elif action == "acquire" and event.kind == "end" and self.concerns(event):
            self._acquire(event, start)
        elif action in ("write", "receive", "load_model") and event.kind == "end":
            self._write(event, start)
        elif action == "serve" and event.kind == "end":
            self._implied((WEIGHTS, KV), event)
        if event.attrs.get("load_format") == "dummy":
            self.state(event.rank).content.never = event

    def _release(self, event: Event, start: Event | None) -> None:
        if event.kind not in ("end", "fail"):
            return
        tags = tags_of(event)
        if tags == (ALL,) and start is not None:
            tags = tags_of(start)
        if event.kind == "fail":
            if event.attrs.get("partial") or number(event.attrs.get("freed_gib")):
                self.state(event.rank).half = event
            return
        level = number(event.attrs.get("level"))
        if level is None and start is not None:
            level = number(start.attrs.get("level"))
        if level == 0:  # vLLM: level 0 pauses and releases nothing
            return
        lost = event.attrs.get("content_lost", event.attrs.get("discarded"))
        names = [lost] if isinstance(lost, str) else lost if isinstance(lost, list | tuple) else []
        gone = WEIGHTS in {tag_name(name) for name in names} or (
            level is not None and level >= 2 and (WEIGHTS in tags or ALL in tags)
        )
        for rank in self.reached(start or event):
            state = self.state(rank)
            state.put(tags, "released", event)
            state.released_at = event.at
            state.half = None
            if gone:
                state.content.lost = event
            for name in names[:64]:
                if str(name) != WEIGHTS:
                    state.content.also[str(name)] = event

    def _acquire(self, event: Event, start: Event | None) -> None:
        tags = tags_of(event)
        if tags == (ALL,) and start is not None:
            tags = tags_of(start)
        for rank in self.reached(start if start is not None and "gpus" in start.attrs else event):
            state = self.state(rank)
            state.put(tags, "mapped", event)
            state.acquired_at = event.at
            state.half = None
            for tag in tags:
                self.acquired.setdefault(tag, {})[rank] = event
            content = state.content
            version = version_number(event.attrs.get("version"))
            if version is not None:
                content.version = version
            if version is not None or event.attrs.get("source") is not None:
                content.lost = None

    def _write(self, event: Event, start: Event | None) -> None:
        state = self.state(event.rank)
        said: Mapping[str, Any] = {**(start.attrs if start else {}), **event.attrs}
        part = str(said.get("part", event.means.part or ""))
        if part.lower() not in ("adapter", "lora", "delta", "peft"):
            state.content.lost = state.content.never = None
            self.written[event.rank] = event
            named = {part, *(str(tag) for tag in _several(said.get("tags", ())))}
            if named == {""}:
                state.content.also.clear()
            for tag in named:
                state.content.also.pop(tag, None)
        version = version_number(said.get("version"))
        content = state.content
        if version is not None:
            content.version = version
            if event.means.action == "write" and version >= (content.committed or version):
                content.committed, content.committed_by = version, event
        if event.means.action != "load_model":
            self._implied((WEIGHTS,), event)

    def _implied(self, tags: tuple[str, ...], event: Event) -> None:
        """What was used without harm was there, even if no line says who mapped it."""
        state = self.of.get(event.rank)
        if state is None:
            return
        for tag in tags:
            known = state.of(tag)
            if known is not None and known[0] == "released":
                state.each[tag] = ("implied", event)
