"""What leaving does to memory: an abort, a process that dies, a call that outlives its caller.

A rank that was aborted keeps what it has. What a dead process owned is lost, or free where the
device frees it; what it worked on is unknown, unless an engine goes on with the call without it.
"""

from phasesync.core.memory import Mapped, Moment, apply, cell, touched
from phasesync.core.plan import Act, Defect, Plan, Touch
from phasesync.core.protocol import Verb
from phasesync.core.state import RankState, Stage, Status
from phasesync.core.turn import next_step

__all__ = ("abort_touches", "aborted", "crashed", "landed")


def abort_touches(plan: Plan, rank: int, state: RankState) -> tuple[Touch, ...]:
    """What an aborted rank does to memory: nothing, in a sound plan. It keeps what it has."""
    if not plan.defects & _ABORTS:
        return ()
    verb = Verb.ACQUIRES if Defect.ABORT_TAKES in plan.defects else Verb.RELEASES
    sought = Verb.RELEASES if verb is Verb.ACQUIRES else Verb.ACQUIRES
    done = plan.programs[rank][: state.at] if state.stage is Stage.EPOCH else ()
    cells = (
        touch.cell
        for act in done
        if isinstance(act, Act)
        for touch in act.touches
        if touch.verb is sought and plan.owner[touch.cell] == plan.members[rank]
    )
    return tuple(Touch(verb, number) for number in dict.fromkeys(cells))


_ABORTS = frozenset((Defect.ABORT_TAKES, Defect.ABORT_RELEASES))


def aborted(plan: Plan, cells: tuple[int, ...], rank: int, state: RankState) -> tuple[int, ...]:
    """Memory after the rank left the epoch because somebody else failed."""
    touches = abort_touches(plan, rank, state)
    if not touches:
        return cells
    after = list(cells)
    for touch in touches:
        after[touch.cell] = apply(plan, after[touch.cell], touch, Moment.END, state.epoch)
    return tuple(after)


def crashed(plan: Plan, cells: tuple[int, ...], rank: int, state: RankState) -> tuple[int, ...]:
    """Memory after the process of `rank` died: its own is lost, what it worked on is unknown
    unless the call was one to an engine, which goes on without it."""
    who = plan.members[rank]
    after = tuple(
        cell(Mapped.NO if plan.freed[number] else Mapped.LOST)
        if plan.owner[number] == who and value & 3 != Mapped.NO
        else value
        for number, value in enumerate(cells)
    )
    here = next_step(plan, rank, state)
    if state.status not in _IN_ACT or not isinstance(here, Act) or here.led:
        return after
    failed = touched(plan, after, here, Moment.FAIL, state.epoch)
    return _but_own(plan, rank, after, failed)


_IN_ACT = frozenset((Status.ACTING, Status.HUNG))


def landed(plan: Plan, cells: tuple[int, ...], rank: int, state: RankState) -> tuple[int, ...]:
    """Memory after the call of a dead leader reached its end on the engine."""
    here = next_step(plan, rank, state)
    assert isinstance(here, Act)
    return _but_own(plan, rank, cells, touched(plan, cells, here, Moment.END, state.epoch))


def _but_own(
    plan: Plan, rank: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...]:
    who = plan.members[rank]
    return tuple(
        old if owner == who else new
        for owner, old, new in zip(plan.owner, before, after, strict=True)
    )
