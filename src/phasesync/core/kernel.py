"""The verbs: what may happen next, and what the system is after it.

Checker, runtime and auditor all ask here. None may have a second opinion. Three small tables hold
everything: what a rank may do (`_MOVES`, here), what an action does to memory (`core/memory.py`),
and what it wants of memory (`core/properties.py`). The runtime walks one rank's state, the checker
the whole system, the auditor whatever was logged; all three look up the same rows.

The kernel knows epochs and versions, never seconds, files, sockets or torch.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from phasesync.core.memory import (
    INPUTS,
    KEEPS,
    NONE,
    PARTIAL,
    SHARED,
    Mapped,
    Moment,
    apply,
    cell,
    content_of,
    input_lost,
    mapped_of,
    synchronised,
    touched,
)
from phasesync.core.plan import Act, Defect, Plan, Step, Touch, Wait
from phasesync.core.protocol import Row, Verb
from phasesync.core.state import (
    NO_FAULTS,
    EngineState,
    Event,
    Faults,
    FenceState,
    Kind,
    Late,
    RankState,
    Stage,
    Status,
    System,
    Verdict,
)
from phasesync.errors import Refused

__all__ = (
    "INPUTS",
    "KEEPS",
    "NONE",
    "NO_FAULTS",
    "PARTIAL",
    "SHARED",
    "EngineState",
    "Event",
    "Faults",
    "FenceState",
    "Kind",
    "Late",
    "Mapped",
    "Moment",
    "RankState",
    "Stage",
    "Status",
    "System",
    "Verdict",
    "abort_touches",
    "aborted",
    "advance",
    "apply",
    "cell",
    "content_of",
    "crashed",
    "enabled",
    "fence_epoch",
    "fences_failed",
    "fences_left",
    "heard",
    "initial",
    "input_lost",
    "landed",
    "lost_leaders",
    "mapped_of",
    "next_step",
    "program",
    "reachable",
    "refusal",
    "rows",
    "step",
    "synchronised",
    "touched",
    "woken",
)


# ------------------------------------------------------------------------------- one rank

_MOVES: dict[tuple[Status, Kind], Status] = {
    (Status.READY, Kind.START): Status.ACTING,
    (Status.ACTING, Kind.END): Status.READY,
    (Status.ACTING, Kind.FAIL): Status.STOPPED,
    (Status.READY, Kind.ARRIVE): Status.WAITING,
    (Status.READY, Kind.REFUSE): Status.STOPPED,
    (Status.WAITING, Kind.PASS): Status.READY,
    (Status.READY, Kind.ABORT): Status.ABORTED,
    (Status.WAITING, Kind.ABORT): Status.ABORTED,
    (Status.STOPPED, Kind.RECOVER): Status.READY,
    (Status.ABORTED, Kind.RECOVER): Status.READY,
    (Status.FINISHED, Kind.BEGIN): Status.READY,
}
_ON_ACT = frozenset((Kind.START, Kind.END, Kind.FAIL))
_ON_WAIT = frozenset((Kind.ARRIVE, Kind.REFUSE, Kind.PASS))


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
    return _advanced(plan, rank, state, kind)


def _advanced(plan: Plan, rank: int, state: RankState, kind: Kind) -> RankState:
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
        case Kind.ARRIVE:
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


# ------------------------------------------------------------------------------ the system


def initial(plan: Plan) -> System:
    """All ranks before the first epoch, memory as `start:` says."""
    return System(
        ranks=tuple(RankState() for _ in plan.members),
        cells=tuple(
            cell(Mapped.YES if start else Mapped.NO, 0 if start and content else NONE)
            for start, content in zip(plan.start, plan.content, strict=True)
        ),
        engines=tuple(EngineState() for _ in plan.engines),
    )


def enabled(
    plan: Plan, system: System, faults: Faults = NO_FAULTS, epochs: int = 2
) -> Iterator[Event]:
    """Everything that may happen next, in a fixed order."""
    may_fault = system.faults < faults.most
    yield from _engine_deaths(plan, system, faults)
    for rank, state in enumerate(system.ranks):
        status = state.status
        if status is Status.FINISHED:
            if _may_begin(system, state, epochs):
                yield Event(Kind.BEGIN, rank, "")
            continue
        here = next_step(plan, rank, state)
        match here:
            case Act(phase=name):
                if status is Status.READY:
                    yield Event(Kind.START, rank, name)
                elif status is Status.ACTING:
                    lost = _must_fail(plan, system, here)
                    if not lost:
                        yield Event(Kind.END, rank, name)
                    if lost or (may_fault and faults.fail and not here.outside):
                        yield Event(Kind.FAIL, rank, name)
                    if may_fault and faults.hang:
                        yield Event(Kind.HANG, rank, name)
                elif status is Status.DEAD_ACTING:
                    yield Event(Kind.LAND, rank, name)
            case Wait(fence=name):
                if status is Status.READY:
                    yield Event(Kind.ARRIVE, rank, name)
                elif status is Status.WAITING:
                    found = _find(plan, system.fences, state, here)
                    if found.verdict is Verdict.OPEN:
                        yield Event(Kind.PASS, rank, name)
                    if faults.deadlines and found.verdict is Verdict.SHUT:
                        yield Event(Kind.DEADLINE, rank, name)
            case None:
                pass
        hears = faults.aborts and Defect.NO_ABORT not in plan.defects
        if hears and status in (Status.READY, Status.WAITING):
            left = fences_left(plan, rank, state)
            if (
                left
                and heard(plan, rank, state, left)
                and (_find(plan, system.fences, state, left[0]).verdict is Verdict.BROKEN)
            ):
                yield Event(Kind.ABORT, rank, left[0].fence)
        stopped = status in (Status.STOPPED, Status.ABORTED)
        if stopped and state.stage is Stage.EPOCH and plan.recover[rank]:
            yield Event(Kind.RECOVER, rank, "")
        if status in (Status.DEAD, Status.DEAD_ACTING):
            if faults.notices and _unnoticed(plan, system, rank):
                yield Event(Kind.NOTICE, rank, "")
            if faults.restart and _may_restart(plan, system, rank, epochs):
                yield Event(Kind.RESTART, rank, "")
        elif may_fault and faults.crash:
            yield Event(Kind.CRASH, rank, "")
    for call in dict.fromkeys(each.rank for each in system.late):
        yield Event(Kind.WAKE, call, "")


def _may_restart(plan: Plan, system: System, rank: int, epochs: int) -> bool:
    """Members change between epochs only: once every live rank has stopped for good.

    The first of the dead stands for all of them: they are replaced together.
    """
    if Defect.RESTARTS_EARLY in plan.defects:
        return system.ranks[rank].incarnation == 0
    if any(other.status in _GONE for other in system.ranks[:rank]):
        return False
    if max(other.epoch for other in system.ranks) >= epochs:
        return False
    return all(
        other.status in _GONE or _settled(plan, at, other) for at, other in enumerate(system.ranks)
    )


def _settled(plan: Plan, rank: int, state: RankState) -> bool:
    if state.status in (Status.STOPPED, Status.ABORTED):
        return state.stage is Stage.RECOVER or not plan.recover[rank]
    return state.status is Status.FINISHED and state.stage is Stage.RECOVER


def _may_begin(system: System, state: RankState, epochs: int) -> bool:
    """Whether another epoch follows: after a recovery, not before every dead rank is replaced."""
    if state.epoch >= epochs:
        return False
    return state.stage is Stage.EPOCH or all(other.status not in _GONE for other in system.ranks)


def heard(plan: Plan, rank: int, state: RankState, left: tuple[Wait, ...]) -> bool:
    """Whether a break of the next fence stops the rank at once.

    The break of an epoch's last fence is learned there, not before: whoever is not in the scope
    of the failure finishes what is legal for it.
    """
    return len(left) > 1 or state.stage is Stage.RECOVER or state.status is Status.WAITING


def step(plan: Plan, system: System, event: Event) -> System:
    """The system after `event`; what a dead engine left of its memory stays as it is.

    Raises:
        Refused: the protocol does not allow it now.
    """
    after = _stepped(plan, system, event)
    if not any(engine.dead for engine in system.engines):
        return after
    dead = {
        rank
        for rank, old, new in zip(plan.engines, system.engines, after.engines, strict=True)
        if old.dead and new.dead
    }
    cells = zip(plan.owner, system.cells, after.cells, strict=True)
    return after._replace(cells=tuple(old if who in dead else new for who, old, new in cells))


def reachable(plan: Plan, system: System, act: Act) -> Act:
    """The action without what it would do to dead engines."""
    dead = {who for who, each in zip(plan.engines, system.engines, strict=True) if each.dead}
    if not dead:
        return act
    return act._replace(touches=tuple(t for t in act.touches if plan.owner[t.cell] not in dead))


def _must_fail(plan: Plan, system: System, act: Act) -> bool:
    """Whether what the action works on, or the engine that it calls, is gone."""
    return input_lost(system.cells, act) or reachable(plan, system, act) != act


def _driver(plan: Plan, engine: int) -> int:
    """The first rank on the devices of an engine."""
    width = len(plan.protocol.resources)
    devices = {at // width for at, who in enumerate(plan.owner) if who == plan.engines[engine]}
    return next((rank for rank, at in enumerate(plan.place) if at in devices), 0)


def _engine_deaths(plan: Plan, system: System, faults: Faults) -> Iterator[Event]:
    if not faults.engine or system.faults >= faults.most:
        return
    for number, engine in enumerate(system.engines):
        if not engine.dead:
            yield Event(Kind.ENGINE, _driver(plan, number), str(plan.engines[number]))


def _engine_dies(plan: Plan, system: System, name: str) -> System:
    """What the engine had mapped is lost, and every call to it fails from now on."""
    cells = tuple(
        cell(Mapped.NO if plan.freed[number] else Mapped.LOST)
        if str(plan.owner[number]) == name and value & 3 != Mapped.NO
        else value
        for number, value in enumerate(system.cells)
    )
    engines = tuple(
        each._replace(dead=each.dead or str(who) == name)
        for who, each in zip(plan.engines, system.engines, strict=True)
    )
    return system._replace(cells=cells, engines=engines, faults=system.faults + 1)


def _stepped(plan: Plan, system: System, event: Event) -> System:
    kind, rank, name = event
    state = system.ranks[rank]
    if kind is Kind.ENGINE:
        return _engine_dies(plan, system, name)
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(plan, system, rank)
    if (reason := refusal(plan, rank, state, kind, name)) is not None:
        raise Refused(reason)
    here = next_step(plan, rank, state)
    after = _advanced(plan, rank, state, kind)
    cells, fences, engines, faults = system.cells, system.fences, system.engines, system.faults
    match kind:
        case Kind.START | Kind.END | Kind.FAIL:
            assert isinstance(here, Act)
            cells = touched(plan, cells, here, Moment(kind), state.epoch)
            if kind is Kind.FAIL:
                fences = _fail_rest(plan, system.fences, rank, state)
                faults += not _must_fail(plan, system, here)
        case Kind.ARRIVE:
            assert isinstance(here, Wait)
            if "device_synchronised" in here.established:
                cells = synchronised(plan, cells, state.pending)
            fences = _arrive(plan, system, rank, state, here)
        case Kind.REFUSE:
            fences = _fail_rest(plan, system.fences, rank, state)
        case Kind.PASS:
            assert isinstance(here, Wait)
            if _find(plan, system.fences, state, here).verdict is not Verdict.OPEN:
                raise Refused(f"{plan.members[rank]} cannot pass {name!r}: the fence is not open")
        case Kind.ABORT:
            fences = _fail_rest(plan, system.fences, rank, state)
            cells = aborted(plan, cells, rank, state)
        case _:
            pass
    ranks = (*system.ranks[:rank], after, *system.ranks[rank + 1 :])
    return System(ranks, cells, _kept(plan, ranks, fences), engines, faults, system.late)


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


def fence_epoch(plan: Plan, epoch: int) -> int:
    """The epoch in a fence's key: its own, unless keys are used again."""
    return 1 if Defect.KEY_REUSED in plan.defects else epoch


def _find(plan: Plan, fences: tuple[FenceState, ...], state: RankState, wait: Wait) -> FenceState:
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


def _put(fences: tuple[FenceState, ...], entry: FenceState) -> tuple[FenceState, ...]:
    key = entry[:4]
    return tuple(sorted((*(kept for kept in fences if kept[:4] != key), entry)))


def _arrive(
    plan: Plan, system: System, rank: int, state: RankState, wait: Wait
) -> tuple[FenceState, ...]:
    found = _find(plan, system.fences, state, wait)
    if found.verdict is not Verdict.SHUT:
        return system.fences
    arrived = found.arrived | 1 << rank
    verdict = _decided(plan, system, arrived, wait, state.stage)
    if verdict is not Verdict.SHUT:
        arrived = 0
    return _put(system.fences, found._replace(arrived=arrived, verdict=verdict))


def _decided(plan: Plan, system: System, arrived: int, wait: Wait, stage: Stage) -> Verdict:
    """Open once all members are in. A recovery waits for the living alone, but breaks where a
    dead leader's part of it can never be done: that replica is poisoned."""
    members = plan.scopes[wait.scope].members
    absent = [member for member in members if not arrived >> member & 1]
    if stage is Stage.RECOVER:
        dead = [member for member in members if system.ranks[member].status in _GONE]
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


_GONE = frozenset((Status.DEAD, Status.DEAD_ACTING))


def fences_failed(plan: Plan, rank: int, state: RankState) -> tuple[Wait, ...]:
    """The fences at which a rank that leaves arrives as failed: all that it has not passed."""
    if Defect.LATE_ABORT in plan.defects:
        steps = program(plan, rank, state.stage)
        return tuple(item for item in steps if isinstance(item, Wait))
    return fences_left(plan, rank, state)


def _fail_rest(
    plan: Plan, fences: tuple[FenceState, ...], rank: int, state: RankState
) -> tuple[FenceState, ...]:
    """The fences after `rank` arrived as failed at all that it has not passed."""
    for wait in fences_failed(plan, rank, state):
        found = _find(plan, fences, state, wait)
        if found.verdict is Verdict.SHUT or Defect.LATE_ABORT in plan.defects:
            fences = _put(fences, found._replace(arrived=0, verdict=Verdict.BROKEN))
    return fences


def _kept(
    plan: Plan, ranks: tuple[RankState, ...], fences: tuple[FenceState, ...]
) -> tuple[FenceState, ...]:
    """Only fences that somebody alive has yet to pass or to learn of."""
    return tuple(entry for entry in fences if _awaited(plan, ranks, entry))


def _awaited(plan: Plan, ranks: tuple[RankState, ...], entry: FenceState) -> bool:
    return any(
        ranks[member].status not in _GONE and not _beyond(plan, member, ranks[member], entry)
        for member in plan.scopes[entry.scope].members
    )


def _beyond(plan: Plan, rank: int, state: RankState, entry: FenceState) -> bool:
    if Defect.KEY_REUSED in plan.defects:
        return False
    if (state.epoch, state.stage) != (entry.epoch, entry.stage):
        return (state.epoch, state.stage) > (entry.epoch, entry.stage)
    return all(wait.fence != entry.fence for wait in fences_left(plan, rank, state))


def _absence(plan: Plan, system: System, rank: int) -> RankState:
    """From where on a dead rank is missing: its next fence, in the next epoch if none is left."""
    state = system.ranks[rank]
    left = fences_left(plan, rank, state)
    return state if left else RankState(state.status, state.epoch + 1)


def _unnoticed(plan: Plan, system: System, rank: int) -> bool:
    state = _absence(plan, system, rank)
    for wait in fences_left(plan, rank, state):
        found = _find(plan, system.fences, state, wait)
        if found.verdict is Verdict.SHUT and _awaited(plan, system.ranks, found):
            return True
    return False


def _crash(plan: Plan, system: System, rank: int) -> System:
    """The rank is gone; memory that its process owns is lost, its call to an engine may land."""
    state = system.ranks[rank]
    here = next_step(plan, rank, state)
    acting = state.status in (Status.ACTING, Status.HUNG) and isinstance(here, Act) and here.led
    cells = crashed(plan, system.cells, rank, state)
    if state.status is Status.WAITING:
        state = state._replace(at=state.at + 1)  # It arrived: that fence may open without it.
    status = Status.DEAD_ACTING if acting else Status.DEAD
    return _placed(plan, system, rank, state._replace(status=status, pending=()), cells, 1)


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


def _land(plan: Plan, system: System, rank: int) -> System:
    state = system.ranks[rank]
    cells = landed(plan, system.cells, rank, state)
    return _placed(plan, system, rank, state._replace(status=Status.DEAD), cells, 0)


def _notice(plan: Plan, system: System, rank: int) -> System:
    """All fences at which the dead rank has not arrived break, for all members at once."""
    state = _absence(plan, system, rank)
    fences = _fail_rest(plan, system.fences, rank, state)
    return system._replace(fences=_kept(plan, system.ranks, fences))


def _hang(plan: Plan, system: System, rank: int) -> System:
    state = system.ranks[rank]._replace(status=Status.HUNG)
    return _placed(plan, system, rank, state, system.cells, 1)


def _deadline(plan: Plan, system: System, rank: int) -> System:
    """The waiting rank's patience is over: its fence breaks, unless it was decided before."""
    state = system.ranks[rank]
    here = next_step(plan, rank, state)
    assert isinstance(here, Wait)
    found = _find(plan, system.fences, state, here)
    if found.verdict is Verdict.SHUT:
        found = found._replace(arrived=0, verdict=Verdict.BROKEN)
    return system._replace(fences=_put(system.fences, found))


def _placed(
    plan: Plan, system: System, rank: int, state: RankState, cells: tuple[int, ...], faults: int
) -> System:
    ranks = (*system.ranks[:rank], state, *system.ranks[rank + 1 :])
    kept = _kept(plan, ranks, system.fences)
    return System(ranks, cells, kept, system.engines, system.faults + faults, system.late)


def _restart(plan: Plan, system: System, rank: int) -> System:
    """The dead are replaced: engines start anew with a floor, and so does all memory."""
    if Defect.RESTARTS_EARLY in plan.defects:
        return _restarted_early(plan, system, rank)
    epoch = max(state.epoch for state in system.ranks) + 1
    ranks = tuple(
        RankState(Status.READY, epoch, incarnation=state.incarnation + (state.status in _GONE))
        for state in system.ranks
    )
    calls = tuple(
        Late(at, state)
        for at, state in enumerate(system.ranks)
        if state.status is Status.DEAD_ACTING
    )
    first = initial(plan)
    engines = tuple(engine._replace(floor=epoch, dead=False) for engine in system.engines)
    return System(ranks, first.cells, (), engines, system.faults, system.late + calls)


def _restarted_early(plan: Plan, system: System, rank: int) -> System:
    """A planted mistake: the new incarnation goes on in the epoch in which the old one died."""
    state = system.ranks[rank]
    fresh = RankState(Status.READY, state.epoch, incarnation=state.incarnation + 1)
    first = initial(plan).cells
    cells = tuple(
        first[number]
        if value & 3 == Mapped.LOST and plan.owner[number] == plan.members[rank]
        else value
        for number, value in enumerate(system.cells)
    )
    return _placed(plan, system, rank, fresh, cells, 0)


def _wake(plan: Plan, system: System, rank: int) -> System:
    """The engine refuses a call from below its floor; without one the call does its work."""
    call = next(call for call in system.late if call.rank == rank)
    cells = system.cells
    if woken(plan, system, rank):
        cells = landed(plan, cells, rank, call.state)
    return system._replace(cells=cells, late=tuple(each for each in system.late if each != call))


def woken(plan: Plan, system: System, rank: int) -> Act | None:
    """The action that a late call of `rank` would perform now; None where the floor refuses it."""
    call = next(call for call in system.late if call.rank == rank)
    floor = max((engine.floor for engine in system.engines), default=0)
    if call.state.epoch < floor and Defect.NO_FLOOR not in plan.defects:
        return None
    act = next_step(plan, rank, call.state)
    return act if isinstance(act, Act) else None


_SPECIAL = {
    Kind.CRASH: _crash,
    Kind.LAND: _land,
    Kind.NOTICE: _notice,
    Kind.HANG: _hang,
    Kind.DEADLINE: _deadline,
    Kind.RESTART: _restart,
    Kind.WAKE: _wake,
}
