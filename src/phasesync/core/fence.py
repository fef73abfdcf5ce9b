"""The judge of a fence: members and arrivals in, one verdict out.

Every transport and the checker ask here, so none has a second opinion. The judge knows no
clock and no socket: that a deadline has passed, or that a rank is gone, is told to it.
Judging more arrivals may turn waiting into a verdict, and never a verdict into another one:
whoever carries the arrivals must keep the first verdict.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from phasesync.core import wire
from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceName,
    Opened,
    Rank,
    RoleName,
    RootCause,
    Ticket,
    Version,
)

__all__ = (
    "FRAME_FORMAT",
    "Lost",
    "Ruling",
    "Waiting",
    "absent",
    "as_broken",
    "cancelled",
    "cause_from_json",
    "cause_to_json",
    "decode_arrivals",
    "encode_arrival",
    "judge",
    "judged_list",
    "missing_of",
    "ranks_from_json",
    "ticket_hash",
)

FRAME_FORMAT = 1
FOREIGN = "frames of format "  # In place of a digest, where frames are of another version.
OURS = f"{FOREIGN}{FRAME_FORMAT}"
ERROR_CHARS_MAX = 2048
RANKS_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No verdict yet: these members have not arrived, or not all of what arrived counts."""

    missing: tuple[Rank, ...]


Ruling: TypeAlias = Waiting | Opened | Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A rank that somebody who watches processes has found gone, up to this incarnation."""

    rank: Rank
    incarnation: int
    cause: RootCause


def judge(
    call: FenceCall,
    arrivals: Iterable[Arrival],
    *,
    lost: Iterable[Lost] = (),
    expired: bool = False,
    seen: Mapping[Rank, str] | None = None,
) -> Ruling:
    """What the arrivals, in the order they came, mean for the fence.

    `expired` says that the deadline has passed for somebody who waits; `seen`, what is known
    then of ranks that are missing (`alive`, `stopped`, `not connected`), for the report.
    """
    arrivals = tuple(arrivals)
    if (judged := _all_well(call, arrivals)) is not None:
        return _opened(call, judged)
    heard = _without_retries(arrivals)
    first = _first_by_rank(heard)
    missing = missing_of(call, first)
    cause = (
        _failure(heard)
        or _second_coming(call, heard, first)
        or _other_version(call, tuple(first.values()), final=expired or not missing)
        or _disagreement(call, tuple(first.values()), final=expired or not missing)
        or _stranger(call, first)
        or _loss(call, first, lost)
        or (_deadline(call, missing, seen or {}) if expired and missing else None)
    )
    if cause is not None:
        return as_broken(call, cause, missing=missing)
    if missing:
        return Waiting(missing=missing)
    return _opened(call, tuple(first[rank] for rank in sorted(call.members)))


def _all_well(call: FenceCall, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...] | None:
    """The arrivals in rank order, if each member came once, all agree, and none is odd.

    That is what nearly every fence comes to, and a look at each arrival is enough for it.
    """
    members = call.members
    if len(arrivals) != len(members):
        return None
    first = arrivals[0] if arrivals else None
    by_rank: dict[Rank, Arrival] = {}
    for arrival in arrivals:
        if (
            first is None
            or arrival.cause is not None
            or arrival.digest != first.digest
            or arrival.epoch != first.epoch
            or arrival.version != first.version
            or arrival.fence != first.fence
        ):
            return None
        by_rank[arrival.rank] = arrival
    if first is None or first.digest.startswith(FOREIGN) or len(by_rank) != len(members):
        return None
    try:
        return tuple([by_rank[rank] for rank in sorted(members)])
    except KeyError:
        return None


def _opened(call: FenceCall, judged: tuple[Arrival, ...]) -> Opened:
    ticket = Ticket(
        key=call.key,
        fence=call.fence,
        epoch=call.epoch,
        count=len(judged),
        hash=ticket_hash(_rows(judged)),
    )
    return Opened(ticket=ticket, arrivals=judged)


def judged_list(arrivals: Iterable[Arrival]) -> list[list[Any]]:
    """What a ticket's hash covers: rank, incarnation, status, seq, free bytes, in rank order."""
    return _rows(sorted(arrivals, key=lambda a: a.rank))


def _rows(arrivals: Iterable[Arrival]) -> list[list[Any]]:
    return [
        [str(a.rank), a.incarnation, "ok" if a.cause is None else "failed", a.seq, a.free_bytes]
        for a in arrivals
    ]


def ticket_hash(judged: list[list[Any]]) -> str:
    """The sha256 of a judged list, as it stands in a ticket and in the journal."""
    return wire.sha256(judged)


def missing_of(call: FenceCall, arrived: Iterable[Rank]) -> tuple[Rank, ...]:
    """The members that are not among `arrived`, in rank order."""
    return tuple(sorted(set(call.members).difference(arrived)))


def as_broken(call: FenceCall, cause: RootCause, *, missing: tuple[Rank, ...] = ()) -> Broken:
    """The verdict that `cause` makes of this fence, its error cut to what a verdict may carry."""
    if cause.error is not None and len(cause.error) > ERROR_CHARS_MAX:
        cause = replace(cause, error=cause.error[: ERROR_CHARS_MAX - 1] + "…")
    return Broken(key=call.key, fence=call.fence, cause=cause, missing=missing)


def cancelled(call: FenceCall, arrival: Arrival) -> Arrival:
    """The failed arrival of a rank whose wait was cancelled: nobody leaves in silence."""
    cause = RootCause(kind="cancelled", ranks=(arrival.rank,), fence=call.fence)
    return replace(arrival, cause=cause)


def absent(call: FenceCall, lost: Iterable[Lost]) -> RootCause | None:
    """The cause, if a member that cannot have arrived yet is among the lost."""
    return _loss(call, {}, lost)


def _without_retries(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The arrivals without those sent again: a retry carries the nonce of the first.

    A rank that arrived and then failed has said two things under one nonce; both count.
    """
    heard: dict[tuple[Rank, int, str, bool], Arrival] = {}
    for arrival in arrivals:
        heard.setdefault((arrival.rank, arrival.incarnation, arrival.nonce, arrival.ok), arrival)
    return list(heard.values())


def _first_by_rank(heard: Sequence[Arrival]) -> dict[Rank, Arrival]:
    first: dict[Rank, Arrival] = {}
    for arrival in heard:
        first.setdefault(arrival.rank, arrival)
    return first


def _failure(heard: Sequence[Arrival]) -> RootCause | None:
    return next((a.cause for a in heard if a.cause is not None), None)


def _second_coming(
    call: FenceCall, heard: Sequence[Arrival], first: Mapping[Rank, Arrival]
) -> RootCause | None:
    """A rank that arrived twice: as another incarnation, or twice as the same."""
    for arrival in heard:
        before = first[arrival.rank]
        if before is arrival:
            continue
        if before.incarnation != arrival.incarnation:
            old, new = sorted((before.incarnation, arrival.incarnation))
            text = f"incarnation {old} arrived, then incarnation {new} took over"
            return _about(call, "restarted", (arrival.rank,), text)
        text = f"incarnation {arrival.incarnation} arrived twice; are there two runners of it?"
        return _about(call, "duplicate", (arrival.rank,), text)
    return None


def _stranger(call: FenceCall, first: Mapping[Rank, Arrival]) -> RootCause | None:
    strangers = tuple(sorted(set(first).difference(call.members)))
    if not strangers:
        return None
    text = f"no members of {call.key.scope}: {_names(strangers)}"
    return _about(call, "digest", strangers, text)


def _loss(call: FenceCall, first: Mapping[Rank, Arrival], lost: Iterable[Lost]) -> RootCause | None:
    for gone in lost:
        if gone.rank in call.members and gone.rank not in first:
            return gone.cause
    return None


def _deadline(call: FenceCall, missing: tuple[Rank, ...], seen: Mapping[Rank, str]) -> RootCause:
    known = [f"{rank} is {seen[rank]}" for rank in missing if rank in seen]
    return RootCause(
        kind="deadline",
        ranks=missing,
        fence=call.fence,
        error="; ".join([f"the others waited {call.deadline_s:g} s", *known[:RANKS_SHOWN_MAX]]),
        missing=missing,
    )


def _about(call: FenceCall, kind: str, ranks: tuple[Rank, ...], text: str) -> RootCause:
    return RootCause(kind=kind, ranks=ranks, fence=call.fence, error=text)


# What all arrivals must agree on, and the kind of the cause when they do not. A digest goes
# first: ranks under different plans may well differ in everything else too.
AGREED: tuple[tuple[str, str], ...] = (
    ("digest", "digest"),
    ("fence", "disagreement"),
    ("epoch", "disagreement"),
    ("version", "disagreement"),
)


def _other_version(call: FenceCall, held: Sequence[Arrival], *, final: bool) -> RootCause | None:
    """Ranks whose phasesync writes other frames than this one reads; nothing else is known of them.

    As with what they must agree on, who differs from the majority is named. All may be of
    another version than whoever judges, and no fence opens on frames that nobody can read.
    """
    formats = _group_by(held, lambda a: a.digest if a.digest.startswith(FOREIGN) else OURS)
    if set(formats) <= {OURS}:
        return None
    largest = max(map(len, formats.values()))
    if not final and 2 * largest <= len(call.members):
        return None
    has_majority = _has_majority(formats) and len(formats) > 1
    odd = tuple(sorted(a.rank for g in formats.values() if len(g) < largest for a in g))
    said = _difference("phasesync", formats, odd_only=has_majority)
    text = f"{said}; {OURS} were expected: install one version everywhere"
    return _about(call, "digest", odd if has_majority else (), text)


def _disagreement(call: FenceCall, held: Sequence[Arrival], *, final: bool) -> RootCause | None:
    """Who differs from the majority; without one, both groups are named and nobody blamed.

    Before the last arrival only a majority of all members decides: nothing can change it.
    """
    if len({(a.digest, a.fence, a.epoch, a.version) for a in held}) < 2:
        return None
    for name, kind in AGREED:
        groups = _group_by(held, lambda a, name=name: getattr(a, name))
        if len(groups) < 2:
            continue
        largest = max(map(len, groups.values()))
        sure = 2 * largest > len(call.members)
        if not (final or sure):
            continue
        odd: tuple[Rank, ...] = ()
        if 2 * largest > len(held):
            odd = tuple(sorted(a.rank for g in groups.values() if len(g) < largest for a in g))
        text = (name == "digest" and _payload_differences(groups)) or _difference(
            name, groups, odd_only=bool(odd)
        )
        return _about(call, kind, odd, text)
    return None


def _payload_differences(groups: Mapping[Any, Sequence[Arrival]]) -> str:
    """What the ranks' plans differ in: `param_offload: false on trainer/2, true on the others`.

    Each rank's payload may hold what is its own (its device), so a name counts only where all
    of a group say the same of it and the groups do not.
    """
    names = dict.fromkeys(name for g in groups.values() for a in g for name, _ in a.payload)
    found: dict[str, str] = {}
    for name in names:
        said = [{dict(a.payload).get(name, "(none)") for a in g} for g in groups.values()]
        if any(len(values) > 1 for values in said) or len(set.union(*said)) < 2:
            continue
        everyone = [a for g in groups.values() for a in g]
        by_value = _group_by(everyone, lambda a, name=name: dict(a.payload).get(name, "(none)"))
        found[name] = _difference(name, by_value, odd_only=_has_majority(by_value))
    if len(found) > 1:
        found.pop("device", None)
    return "; ".join(found.values())


def _has_majority(groups: Mapping[Any, Sequence[Arrival]]) -> bool:
    sizes = [len(g) for g in groups.values()]
    return 2 * max(sizes) > sum(sizes)


def _difference(name: str, groups: Mapping[Any, Sequence[Arrival]], *, odd_only: bool) -> str:
    """One line on who holds which value; the majority, if any, is `the others`."""
    by_size = sorted(groups.items(), key=lambda item: (len(item[1]), min(a.rank for a in item[1])))
    parts = []
    for i, (value, group) in enumerate(by_size):
        is_majority = odd_only and i == len(by_size) - 1
        who = "the others" if is_majority else _names(sorted(a.rank for a in group))
        parts.append(f"{value} on {who}")
    return f"{name}: {', '.join(parts)}"


def _group_by(held: Iterable[Arrival], value: Any) -> dict[Hashable, list[Arrival]]:
    groups: dict[Hashable, list[Arrival]] = defaultdict(list)
    for arrival in held:
        groups[value(arrival)].append(arrival)
    return groups


def _names(ranks: Sequence[Rank]) -> str:
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN_MAX]))
    rest = len(ranks) - RANKS_SHOWN_MAX
    return shown if rest <= 0 else f"{shown} and {rest} more"


# --- Frames: one line of JSON an arrival, so that a log of them can be appended to. ---------


def encode_arrival(arrival: Arrival) -> bytes:
    """One line. Its first three values keep their place in every later format."""
    return (
        wire.encode(
            (
                FRAME_FORMAT,
                arrival.rank.role,
                arrival.rank.number,
                arrival.incarnation,
                arrival.nonce,
                arrival.fence,
                arrival.epoch,
                arrival.version,
                arrival.digest,
                arrival.seq,
                arrival.free_bytes,
                None if arrival.cause is None else cause_to_json(arrival.cause),
                arrival.payload,
            )
        )
        + b"\n"
    )


def decode_arrivals(log: bytes) -> list[Arrival]:
    """The arrivals of a log. A line that names no rank is no arrival; its rank stays missing."""
    arrivals = []
    for line in log.splitlines():
        try:
            frame = wire.decode(line)
            rank = Rank(RoleName(str(frame[1])), int(frame[2]))
        except (wire.JsonError, LookupError, TypeError, ValueError):
            continue
        arrivals.append(_arrival(rank, frame))
    return arrivals


def _arrival(rank: Rank, frame: Sequence[Any]) -> Arrival:
    """The arrival in a frame; one of another format agrees with none of ours."""
    if frame[0] != FRAME_FORMAT or len(frame) != 13:
        return Arrival(
            rank=rank,
            incarnation=0,
            nonce="",
            fence=FenceName(""),
            epoch=Epoch(0),
            version=Version(0),
            digest=Digest(f"{FOREIGN}{frame[0]}"),
            seq=0,
        )
    return Arrival(
        rank=rank,
        incarnation=frame[3],
        nonce=frame[4],
        fence=FenceName(frame[5]),
        epoch=Epoch(frame[6]),
        version=Version(frame[7]),
        digest=Digest(frame[8]),
        seq=frame[9],
        free_bytes=frame[10],
        cause=None if frame[11] is None else cause_from_json(frame[11]),
        payload=tuple((str(name), str(value)) for name, value in frame[12]),
    )


def cause_to_json(cause: RootCause) -> wire.Json:
    """A root cause as JSON, without what it does not say."""
    said = {
        "kind": cause.kind,
        "ranks": [list(rank) for rank in cause.ranks],
        "phase": cause.phase,
        "fence": cause.fence,
        "error_type": cause.error_type,
        "error": cause.error,
        "missing": [list(rank) for rank in cause.missing],
    }
    return {name: value for name, value in said.items() if value not in (None, [])}


def cause_from_json(said: wire.Json) -> RootCause:
    """The root cause that `cause_to_json` wrote."""
    return RootCause(
        kind=said["kind"],
        ranks=ranks_from_json(said.get("ranks", ())),
        phase=said.get("phase"),
        fence=said.get("fence"),
        error_type=said.get("error_type"),
        error=said.get("error"),
        missing=ranks_from_json(said.get("missing", ())),
    )


def ranks_from_json(pairs: Iterable[Sequence[Any]]) -> tuple[Rank, ...]:
    """Ranks from their pairs of role and number."""
    return tuple(Rank(RoleName(role), int(number)) for role, number in pairs)
