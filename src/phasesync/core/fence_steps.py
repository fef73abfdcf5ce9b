"""A member's fence over a key-value store, as steps: append, count, one verdict.

A step generator yields operations (fence_keys), receives their replies, and returns what came
of it, so that the checker can crash between any two. Three things must survive edits:

- One verdict: it is compare-and-set into an empty key, and everybody adopts what is there.
- A rank passes only if its own arrival was judged. The closer reads the log *after* the count
  that made it close, so a log of exactly `count` lines holds exactly the arrivals 1..count.
- A verdict is deleted before its counter. The other way round a sleeper that wakes up late
  would find the count start again at 1 beside an old verdict, and pass.

Ranks of one host may have one of them bring their arrivals (`bringing`). Where all of a fence are
in its hands it need not read them again: it decides in one round trip, and looks in the same one
whether the fence is long over. Each of them may come by itself all the same, at any time: a
second arrival with the nonce of the first is the first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phasesync.core import wire
from phasesync.core.fence import (
    Waiting,
    absent,
    decode_arrivals,
    encode_arrival,
    judge,
    judged_list,
    missing_of,
    ticket_hash,
)
from phasesync.core.fence_keys import (
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Gone,
    Keys,
    Put,
    Read,
    Registered,
    Space,
    Steps,
    Tell,
    Verdict,
    Wait,
    lost_among,
    writer,
)
from phasesync.core.model import Arrival, Broken, FenceCall, FenceVerdict, Opened, Rank

__all__ = (
    "COLLECTED_MAX",
    "UNJUDGED",
    "VERDICTS_KEPT",
    "Brought",
    "Counted",
    "Passed",
    "admitting",
    "arriving",
    "bringing",
    "collecting",
    "connecting",
    "expiring",
    "failing",
    "judged_in",
    "missing_ranks",
    "peeking",
    "plainly",
    "watching",
)

# Verdicts outlive their fence by so many generations: whoever is slow to look still finds them.
VERDICTS_KEPT = 8
# After a gap in the generations (a broken epoch may skip some) at most so many are cleaned up.
COLLECTED_MAX = 64
# Among so few, everybody gets the log with the count: a round trip less for the last to arrive.
READ_AHEAD_MAX = 4
# So many arrivals of others may come before those that one rank brought, and they are still found.
FOREIGN_LINES_MAX = 8


@dataclass(frozen=True, slots=True)
class Counted:
    """Arrived as number `order`; another wait of this process will bring the verdict."""

    order: int


@dataclass(frozen=True, slots=True)
class Passed:
    """The verdict, and what it means for this arrival; None if it was not judged."""

    verdict: Verdict
    answer: Opened | Broken | None


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of arrivals that one rank brought for several: the order of the last of them, the
    verdict if there is one, and `ruling` if it was made of them, so that all of them pass."""

    order: int | None
    verdict: Verdict | None = None
    ruling: Opened | None = None


#: The fence was decided without this arrival and tidied up, so long ago it was.
UNJUDGED = Passed(Verdict(by=""), None)


def connecting(space: Space, rank: Rank, incarnation: int, *, nonce: str) -> Steps:
    """Be known to this start of the store; returns its id.

    A rank that was found gone as an earlier incarnation says that it is back.
    """
    boot = yield CompareSet(space.boot, nonce.encode())
    gone = Gone.lines((yield Read(space.lost)))
    if any(line.rank == rank and line.incarnation < incarnation for line in gone):
        yield Append(space.lost, Gone(rank, incarnation, None).line())
        yield Read(space.lost)  # The reply proves that the line above has come.
    return bytes(boot).decode()


def arriving(
    space: Space,
    call: FenceCall,
    arrival: Arrival,
    *,
    register: bool,
    opened_before: int | None,
    wait: bool,
) -> Steps:
    """Arrive, close the fence if this makes the count full, wait, and pass or not.

    `register` says who waits here, for whoever reports a loss; needed at the first fence of a
    scope, when its members or the count of generations change, and after a break.
    `opened_before` is the last generation of the scope that this rank passed.
    Returns `Passed`, or `Counted` where `wait` is false.
    """
    at = space.at(call.key.scope, call.key.generation)
    me = writer(arrival.rank, arrival.incarnation)
    if register:
        verdict = yield from _registering(space, call, me)
        if verdict is not None:
            return (yield from admitting(space, call, arrival, None, verdict))
        opened_before = None  # Whoever broke off may not have tidied up.
    yield Append(at.log, encode_arrival(arrival))
    is_small = len(call.members) <= READ_AHEAD_MAX
    order = yield Add(at.counter, 1, at.log if is_small else "")
    if not arrival.ok:
        verdict = yield from _breaking(space, call, arrival)
        return (yield from admitting(space, call, arrival, order, verdict))
    if order >= len(call.members):
        closed = yield from _closing(space, at, call, me, order)
        if closed is not None:
            passed = yield from _closed(space, call, arrival, order, *closed)
            yield Tell(passed)
            if isinstance(passed.answer, Opened):
                yield from collecting(space, call, opened_before)
            return passed
    # Who comes when all is tidied up counts anew from 1; where the count is full without its log,
    # that goes on just now. Who has passed the fence before this one need not look.
    is_first = order == 1 and opened_before != call.key.generation - 1
    if (is_first or order >= len(call.members)) and (yield from _is_tidied_up(space, call)):
        return UNJUDGED
    if not wait:
        return Counted(order)
    verdict = Verdict.decode((yield Wait(at.verdict)))
    return (yield from admitting(space, call, arrival, order, verdict))


def bringing(
    space: Space,
    call: FenceCall,
    batch: Sequence[Arrival],
    me: str,
    *,
    lines: bytes,
    whole: Sequence[Arrival] = (),
    whole_bytes: int = 0,
    register: bool,
    opened_before: int | None,
) -> Steps:
    """Arrive for several ranks of one host, without waiting; `lines` are their frames.

    `whole` are all that this rank has brought to the fence, this batch and those before it, if
    they may be all members; `whole_bytes` long are their frames. Returns `Brought`.
    """
    at = space.at(call.key.scope, call.key.generation)
    if register:
        verdict = yield from _registering(space, call, me)
        if verdict is not None:
            return Brought(None, verdict)
        opened_before = None  # Whoever broke off may not have tidied up.
    ruling = judge(call, whole) if len(whole) >= len(call.members) else None
    yield Append(at.log, lines)
    if isinstance(ruling, Opened):
        yield Count(at.counter, len(batch))
        return (yield from _deciding(space, call, ruling, me, whole_bytes, opened_before))
    is_small = len(call.members) <= READ_AHEAD_MAX * len(batch)
    order = yield Add(at.counter, len(batch), at.log if is_small else "")
    if order >= len(call.members):
        closed = yield from _closing(space, at, call, me, order)
        if closed is not None:
            brought = Brought(order, *closed)
            yield Tell(brought)
            if brought.ruling is not None:
                yield from collecting(space, call, opened_before)
            return brought
    is_first = order == len(batch) and opened_before != call.key.generation - 1
    if (is_first or order >= len(call.members)) and (yield from _is_tidied_up(space, call)):
        return Brought(None, UNJUDGED.verdict)
    return Brought(order)


def _deciding(
    space: Space,
    call: FenceCall,
    ruling: Opened,
    me: str,
    log_bytes: int,
    opened_before: int | None,
) -> Steps:
    """Write the verdict on arrivals that are all in this rank's hands."""
    own = _verdict(ruling, me, plain=False, log_bytes=log_bytes)
    verdict = yield from _settling(space, call, own)
    if verdict is None:
        return Brought(None, UNJUDGED.verdict)
    if verdict is not own:
        return Brought(ruling.ticket.count, verdict)
    brought = Brought(ruling.ticket.count, own, ruling)
    yield Tell(brought)
    yield from collecting(space, call, opened_before)
    return brought


def _settling(space: Space, call: FenceCall, own: Verdict) -> Steps:
    """Write a verdict: `own` if it is the first, else the one that is there.

    None if the fence is long over. Who comes from a long sleep finds the verdict's key empty again:
    that is looked at in the same round trip, nobody is told before it is known, and what the
    sleeper wrote is taken back.
    """
    at = space.at(call.key.scope, call.key.generation)
    head = space.head(call.key.scope)
    text = own.encode()
    winner = yield CompareSet(at.verdict, text, ahead=head)
    last = yield Get(head)
    if winner != text:
        return Verdict.decode(winner)
    if (yield from _has_gone_on(space, call, last)):
        yield Delete(at.verdict)
        yield Delete(at.log)
        yield Delete(at.counter)
        yield Read(space.boot)  # The reply proves that they are gone.
        return None
    return own


def expiring(
    space: Space,
    call: FenceCall,
    me: str,
    seen: Mapping[Rank, str],
    *,
    own: Arrival | None = None,
) -> Steps:
    """The deadline has passed for a rank that waits: decide with whoever has arrived.

    `seen` is what this rank knows of others, for the report on who is missing. `own` is its
    arrival, if somebody else was to bring it.

    Returns the verdict, or None if it was tidied up: the rank comes from a long sleep, or all are
    through and have left, with another incarnation in its place.
    """
    at = space.at(call.key.scope, call.key.generation)
    if own is not None:
        yield Append(at.log, encode_arrival(own))
        yield Count(at.counter, 1)
    count = yield Add(at.counter, 0)
    text = yield Read(at.verdict)
    if text is not None:
        return Verdict.decode(text)
    if (yield from _is_tidied_up(space, call)):
        return None
    log = (yield Read(at.log)) or b""
    ruling = judge(call, decode_arrivals(log), expired=True, seen=seen)
    assert not isinstance(ruling, Waiting), "at the deadline there is no more waiting"
    mine = _verdict(ruling, me, plain=_is_plain(log, count, ruling), log_bytes=len(log))
    verdict = yield from _settling(space, call, mine)
    if verdict is mine and isinstance(ruling, Opened):
        yield Tell(verdict)
        yield from collecting(space, call, None)
    return verdict


def failing(space: Space, call: FenceCall, arrival: Arrival) -> Steps:
    """Arrive as failed and break the fence, without waiting; the verdict that it now has."""
    at = space.at(call.key.scope, call.key.generation)
    yield Append(at.log, encode_arrival(arrival))
    yield Add(at.counter, 1)
    return (yield from _breaking(space, call, arrival))


def watching(space: Space, call: FenceCall, me: str, *, register: bool) -> Steps:
    """Wait for the verdict without arriving; None if it was tidied up."""
    if register:
        verdict = yield from _registering(space, call, me)
        if verdict is not None:
            return None if verdict is UNJUDGED.verdict else verdict
    at = space.at(call.key.scope, call.key.generation)
    return Verdict.decode((yield Wait(at.verdict)))


def peeking(space: Space, call: FenceCall) -> Steps:
    """The verdict, or None."""
    text = yield Read(space.at(call.key.scope, call.key.generation).verdict)
    return None if text is None else Verdict.decode(text)


def missing_ranks(space: Space, call: FenceCall) -> Steps:
    """The members that are not in the log."""
    log = yield Read(space.at(call.key.scope, call.key.generation).log)
    return missing_of(call, (a.rank for a in decode_arrivals(log or b"")))


def arrivals_in(space: Space, scope: str, generations: Iterable[int]) -> Steps:
    """What is in the logs of these fences of a scope, whoever asks; those tidied up have none."""
    found: list[Arrival] = []
    for generation in generations:
        log = yield Read(space.at(scope, generation).log)
        found += decode_arrivals(log or b"")
    return tuple(found)


def plainly(
    call: FenceCall, arrival: Arrival, order: int | None, verdict: Verdict
) -> Opened | Broken | None:
    """What the verdict means for this arrival, where that can be said without a look at the log."""
    answer = verdict.read_by(call, writer(arrival.rank, arrival.incarnation))
    if answer.decided:
        return None  # Who decided is to show what was judged.
    if isinstance(answer, Broken):
        return answer
    if verdict.plain and not verdict.payload and order is not None and order <= verdict.count:
        return replace(answer, order=order)
    return None


def admitting(
    space: Space, call: FenceCall, arrival: Arrival, order: int | None, verdict: Verdict
) -> Steps:
    """Whether the verdict lets this very arrival pass, and what it passes with."""
    answer: Opened | Broken | None = plainly(call, arrival, order, verdict)
    if answer is not None:
        return Passed(verdict, answer)
    answer = verdict.read_by(call, writer(arrival.rank, arrival.incarnation))
    log = (yield Read(space.at(call.key.scope, call.key.generation).log)) or b""
    if isinstance(answer, Broken):
        return Passed(verdict, replace(answer, arrivals=tuple(decode_arrivals(log))))
    judged = _judged(call, log, verdict)
    if not any(_same(a, arrival) for a in judged):
        return Passed(verdict, None)
    if not verdict.plain and (yield from _is_long_over(space, call)):
        return Passed(verdict, None)  # It is a sleeper's, which takes it back.
    return Passed(verdict, replace(answer, arrivals=judged, order=order))


def _is_long_over(space: Space, call: FenceCall) -> Steps:
    """Whether this fence is so long over that its verdict was tidied up."""
    head = yield Read(space.head(call.key.scope))
    if head:
        return int(head) > call.key.generation + VERDICTS_KEPT
    return (yield Read(space.boot)) is None


def _has_gone_on(space: Space, call: FenceCall, head: bytes | None) -> Steps:
    """Whether a later fence has opened, or all have left.

    Who decides puts the head on afterwards, and may be so late with it that all has been swept by
    then: a head that is just here tells nothing.
    """
    if head and int(head) != call.key.generation:
        return int(head) > call.key.generation
    return (yield Read(space.boot)) is None


def _is_tidied_up(space: Space, call: FenceCall) -> Steps:
    """Whether this fence is long over, and so is its verdict: nobody will decide it any more.

    Then what an arrival has written anew is removed again. The head is looked at first: when it
    has gone on, the verdict was there before it.
    """
    at = space.at(call.key.scope, call.key.generation)
    head = yield Read(space.head(call.key.scope))
    if not (yield from _has_gone_on(space, call, head)) or (yield Read(at.verdict)) is not None:
        return False
    yield Delete(at.log)
    yield Delete(at.counter)
    yield Read(space.boot)  # The reply proves that both are gone.
    return True


def _registering(space: Space, call: FenceCall, me: str) -> Steps:
    """Say who waits here, then look who is lost: whoever reports a loss does both the other
    way round, so one of the two sees the other. Returns the verdict, if a member is lost."""
    members = [list(rank) for rank in call.members]
    digest = wire.sha256(members)[:16]
    yield CompareSet(space.members(digest), wire.encode(members))
    yield Append(space.scopes, Registered(call.key.scope, call.key.generation, digest).line())
    lost = lost_among(Gone.lines((yield Read(space.lost))))
    if absent(call, lost) is None:
        return None
    at = space.at(call.key.scope, call.key.generation)
    log = (yield Read(at.log)) or b""
    ruling = judge(call, decode_arrivals(log), lost=lost)
    if not isinstance(ruling, Broken):
        return None
    own = Verdict.of_broken(ruling, by=me)
    return (yield from _settling(space, call, own)) or UNJUDGED.verdict


def _breaking(space: Space, call: FenceCall, arrival: Arrival) -> Steps:
    """Write the failure of this arrival as the verdict, unless there is one already."""
    ruling = judge(call, (arrival,))
    assert isinstance(ruling, Broken), "a failed arrival breaks the fence"
    own = Verdict.of_broken(ruling, by=writer(arrival.rank, arrival.incarnation))
    return (yield from _settling(space, call, own)) or own  # Nobody else is told of it then.


def _closing(space: Space, at: Keys, call: FenceCall, me: str, order: int) -> Steps:
    """Judge what has arrived; the verdict, and the ruling if it is that one.

    None if the count was full and the log is not.
    """
    log = yield Get(at.log)
    ruling = judge(call, decode_arrivals(log))
    if isinstance(ruling, Waiting):
        return None
    own = _verdict(ruling, me, plain=_is_plain(log, order, ruling), log_bytes=len(log))
    verdict = yield from _settling(space, call, own)
    if verdict is own and isinstance(ruling, Opened):
        return own, ruling
    return verdict or UNJUDGED.verdict, None


def _closed(
    space: Space,
    call: FenceCall,
    arrival: Arrival,
    order: int,
    verdict: Verdict,
    ruling: Opened | None,
) -> Steps:
    if ruling is not None:
        return Passed(verdict, replace(ruling, order=order, decided=True))
    return (yield from admitting(space, call, arrival, order, verdict))


def collecting(space: Space, call: FenceCall, opened_before: int | None) -> Steps:
    """This fence has opened: put the head further on, and remove what nobody can need, since all
    members are here, and so have left the fences before.

    The head goes on after the verdict, so that a sleeper does not set it back. `opened_before` is
    the last fence that was tidied up after, where that is known.
    """
    scope, now = call.key.scope, call.key.generation
    yield Put(space.head(scope), str(now).encode())
    first = max(now - COLLECTED_MAX, opened_before or 0, 0)
    for generation in range(first, now):
        yield Delete(space.at(scope, generation).log)
    for generation in range(max(first - VERDICTS_KEPT, 0), now - VERDICTS_KEPT):
        keys = space.at(scope, generation)
        yield Delete(keys.verdict)
        yield Delete(keys.counter)


def _is_plain(log: bytes, count: int, ruling: FenceVerdict) -> bool:
    """Whether exactly the arrivals 1..count were judged."""
    return isinstance(ruling, Opened) and log.count(b"\n") == count == ruling.ticket.count


def _verdict(ruling: FenceVerdict, me: str, *, plain: bool, log_bytes: int) -> Verdict:
    match ruling:
        case Broken():
            return Verdict.of_broken(ruling, by=me)
        case Opened(ticket=ticket, arrivals=arrivals):
            return Verdict(
                by=me,
                count=ticket.count,
                hash=ticket.hash,
                plain=plain,
                log_bytes=log_bytes,
                payload=any(a.payload for a in arrivals),
            )


def _judged(call: FenceCall, log: bytes, verdict: Verdict) -> tuple[Arrival, ...]:
    """As `judged_in`, for a member: as its own call judges them."""
    for part in _parts(log, verdict):
        ruling = judge(call, decode_arrivals(part))
        if isinstance(ruling, Opened) and ruling.ticket.hash == verdict.hash:
            return ruling.arrivals
    return ()


def judged_in(log: bytes, verdict: Verdict) -> tuple[Arrival, ...]:
    """The arrivals that a verdict to open was made of; none if they are not in the log."""
    for part in _parts(log, verdict):
        latest: dict[Rank, Arrival] = {}
        for arrival in decode_arrivals(part):
            known = latest.get(arrival.rank)
            if known is None or known.incarnation < arrival.incarnation:
                latest[arrival.rank] = arrival
        if ticket_hash(judged_list(latest.values())) == verdict.hash:
            return tuple(latest[rank] for rank in sorted(latest))
    return ()


def _parts(log: bytes, verdict: Verdict) -> Iterator[bytes]:
    """Where in a log the judged arrivals may be.

    They are the log's beginning, unless one rank brought them all: then somebody else may have come
    before. The hash tells what was judged from what a sleeper began anew.
    """
    start = 0
    for _ in range(FOREIGN_LINES_MAX + 1):
        yield log[start : start + verdict.log_bytes]
        start = log.find(b"\n", start) + 1
        if verdict.plain or not 0 < start < len(log):
            break


def _same(one: Arrival, other: Arrival) -> bool:
    return (one.rank, one.incarnation, one.nonce) == (other.rank, other.incarnation, other.nonce)
