"""Ranks that went different ways, or would: R-SAMEPLAN."""

from typing import Final

from phasesync.audit.answer import BROKEN, MISSING, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import Facts, group_of
from phasesync.audit.rules.seen import Seen
from phasesync.audit.waits import STEPS, Meet, Waits, named, waiters

__all__ = ("joins", "plans", "sameplan")

# What nobody does on the way to a step at which others wait.
_BEYOND: Final = frozenset({"serve", "train", "publish", "collective", "fence"})
# On what all who make a group have to agree.
_TERMS: Final = (
    "config",
    "plan",
    "backend",
    "world_size",
    "address",
    "master_addr",
    "port",
    "master_port",
    "init_method",
    "dtype",
)
# On what all who are in one collective have to agree, or none of them comes out of it.
_OPERANDS: Final = ("op", "reduce_op", "numel", "shape", "count", "dtype", "root", "src")
# Where a rank that took another branch can be found waiting.
_ASIDE: Final = STEPS | {"drain", "wait"}


def sameplan(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-SAMEPLAN: ranks took different branches.

    Sees: ranks of one role that wait in different steps, each for the others, or for a rank that
    went past the step and did what comes after it. The minority that took the other branch is
    guilty. Cannot see: a branch after which nobody
    waits, nor whether a rank that is at work is on its way to the step or has gone past it.
    Sources: TensorRT-LLM PR 13564, verl PR 7851 (mixed configuration).
    """
    facts = waits.facts
    found = []
    live = [
        meet
        for meet in waits.meets
        if meet.action in STEPS and not any(wait.event.at in explained for wait in meet.waits)
    ]
    fences = [meet for meet in live if meet.action == "fence"] or live
    for meet in sorted(fences, key=lambda meet: -len(meet.ranks)):
        elsewhere: dict[Name, Event] = {}
        for rank, state in meet.absent.items():
            known = facts.rank(rank)
            if state == "waiting":
                opened = [each.event for each in known.open if each.event.action in _ASIDE]
                if opened and all(
                    _other_step(each, meet)
                    and not _is_behind(each, meet, facts)
                    and not _has_counterpart(each, facts)
                    for each in opened
                ):
                    elsewhere[rank] = opened[-1]
            elif state in ("working", "idle") and not _has_done(rank, meet, facts):
                past = _went_past(known.started(meet.epoch), meet, facts)
                if past is not None:
                    elsewhere[rank] = past
        if not elsewhere:
            continue
        others = [other for other in meet.absent if other not in elsewhere]
        if any(meet.absent[other] in ("working", "silent") for other in others):
            continue
        kind = facts.header.kind
        across = not {kind(rank) for rank in elsewhere} & {kind(rank) for rank in meet.ranks}
        # Who waits where nobody meets has left the course of those who do.
        aside = all(event.action not in STEPS for event in elsewhere.values())
        if across and aside and _is_served(elsewhere, waits):
            continue
        explained.update(wait.event.at for wait in meet.waits)
        explained.update(event.at for event in elsewhere.values())
        guilty: tuple[Name, ...] = ()
        if aside or len(elsewhere) < len(meet.ranks):
            guilty = tuple(elsewhere)
        elif len(meet.ranks) < len(elsewhere) and len({e.phase for e in elsewhere.values()}) == 1:
            guilty = meet.ranks  # All others are together somewhere else.
        skipped = sorted(elsewhere.values(), key=lambda event: event.at)
        found.append(
            Finding.on(
                # Two roles have two plans: one side of what they do together never entered.
                "R-HANDSHAKE" if across and meet.action in ("send", "receive") else "R-SAMEPLAN",
                skipped[0],
                f"{waiters(meet.ranks)} in {meet.phase}, while {_where(elsewhere)}",
                *(wait.event for wait in meet.waits[:6]),
                *skipped[1:4],
                strength=MISSING,
                guilty=tuple(sorted(guilty, key=str)),
                waiting=facts.waiting(),
            )
        )
        break
    return found


def joins(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-SAMEPLAN: ranks join one group on other terms, or one collective with other operands.

    Sees: all who wait for a group to be made, with another backend, size or address; a collective
    that everybody is in and nobody comes out of, with another size, type or root. Cannot see:
    terms that no line names. Sources: TRL PR 6787, PyTorch issue 97191.
    """
    found = []
    for meet in waits.meets:
        joint = meet.action == "collective" and not meet.absent
        terms = _TERMS if meet.action == "init_group" else _OPERANDS if joint else ()
        if any(w.event.at in explained for w in meet.waits):
            continue
        for name in terms:
            sides: dict[str, list[Event]] = {}
            for wait in meet.waits:
                if name in wait.event.attrs:
                    sides.setdefault(str(wait.event.attrs[name]), []).append(wait.event)
            if len(sides) < 2:
                continue
            explained.update(wait.event.at for wait in meet.waits)
            fewest, *_, most = sorted(sides.values(), key=len)
            said = "; ".join(
                f"{value} on {named(e.rank for e in on)}" for value, on in sides.items()
            )
            found.append(
                Finding.on(
                    "R-SAMEPLAN",
                    fewest[0],
                    f"ranks join {meet.phase} with different values of {name}: {said}",
                    *(wait.event for wait in meet.waits[:8]),
                    strength=MISSING,
                    guilty=tuple(e.rank for e in fewest) if len(fewest) < len(most) else (),
                    waiting=waits.facts.waiting(),
                )
            )
            break
    return found


def plans(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-SAMEPLAN: ranks hold different plans, whether or not anything came of it yet.

    Sees: values of `plan`, `digest` or `config` that differ within one role in one epoch. Cannot
    see: options that no line names. Source: verl PR 7851 (mixed configuration).

    Only `plan`, `digest` and `config` must agree; a `choice` of its own is a rank's right until
    somebody waits for the others' branch.
    """
    facts = waits.facts
    found = []
    for (_, name), chosen in seen.choices.items():
        if name.split()[0] in ("choice", "branch", "decision"):
            continue
        for kind in {facts.header.kind(rank) for rank in chosen}:
            mine = {r: c for r, c in chosen.items() if facts.header.kind(r) == kind}
            groups: dict[str, list[Name]] = {}
            for rank, (value, _) in mine.items():
                groups.setdefault(value, []).append(rank)
            if len(groups) < 2:
                continue
            sizes = sorted(groups.values(), key=len)
            # Those without a line might have been on either side.
            fewest = len(sizes[0]) + len(facts.silent(kind))
            guilty = sizes[0] if len(sizes) == 2 and fewest < len(sizes[1]) else []
            events = [event for _, event in mine.values()]
            first = mine[guilty[0]][1] if guilty else events[-1]
            found.append(
                Finding.on(
                    "R-SAMEPLAN",
                    first,
                    f"ranks hold different values of {name}: "
                    + "; ".join(f"{value} on {ranks}" for value, ranks in groups.items()),
                    *events[:8],
                    strength=BROKEN,
                    guilty=tuple(guilty),
                    waiting=facts.waiting(),
                )
            )
    return found


def _is_served(elsewhere: dict[Name, Event], waits: Waits) -> bool:
    """Whether somebody of another role is still at work, or has no line, for whom those elsewhere
    may wait.
    """
    kind = waits.facts.header.kind
    kinds = {kind(rank) for rank in elsewhere} | {"controller"}
    return any(
        (known.open or known.first is None)
        and known.exit is None
        and rank not in waits.waiting_ranks
        for rank, known in waits.facts.ranks.items()
        if kind(rank) not in kinds
    )


def _where(elsewhere: dict[Name, Event]) -> str:
    """Which ranks are in which phase."""
    phases: dict[str, list[Name]] = {}
    for rank, event in elsewhere.items():
        phases.setdefault(event.phase, []).append(rank)
    return ", ".join(
        f"{named(ranks)} {'are' if len(ranks) > 1 else 'is'} in {phase}"
        for phase, ranks in phases.items()
    )


def _other_step(event: Event, meet: Meet) -> bool:
    return event.phase != meet.phase or group_of(event) != meet.group


def _has_done(rank: Name, meet: Meet, facts: Facts) -> bool:
    """Whether a rank did its part of a transfer before the one that waits came to its own."""
    return meet.action in ("send", "receive") and meet.phase in facts.rank(rank).finished(
        meet.epoch
    )


def _has_counterpart(event: Event, facts: Facts) -> bool:
    """Whether a rank waits for somebody of another role: then that one is who is awaited."""
    kind = facts.header.kind(event.rank)
    return event.action in ("send", "receive") and any(
        facts.header.kind(rank) not in (kind, "controller", "") for rank in facts.ranks
    )


def _is_behind(event: Event, meet: Meet, facts: Facts) -> bool:
    """Whether those at the meet have been through that step: its rank is late, not elsewhere."""
    return all(
        event.phase in facts.ranks[rank].finished(event.epoch)
        and facts.ranks[rank].finished(event.epoch)[event.phase].at > event.at
        for rank in meet.ranks
    )


def _went_past(started: dict[str, Event], meet: Meet, facts: Facts) -> Event | None:
    """The phase that an absent rank entered although, elsewhere, it lies behind this step."""
    later = [
        event
        for event in started.values()
        if event.at > meet.first.at and event.action not in ("release", "synchronize", "window")
    ]
    done = {
        phase
        for rank in meet.ranks
        for phase in facts.ranks[rank].started(meet.epoch)
        if phase != meet.phase
    }
    new = [
        event
        for event in later
        if event.phase not in done
        and event.phase != meet.phase
        and (event.action in _BEYOND or _lies_behind(event, meet, facts))
    ]
    return min(new, key=lambda event: event.at) if new else None


def _lies_behind(event: Event, meet: Meet, facts: Facts) -> bool:
    """Whether in an earlier epoch that phase came after the step at which others wait now.

    A leader has phases of its own before a step; only what has been seen to follow it is past it.
    """
    return any(
        began.at > ended.at
        for rank in facts.ranks.values()
        for epoch, phases in rank.began.items()
        if epoch != meet.epoch
        and (began := phases.get(event.phase)) is not None
        and (ended := rank.finished(epoch).get(meet.phase)) is not None
    )
