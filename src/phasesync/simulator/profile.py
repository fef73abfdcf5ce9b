"""How long things take and how much memory they hold: given, or fitted from journals."""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phasesync.core.plan import Act, Plan
from phasesync.core.protocol import PhaseDecl, Verb
from phasesync.errors import PlanError

__all__ = ("Profile", "Span", "fit", "profile_of")


@dataclass(frozen=True, slots=True)
class Span:
    """A duration: its mean in seconds, and its relative spread (log-normal)."""

    mean_s: float
    spread: float = 0.0

    def draw(self, chance: random.Random) -> float:
        """One duration by chance."""
        if self.mean_s <= 0:
            return 0.0
        if self.spread <= 0:
            return self.mean_s
        sigma = math.sqrt(math.log1p(self.spread**2))
        return self.mean_s * math.exp(chance.gauss(-sigma * sigma / 2, sigma))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Durations of phases, what passing a fence costs, GiB a resource holds on a device."""

    phases: Mapping[str, Span] = field(default_factory=dict)
    default: Span = Span(1.0, 0.1)
    fence_s: float = 0.002
    notice_s: float = 0.5
    gib: Mapping[str, float] = field(default_factory=dict)

    def span(self, phase: str) -> Span:
        return self.phases.get(phase, self.default)


def profile_of(body: Mapping[str, Any], plan: Plan | None = None) -> Profile:
    """A profile from plain values: `{"phases": {"load": 3.5, ...}, "gib": {...}}`.

    With a plan, phases and resources have to be some of its own.

    Raises:
        PlanError: a key is unknown, or a value is no number of 0 or more.
    """
    known = {"phases", "default", "fence_s", "notice_s", "gib"}
    _known("profile", "key", body, known)
    phases, gib = (_mapping(key, body.get(key, {})) for key in ("phases", "gib"))
    if plan is not None:
        steps = (*plan.protocol.steps, *plan.protocol.recover)
        _known(
            "protocol", "phase", phases, {str(s.name) for s in steps if isinstance(s, PhaseDecl)}
        )
        _known("protocol", "resource", gib, {str(each.name) for each in plan.protocol.resources})
    return Profile(
        phases={name: _span(f"phase {name}", value) for name, value in phases.items()},
        default=_span("default", body.get("default", {"mean_s": 1.0, "spread": 0.1})),
        fence_s=_number("fence_s", body.get("fence_s", 0.002)),
        notice_s=_number("notice_s", body.get("notice_s", 0.5)),
        gib={name: _number(f"gib of {name}", value) for name, value in gib.items()},
    )


def _known(what: str, kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            have = ", ".join(sorted(known))
            raise PlanError(f"the {what} has no {kind} {name!r}; it has: {have}")


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{key} of a profile is an object, a number a name; it is {value!r}")
    return value


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlanError(f"{what} is {value!r}; a profile is made of numbers, 0 or more")
    return float(value)


def _span(what: str, value: Any) -> Span:
    if not isinstance(value, Mapping):
        return Span(_number(what, value))
    _known(what, "key", value, {"mean_s", "spread"})
    return Span(
        _number(f"mean_s of {what}", value.get("mean_s")),
        _number(f"spread of {what}", value.get("spread", 0.0)),
    )


def fit(
    lines: Iterable[Mapping[str, Any]], base: Profile | None = None, plan: Plan | None = None
) -> Profile:
    """The profile that journal lines show: mean and spread of each phase that ended well.

    With a plan also GiB: where a phase acquires one resource alone, and free memory was written
    down before and after, the resource is what went.
    """
    took: dict[str, list[float]] = {}
    gib: dict[str, list[float]] = {}
    free: dict[tuple[object, ...], int] = {}
    alone = _alone(plan)
    for line in lines:
        ended = line.get("event") == "phase.end"
        phase = str(line.get("phase"))
        if ended and isinstance(line.get("duration_s"), int | float):
            took.setdefault(phase, []).append(float(line["duration_s"]))
        if isinstance(now := line.get("free_bytes"), int):
            who = tuple(line.get(key) for key in ("role", "rank", "incarnation"))
            went = free.get(who, now) - now
            if ended and phase in alone and went > 0:
                gib.setdefault(alone[phase], []).append(went / 2**30)
            free[who] = now
    base = base or Profile()
    return replace(
        base,
        phases={**base.phases, **{name: _fitted(values) for name, values in took.items()}},
        gib={**base.gib, **{name: sum(each) / len(each) for name, each in gib.items()}},
    )


def _alone(plan: Plan | None) -> dict[str, str]:
    """Phases that acquire one resource, and which."""
    found: dict[str, str] = {}
    for program in plan.programs if plan else ():
        for step in program:
            if isinstance(step, Act):
                cells = [touch.cell for touch in step.touches if touch.verb is Verb.ACQUIRES]
                names = {plan.cell_name(cell)[1] for cell in cells} if plan else set()
                if len(names) == 1:
                    found[step.phase] = str(names.pop())
    return found


def _fitted(values: list[float]) -> Span:
    mean = sum(values) / len(values)
    if len(values) < 2 or mean <= 0:
        return Span(mean)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Span(mean, math.sqrt(variance) / mean)
