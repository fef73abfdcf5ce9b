"""The search without tables: the kernel asked for every step of every system.

Slow, and the measure of all that is fast. It is used where the tables do not reach: ranks that are
replaced, calls of their older selves that still come, engines that die. Symmetry is taken from the
space: of systems that differ by who is who only the first is gone on from.
"""

from collections.abc import Callable

from phasesync.checker.paths import Lifted
from phasesync.checker.search import NO_BUDGET, Budget, Found
from phasesync.checker.space import Space
from phasesync.core.kernel import Event, Faults, Status, System, enabled, initial, step
from phasesync.core.plan import Defect, Plan
from phasesync.core.properties import Violation, violations

__all__ = ("search_plainly",)

_STUCK = frozenset((Status.READY, Status.WAITING, Status.CUT))


def search_plainly(
    plan: Plan, faults: Faults, epochs: int, budget: Budget = NO_BUDGET, *, symmetry: bool = False
) -> tuple[Found, Lifted | None]:
    """What a search found, and the run that breaks a rule or ends in a deadlock, if any."""
    first = initial(plan)
    parents: dict[System, tuple[System, Event] | None] = {first: None}
    orbit = _orbits(plan, faults, epochs, symmetry=symmetry)
    seen = {orbit(first)}
    found, level = Found(), [first]
    while level:
        following: list[System] = []
        for system in level:
            if (bound := budget.over(len(parents))) is not None:
                found.bound, found.states = bound, len(parents)
                return found, None
            goes_on = False
            for event in enabled(plan, system, faults, epochs):
                after = step(plan, system, event)
                found.transitions += 1
                found.reached.add((event.kind, event.name))
                goes_on = goes_on or after.faults == system.faults
                if broken := violations(plan, system, event, after):
                    found.states = len(parents)
                    return found, _lifted(parents, system, (event, after), broken)
                if (key := orbit(after)) not in seen:
                    seen.add(key)
                    parents[after] = (system, event)
                    following.append(after)
            if not goes_on and any(rank.status in _STUCK for rank in system.ranks):
                found.states, found.deadlock = len(parents), True
                return found, _lifted(parents, system, None, ())
        found.depth += bool(following)
        level = following
    found.states = len(parents)
    return found, None


def _orbits(
    plan: Plan, faults: Faults, epochs: int, *, symmetry: bool
) -> Callable[[System], object]:
    """By what systems are told apart. A rank that was replaced in mid-epoch may have arrived as its
    older self, which its state does not say: there every system is one by itself."""
    if not symmetry or plan.defects - {Defect.NO_FLOOR, Defect.NO_ABORT}:
        return lambda system: system
    return Space(plan, faults, epochs, reduction=False).orbit


def _lifted(
    parents: dict[System, tuple[System, Event] | None],
    system: System,
    last: tuple[Event, System] | None,
    broken: tuple[Violation, ...],
) -> Lifted:
    path, systems = ([last[0]], [last[1]]) if last else ([], [])
    here = system
    while (came := parents[here]) is not None:
        systems.append(here)
        here = came[0]
        path.append(came[1])
    systems.append(here)
    if last:  # The last step was put first; everything else came in backwards.
        path = [*reversed(path[1:]), path[0]]
        systems = [*reversed(systems[1:]), systems[0]]
    else:
        path, systems = path[::-1], systems[::-1]
    return Lifted(tuple(path), tuple(systems), broken)
