"""From the states of a search back to the kernel's events on concrete ranks.

Every counterexample is replayed on the kernel before anybody sees it: a path that the kernel
does not confirm is a bug of ours, and is raised as one.
"""

from collections.abc import Iterator
from typing import NamedTuple

from phasesync.checker.search import Label
from phasesync.checker.space import Space, State
from phasesync.core.kernel import Event, Kind, Status, System, enabled, initial, step
from phasesync.core.properties import Violation, violations

__all__ = ("Lifted", "lift")


class Lifted(NamedTuple):
    """A concrete run: its events, the system after each, and what the last one breaks."""

    path: tuple[Event, ...]
    systems: tuple[System, ...]
    violations: tuple[Violation, ...]


def lift(space: Space, trail: tuple[tuple[Label, State], ...]) -> Lifted:
    """The run on concrete ranks that a trail of states stands for."""
    system = initial(space.plan)
    path: list[Event] = []
    systems = [system]
    broken: tuple[Violation, ...] = ()
    for label, target in trail:
        for events, reached, found in _candidates(space, system, label):
            if space.encode(reached[-1]) == target:
                path += events
                systems += reached
                system, broken = reached[-1], found
                break
        else:
            raise AssertionError(f"the kernel does not follow the search at {label}")
    return Lifted(tuple(path), tuple(systems), broken)


def _candidates(
    space: Space, system: System, label: Label
) -> Iterator[tuple[list[Event], list[System], tuple[Violation, ...]]]:
    """Each event of that label, and what follows it at once where steps are whole."""
    plan = space.plan
    for event in enabled(plan, system, space.faults, space.epochs):
        # Which of several engines it is that dies, the state after it says.
        if event.kind is not label[0] or (event.kind is not Kind.ENGINE and event.name != label[1]):
            continue
        after = step(plan, system, event)
        events, reached = [event], [after]
        found = violations(plan, system, event, after)
        if space.whole and event.kind in (Kind.END, Kind.PASS, Kind.BEGIN, Kind.RECOVER):
            found += _follow(space, events, reached)
        yield events, reached, found


def _follow(space: Space, events: list[Event], reached: list[System]) -> tuple[Violation, ...]:
    rank, before = events[0].rank, reached[-1]
    if before.ranks[rank].status is not Status.READY:
        return ()
    event = next(
        event
        for event in enabled(space.plan, before, space.faults, space.epochs)
        if event.rank == rank and event.kind in (Kind.START, Kind.ARRIVE)
    )
    after = step(space.plan, before, event)
    events.append(event)
    reached.append(after)
    return violations(space.plan, before, event, after)
