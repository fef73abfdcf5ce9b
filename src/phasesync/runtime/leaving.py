"""How a rank leaves an epoch that failed, and comes back.

Nobody leaves in silence: a rank that fails, is cancelled or learns of a failure arrives as failed
at every fence that it has not passed, and names the root cause that the epoch's last fence has.
Memory is put back between epochs only, behind a fence that every live rank has stopped.
"""

from dataclasses import replace

from phasesync.core.aftermath import aftermath, put_back, to_replace
from phasesync.core.kernel import Kind, Stage, Status, fences_left
from phasesync.core.model import RootCause
from phasesync.core.plan import Act
from phasesync.errors import EpochFailed, describe
from phasesync.journal import line_cut
from phasesync.runtime.walk import STOPPED, Halt, Walk

__all__ = ("cancelled", "failed", "recover", "recovery_is_due", "unexpected")


def recovery_is_due(walk: Walk) -> bool:
    """After a failure, where the caller joins: recovery waits for all to be called again."""
    state = walk.machine.state
    return (
        walk.caller_joins
        and state.status in STOPPED
        and state.stage is Stage.EPOCH
        and bool(walk.plan.protocol.recover)
        and not walk.fences.gone
    )


async def failed(walk: Walk, cause: RootCause) -> EpochFailed:
    """Carry the failure to every fence that is left, recover if the protocol can, and say so.

    The last fence of the epoch has the one root cause that all ranks name.
    """
    await walk.alarm.off()
    state = walk.machine.state
    left = fences_left(walk.plan, walk.index, state)
    shut = frozenset(wait.fence for wait in left)
    root = await walk.fences.fail_all(walk.plan, state, cause, left)
    behind = aftermath(walk.plan, walk.index, state, frozenset(walk.fences.passed), shut)
    walk.fences.gone = frozenset(to_replace(root)) | frozenset(to_replace(cause))
    walk.journal.write("epoch.end", level="error", error_type=root.error_type, error=describe(root))
    is_due = recovery_is_due(walk)
    recovered = is_due or await _recovered(walk)
    behind = put_back(walk.plan, behind) if recovered else behind
    return EpochFailed(
        walk.rank,
        walk.epoch,
        root,
        to_replace(root),
        weights=behind.weights,
        kv=behind.kv,
        groups="lost" if root.kind == "store_lost" else "intact",
        can_retry=recovered and not walk.fences.gone,
        poisoned=() if recovered else _own_groups(walk),
        recovers_next=is_due,
    )


async def _recovered(walk: Walk) -> bool:
    """Whether the declared recovery went well; whom the others go on without, stays out."""
    if not walk.plan.protocol.recover or walk.caller_joins or walk.rank in walk.fences.gone:
        return False
    try:
        await recover(walk)
    except Halt:
        return False
    return True


async def recover(walk: Walk) -> None:
    """The declared recovery, behind a fence that every live rank has stopped."""
    walk.machine.fire(Kind.RECOVER)
    walk.fences.begin()
    walk.journal.write("recover.begin")
    try:
        await walk.on()
    except Halt as halt:
        state = walk.machine.state
        left = fences_left(walk.plan, walk.index, state)
        await walk.fences.fail_all(walk.plan, state, halt.cause, left)
        walk.journal.write("recover.end", level="error", error=describe(halt.cause))
        raise


def unexpected(walk: Walk, error: Exception) -> RootCause:
    """An error of phasesync's own, or of a journal or device: peers hear of it all the same."""
    state = walk.machine.state
    here = walk.here()
    if state.status is Status.ACTING and isinstance(here, Act):
        return walk.own_failure(here, error)
    if state.status in (Status.READY, Status.WAITING):
        walk.machine.fire(Kind.ABORT)
    kind, text = type(error).__name__, line_cut(str(error) or repr(error))
    return RootCause(kind="failed", ranks=(walk.rank,), error_type=kind, error=text)


async def cancelled(walk: Walk) -> None:
    """Nobody leaves in silence: a cancelled rank arrives as failed wherever it is awaited."""
    await walk.alarm.off()
    cause = RootCause(kind="cancelled", ranks=(walk.rank,))
    state = walk.machine.state
    here = walk.here()
    if state.status is Status.ACTING and isinstance(here, Act):
        cause = replace(cause, phase=here.phase)
        walk.journal.write(
            "phase.fail",
            level="error",
            phase=here.phase,
            error_type="Cancelled",
            error="the task of this rank was cancelled",
        )
        walk.machine.fire(Kind.FAIL, here.phase)
    elif state.status in (Status.READY, Status.WAITING):
        walk.machine.fire(Kind.ABORT)
    left = fences_left(walk.plan, walk.index, state)
    await walk.fences.fail_all(walk.plan, state, cause, left)
    walk.journal.write("epoch.end", level="error", error_type="Cancelled", error=describe(cause))


def _own_groups(walk: Walk) -> tuple[str, ...]:
    return tuple(
        f"{name}/{number}"
        for name, parts in walk.plan.groups
        for number, part in enumerate(parts)
        if walk.index in part
    )
