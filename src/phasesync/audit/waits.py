"""Who waits for whom at the end of a log: the graph that all rules about hangs read.

A wait is a phase that never ended, or that a limit cut. Whoever should be there and is not is
absent; a rank that waits is never guilty for waiting.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from phasesync.audit.events import Event, Name, version_number
from phasesync.audit.facts import WAITING, Facts, group_of, instance_of, is_timeout, ranks_in

__all__ = (
    "STEPS",
    "Meet",
    "Wait",
    "Waits",
    "named",
    "strongly_connected",
    "unrecovered",
    "version_of",
    "waiters",
)

# Steps at which ranks of one role meet, or a sender its receivers.
STEPS: Final = frozenset({"fence", "collective", "send", "receive"})

_NAMED: Final = 16
_PAIRED: Final = frozenset({"send", "receive", "publish", "wait"})
_TOGETHER: Final = frozenset({"fence", "collective", "init_group", "destroy_group"})


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank that waits in one phase; `cut` is the event that ended it by a limit."""

    event: Event
    cut: Event | None = None

    @property
    def rank(self) -> Name:
        return self.event.rank


@dataclass(slots=True)
class Meet:
    """One place at which ranks wait for each other, with those who came and those who did not."""

    action: str
    phase: str
    group: str | None
    epoch: int | None
    waits: list[Wait] = field(default_factory=list)
    absent: dict[Name, str] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[Name, ...]:
        return tuple(dict.fromkeys(wait.rank for wait in self.waits))

    @property
    def first(self) -> Event:
        return min((wait.event for wait in self.waits), key=lambda event: event.at)

    @property
    def last(self) -> Event:
        return max((wait.event for wait in self.waits), key=lambda event: event.at)


class Waits:
    """All waits of a log, by the place where ranks meet. `cut` are the waits that a limit ended."""

    def __init__(self, facts: Facts, cut: Iterable[Wait] = ()) -> None:
        self.facts = facts
        self.waits = [
            Wait(each.event) for rank in facts.ranks.values() for each in facts.waits_of(rank)
        ]
        self.waits += list(cut)
        self.waits.sort(key=lambda wait: wait.event.at)
        self.meets = self._meets()
        self.waiting_ranks = {wait.rank for wait in self.waits}
        for meet in self.meets:
            meet.absent = self._absent(meet)

    def _meets(self) -> list[Meet]:
        meets: dict[tuple[object, ...], Meet] = {}
        for wait in self.waits:
            event = wait.event
            key: tuple[object, ...]
            group = group_of(event)
            if event.action in _TOGETHER:
                bucket = event.attrs.get("bucket", event.means.bucket)
                key = (event.phase, group, event.epoch, instance_of(event), str(bucket))
            elif event.action in ("send", "receive") and group is not None:
                key = ("payload", group, event.epoch)
            else:
                key = (event.rank, event.phase, event.epoch)
            meet = meets.get(key)
            if meet is None:
                meet = meets[key] = Meet(event.action, event.phase, group, event.epoch)
            meet.waits.append(wait)
        return list(meets.values())

    def expected(self, meet: Meet) -> tuple[Name, ...]:
        """Who should come to `meet`, as far as the log tells."""
        facts, header = self.facts, self.facts.header
        for wait in meet.waits:
            members = wait.event.attrs.get("members")
            if isinstance(members, list | tuple) and members:
                return tuple(ranks_in(members, header.ranks))
            target = wait.event.attrs.get("target", wait.event.attrs.get("targets"))
            if target is not None:
                return tuple(ranks_in(target, header.ranks))
            if wait.event.action == "receive" and (named := self._read_from(wait.event)):
                return named
        if meet.group is not None and meet.group in facts.members:
            return facts.members[meet.group]
        if meet.action == "init_group":
            return self._roles_of(meet)
        if meet.action in _TOGETHER:
            if meet.group is not None:
                seen = tuple(facts.groups.get(meet.group, ()))
                everybody = meet.group.lower() in ("all", "world")
                if len(seen) > 1 and (not everybody or len(seen) > len(meet.ranks)):
                    return seen
            peers: dict[Name, None] = {}
            for rank in meet.ranks:
                peers.update(dict.fromkeys(header.peers(rank, facts.ranks)))
            return tuple(peers)
        if meet.action in _PAIRED:
            seen = tuple(facts.groups.get(meet.group, ())) if meet.group is not None else ()
            if len({header.kind(rank) for rank in seen}) > 1:
                return seen
            if meet.group is not None and meet.group.lower() in ("all", "world"):
                return tuple(facts.ranks)
            mine = {header.kind(rank) for rank in meet.ranks}
            return tuple(
                rank for rank in facts.ranks if header.kind(rank) not in mine or not header.roles
            )
        return ()

    def _read_from(self, reader: Event) -> tuple[Name, ...]:
        """From whom a rank says that it reads."""
        said = reader.attrs.get("handles", reader.attrs.get("sources"))
        named = ranks_in(said, self.facts.header.ranks) if said is not None else ()
        return tuple(rank for rank in named if rank in self.facts.ranks)

    def _roles_of(self, meet: Meet) -> tuple[Name, ...]:
        """For a group that is being made: everybody whose exact role has somebody there."""
        header = self.facts.header
        if not header.roles:
            return meet.ranks
        roles = {header.role(rank) for rank in meet.ranks}
        ranks = self.facts.ranks
        silent = self.facts.silent()  # Then it may wait for one of those, rather than for the dead.
        return tuple(
            rank
            for rank in ranks
            if header.role(rank) in roles
            and (not silent or (gone := ranks[rank].exit) is None or _same_epoch(gone, meet))
        )

    def _absent(self, meet: Meet) -> dict[Name, str]:
        here = set(meet.ranks)
        absent = {}
        for rank in dict.fromkeys((*self.expected(meet), *self._fallen(meet))):
            if rank in here or self._passed(rank, meet):
                continue
            absent[rank] = self._state(rank, meet)
        return absent

    def _fallen(self, meet: Meet) -> Iterator[Name]:
        """Who was there, and failed in it: whoever else belongs to it, that one does."""
        if meet.action not in _TOGETHER:
            return
        for rank, known in self.facts.ranks.items():
            failed = known.failed
            if (
                failed is not None
                and (failed.phase, failed.epoch) == (meet.phase, meet.epoch)
                and group_of(failed) in (None, meet.group)
            ):
                yield rank

    def _passed(self, rank: Name, meet: Meet) -> bool:
        """Whether `rank` came to this meet and went on."""
        known = self.facts.ranks.get(rank)
        if known is None or meet.action not in _TOGETHER:
            return False
        done = known.finished(meet.epoch).get(meet.phase)
        return (
            done is not None
            and instance_of(done) in ((), instance_of(meet.first))
            and done.at > meet.first.at
        )

    def without_lines(self, meet: Meet) -> tuple[Name, ...]:
        """Ranks that the log promises, of the kind of those who wait, and has no line of."""
        header = self.facts.header
        return tuple(
            rank
            for rank in header.peers(meet.ranks[0], header.ranks)
            if self._state(rank, meet) == "silent"
        )

    def _state(self, rank: Name, meet: Meet) -> str:
        """Where an absent rank is: gone, failed, silent, waiting, working or idle."""
        facts = self.facts
        known = facts.ranks.get(rank)
        if known is None or known.first is None:
            return "silent"
        if known.exit is not None:
            return "gone" if _same_epoch(known.exit, meet) else "gone before"
        if known.left is not None:
            return "gone before"
        failed = unrecovered(known.failed, facts)
        cut = failed is not None and is_timeout(failed) and failed.action in WAITING
        if failed is not None and not cut and _same_epoch(failed, meet):
            return "failed"
        if rank in self.waiting_ranks:
            return "waiting"
        if known.open:
            return "working"
        return "idle"


def named(ranks: Iterable[Name]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`; of very many, the first."""
    each = tuple(ranks)
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each[:_NAMED]))}{more}"


def waiters(ranks: Iterable[Name]) -> str:
    """`rank 3 waits`, or `ranks 0, 1, 2 wait`."""
    each = tuple(ranks)
    return f"{named(each)} wait{'' if len(each) > 1 else 's'}"


def _same_epoch(event: Event, meet: Meet) -> bool:
    return event.epoch is None or meet.epoch is None or event.epoch >= meet.epoch


def unrecovered(failed: Event | None, facts: Facts) -> Event | None:
    """`failed`, unless the same phase succeeded on that rank afterwards."""
    if failed is None:
        return None
    done = facts.ranks[failed.rank].finished(failed.epoch).get(failed.phase)
    return None if done is not None and done.at > failed.at else failed


def version_of(event: Event) -> float | None:
    return version_number(event.attrs.get("version"))


def strongly_connected(edges: dict[Name, set[Name]]) -> list[list[Name]]:
    """The cycles of a graph: its strongly connected components with more than one node."""
    index: dict[Name, int] = {}
    low: dict[Name, int] = {}
    stack: list[Name] = []
    on: set[Name] = set()
    found: list[list[Name]] = []
    for root in edges:
        if root in index:
            continue
        work: list[tuple[Name, list[Name]]] = [(root, list(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on.add(root)
        while work:
            node, left = work[-1]
            if left:
                after = left.pop()
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on.add(after)
                    work.append((after, list(edges.get(after, ()))))
                elif after in on:
                    low[node] = min(low[node], index[after])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                part = []
                while True:
                    top = stack.pop()
                    on.discard(top)
                    part.append(top)
                    if top == node:
                        break
                if len(part) > 1:
                    found.append(part)
    return found
