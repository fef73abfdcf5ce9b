"""The verbs: what may happen next, and what the system is after it.

Checker, runtime and auditor all ask here. None may have a second opinion. Three small tables hold
everything: what a rank may do (core/turn.py), what an action does to memory (`core/memory.py`),
and what it wants of memory (`core/properties.py`). The runtime walks one rank's state, the checker
the whole system, the auditor whatever was logged; all three look up the same rows.

The kernel knows epochs and versions, never seconds, files, sockets or torch.
"""

from collections.abc import Iterator

from phasesync.core.instances import (
    GONE,
    absence,
    arrive,
    fail_rest,
    fence_epoch,
    fences_failed,
    find,
    kept,
    lost_leaders,
    missing_from,
    orphaned,
    put,
    unnoticed,
)
from phasesync.core.leaving import abort_touches, aborted, crashed, landed
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
from phasesync.core.plan import PLAN, Act, Defect, Plan, Wait
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
from phasesync.core.turn import (
    AT_FENCE,
    advance,
    advanced,
    fences_left,
    heard,
    last_counted,
    next_step,
    program,
    refusal,
    rows,
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
    "last_counted",
    "lost_leaders",
    "mapped_of",
    "missing_from",
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
            if _may_begin(plan, system, state, epochs):
                yield Event(Kind.BEGIN, rank, "")
            continue
        match next_step(plan, rank, state):
            case Act() as act:
                yield from _at_act(plan, system, rank, act, faults)
            case Wait() as wait:
                yield from _at_fence(plan, system, rank, wait, faults)
            case None:
                pass
        if may_fault and faults.again and (counted := last_counted(plan, rank, state)) is not None:
            yield Event(Kind.AGAIN, rank, counted.fence)
        hears = faults.aborts and Defect.NO_ABORT not in plan.defects
        if hears and status in (Status.READY, Status.WAITING, Status.CUT):
            left = fences_left(plan, rank, state)
            if (
                left
                and heard(plan, rank, state, left)
                and (find(plan, system.fences, state, left[0]).verdict is Verdict.BROKEN)
            ):
                yield Event(Kind.ABORT, rank, left[0].fence)
        stopped = status in (Status.STOPPED, Status.ABORTED)
        if stopped and state.stage is Stage.EPOCH and plan.recover[rank]:
            yield Event(Kind.RECOVER, rank, "")
        if status in (Status.DEAD, Status.DEAD_ACTING):
            if faults.notices and unnoticed(plan, system, rank):
                yield Event(Kind.NOTICE, rank, "")
            if faults.restart and _may_restart(plan, system, rank, epochs):
                yield Event(Kind.RESTART, rank, "")
        elif may_fault and faults.crash:
            yield Event(Kind.CRASH, rank, "")
    for call in dict.fromkeys(each.rank for each in system.late):
        yield Event(Kind.WAKE, call, "")


def _at_act(plan: Plan, system: System, rank: int, act: Act, faults: Faults) -> Iterator[Event]:
    name, may_fault = act.phase, system.faults < faults.most
    match system.ranks[rank].status:
        case Status.READY:
            yield Event(Kind.START, rank, name)
        case Status.ACTING:
            lost = _must_fail(plan, system, act)
            if not lost:
                yield Event(Kind.END, rank, name)
            if lost or (may_fault and faults.fail and not act.outside):
                yield Event(Kind.FAIL, rank, name)
            if may_fault and faults.hang:
                yield Event(Kind.HANG, rank, name)
        case Status.DEAD_ACTING:
            yield Event(Kind.LAND, rank, name)
        case _:
            pass


def _at_fence(plan: Plan, system: System, rank: int, wait: Wait, faults: Faults) -> Iterator[Event]:
    state, name = system.ranks[rank], wait.fence
    may_fault = system.faults < faults.most
    if state.status is Status.READY:
        yield Event(Kind.ARRIVE, rank, name)
        if may_fault and faults.lost:
            yield Event(Kind.LOSE, rank, name)
        if may_fault and faults.mixed and name == PLAN:
            yield Event(Kind.REFUSE, rank, name)
    elif state.status in AT_FENCE:
        found = find(plan, system.fences, state, wait)
        if state.status is Status.WAITING and found.verdict is Verdict.OPEN:
            yield Event(Kind.PASS, rank, name)
        if faults.deadlines and found.verdict is Verdict.SHUT:
            yield Event(Kind.DEADLINE, rank, name)


def _may_restart(plan: Plan, system: System, rank: int, epochs: int) -> bool:
    """Members change between epochs only: once every live rank has stopped for good.

    The first of the dead stands for all of them: they are replaced together.
    """
    if Defect.RESTARTS_EARLY in plan.defects:
        return system.ranks[rank].incarnation == 0
    if any(other.status in GONE for other in system.ranks[:rank]):
        return False
    if max(other.epoch for other in system.ranks) >= epochs:
        return False
    return all(
        other.status in GONE or _settled(plan, at, other) for at, other in enumerate(system.ranks)
    )


def _settled(plan: Plan, rank: int, state: RankState) -> bool:
    if state.status in (Status.STOPPED, Status.ABORTED):
        return state.stage is Stage.RECOVER or not plan.recover[rank]
    return state.status is Status.FINISHED and state.stage is Stage.RECOVER


def _may_begin(plan: Plan, system: System, state: RankState, epochs: int) -> bool:
    """Whether another epoch follows: after a recovery, not before all are replaced whom it went
    on without. Of one who died after it nobody can know before the next fence: all begin."""
    if state.epoch >= epochs:
        return False
    return state.stage is Stage.EPOCH or all(
        missing_from(plan, rank, other) > state.epoch
        for rank, other in enumerate(system.ranks)
        if other.status in GONE
    )


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
    after = advanced(plan, rank, state, kind)
    cells, fences, engines, faults = system.cells, system.fences, system.engines, system.faults
    match kind:
        case Kind.START | Kind.END | Kind.FAIL:
            assert isinstance(here, Act)
            cells = touched(plan, cells, here, Moment(kind), state.epoch)
            if kind is Kind.FAIL:
                fences = fail_rest(plan, system.fences, rank, state)
                faults += not _must_fail(plan, system, here)
        case Kind.ARRIVE:
            assert isinstance(here, Wait)
            if "device_synchronised" in here.established:
                cells = synchronised(plan, cells, state.pending)
            fences = arrive(plan, system, rank, state, here)
        case Kind.LOSE:
            assert isinstance(here, Wait)
            if "device_synchronised" in here.established:
                cells = synchronised(plan, cells, state.pending)
            faults += 1
        case Kind.REFUSE:
            fences = fail_rest(plan, system.fences, rank, state)
            faults += name == PLAN
        case Kind.PASS:
            assert isinstance(here, Wait)
            if find(plan, system.fences, state, here).verdict is not Verdict.OPEN:
                raise Refused(f"{plan.members[rank]} cannot pass {name!r}: the fence is not open")
        case Kind.ABORT:
            fences = fail_rest(plan, system.fences, rank, state)
            cells = aborted(plan, cells, rank, state)
        case _:
            pass
    ranks = (*system.ranks[:rank], after, *system.ranks[rank + 1 :])
    return System(ranks, cells, kept(plan, ranks, fences), engines, faults, system.late)


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


def _land(plan: Plan, system: System, rank: int) -> System:
    state = system.ranks[rank]
    cells = landed(plan, system.cells, rank, state)
    return _placed(plan, system, rank, state._replace(status=Status.DEAD), cells, 0)


def _notice(plan: Plan, system: System, rank: int) -> System:
    """All fences at which the dead rank has not arrived break, for all members at once; a
    recovery's that waits for the dead alone is decided."""
    state = absence(plan, system, rank)
    fences = fail_rest(plan, system.fences, rank, state)
    if (judged := orphaned(plan, system, rank)) is not None:
        fences = put(fences, judged)
    return system._replace(fences=kept(plan, system.ranks, fences))


def _again(plan: Plan, system: System, rank: int) -> System:
    """An arrival that comes twice is counted as if it came for the first time."""
    state = system.ranks[rank]
    wait = last_counted(plan, rank, state)
    assert wait is not None
    fences = kept(plan, system.ranks, arrive(plan, system, rank, state, wait))
    return system._replace(fences=fences, faults=system.faults + 1)


def _hang(plan: Plan, system: System, rank: int) -> System:
    state = system.ranks[rank]._replace(status=Status.HUNG)
    return _placed(plan, system, rank, state, system.cells, 1)


def _deadline(plan: Plan, system: System, rank: int) -> System:
    """The waiting rank's patience is over: its fence breaks, unless it was decided before."""
    state = system.ranks[rank]
    here = next_step(plan, rank, state)
    assert isinstance(here, Wait)
    found = find(plan, system.fences, state, here)
    if found.verdict is Verdict.SHUT:
        found = found._replace(arrived=0, verdict=Verdict.BROKEN)
    return system._replace(fences=put(system.fences, found))


def _placed(
    plan: Plan, system: System, rank: int, state: RankState, cells: tuple[int, ...], faults: int
) -> System:
    ranks = (*system.ranks[:rank], state, *system.ranks[rank + 1 :])
    fences = kept(plan, ranks, system.fences)
    return System(ranks, cells, fences, system.engines, system.faults + faults, system.late)


def _restart(plan: Plan, system: System, rank: int) -> System:
    """The dead are replaced: engines start anew with a floor, and so does all memory."""
    if Defect.RESTARTS_EARLY in plan.defects:
        return _restarted_early(plan, system, rank)
    epoch = max(state.epoch for state in system.ranks) + 1
    ranks = tuple(
        RankState(Status.READY, epoch, incarnation=state.incarnation + (state.status in GONE))
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
    Kind.AGAIN: _again,
}
