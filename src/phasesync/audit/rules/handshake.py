"""Two sides that wait for each other's other step: R-HANDSHAKE."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from phasesync.audit.answer import MISSING, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import Facts, RankFacts
from phasesync.audit.rules.seen import Seen
from phasesync.audit.waits import Meet, Waits, named, version_of, waiters

__all__ = ("handshake",)

# What is no part of any handshake.
_SERVING: Final = ("serve", "life", "window")
# What names one thing that is handed over once.
_ONE_TIME: Final = ("ticket", "key", "call", "request")


def handshake(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-HANDSHAKE: two sides wait for different versions, or one never entered.

    Sees: open waits of two roles that name different versions; the side that skipped one (its
    epochs have a gap), else the counterpart of the earliest wait, is guilty. Or a send with no
    receiver that ever came although it is alive and idle, or itself waits for those who wait for
    it; or a rank that asks again for what it was given once. Cannot see: a log that ends between
    the offer and its answer from one that hangs there. Sources: prime-rl PR 1667 and PR 3016, vLLM
    PR 53250.
    """
    facts = waits.facts
    found = []
    sides = [
        wait
        for wait in waits.waits
        if wait.event.at not in explained
        and wait.event.action in ("wait", "publish", "send", "receive", "write", "poll")
    ]
    for wait in sides:
        version = version_of(wait.event)
        if version is None:
            continue
        for other in sides:
            theirs = version_of(other.event)
            if other.rank == wait.rank or theirs is None or theirs == version:
                continue
            if other.event.at < wait.event.at or other.event.at in explained:
                continue
            if facts.header.roles and facts.header.kind(other.rank) == facts.header.kind(wait.rank):
                continue
            guilty = _skipper(wait.event, other.event, facts)
            explained.update((wait.event.at, other.event.at))
            found.append(
                Finding.on(
                    "R-HANDSHAKE",
                    other.event,
                    f"rank {wait.rank} waits in {wait.event.phase} for version {version:g}, "
                    "rank "
                    f"{other.rank} in {other.event.phase} for version {theirs:g}",
                    wait.event,
                    strength=MISSING,
                    guilty=guilty,
                    waiting=facts.waiting(),
                )
            )
            return found
    for meet in waits.meets:
        if meet.action not in ("send", "receive", "publish", "wait"):
            continue
        if len(meet.ranks) > 1 and not _one_side(meet.ranks, facts):
            continue
        if any(wait.event.at in explained for wait in meet.waits) or not meet.absent:
            continue
        if (again := _asked_twice(meet, facts)) is not None:
            explained.update(wait.event.at for wait in meet.waits)
            found.append(again)
            continue
        if _is_offered(meet, facts):
            continue
        absent = _other_side(meet, facts)
        lazy = [
            rank
            for rank, state in absent.items()
            if state == "idle"
            or (state == "working" and _only_serves(facts.ranks[rank]))
            or (state == "waiting" and _only_awaits(facts.ranks[rank], meet, waits))
        ]
        kinds = {facts.header.kind(rank) for rank in meet.ranks}
        lazy = [
            rank
            for rank in lazy
            if facts.header.kind(rank) not in kinds
            and not any(
                event.action in ("send", "receive")
                or (event.at > meet.first.at and event.action not in (*_SERVING, "wait"))
                for event in facts.ranks[rank].started(meet.epoch).values()
            )
        ]
        if not lazy or len(lazy) < len(absent):
            continue
        if meet.action == "wait" and len({facts.header.kind(rank) for rank in lazy}) > 1:
            continue  # One of them is awaited, and no line says which.
        if len(facts.ranks) == len(meet.ranks):
            continue
        explained.update(wait.event.at for wait in meet.waits)
        explained.update(each.event.at for rank in lazy for each in facts.ranks[rank].open)
        last = facts.ranks[lazy[0]].last
        found.append(
            Finding.on(
                "R-HANDSHAKE",
                meet.first,
                f"{waiters(meet.ranks)} in {meet.phase}, and {named(lazy)} never entered the other "
                "side of it",
                *([last] if last is not None else []),
                strength=MISSING,
                guilty=tuple(lazy),
                waiting=facts.waiting(),
            )
        )
    return found


def _asked_twice(meet: Meet, facts: Facts) -> Finding | None:
    """A wait for what that rank has already had, and the other side has already given."""
    wait = meet.first
    identity = _identity(wait)
    done = facts.ranks[wait.rank].finished(wait.epoch).get(wait.phase)
    if len(meet.ranks) > 1 or not identity or done is None or done.at > wait.at:
        return None
    kinds = {facts.header.kind(wait.rank)}
    given = [
        event
        for rank in meet.absent
        for event in facts.ranks[rank].finished(wait.epoch).values()
        if _identity(event) == identity and facts.header.kind(rank) not in kinds
    ]
    if _identity(done) != identity or not given:
        return None
    what = " ".join(f"{name} {value}" for name, value in identity)
    why = f"rank {wait.rank} waits in {wait.phase} for {what}, which it has had already"
    return Finding.on(
        "R-HANDSHAKE", wait, why, done, *given[:2], strength=MISSING, waiting=facts.waiting()
    )


def _is_offered(meet: Meet, facts: Facts) -> bool:
    """Whether the version that is waited for has been given by somebody: then it is on its way."""
    want = version_of(meet.first)
    return want is not None and any(
        version_of(event) == want and event.action in ("publish", "send", "other")
        for rank in meet.absent
        for event in facts.ranks[rank].finished(meet.epoch).values()
    )


def _identity(event: Event) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(event.attrs[name])) for name in _ONE_TIME if name in event.attrs)


def _other_side(meet: Meet, facts: Facts) -> dict[Name, str]:
    """Who is awaited: where trainers are known, no controller sends weights on a group."""
    kind = facts.header.kind
    kinds = {kind(rank) for rank in meet.absent}
    if meet.group is None or meet.action != "receive" or "trainer" not in kinds:
        return meet.absent
    return {rank: state for rank, state in meet.absent.items() if kind(rank) != "controller"}


def _only_awaits(rank: RankFacts, meet: Meet, waits: Waits) -> bool:
    """Whether a rank waits for work of those at the meet, and everybody else waits too: nobody is
    left who could bring it.
    """
    facts = waits.facts
    awaits = rank.open and all(each.event.action == "wait" for each in rank.open)
    left = [
        other
        for other, known in facts.ranks.items()
        if other not in waits.waiting_ranks
        and known.exit is None
        and facts.header.kind(other) != "controller"
    ]
    blocked = all(len(facts.ranks[each].open) == 1 for each in meet.ranks)
    return bool(awaits) and not left and blocked


def _one_side(ranks: Iterable[Name], facts: Facts) -> bool:
    """Whether all that wait are of one role: several senders are one side."""
    kinds = {facts.header.kind(rank) for rank in ranks}
    return len(kinds) == 1 and "" not in kinds


def _only_serves(rank: RankFacts) -> bool:
    """Whether a rank does nothing but answer requests, which is no part of any handshake."""
    return all(each.event.action in _SERVING for each in rank.open)


def _skipper(one: Event, other: Event, facts: Facts) -> tuple[Name, ...]:
    """Who of two sides skipped a version: whose own epochs have a gap, else who is not there
    first.
    """
    gaps = []
    for event in (one, other):
        epochs = sorted(facts.ranks[event.rank].epochs)
        if any(after - before > 1 for before, after in pairwise(epochs)):
            gaps.append(event.rank)
    if len(gaps) == 1:
        return (gaps[0],)
    named = version_of(one) is not None and version_of(other) is not None
    return (other.rank,) if named else ()
