"""A mistake that was asked for by name, as a value: planted in a plan, said, written, read back.

A run of a protocol with a mistake in it is no run of the protocol. Whoever writes the run down
writes the mistake too, so that whoever takes the run again plants it again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phasesync.checker.anyn import Mutate
from phasesync.checker.explicit import behind_plan_fence
from phasesync.checker.mutants import rescoped, swapped, without_fence
from phasesync.core.model import OptionValue
from phasesync.core.plan import Plan, resolve
from phasesync.core.protocol import Protocol
from phasesync.errors import PlanError

__all__ = ("PLANTS", "Planted", "plan_of", "planted_from_json")

#: How a mistake is planted, how many names that takes, and how it is said.
PLANTS: Mapping[str, tuple[Callable[..., Mutate], int, str]] = {
    "without_fence": (without_fence, 1, "without fence {}"),
    "swapped": (swapped, 2, "{} and {} swapped"),
    "rescoped": (rescoped, 2, "{} with scope {}"),
}


class Planted(NamedTuple):
    """One of `PLANTS`, and the names that it is given."""

    how: str
    names: tuple[str, ...]

    @property
    def mutate(self) -> Mutate:
        return PLANTS[self.how][0](*self.names)

    def __str__(self) -> str:
        return PLANTS[self.how][2].format(*self.names)

    def to_json(self) -> dict[str, object]:
        return {"how": self.how, "names": list(self.names)}


def planted_from_json(body: Any) -> Planted | None:
    """The mistake in a report, if there is one.

    Raises:
        PlanError: it is none that is known.
    """
    if body is None:
        return None
    match body:
        case {"how": str(how), "names": [*names]} if how in PLANTS:
            if len(names) == PLANTS[how][1]:
                return Planted(how, tuple(map(str, names)))
        case _:
            pass
    raise PlanError(f"{body!r} is no mistake; mistakes are: {', '.join(PLANTS)}")


def plan_of(
    protocol: Protocol,
    ranks: Mapping[str, int],
    options: Mapping[str, OptionValue],
    *,
    planted: Planted | None = None,
    apart: bool = False,
    mixed: bool = False,
) -> Plan:
    """The plan that a run of a report is taken again on.

    `apart` gives each rank a device, also where roles share them; `mixed` lets ranks with other
    options show, at the plan fence.

    Raises:
        PlanError: the protocol has no such options, ranks, steps or scopes.
    """
    devices = [f"device/{number}" for number in range(sum(ranks.values()))] if apart else None
    plan = resolve(protocol, ranks, options, devices=devices)
    plan = planted.mutate(plan) if planted else plan
    return behind_plan_fence(plan) if mixed else plan
