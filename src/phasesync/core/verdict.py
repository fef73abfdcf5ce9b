"""The three answers of the checker. "No" and "not yet known" differ, so there is no bool."""

from dataclasses import dataclass, field
from typing import TypeAlias

from phasesync.core.kernel import Event
from phasesync.core.properties import Violation

__all__ = ("DEADLOCK", "SOMETIMES", "Holds", "Undecided", "Verdict", "Violated")

#: Properties that no single step breaks: nobody alive waits for ever; what must be able to happen
#: does happen in some run.
DEADLOCK = "deadlock"
SOMETIMES = "sometimes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """The property holds in all `states` of the stated bounds."""

    states: int
    transitions: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Violated:
    """A property is broken at the end of `path`, a shortest one unless `shortest` is false."""

    property: str
    path: tuple[Event, ...]
    violations: tuple[Violation, ...]
    states: int
    says: str = ""
    shortest: bool = field(default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The budget ended first, or the method does not apply; never counted as a pass."""

    bound: str
    states: int
    depth: int


Verdict: TypeAlias = Holds | Violated | Undecided
