"""What was checked and what came of it, as one value that prints itself as JSON.

A report never says more than its cases: any number of ranks where the argument for any N was
made, up to N where ranks were counted out, and undecided wherever a budget ended first.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from phasesync.core.model import OptionValue
from phasesync.core.plan import Plan
from phasesync.core.properties import Violation
from phasesync.core.verdict import DEADLOCK, SOMETIMES, Holds, Undecided, Verdict, Violated

__all__ = ("NOT_NEEDED", "SAFETY", "Assignment", "Case", "Report", "Summary", "word")

Assignment: TypeAlias = tuple[tuple[str, OptionValue], ...]
SAFETY = "safety"
#: The bound of a search that was left out or cut short because something else is broken already.
NOT_NEEDED = "a rule is broken already"
_WORDS = {Holds: "holds", Violated: "violated", Undecided: "undecided"}


def word(verdict: Verdict) -> str:
    """`holds`, `violated` or `undecided`."""
    return _WORDS[type(verdict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One search: its bounds, and its verdict. `ranks` and `epochs` are None where any number is
    meant; `plan` is what a counterexample replays on; `product` is how many states those seen
    stand for where interchangeable ranks are told apart. An `extra` case is one under other options
    than those asked for: what it finds broken counts, what it does not reach is only told.
    `covers` are further assignments of the options that follow from this one (checker.cover)."""

    ranks: int | None
    options: Assignment
    faults: str
    epochs: int | None
    asks: tuple[str, ...]
    verdict: Verdict
    elapsed_s: float | None = None
    extra: bool = False
    covers: tuple[Assignment, ...] = ()
    product: int = 0
    plan: Plan | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, object]:
        """The case with names in place of numbers."""
        body: dict[str, object] = {
            "ranks": "any" if self.ranks is None else self.ranks,
            "options": dict(self.options),
            "faults": self.faults,
            "epochs": "any" if self.epochs is None else self.epochs,
            "asks": list(self.asks),
            "verdict": word(self.verdict),
            "elapsed_s": self.elapsed_s,
            "extra": self.extra,
            "covers": [dict(each) for each in self.covers],
        }
        match self.verdict:
            case Holds(states=states, transitions=transitions, depth=depth):
                body |= {"states": states, "transitions": transitions, "depth": depth}
                body["product"] = _number(self.product or states)
            case Undecided(bound=bound, states=states, depth=depth):
                body |= {"bound": bound, "states": states, "depth": depth}
            case Violated() as broken:
                body |= self._broken(broken)
        return body

    def _broken(self, broken: Violated) -> dict[str, object]:
        plan = self.plan
        return {
            "property": broken.property,
            "says": broken.says,
            "states": broken.states,
            "shortest": broken.shortest,
            "path": [
                {
                    "event": str(event.kind),
                    "rank": str(plan.members[event.rank]) if plan else event.rank,
                    "name": event.name,
                }
                for event in broken.path
            ],
            "violations": [_violation(each) for each in broken.violations],
        }


def _number(count: int) -> int | float | None:
    """A number as JSON has them: exact while it can be, else near, else none."""
    try:
        return count if count < 2**53 else float(count)
    except OverflowError:
        return None


def _violation(each: Violation) -> dict[str, object]:
    return {
        "property": each.property,
        "device": each.device,
        "resources": list(each.resources),
        "rank": str(each.rank),
        "holders": [str(rank) for rank in each.holders],
        "says": each.says,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One property over all cases: how far it was proved, or where it breaks."""

    property: str
    verdict: str
    reach: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All cases of one protocol under one mutation (none: as it is declared)."""

    protocol: str
    cases: tuple[Case, ...]
    mutation: str | None = None
    reached: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int | None], ...] = ()
    elapsed_s: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst: violated before undecided before holds."""
        verdicts = [
            case.verdict
            for case in self.cases
            if not (case.extra and isinstance(case.verdict, Undecided))
        ]
        for kind in (Violated, Undecided):
            found = next((each for each in verdicts if isinstance(each, kind)), None)
            if found is not None:
                return found
        holding = [each for each in verdicts if isinstance(each, Holds)]
        return Holds(
            states=sum(each.states for each in holding),
            transitions=sum(each.transitions for each in holding),
            depth=max((each.depth for each in holding), default=0),
        )

    @property
    def counterexample(self) -> Case | None:
        """The case with the shortest broken run, if a rule is broken."""
        broken = [
            (len(case.verdict.path), at)
            for at, case in enumerate(self.cases)
            if isinstance(case.verdict, Violated)
        ]
        return self.cases[min(broken)[1]] if broken else None

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Property by property, any N or up to N."""
        return tuple(self._summary(name) for name in (SAFETY, DEADLOCK, SOMETIMES))

    def _summary(self, name: str) -> Summary:
        cases = [case for case in self.cases if name in case.asks]
        broken = next((c for c in cases if _breaks(c.verdict, name)), None)
        if broken is not None:
            return Summary(property=name, verdict="violated", reach=f"at N = {broken.ranks}")
        holding = [case for case in cases if isinstance(case.verdict, Holds)]
        open_cases = [c for c in cases if isinstance(c.verdict, Undecided) and not c.extra]
        verdict = "holds" if holding and not open_cases else "undecided"
        if not holding:
            reach = _unreached(cases)
        elif any(case.ranks is None for case in holding):
            asked = [case for case in cases if case.ranks is None]
            many = sum(1 + len(case.covers) for case in asked)
            proved = sum(1 + len(c.covers) for c in asked if isinstance(c.verdict, Holds))
            of = "" if proved == many else f"{proved} of "
            reach = f"any N, {of}{many} option assignment{'s' * (many != 1)}"
        else:
            reach = f"up to N = {max((case.ranks or 0 for case in holding), default=0)}"
        return Summary(property=name, verdict=verdict, reach=reach)

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            "check": 1,
            "protocol": self.protocol,
            "mutation": self.mutation,
            "verdict": word(self.verdict),
            "properties": [
                {"property": each.property, "verdict": each.verdict, "reach": each.reach}
                for each in self.summaries
            ],
            "cases": [case.to_json() for case in self.cases],
            "reached": list(self.reached),
            "lengths": [list(each) for each in self.lengths],
            "elapsed_s": self.elapsed_s,
        }


def _unreached(cases: list[Case]) -> str:
    """Why nothing came of the searches for a property."""
    bounds = {case.verdict.bound for case in cases if isinstance(case.verdict, Undecided)}
    if any(isinstance(case.verdict, Violated) for case in cases):
        return "its searches ended where another property broke"
    if not cases or bounds == {NOT_NEEDED}:
        return "not looked for" + (f": {NOT_NEEDED}" if cases else "")
    return "no search for it came to its end"


def _breaks(verdict: Verdict, name: str) -> bool:
    if not isinstance(verdict, Violated):
        return False
    special = (DEADLOCK, SOMETIMES)
    return verdict.property == name if name in special else verdict.property not in special
