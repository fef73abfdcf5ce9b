"""Fence instances as the kernel holds them: who has arrived, what is decided, who has yet to pass.

A verdict stays: an open fence stays open, a broken one broken. An instance that nobody alive has
yet to pass or to learn of is not held any more, so that two systems that differ by such a one alone
are one.
"""

from collections.abc import Iterable

from phasesync.core.plan import Act, Defect, Plan, Wait
from phasesync.core.state import FenceState, RankState, Stage, Status, System, Verdict
from phasesync.core.turn import fences_left, program

__all__ = (
    "GONE",
    "absence",
    "arrive",
    "fail_rest",
    "fence_epoch",
    "fences_failed",
    "find",
    "kept",
    "lost_leaders",
    "missing_from",
    "orphaned",
    "put",
    "unnoticed",
)

#: Who takes no part any more.
GONE = frozenset((Status.DEAD, Status.DEAD_ACTING))


def fence_epoch(plan: Plan, epoch: int) -> int:
    """The epoch in a fence's key: its own, unless keys are used again."""
    return 1 if Defect.KEY_REUSED in plan.defects else epoch


def find(plan: Plan, fences: tuple[FenceState, ...], state: RankState, wait: Wait) -> FenceState:
    """The instance that a rank comes to: shut and without arrivals, if nobody came before."""
    epoch = fence_epoch(plan, state.epoch)
    for found in fences:
        if (
            found.fence == wait.fence
            and found.scope == wait.scope
            and found.epoch == epoch
            and found.stage is state.stage
        ):
            return found
    return FenceState(epoch, state.stage, wait.scope, wait.fence)


def put(fences: tuple[FenceState, ...], entry: FenceState) -> tuple[FenceState, ...]:
    """The instances with this one in the place of its former self."""
    key = entry[:4]
    return tuple(sorted((*(held for held in fences if held[:4] != key), entry)))


def arrive(
    plan: Plan, system: System, rank: int, state: RankState, wait: Wait
) -> tuple[FenceState, ...]:
    """The instances after a rank arrived at its own."""
    found = find(plan, system.fences, state, wait)
    if found.verdict is not Verdict.SHUT:
        return system.fences
    arrived = found.arrived | 1 << rank
    verdict = decided(plan, system, arrived, wait, state.stage)
    if verdict is not Verdict.SHUT:
        arrived = 0
    return put(system.fences, found._replace(arrived=arrived, verdict=verdict))


def decided(plan: Plan, system: System, arrived: int, wait: Wait, stage: Stage) -> Verdict:
    """Open once all members are in. A recovery waits for the living alone, but breaks where a
    dead leader's part of it can never be done: that replica is poisoned."""
    members = plan.scopes[wait.scope].members
    absent = [member for member in members if not arrived >> member & 1]
    if stage is Stage.RECOVER:
        dead = [member for member in members if system.ranks[member].status in GONE]
        if lost_leaders(plan, wait, dead):
            return Verdict.BROKEN
        absent = [member for member in absent if member not in dead]
    return Verdict.SHUT if absent else Verdict.OPEN


def lost_leaders(plan: Plan, wait: Wait, dead: Iterable[int]) -> tuple[int, ...]:
    """The dead members of a recovery's fence whose part before it can never be done."""
    members = plan.scopes[wait.scope].members
    return tuple(rank for rank in dead if rank in members and _leads_before(plan, rank, wait))


def _leads_before(plan: Plan, rank: int, wait: Wait) -> bool:
    steps = plan.recover[rank]
    before = steps[: steps.index(wait)] if wait in steps else ()
    return any(isinstance(item, Act) and item.led for item in before)


def fences_failed(plan: Plan, rank: int, state: RankState) -> tuple[Wait, ...]:
    """The fences at which a rank that leaves arrives as failed: all that it has not passed."""
    if Defect.LATE_ABORT in plan.defects:
        steps = program(plan, rank, state.stage)
        return tuple(item for item in steps if isinstance(item, Wait))
    return fences_left(plan, rank, state)


def fail_rest(
    plan: Plan, fences: tuple[FenceState, ...], rank: int, state: RankState
) -> tuple[FenceState, ...]:
    """The fences after `rank` arrived as failed at all that it has not passed."""
    for wait in fences_failed(plan, rank, state):
        found = find(plan, fences, state, wait)
        if found.verdict is Verdict.SHUT or Defect.LATE_ABORT in plan.defects:
            fences = put(fences, found._replace(arrived=0, verdict=Verdict.BROKEN))
    return fences


def kept(
    plan: Plan, ranks: tuple[RankState, ...], fences: tuple[FenceState, ...]
) -> tuple[FenceState, ...]:
    """Only fences that somebody alive has yet to pass or to learn of."""
    return tuple(entry for entry in fences if _awaited(plan, ranks, entry))


def _awaited(plan: Plan, ranks: tuple[RankState, ...], entry: FenceState) -> bool:
    return any(
        ranks[member].status not in GONE and not _beyond(plan, member, ranks[member], entry)
        for member in plan.scopes[entry.scope].members
    )


def _beyond(plan: Plan, rank: int, state: RankState, entry: FenceState) -> bool:
    if Defect.KEY_REUSED in plan.defects:
        return False
    if (state.epoch, state.stage) != (entry.epoch, entry.stage):
        return (state.epoch, state.stage) > (entry.epoch, entry.stage)
    return all(wait.fence != entry.fence for wait in fences_left(plan, rank, state))


def absence(plan: Plan, system: System, rank: int) -> RankState:
    """From where on a dead rank is missing: its next fence, in the next epoch if none is left."""
    state = system.ranks[rank]
    left = fences_left(plan, rank, state)
    return state if left else RankState(state.status, state.epoch + 1)


def missing_from(plan: Plan, rank: int, dead: RankState) -> int:
    """The epoch from which on a dead rank is missing."""
    return dead.epoch if fences_left(plan, rank, dead) else dead.epoch + 1


def unnoticed(plan: Plan, system: System, rank: int) -> bool:
    """Whether the death of a rank decides a fence that somebody alive waits for."""
    state = absence(plan, system, rank)
    for wait in fences_left(plan, rank, state):
        found = find(plan, system.fences, state, wait)
        if found.verdict is Verdict.SHUT and _awaited(plan, system.ranks, found):
            return True
    return orphaned(plan, system, rank) is not None


def orphaned(plan: Plan, system: System, rank: int) -> FenceState | None:
    """A recovery's fence, judged, for which only the dead are missing: they count no more, also
    where they died after the others had come."""
    for entry in system.fences:
        if entry.stage is not Stage.RECOVER or entry.verdict is not Verdict.SHUT:
            continue
        for wait in plan.recover[rank]:
            if isinstance(wait, Wait) and (wait.scope, wait.fence) == (entry.scope, entry.fence):
                verdict = decided(plan, system, entry.arrived, wait, entry.stage)
                if entry.arrived and verdict is not Verdict.SHUT:
                    return entry._replace(arrived=0, verdict=verdict)
    return None
