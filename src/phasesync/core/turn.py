"""One rank's turn: what it may do where it stands, and where it stands after it.

A row of `_MOVES` is all that a status allows. Only the rank's own position is judged here; whether
a fence is open is the system's to say (core/kernel.py), which asks here for every step.
"""

from functools import lru_cache

from phasesync.core.plan import Act, Plan, Step, Wait
from phasesync.core.protocol import Row, Verb
from phasesync.core.state import Kind, RankState, Stage, Status
from phasesync.errors import Refused

__all__ = (
    "AT_FENCE",
    "advance",
    "advanced",
    "fences_left",
    "heard",
    "last_counted",
    "next_step",
    "program",
    "refusal",
    "rows",
)

#: Where a rank is at a fence: its arrival counted there, or was lost on the way.
AT_FENCE = frozenset((Status.WAITING, Status.CUT))
_MOVES: dict[tuple[Status, Kind], Status] = {
    (Status.READY, Kind.START): Status.ACTING,
    (Status.ACTING, Kind.END): Status.READY,
    (Status.ACTING, Kind.FAIL): Status.STOPPED,
    (Status.READY, Kind.ARRIVE): Status.WAITING,
    (Status.READY, Kind.REFUSE): Status.STOPPED,
    (Status.READY, Kind.LOSE): Status.CUT,
    (Status.WAITING, Kind.PASS): Status.READY,
    (Status.READY, Kind.ABORT): Status.ABORTED,
    (Status.WAITING, Kind.ABORT): Status.ABORTED,
    (Status.CUT, Kind.ABORT): Status.ABORTED,
    (Status.STOPPED, Kind.RECOVER): Status.READY,
    (Status.ABORTED, Kind.RECOVER): Status.READY,
    (Status.FINISHED, Kind.BEGIN): Status.READY,
}
_ON_ACT = frozenset((Kind.START, Kind.END, Kind.FAIL))
_ON_WAIT = frozenset((Kind.ARRIVE, Kind.REFUSE, Kind.PASS, Kind.LOSE))


def program(plan: Plan, rank: int, stage: Stage) -> tuple[Step, ...]:
    """The steps of a rank, of the epoch or of the recovery after it."""
    return plan.programs[rank] if stage is Stage.EPOCH else plan.recover[rank]


def next_step(plan: Plan, rank: int, state: RankState) -> Step | None:
    """The step that the rank stands before or in; None at the end."""
    steps = program(plan, rank, state.stage)
    return steps[state.at] if state.at < len(steps) else None


def refusal(plan: Plan, rank: int, state: RankState, kind: Kind, name: str) -> str | None:
    """Why this rank may not do this where it stands, or None if it may.

    Only the rank's own position is judged here; whether a fence is open is the fence's to say, and
    passing one takes its ticket.
    """
    who = plan.members[rank]
    if (state.status, kind) not in _MOVES:
        return (
            f"{who} cannot {kind} {name!r}: it is {state.status.name.lower().replace('_', ' ')}"
            f"{_where(plan, rank, state)}"
        )
    if kind in (Kind.ABORT, Kind.RECOVER, Kind.BEGIN):
        return None
    here = next_step(plan, rank, state)
    match here:
        case None:
            return f"{who} cannot {kind} {name!r}: epoch {state.epoch} is over for it"
        case Act(phase=phase) if kind in _ON_ACT and phase == name:
            return None
        case Wait(fence=fence) if kind in _ON_WAIT and fence == name:
            return None
        case Act(phase=phase):
            return f"{who} cannot {kind} {name!r} yet; next is phase {phase!r}"
        case Wait(fence=fence):
            return f"{who} cannot {kind} {name!r} yet; next is fence {fence!r}"


def advance(plan: Plan, rank: int, state: RankState, kind: Kind, name: str) -> RankState:
    """The rank after it did this.

    Raises:
        Refused: it may not, where it stands.
    """
    if (reason := refusal(plan, rank, state, kind, name)) is not None:
        raise Refused(reason)
    return advanced(plan, rank, state, kind)


def advanced(plan: Plan, rank: int, state: RankState, kind: Kind) -> RankState:
    status = _MOVES[state.status, kind]
    match kind:
        case Kind.END:
            act = program(plan, rank, state.stage)[state.at]
            assert isinstance(act, Act)
            pending = state.pending
            if act.enqueued:
                cells = (touch.cell for touch in act.touches if touch.verb is Verb.RELEASES)
                pending = tuple(sorted({*pending, *cells}))
            return _at(plan, rank, state._replace(status=status, pending=pending), state.at + 1)
        case Kind.ARRIVE | Kind.LOSE:
            wait = program(plan, rank, state.stage)[state.at]
            assert isinstance(wait, Wait)
            synced = "device_synchronised" in wait.established
            return state._replace(status=status, pending=() if synced else state.pending)
        case Kind.PASS:
            return _at(plan, rank, state._replace(status=status), state.at + 1)
        case Kind.RECOVER:
            return state._replace(status=status, stage=Stage.RECOVER, at=0)
        case Kind.BEGIN:
            return RankState(Status.READY, state.epoch + 1, incarnation=state.incarnation)
        case _:
            return state._replace(status=status)


def _at(plan: Plan, rank: int, state: RankState, at: int) -> RankState:
    if at < len(program(plan, rank, state.stage)):
        return state._replace(at=at)
    return state._replace(at=at, status=Status.FINISHED)


def _where(plan: Plan, rank: int, state: RankState) -> str:
    match next_step(plan, rank, state):
        case Act(phase=phase):
            return f" at phase {phase!r}"
        case Wait(fence=fence):
            return f" at fence {fence!r}"
        case None:
            return ""


def fences_left(plan: Plan, rank: int, state: RankState) -> tuple[Wait, ...]:
    """The fences of this stage that the rank has not passed, in order."""
    return tuple(
        step for step in program(plan, rank, state.stage)[state.at :] if isinstance(step, Wait)
    )


@lru_cache(maxsize=4096)
def rows(plan_steps: tuple[Step, ...], role: str) -> tuple[Row, ...]:
    """The steps of one rank as a transition table, for whoever executes it."""
    table: list[Row] = []
    source = "ready"
    for item in plan_steps:
        match item:
            case Act(phase=name):
                table.append(Row(role, source, f"start {name}", f"in {name}"))  # type: ignore[arg-type]
                table.append(Row(role, f"in {name}", f"end {name}", f"after {name}"))  # type: ignore[arg-type]
            case Wait(fence=name):
                table.append(Row(role, source, f"arrive {name}", f"at {name}"))  # type: ignore[arg-type]
                table.append(Row(role, f"at {name}", f"pass {name}", f"after {name}", name))  # type: ignore[arg-type]
        source = f"after {name}"
    return tuple(table)


def heard(plan: Plan, rank: int, state: RankState, left: tuple[Wait, ...]) -> bool:
    """Whether a break of the next fence stops the rank at once.

    The break of an epoch's last fence is learned there, not before: whoever is not in the scope
    of the failure finishes what is legal for it.
    """
    return len(left) > 1 or state.stage is Stage.RECOVER or state.status in AT_FENCE


def last_counted(plan: Plan, rank: int, state: RankState) -> Wait | None:
    """The last fence of this stage at which an arrival of the rank was counted; its arrival may
    come again, at any time that the rank is alive."""
    if state.status not in (Status.READY, Status.ACTING, Status.WAITING):
        return None
    steps = program(plan, rank, state.stage)
    before = steps[: state.at + (state.status is Status.WAITING)]
    return next((step for step in reversed(before) if isinstance(step, Wait)), None)
