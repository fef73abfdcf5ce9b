"""Losses and leave-taking over a key-value store, as steps.

Whoever watches processes is no member and does not know where a lost rank stands. It writes
the loss down first and then looks at every scope; a member says where it waits first and then
looks at the losses. So one of the two sees the other, and nobody waits for a deadline.
"""

from collections.abc import Mapping, Sequence

from phasesync.core import wire
from phasesync.core.fence import (
    Lost,
    Waiting,
    as_broken,
    cause_to_json,
    decode_arrivals,
    judge,
    missing_of,
    ranks_from_json,
)
from phasesync.core.fence_beats import Ask, Beat
from phasesync.core.fence_keys import (
    REPORTER,
    Add,
    Append,
    CompareSet,
    Delete,
    Gone,
    Left,
    Process,
    Read,
    Registered,
    Space,
    Steps,
    Verdict,
    lost_among,
)
from phasesync.core.fence_steps import COLLECTED_MAX, VERDICTS_KEPT, collecting
from phasesync.core.model import (
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    Version,
)

__all__ = (
    "announcing",
    "asking",
    "leaving",
    "looking",
    "neighbours",
    "reporting",
    "reporting_death",
    "sweeping",
    "wards",
)


def reporting(space: Space, lost: Lost) -> Steps:
    """Break the present fence of every scope that the lost rank is in and has not arrived at.

    Returns the scopes and generations that are broken now.
    """
    yield Append(space.lost, Gone(lost.rank, lost.incarnation, cause_to_json(lost.cause)).line())
    registered = Registered.lines((yield Read(space.scopes)))
    broken: dict[str, list[int]] = {}
    for scope in sorted({line.scope for line in registered}):
        here = [line for line in registered if line.scope == scope]
        generation = yield from _breaking(space, scope, here, lost)
        if generation is not None:
            broken[scope] = [generation, generation]
    if broken:
        yield Append(space.left, Left(None, broken).line())
        yield Read(space.boot)  # The reply proves that the line above has come.
    return broken


def _breaking(space: Space, scope: str, registered: list[Registered], lost: Lost) -> Steps:
    """Walk from the last open generation to the one that the lost rank keeps shut.

    After a break that was there before, members register anew and see the loss themselves;
    only generations that are registered already are looked at here.
    """
    head = yield Read(space.head(scope))
    generation = max(int(head or 0), min(line.generation for line in registered))
    last = max(line.generation for line in registered)
    while True:
        at = space.at(scope, generation)
        text = yield Read(at.verdict)
        if text is None:
            stays = yield from _breaking_one(space, scope, generation, registered, lost)
            if stays is not None:
                return generation if stays else None
        elif Verdict.decode(text).broken is not None and generation >= last:
            return None
        generation += 1


def _breaking_one(
    space: Space, scope: str, generation: int, registered: list[Registered], lost: Lost
) -> Steps:
    """Break one generation: True if it is broken, False if there is nothing to break here,
    None if the next one must be looked at."""
    members = yield from _members(space, generation, registered)
    if lost.rank not in members:
        return False
    at = space.at(scope, generation)
    log = (yield Read(at.log)) or b""
    arrivals = decode_arrivals(log)
    if any(a.rank == lost.rank and a.incarnation > lost.incarnation for a in arrivals):
        return False
    call = _call(space, scope, generation, members)
    if any(a.rank == lost.rank for a in arrivals):
        # It arrived, and may have died before it counted. One count too many only makes the
        # closer look once more; one too few would make everybody wait for the deadline.
        count = yield Add(at.counter, 1)
        if count >= len(members):
            yield from _closing_for_the_dead(space, call, count)
        return None
    broken = as_broken(call, lost.cause, missing=missing_of(call, (a.rank for a in arrivals)))
    own = Verdict.of_broken(broken, by=REPORTER)
    verdict = Verdict.decode((yield CompareSet(at.verdict, own.encode())))
    return None if verdict.broken is None else True


def _closing_for_the_dead(space: Space, call: FenceCall, count: int) -> Steps:
    """The last to arrive died before it judged; judge for it."""
    at = space.at(call.key.scope, call.key.generation)
    log = (yield Read(at.log)) or b""
    arrivals = decode_arrivals(log)
    if not arrivals:
        return
    first = arrivals[0]
    asked = FenceCall(
        key=call.key,
        fence=first.fence,
        epoch=first.epoch,
        version=first.version,
        digest=first.digest,
        members=call.members,
        deadline_s=0.0,
    )
    ruling = judge(asked, arrivals)
    match ruling:
        case Waiting():
            return
        case Opened(ticket=ticket, arrivals=judged):
            own = Verdict(
                by=REPORTER,
                count=ticket.count,
                hash=ticket.hash,
                log_bytes=len(log),
                payload=any(a.payload for a in judged),
            )
        case _:
            own = Verdict.of_broken(ruling, by=REPORTER)
    text = own.encode()
    if (yield CompareSet(at.verdict, text)) == text and own.broken is None:
        yield from collecting(space, call, None)


def _members(space: Space, generation: int, registered: list[Registered]) -> Steps:
    """Who may wait at this generation: the latest registration up to it counts."""
    before = [line for line in registered if line.generation <= generation] or registered[:1]
    latest = max(before, key=lambda line: line.generation)
    text = yield Read(space.members(latest.members))
    return () if text is None else ranks_from_json(wire.decode(text))


def _call(space: Space, scope: str, generation: int, members: tuple[Rank, ...]) -> FenceCall:
    """The fence as one sees it who does not know its name: enough to break it."""
    return FenceCall(
        key=FenceKey(space.root, 0, scope, generation),
        fence=FenceName(""),
        epoch=Epoch(0),
        version=Version(0),
        digest=Digest(""),
        members=members,
        deadline_s=0.0,
    )


def announcing(space: Space, host: str, process: Process) -> Steps:
    """Say which process of which host this rank is; returns who is near, as `neighbours`."""
    known = yield Read(space.pids(host))
    if known is None:
        yield Append(space.hosts, host.encode() + b"\n")
    yield Append(space.pids(host), process.line())
    return (yield from neighbours(space, host))


def neighbours(space: Space, host: str) -> Steps:
    """The processes that have announced themselves: of this host, and of the hosts before and
    after it in a ring of all."""
    here = Process.lines((yield Read(space.pids(host))))
    hosts = sorted(set(((yield Read(space.hosts)) or b"").decode().splitlines()))
    near: list[Process] = []
    if host in hosts:
        at = hosts.index(host)
        for other in sorted({hosts[at - 1], hosts[(at + 1) % len(hosts)]} - {host}):
            near += Process.lines((yield Read(space.pids(other))))
    return here, near


def wards(me: Rank, here: Sequence[Process], near: Sequence[Process]) -> list[Process]:
    """Which processes of the hosts nearby this rank watches: its host shares them out."""
    ranks = sorted({process.rank for process in here})
    if me not in ranks:
        return []
    mine = ranks.index(me)
    return [process for n, process in enumerate(near) if n % len(ranks) == mine]


def reporting_death(space: Space, lost: Lost) -> Steps:
    """Report a process that is gone, unless it had finished."""
    left = Left.lines((yield Read(space.left)))
    if any(line.rank == lost.rank for line in left):
        return {}
    return (yield from reporting(space, lost))


SIGNS_MAX = 64


def asking(space: Space, call: FenceCall, why: str) -> Steps:
    """Ask those who have not arrived to write down what they do; once for a reason."""
    asked = Ask.lines((yield Read(space.asks)))
    ask = Ask(call.key.scope, call.key.generation, call.fence, why)
    if ask not in asked:
        yield Append(space.asks, ask.line())
        yield Read(space.boot)  # The reply proves that the line above has come.


def looking(space: Space, call: FenceCall) -> Steps:
    """Who is missing, and the last beats of the first of them."""
    log = (yield Read(space.at(call.key.scope, call.key.generation).log)) or b""
    missing = missing_of(call, (a.rank for a in decode_arrivals(log)))
    beats: dict[Rank, Beat | None] = {}
    for rank in missing[:SIGNS_MAX]:
        beats[rank] = Beat.decode((yield Read(space.beat(rank))))
    return missing, beats


def leaving(space: Space, rank: Rank, used: Mapping[str, tuple[int, int]], *, peers: int) -> Steps:
    """Say that this rank has finished; the last of the run removes every key.

    `peers` is the greatest number of members that this rank has seen in a scope: with fewer
    leavers it cannot be the last. One that comes after it (an older incarnation, say) finds the run
    swept, and sweeps what it has written itself.
    """
    yield Append(space.left, Left(rank, {scope: list(ends) for scope, ends in used.items()}).line())
    count = yield Add(space.leavers, 1)
    if count >= peers or (yield Read(space.boot)) is None:
        yield from sweeping(space)


def sweeping(space: Space) -> Steps:
    """Remove every key of the attempt, once each rank of it has left or is lost."""
    left = Left.lines((yield Read(space.left)))
    registered = Registered.lines((yield Read(space.scopes)))
    lost = lost_among(Gone.lines((yield Read(space.lost))))
    lists = sorted({line.members for line in registered})
    ranks: set[Rank] = set()
    for digest in lists:
        text = yield Read(space.members(digest))
        ranks.update(ranks_from_json(wire.decode(text or b"[]")))
    hosts = sorted(set(((yield Read(space.hosts)) or b"").decode().splitlines()))
    for host in hosts:  # Who has come and not been at a fence yet is here all the same.
        ranks.update(line.rank for line in Process.lines((yield Read(space.pids(host)))))
    gone = {line.rank for line in left} | {line.rank for line in lost}
    if not ranks <= gone and (yield Read(space.boot)) is not None:
        return  # Where `boot` is missing all had left: who is here wrote these keys since.
    # A second process of a rank, broken off at a fence, may have been at none since all was swept.
    for scope in sorted({line.scope for line in registered}.union(*(line.used for line in left))):
        yield from _sweeping_scope(space, scope, left, registered)
    for digest in lists:
        yield Delete(space.members(digest))
    for host in hosts:
        yield Delete(space.pids(host))
    if (yield Read(space.beating)) is not None:
        for rank in sorted(ranks):
            yield Delete(space.beat(rank))
    for key in space.of_the_run:
        yield Delete(key)
    yield Read(space.boot)  # The reply proves that all of them are gone.


def _sweeping_scope(
    space: Space, scope: str, left: list[Left], registered: list[Registered]
) -> Steps:
    """Remove the generations that fences have not removed as they went."""
    head = int((yield Read(space.head(scope))) or 0)
    ends = [line.used[scope] for line in left if scope in line.used]
    low = min((low for low, _ in ends), default=head - VERDICTS_KEPT)
    seen = [line.generation for line in registered if line.scope == scope]
    high = max(head + 1, *seen, *(high for _, high in ends))
    oldest = max(min(low, head - VERDICTS_KEPT), head - VERDICTS_KEPT - COLLECTED_MAX, 0)
    for generation in range(oldest, high + 1):
        keys = space.at(scope, generation)
        yield Delete(keys.verdict)
        yield Delete(keys.log)
        yield Delete(keys.counter)
    yield Delete(space.head(scope))
