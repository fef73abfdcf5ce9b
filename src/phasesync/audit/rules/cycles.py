"""Waits that close a circle, and fences on a group that carries payload: R-NOCYCLE, R-CTRLPLANE."""

from collections.abc import Iterable
from typing import Final

from phasesync.audit.answer import MISSING, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import group_of, ranks_in
from phasesync.audit.rules.seen import Seen, lock_of
from phasesync.audit.waits import STEPS, Meet, Wait, Waits, strongly_connected, waiters

__all__ = ("ctrlplane", "nocycle")

_RINGS: Final = STEPS | {"init_group", "destroy_group", "lock"}
_PAYLOAD: Final = frozenset({"send", "receive", "collective", "write"})


def nocycle(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-NOCYCLE: a wait-for cycle over groups, threads or locks.

    Sees: a phase queued behind another of the same rank while peers wait for it; phases that name
    what they wait for and form a ring; groups that are joined in different orders. Locks that are
    taken in different orders count too. Cannot see: waits of threads that no line shows, and
    members of a group that no line names. Sources: TRL issue 6797, slime PR 2331, verl PR 7846.
    """
    found = _queued(waits, explained) + _named_ring(waits, seen, explained)
    found += _locks(waits, seen, explained)
    if found:
        return found
    live = [meet for meet in waits.meets if meet.action in _RINGS]
    edges: dict[Name, set[Name]] = {}
    at: dict[Name, list[Meet]] = {}
    for meet in live:
        for wait in meet.waits:
            at.setdefault(wait.rank, []).append(meet)
            edges.setdefault(wait.rank, set()).update(
                rank
                for rank, state in meet.absent.items()
                if state == "waiting" and _is_awaited(rank, meet, waits)
            )
    for ring in strongly_connected(edges):
        meets = {id(meet): meet for rank in ring for meet in at.get(rank, ())}
        groups = {meet.group for meet in meets.values()}
        if len(meets) < 2 or None in groups or len(groups) < 2:
            continue
        decided = _decided(ring, list(meets.values()), seen)
        guilty = _closers(ring, list(meets.values()))
        events = [wait.event for meet in meets.values() for wait in meet.waits]
        explained.update(event.at for event in events)
        steps = "; ".join(
            f"{meet.phase} on group {meet.group} has {', '.join(map(str, meet.ranks))} and "
            "waits for "
            f"{', '.join(map(str, meet.absent))}"
            for meet in meets.values()
        )
        if decided:
            sides = sorted((meet.ranks for meet in meets.values()), key=len)
            found.append(
                Finding.on(
                    "R-SAMEPLAN",
                    decided[0],
                    f"ranks decided differently in {decided[0].phase}, and went different ways: "
                    f"{steps}",
                    *decided[1:8],
                    *events[:4],
                    strength=MISSING,
                    guilty=sides[0] if len(sides[0]) < len(sides[-1]) else (),
                    waiting=waits.facts.waiting(),
                )
            )
            continue
        found.append(
            Finding.on(
                "R-NOCYCLE",
                max((e for e in events if e.rank in guilty), key=lambda e: e.at),
                f"a cycle of waits: {steps}",
                *events[:8],
                strength=MISSING,
                guilty=tuple(guilty),
                waiting=waits.facts.waiting(),
            )
        )
    return found


def _decided(ring: list[Name], meets: list[Meet], seen: Seen) -> list[Event]:
    """The decisions that sent the ranks of a ring to different meets, one value each."""
    for chosen in seen.choices.values():
        values = {
            frozenset(chosen[rank][0] for rank in meet.ranks if rank in chosen) for meet in meets
        }
        apart = len(values) == len(meets) and all(len(each) == 1 for each in values)
        if apart and all(rank in chosen for rank in ring):
            return sorted((chosen[rank][1] for rank in ring), key=lambda event: event.at)
    return []


def _is_joint(fence: Meet, payload: list[Wait], waits: Waits) -> bool:
    """Whether the payload is a collective of the ranks at the fence too: then they went another way
    than their peers, which is R-SAMEPLAN.
    """
    kind = waits.facts.header.kind
    kinds = {kind(rank) for rank in fence.ranks}
    return all(wait.event.action == "collective" and {kind(wait.rank)} == kinds for wait in payload)


def _is_awaited(rank: Name, meet: Meet, waits: Waits) -> bool:
    """Whether those at a meet wait for `rank`: a sender waits for receivers, not for the senders
    of its own side that never moved anything on that group.
    """
    kind = waits.facts.header.kind
    if meet.action not in ("send", "receive") or not waits.facts.header.roles:
        return True
    if kind(rank) not in {kind(other) for other in meet.ranks}:
        return True
    return any(
        event.action in _PAYLOAD and group_of(event) == meet.group
        for phases in waits.facts.ranks[rank].began.values()
        for event in phases.values()
    )


def _closers(ring: list[Name], meets: list[Meet]) -> list[Name]:
    """Of a ring, those who chose against the majority; all of it where there is none."""
    sides = sorted(([rank for rank in meet.ranks if rank in ring] for meet in meets), key=len)
    sides = [side for side in sides if side]
    if len(sides) == 2 and len(sides[0]) < len(sides[1]) and len({m.phase for m in meets}) > 1:
        return sorted(sides[0], key=str)
    return sorted(ring, key=lambda rank: (str(type(rank)), rank))


def _queued(waits: Waits, explained: set[int]) -> list[Finding]:
    found = []
    for wait in waits.waits:
        event = wait.event
        if event.attrs.get("queued_behind") is None:
            continue
        others = [
            other.event
            for other in waits.waits
            if other.rank != event.rank
            and other.event.phase == event.phase
            and group_of(other.event) == group_of(event)
        ]
        own = [
            each.event
            for each in waits.facts.ranks[event.rank].open
            if each.event is not event and group_of(each.event) != group_of(event)
        ]
        if not others or not own:
            continue
        explained.update(each.event.at for each in waits.waits)
        ahead = own[-1]
        found.append(
            Finding.on(
                "R-NOCYCLE",
                event,
                f"rank {event.rank} queued {event.phase} behind "
                f"{event.attrs['queued_behind']}; "
                f"{', '.join(str(other.rank) for other in others)} wait for it in "
                f"{event.phase}, and "
                "the order of the two groups differs between ranks",
                ahead,
                *others[:6],
                strength=MISSING,
                waiting=waits.facts.waiting(),
            )
        )
    return found


def _named_ring(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """A ring of open phases that say what they wait for."""
    nodes = [
        each.event for rank in waits.facts.ranks.values() if rank.exit is None for each in rank.open
    ][:4096]
    edges: dict[Name, set[Name]] = {}
    for index, node in enumerate(nodes):
        named = node.attrs.get("waiting_for", node.attrs.get("waits_for"))
        if named is not None:
            edges[index] = set(_named(node, named, nodes, waits, seen))
    found = []
    for ring in strongly_connected(edges) + [
        [node] for node, after in edges.items() if node in after
    ]:
        events = sorted((nodes[int(node)] for node in ring), key=lambda event: event.at)
        explained.update(event.at for event in events)
        steps = " -> ".join(
            f"rank {each.rank} in {each.phase} waits for {each.attrs.get('waiting_for')}"
            for each in events
        )
        alike = len(events) > 1 and len({each.phase for each in events}) == 1
        found.append(
            Finding.on(
                "R-NOCYCLE",
                events[-1],
                f"a cycle of waits: {steps}",
                *events[:-1],
                strength=MISSING,
                # Where all do the same, none of them is the one that closed the ring.
                guilty=tuple(dict.fromkeys(each.rank for each in events)) if alike else None,
                waiting=waits.facts.waiting(),
            )
        )
    return found


def _locks(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """A ring of ranks of which each waits for a lock that the next one holds."""
    wanted = {wait.rank: wait.event for wait in waits.waits if wait.event.action == "lock"}
    edges: dict[Name, set[Name]] = {
        rank: {
            holder
            for holder, lock in seen.held
            if lock == lock_of(event) and holder != rank and holder in wanted
        }
        for rank, event in wanted.items()
    }
    found = []
    for ring in strongly_connected(edges):
        events = sorted((wanted[rank] for rank in ring), key=lambda event: event.at)
        explained.update(event.at for event in events)
        steps = ", ".join(f"rank {each.rank} waits for {lock_of(each)}" for each in events)
        found.append(
            Finding.on(
                "R-NOCYCLE",
                events[-1],
                f"a cycle of locks: {steps}, and each is held by the next",
                *events[:-1],
                *(taken for (rank, _), taken in seen.held.items() if rank in ring),
                strength=MISSING,
                guilty=tuple(sorted(ring, key=str)),
                waiting=waits.facts.waiting(),
            )
        )
    return found


def _named(
    node: Event, named: object, nodes: list[Event], waits: Waits, seen: Seen
) -> Iterable[int]:
    items = named if isinstance(named, list | tuple) else [named]
    for item in items:
        text = str(item)
        ranks = set(ranks_in(item, waits.facts.header.ranks)) & set(waits.facts.ranks)
        words = set(text.lower().replace(":", " ").replace("/", " ").split())
        ranks |= {rank for rank in waits.facts.ranks if "rank" in words and str(rank) in words}
        holders = {
            rank for (rank, lock) in seen.held if lock != "gate" and (lock == text or lock in words)
        }
        for index, other in enumerate(nodes):
            if other is node:
                continue
            if (
                other.rank in ranks
                or (other.rank in holders and "waiting_for" in other.attrs)
                or other.phase == text
                or (other.phase in words and (other.rank in ranks or not ranks))
                or (text and group_of(other) == text and other.rank != node.rank)
                or (text and str(other.attrs.get("holds", "")) == text)
            ):
                yield index


def ctrlplane(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-CTRLPLANE: a fence or control phase waits on a group that carries payload.

    Sees: ranks in a fence on a group on which other ranks move payload, where those in the fence
    did no such payload in this epoch: they are not behind it, they block it. Cannot see: which
    group a fence is on, where no line says so. Sources: AReaL PR 1596, issue 1439.
    """
    found = []
    for fence in waits.meets:
        if fence.action not in ("fence", "wait") or fence.group is None:
            continue
        payload = [
            wait
            for wait in waits.waits
            if wait.event.action in _PAYLOAD
            and group_of(wait.event) == fence.group
            and wait.rank not in fence.ranks
            and wait.event.epoch == fence.epoch
        ]
        did = [
            rank
            for rank in fence.ranks
            if any(
                event.action in _PAYLOAD
                for event in waits.facts.ranks[rank].finished(fence.epoch).values()
            )
        ]
        if not payload or did or _is_joint(fence, payload, waits):
            continue
        explained.update(wait.event.at for wait in fence.waits)
        explained.update(wait.event.at for wait in payload)
        moving = ", ".join(str(wait.rank) for wait in payload)
        found.append(
            Finding.on(
                "R-CTRLPLANE",
                fence.first,
                f"{waiters(fence.ranks)} in {fence.phase} on group "
                f"{fence.group}, on which {moving} move payload",
                *(wait.event for wait in fence.waits[1:4]),
                *(wait.event for wait in payload[:4]),
                strength=MISSING,
                guilty=fence.ranks,
                waiting=waits.facts.waiting(),
            )
        )
    return found
