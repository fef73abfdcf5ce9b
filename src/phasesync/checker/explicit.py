"""One plan, counted out: every interleaving of its ranks under the given faults.

A broken rule is looked for with all reductions first; the run that is shown is then the shortest
one of a search without the reduction that changes lengths.
"""

from collections.abc import Iterator
from dataclasses import replace

from phasesync.checker.paths import Lifted, lift
from phasesync.checker.plainly import search_plainly
from phasesync.checker.search import NO_BUDGET, Budget, Found, search
from phasesync.checker.space import Space
from phasesync.core.kernel import Event, Faults, Kind, Status, System, initial, next_step, step
from phasesync.core.plan import FIRST_FROM_S, PLAN, Act, Plan, Wait
from phasesync.core.verdict import DEADLOCK, SOMETIMES, Holds, Undecided, Verdict, Violated
from phasesync.errors import Refused

__all__ = ("behind_plan_fence", "explore", "judge", "never_reached", "smooth", "told", "vacuous")


def behind_plan_fence(plan: Plan) -> Plan:
    """The plan with the implicit fence before each epoch as a step of its own: there a rank that
    resolved other options shows, because its digest is another one."""
    patience = max((step.deadline_s for step in _waits(plan)), default=FIRST_FROM_S)
    first = Wait(PLAN, plan.world, patience, (), (), False)
    return replace(plan, programs=tuple((first, *steps) for steps in plan.programs))


def _waits(plan: Plan) -> Iterator[Wait]:
    for program in plan.programs:
        yield from (step for step in program if isinstance(step, Wait))


def explore(
    plan: Plan,
    faults: Faults,
    epochs: int,
    *,
    budget: Budget = NO_BUDGET,
    symmetry: bool = True,
    reduction: bool = True,
    deadlocks: bool = True,
    rules: bool = True,
    whole: bool = False,
    shortest: bool = True,
) -> tuple[Verdict, Found]:
    """The verdict on a plan, and what the search saw on its way."""
    if faults.restart or (faults.engine and not _of_blocks(plan)):
        plain, lifted = search_plainly(plan, faults, epochs, budget, symmetry=symmetry)
        if lifted is None:
            return judge(plain), plain
        return _told(plan, plain, lifted, shortest=True), plain
    space = Space(plan, faults, epochs, symmetry=symmetry, reduction=reduction, whole=whole)
    found = search(space, budget, deadlocks=deadlocks, rules=rules)
    if found.trail is None:
        return judge(found), found
    if reduction and shortest:
        full = Space(plan, faults, epochs, symmetry=symmetry, reduction=False, whole=whole)
        shorter = search(full, budget, deadlocks=deadlocks, rules=rules)
        if shorter.trail is not None:
            return _broken(full, shorter, shortest=True), shorter
    return _broken(space, found, shortest=not reduction), found


def _of_blocks(plan: Plan) -> bool:
    """Whether each engine has memory, so that its death shows in a block."""
    return set(plan.engines) <= set(plan.owner)


def judge(found: Found) -> Verdict:
    """Of a search that found nothing wrong."""
    if found.bound is not None:
        return Undecided(bound=found.bound, states=found.states, depth=found.depth)
    return Holds(states=found.states, transitions=found.transitions, depth=found.depth)


def _broken(space: Space, found: Found, *, shortest: bool) -> Violated:
    assert found.trail is not None
    return _told(space.plan, found, lift(space, found.trail), shortest=shortest)


def _told(plan: Plan, found: Found, lifted: Lifted, *, shortest: bool) -> Violated:
    if found.deadlock:
        return Violated(
            property=DEADLOCK,
            path=lifted.path,
            violations=(),
            states=found.states,
            says=_who_waits(plan, lifted),
            shortest=shortest,
        )
    assert lifted.violations, "the kernel does not confirm what the search found"
    return Violated(
        property=lifted.violations[0].property,
        path=lifted.path,
        violations=lifted.violations,
        states=found.states,
        says=lifted.violations[0].says,
        shortest=shortest,
    )


def told(plan: Plan, lifted: Lifted, *, states: int) -> Violated:
    """The verdict on a run that breaks a rule, and need not be a shortest one."""
    return _told(plan, Found(states=states), lifted, shortest=False)


def _who_waits(plan: Plan, lifted: Lifted) -> str:
    """Who waits for ever, and where."""
    waits: list[str] = []
    for rank, state in enumerate(lifted.systems[-1].ranks):
        match next_step(plan, rank, state):
            case Wait(fence=fence) if state.status in (Status.WAITING, Status.CUT):
                waits.append(f"{plan.members[rank]} waits for ever at fence {fence!r}")
            case _:
                pass
    return "; ".join(waits) or "nobody can go on"


def smooth(plan: Plan) -> Found:
    """One run of one epoch in which nothing fails: each rank in turn goes as far as it can."""
    system, found, moved = initial(plan), Found(states=1), True
    while moved:
        moved = False
        for rank in range(len(plan.members)):
            while (after := _on(plan, system, rank)) is not None:
                event, system = after
                found.reached.add((event.kind, event.name))
                found.states, found.depth, moved = found.states + 1, found.depth + 1, True
    found.transitions = found.depth
    return found


def _on(plan: Plan, system: System, rank: int) -> tuple[Event, System] | None:
    """The next step of a rank, and what is after it; None where it waits or is at its end."""
    state = system.ranks[rank]
    here = next_step(plan, rank, state)
    kind = _NEXT.get((type(here), state.status))
    if here is None or kind is None:
        return None
    event = Event(kind, rank, here.phase if isinstance(here, Act) else here.fence)
    try:
        return event, step(plan, system, event)
    except Refused:
        return None


_NEXT = {
    (Act, Status.READY): Kind.START,
    (Act, Status.ACTING): Kind.END,
    (Wait, Status.READY): Kind.ARRIVE,
    (Wait, Status.WAITING): Kind.PASS,
}


def never_reached(plan: Plan, found: Found) -> tuple[str, ...]:
    """Fences that never open and phases that never end in any run: a model that is vacuous."""
    missing: list[str] = []
    for program in plan.programs:
        for item in program:
            match item:
                case Wait(fence=fence) if (Kind.PASS, fence) not in found.reached:
                    missing.append(f"fence {fence!r} never opens")
                case Act(phase=phase) if (Kind.END, phase) not in found.reached:
                    missing.append(f"phase {phase!r} never ends")
                case _:
                    pass
    return tuple(dict.fromkeys(missing))


def vacuous(missing: tuple[str, ...], states: int) -> Violated:
    """The verdict on a plan in which something can never happen."""
    return Violated(
        property=SOMETIMES, path=(), violations=(), states=states, says="; ".join(missing)
    )
