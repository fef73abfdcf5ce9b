"""Does it fit: the most that a device holds over all interleavings, and the phase that is the peak.

Without figures nothing is said of fit. With GiB a resource and a capacity a device, the worst
moment is found by looking at every one, not by adding up what a plan intends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasesync.checker.paths import lift
from phasesync.checker.search import NO_BUDGET, Budget, search
from phasesync.checker.space import Space, State
from phasesync.core.kernel import Event, Faults
from phasesync.core.plan import Plan
from phasesync.errors import PlanError

__all__ = ("Figures", "Peak", "figures_of", "peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """GiB that a resource takes on a device, and GiB that a device has."""

    gib: Mapping[str, float]
    capacity_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that any device holds, the phase that makes it so, and a shortest run to it."""

    gib: float
    capacity_gib: float
    phase: str
    held: tuple[str, ...]
    path: tuple[Event, ...]
    bound: str | None = None

    @property
    def fits(self) -> bool:
        return self.gib <= self.capacity_gib

    def says(self) -> str:
        """One line: how much, in which phase, and whether it fits."""
        fit = "fits" if self.fits else "does not fit"
        held = ", ".join(self.held)
        part = f" (looked at {self.bound} only)" if self.bound else ""
        return (
            f"peak {self.gib:g} GiB of {self.capacity_gib:g} GiB in {self.phase}: {fit}; "
            f"held: {held}{part}"
        )

    def to_json(self) -> dict[str, object]:
        return {
            "peak_gib": self.gib,
            "capacity_gib": self.capacity_gib,
            "fits": self.fits,
            "phase": self.phase,
            "held": list(self.held),
            "steps": len(self.path),
            "bound": self.bound,
        }


def figures_of(plan: Plan, body: Mapping[str, Any]) -> Figures:
    """Figures from plain values: `{"capacity_gib": 80, "gib": {"kv_cache": 40, ...}}`.

    Raises:
        PlanError: a resource is unknown or left out, or a value is no number.
    """
    names = [str(resource.name) for resource in plan.protocol.resources]
    if not isinstance(body, Mapping) or not body.keys() <= {"gib", "capacity_gib"}:
        raise PlanError(f"{_SHAPE}; it has no other keys")
    said = body.get("gib")
    if not isinstance(said, Mapping):
        raise PlanError(f"{_SHAPE}; 'gib' is missing")
    gib = {str(name): _gib(f"gib of {name}", value) for name, value in said.items()}
    capacity = _gib("capacity_gib", body.get("capacity_gib"))
    for name in gib:
        if name not in names:
            raise PlanError(f"no resource {name!r}; resources are: {', '.join(names)}")
    if missing := [name for name in names if name not in gib]:
        raise PlanError(f"gib has no figure for: {', '.join(missing)}")
    return Figures(gib=gib, capacity_gib=capacity)


_SHAPE = 'memory figures are {"capacity_gib": 80, "gib": {RESOURCE: 40, ...}}'


def _gib(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlanError(f"{_SHAPE}; {what} is {value!r}, and has to be a number, 0 or more")
    return float(value)


def peak(plan: Plan, figures: Figures, *, epochs: int = 1, budget: Budget = NO_BUDGET) -> Peak:
    """The peak over every interleaving; reductions are off, since they skip moments."""
    space = Space(plan, Faults(), epochs, reduction=False)
    weight = [figures.gib[str(resource.name)] for resource in plan.protocol.resources]
    known: dict[tuple[int, int], float] = {}

    def most(state: State) -> float:
        best = 0.0
        for at, part in enumerate(state[3:]):
            key = (space.kind[at], part)
            if key not in known:
                known[key] = max(map(sum, _devices(space, at, part, weight)), default=0.0)
            best = max(best, known[key])
        return best

    highest = most(space.initial())

    def watch(state: State) -> bool:
        nonlocal highest
        highest = max(highest, most(state))
        return False

    found = search(space, budget, deadlocks=False, rules=False, stop=watch)
    shown = search(space, deadlocks=False, rules=False, stop=lambda s: most(s) >= highest)
    lifted = lift(space, shown.trail or ())
    cells = lifted.systems[-1].cells
    width = len(weight)
    device = max(
        range(len(plan.devices)),
        key=lambda d: sum(weight[r] for r in range(width) if cells[d * width + r] & 3),
    )
    held = [
        f"{resource.name} {weight[at]:g}"
        for at, resource in enumerate(plan.protocol.resources)
        if cells[device * width + at] & 3
    ]
    return Peak(
        gib=highest,
        capacity_gib=figures.capacity_gib,
        phase=lifted.path[-1].name if lifted.path else "start",
        held=tuple(held),
        path=lifted.path,
        bound=found.bound,
    )


def _devices(space: Space, at: int, part: int, weight: list[float]) -> list[list[float]]:
    moves = space.of[at]
    cells = (moves.tables.unit_of[unit][1] for unit in moves.blocks[part][2:])
    return [
        [w for w, value in zip(weight, each, strict=True) if value & 3] for each in cells if each
    ]
