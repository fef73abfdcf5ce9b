"""The implicit world fence `plan`: ranks agree on what they are to do before any does it.

Its key does not depend on the plan, so ranks that hold different ones meet here, and who differs is
named. A rank that cannot even make its plan says so here too: its peers break with the reason at
once, where they would have waited for it.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

from phasesync.core.aftermath import to_replace
from phasesync.core.model import (
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    OptionValue,
    Rank,
    RootCause,
    Version,
)
from phasesync.core.plan import PLAN, Plan, Wait, text_digest
from phasesync.core.protocol import WORLD
from phasesync.errors import EpochFailed
from phasesync.fences.base import FenceTransport
from phasesync.journal import Journal, line_cut
from phasesync.runtime.walk import Walk

__all__ = ("agree", "call_off", "own_cause", "tell_unready", "write_plan")


async def agree(walk: Walk, resolved: Callable[..., Plan], device: str, deadline_s: float) -> None:
    """Pass the fence `plan`; what `resolved` makes of the devices learned there is the plan.

    Raises:
        EpochFailed: ranks hold different plans, one has none, or somebody did not come.
    """
    plan, fences = walk.plan, walk.fences
    wait, call = _coming(walk, deadline_s)
    payload = (
        ("protocol", plan.protocol.name),
        ("what the protocol says", text_digest(plan.protocol)[:12]),
        ("ranks", str(len(plan.members))),
        *((name, _word(value)) for name, value in plan.options),
        ("device", device),
    )
    fences.announce(call, epoch=0)
    answer = await fences.arrive(call, payload=payload)
    if isinstance(answer, RootCause):
        raise EpochFailed(walk.rank, 0, answer, to_replace(answer), weights="intact", kv="intact")
    fences.use_up((wait,))
    devices = {held.rank: dict(held.payload).get("device", "") for held in answer.arrivals}
    walk.take(resolved(devices=[devices[member] for member in plan.members]))
    fences.opened(call, answer)
    plan = walk.plan
    walk.journal.bind(digest=plan.digest)
    write_plan(walk.journal, plan, caller_joins=walk.caller_joins)


def write_plan(journal: Journal, plan: Plan, *, caller_joins: bool) -> None:
    """The line that says what all ranks go by: an auditor makes the plan again from it."""
    journal.write(
        "plan",
        epoch=0,
        options=dict(plan.options),
        members=[str(member) for member in plan.members],
        devices=list(plan.devices),
        place=list(plan.place),
        groups={name: [list(part) for part in parts] for name, parts in plan.groups},
        caller_joins=caller_joins or None,
    )


async def call_off(walk: Walk, error: Exception) -> None:
    """Break the fence `plan` at which this rank waits itself: it has learned that not all come."""
    _, call = _coming(walk, 0.0)
    await walk.fences.shut(call, replace(own_cause(walk.rank, error), fence=PLAN))


def _coming(walk: Walk, deadline_s: float) -> tuple[Wait, FenceCall]:
    """The fence `plan`, and its instance that a rank comes to that has passed none."""
    plan = walk.plan
    wait = Wait(PLAN, plan.world, deadline_s, (), (), False)
    call = walk.fences.call(plan, walk.machine.state, wait)
    return wait, replace(call, epoch=Epoch(0), version=Version(0))


async def tell_unready(
    transport: FenceTransport,
    error: BaseException | RootCause,
    *,
    rank: Rank,
    members: tuple[Rank, ...],
    run: str,
    attempt: int = 0,
    incarnation: int = 0,
) -> None:
    """Tell all `members` that `rank` has no plan, and why: their fence `plan` breaks at once.

    For whoever makes a `RankRunner` and fails at it: the peers wait for this rank all the same.
    The reason may be somebody else's: a rank that stays where a peer has gone on alone says so.
    """
    own = error if isinstance(error, RootCause) else own_cause(rank, error)
    cause = replace(own, fence=PLAN)
    call = FenceCall(
        key=FenceKey(run, attempt, WORLD, 0),
        fence=PLAN,
        epoch=Epoch(0),
        version=Version(0),
        digest=Digest(""),
        members=members,
        deadline_s=0.0,
    )
    nonce = secrets.token_hex(8)
    arrival = call.arrival(rank, incarnation=incarnation, nonce=nonce, cause=cause)
    await transport.connect()
    try:
        await transport.fail(call, arrival)
    finally:
        await transport.close()


def own_cause(rank: Rank, error: BaseException) -> RootCause:
    """The root cause that an error of `rank` is, outside any phase."""
    return RootCause(
        kind="failed",
        ranks=(rank,),
        error_type=type(error).__name__,
        error=line_cut(str(error) or repr(error)),
    )


def _word(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
