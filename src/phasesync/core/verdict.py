"""The three answers of the checker. "No" and "not yet known" differ, so there is no bool."""

from dataclasses import dataclass
from typing import TypeAlias

from phasesync.core.kernel import Event
from phasesync.core.properties import Violation

__all__ = ("Holds", "Undecided", "Verdict", "Violated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """The property holds in all `states` of the stated bounds."""

    states: int
    transitions: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Violated:
    """A property is broken at the end of `path`, which is a shortest one."""

    property: str
    path: tuple[Event, ...]
    violations: tuple[Violation, ...]
    states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The budget ended first; never counted as a pass."""

    bound: str
    states: int
    depth: int


Verdict: TypeAlias = Holds | Violated | Undecided
