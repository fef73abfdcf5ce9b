"""What the rules share: who is in which phase, who is gone, which group has which members.

One pass keeps it, in memory that does not grow with the log: per rank, per group and per device,
never per line.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from phasesync.audit.events import Event, Header, Name
from phasesync.audit.ledgers import Devices, Tags
from phasesync.audit.vocabulary import is_timeout_error

__all__ = (
    "WAITING",
    "Facts",
    "Open",
    "RankFacts",
    "group_of",
    "instance_of",
    "of_later_epoch",
    "ranks_in",
    "same_work",
)

# Phases whose rank waits for others while it is in them.
WAITING: Final = frozenset(
    {
        "fence",
        "collective",
        "send",
        "receive",
        "wait",
        "init_group",
        "destroy_group",
        "publish",
        "lock",
        "drain",
        "teardown",
    }
)
_IDS: Final = ("bucket", "call", "key", "ticket", "epoch", "part", "group", "request", "version")
_EPOCHS_KEPT: Final = 3
_FAILURES_KEPT: Final = 256


@dataclass(slots=True)
class Open:
    """A phase that began and has not ended, with its last sign of life."""

    event: Event
    progress: Event | None = None


@dataclass(slots=True)
class RankFacts:
    """Where one rank stands."""

    name: Name
    open: list[Open] = field(default_factory=list)
    last: Event | None = None
    first: Event | None = None
    exit: Event | None = None
    left: Event | None = None
    failed: Event | None = None
    recovered: list[int] = field(default_factory=list)
    done: dict[int | None, dict[str, Event]] = field(default_factory=dict)
    began: dict[int | None, dict[str, Event]] = field(default_factory=dict)
    epochs: deque[int] = field(default_factory=lambda: deque(maxlen=_EPOCHS_KEPT))
    attempted: dict[str, Event] = field(default_factory=dict)

    def opened(self, *actions: str) -> list[Open]:
        return [each for each in self.open if each.event.action in actions]

    def finished(self, epoch: int | None) -> dict[str, Event]:
        return self.done.get(epoch, {})

    def started(self, epoch: int | None) -> dict[str, Event]:
        return self.began.get(epoch, {})


class Facts:
    """The state of the run as far as the lines read so far tell it."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.ranks: dict[Name, RankFacts] = {rank: RankFacts(rank) for rank in header.ranks}
        self.devices = Devices(header)
        self.tags = Tags(self.devices)
        self.groups: dict[str, dict[Name, None]] = {}
        self.members: dict[str, tuple[Name, ...]] = {}
        self.failures: list[Event] = []
        self.exits: dict[Name, Event] = {}
        self.reconciled: set[Name] = set()
        self.skews: Sequence[tuple[str, str, float, float]] = ()
        self.shut_down: int | None = None
        self.at = -1
        self.epoch: int | None = None
        self.first_epoch: int | None = None

    def rank(self, name: Name) -> RankFacts:
        facts = self.ranks.get(name)
        if facts is None:
            facts = self.ranks[name] = RankFacts(name)
            if not self.header.ranks:  # Without a header, who is seen is who there is.
                self.devices.ranks[name] = None
        return facts

    def match(self, event: Event) -> Open | None:
        """Note `event`; the open phase that it ends or goes on with, if any."""
        rank = self.rank(event.rank)
        self.at = event.at
        if rank.first is None:
            rank.first = event
        rank.last = event
        if event.attrs:
            self.devices.learn(event)
            self._groups(event)
        if event.epoch is not None:
            if self.first_epoch is None:
                self.first_epoch = event.epoch
            if not rank.epochs or rank.epochs[-1] != event.epoch:
                self._turn(rank, event.epoch)
        match event.kind:
            case "start":
                if rank.exit is not None and of_later_epoch(event, rank.exit):
                    rank.exit = None  # Another process has taken its place.
                    rank.open.clear()
                rank.open.append(Open(event))
                if len(rank.open) > 4096:  # a log that never ends its phases
                    del rank.open[0]
                rank.began.setdefault(event.epoch, {}).setdefault(event.phase, event)
                return None
            case "progress":
                found = _find(rank.open, event)
                if found is not None:
                    found.progress = event
                return found
            case "exit":
                found = _find(rank.open, event)
                rank.exit = self.exits[event.rank] = event
                self._fail(event)
                return found
            case _:
                found = _find(rank.open, event)
                if found is not None:
                    rank.open.remove(found)
                if event.kind == "end":
                    if event.action == "teardown" and self.header.kind(event.rank) == "controller":
                        self.shut_down = event.at
                    rank.done.setdefault(event.epoch, {})[event.phase] = event
                    if event.action == "unregister":
                        rank.left = event
                elif event.kind != "abort":
                    rank.failed = event
                    self._fail(event)
                return found

    def settle(self, event: Event, start: Open | None) -> None:
        """Let the ledgers take over `event`, after the rules have seen it."""
        self.devices.settle(event)
        self.tags.settle(event, start.event if start else None)

    def _fail(self, event: Event) -> None:
        if len(self.failures) < _FAILURES_KEPT:
            self.failures.append(event)

    def _turn(self, rank: RankFacts, epoch: int) -> None:
        if epoch in rank.epochs:
            return
        if len(rank.epochs) == _EPOCHS_KEPT:
            old = rank.epochs[0]
            rank.done.pop(old, None)
            rank.began.pop(old, None)
        rank.epochs.append(epoch)
        self.epoch = epoch if self.epoch is None else max(self.epoch, epoch)

    def _groups(self, event: Event) -> None:
        if self.exits:
            self._reconcile(event)
        group = group_of(event)
        if group is None:
            return
        self.groups.setdefault(group, {})[event.rank] = None
        members = event.attrs.get("members")
        if isinstance(members, list | tuple) and members:
            self.members[group] = tuple(ranks_in(members, self.header.ranks))

    def _reconcile(self, event: Event) -> None:
        """Note which lost ranks the others know to be lost: replaced, or no member any more."""
        replaced = event.attrs.get("replaces")
        if replaced is not None:
            self.reconciled.update(ranks_in(replaced, self.header.ranks))
        members = event.attrs.get("members")
        if isinstance(members, list | tuple) and members:
            named = set(ranks_in(members, self.header.ranks))
            for rank, exit_ in self.exits.items():
                if rank not in named and exit_.epoch != event.epoch:
                    self.reconciled.add(rank)

    def silent(self, kind: str | None = None) -> tuple[Name, ...]:
        """The ranks that the log promises, of one kind or of all, and has no line of."""
        return tuple(
            rank
            for rank in self.header.ranks
            if self.ranks[rank].first is None and kind in (None, self.header.kind(rank))
        )

    def recover(self, rank: RankFacts, at: int) -> None:
        """Note that a recovery of `rank` has ended well."""
        if len(rank.recovered) < _FAILURES_KEPT:
            rank.recovered.append(at)

    def is_over(self, exit_: Event) -> bool:
        """Whether a process ended after the shutdown of the job, with nothing under way in it."""
        rank = self.ranks[exit_.rank]
        begun = [each for each in rank.open if each.event.action != "life"]
        return self.shut_down is not None and self.shut_down < exit_.at and not begun

    def is_anew(self, event: Event, at: int, epoch: int | None) -> bool:
        """Whether `event` is of a later epoch than `epoch`, which its rank began after it had
        recovered from what was at `at`.
        """
        if event.epoch is None or epoch is None or event.epoch <= epoch:
            return False
        return any(at < end < event.at for end in self.rank(event.rank).recovered)

    def waiting(self) -> tuple[Name, ...]:
        """The ranks that still wait for somebody, now."""
        return tuple(name for name, rank in self.ranks.items() if self.waits_of(rank))

    def waits_of(self, rank: RankFacts) -> list[Open]:
        if rank.exit is not None:
            return []
        return [
            each
            for each in rank.open
            if each.event.action in WAITING or each.event.attrs.get("dispatch") is True
        ]

    def troubled(self) -> bool:
        """Whether anything failed, or somebody waits."""
        return bool(self.failures) or bool(self.waiting())

    def failures_after(self, at: int, ranks: Iterable[Name] | None = None) -> list[Event]:
        wanted = None if ranks is None else set(ranks)
        return [
            event
            for event in self.failures
            if event.at > at and (wanted is None or event.rank in wanted)
        ]

    def outcome(self, start: Event) -> str:
        """How the phase that `start` began went on: `good`, `bad` or `open`."""
        for failure in self.failures:
            if (
                failure.at > start.at
                and failure.rank == start.rank
                and (failure.phase == start.phase or failure.kind == "exit")
            ):
                return "bad"
        rank = self.ranks[start.rank]
        return "open" if any(each.event is start for each in rank.open) else "good"


def _find(phases: list[Open], event: Event) -> Open | None:
    """The latest open phase that `event` can belong to: same name, no identity that differs."""
    for each in reversed(phases):
        if each.event.phase == event.phase and same_work(each.event.attrs, event.attrs):
            return each
    if event.kind == "end":
        # An end whose identity differs still ends the phase: that it differs is R-EPOCH's business.
        for each in reversed(phases):
            if each.event.phase == event.phase:
                return each
    return None


def of_later_epoch(event: Event, other: Event) -> bool:
    """Whether `event` is of a later epoch than `other`, as far as both name one."""
    return event.epoch is not None and other.epoch is not None and event.epoch > other.epoch


def same_work(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two sets of attributes can describe one piece of work."""
    if not one or not other:
        return True
    return all(name not in one or name not in other or one[name] == other[name] for name in _IDS)


def group_of(event: Event) -> str | None:
    """The communicator that `event` names, if any."""
    group = event.attrs.get("group")
    return None if group is None or group == "" else str(group)


def instance_of(event: Event) -> tuple[str, ...]:
    """What tells one call of a fence from another inside an epoch."""
    attrs = event.attrs
    if not attrs:
        return ()
    return tuple(
        f"{name}={attrs[name]}" for name in ("epoch", "call", "key", "ticket") if name in attrs
    )


def ranks_in(value: object, known: Iterable[Name]) -> list[Name]:
    """The ranks that an attribute names (a rank, or a list of them)."""
    items = value if isinstance(value, list | tuple) else [value]
    names = {str(rank): rank for rank in known}
    found: list[Name] = []
    for item in items[:65536]:
        text = str(item)
        if text in names:
            found.append(names[text])
        elif text.rpartition("/")[2] in names:
            found.append(names[text.rpartition("/")[2]])
        elif isinstance(item, int | str) and not isinstance(item, bool):
            found.append(item)
    return found


def is_timeout(event: Event) -> bool:
    """Whether a wait was cut by a limit."""
    return event.kind == "timeout" or (
        event.kind == "fail" and is_timeout_error(event.attrs.get("error"))
    )
