"""A run that `check` found, read back and taken again on the kernel."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasesync.core.kernel import Event, Faults, Kind, Status, System, enabled, initial, step
from phasesync.core.model import Rank
from phasesync.core.plan import Plan
from phasesync.core.properties import Violation, violations
from phasesync.errors import PlanError

__all__ = ("events_of", "replay", "stuck")


def events_of(plan: Plan, path: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events that a JSON report lists.

    Raises:
        PlanError: a step names no rank of the plan, or no kind of event.
    """
    try:
        return tuple(
            Event(Kind(each["event"]), plan.index(Rank.parse(each["rank"])), each["name"])
            for each in path
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"this is no run of {plan.protocol.name!r}: {error}") from error


def replay(plan: Plan, events: Sequence[Event]) -> tuple[tuple[System, ...], tuple[Violation, ...]]:
    """Every system on the way, and what the run breaks.

    Raises:
        Refused: the kernel does not allow a step.
    """
    systems = [initial(plan)]
    broken: list[Violation] = []
    for event in events:
        after = step(plan, systems[-1], event)
        broken += violations(plan, systems[-1], event, after)
        systems.append(after)
    return tuple(systems), tuple(broken)


def stuck(plan: Plan, system: System, epochs: int) -> tuple[Rank, ...]:
    """Who waits for ever, if nothing can happen any more, deadlines left aside."""
    if any(True for _ in enabled(plan, system, Faults(), epochs)):
        return ()
    waiting = (Status.READY, Status.WAITING)
    ranks = zip(plan.members, system.ranks, strict=True)
    return tuple(member for member, state in ranks if state.status in waiting)
