"""How far a search may go, and what it saw: the values that every way of searching shares.

An exhausted budget is `Undecided`, never a pass. Time and memory come in as functions, since this
layer has no clock of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from phasesync.checker.space import State
from phasesync.core.kernel import Kind

__all__ = ("NO_BUDGET", "TIME", "Budget", "Found", "Label", "Parents", "trail_of")

Label: TypeAlias = tuple[Kind, str]
#: Where each state was first come to from, and by which step.
Parents: TypeAlias = dict[State, tuple[State, Label] | None]
#: The bound of a search that time ended.
TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far a search may go; `now` is a clock in seconds, without which time is unlimited, and
    `held` says how many bytes the process has, without which memory is."""

    states_max: int = 5_000_000
    until_s: float | None = None
    now: Callable[[], float] | None = None
    bytes_max: int = 2 << 30
    held: Callable[[], int] | None = None

    def over(self, states: int) -> str | None:
        """Which bound is reached, if one is."""
        if states > self.states_max:
            return f"{self.states_max:,} states"
        if self.now is not None and self.until_s is not None and self.now() > self.until_s:
            return TIME
        if self.held is not None and self.held() > self.bytes_max:
            return f"{self.bytes_max / 2**30:.2g} GiB of memory"
        return None


NO_BUDGET = Budget()


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search saw. `trail` are the states and labels to the broken rule, if one is broken;
    `bound` is the budget that ended it, if one did; `product` is how many states the seen ones
    stand for where ranks are told apart, of a search that saw all."""

    states: int = 0
    product: int = 0
    transitions: int = 0
    depth: int = 0
    reached: set[Label] = field(default_factory=set)
    deadlock: bool = False
    trail: tuple[tuple[Label, State], ...] | None = None
    bound: str | None = None


def trail_of(parents: Parents, state: State) -> tuple[tuple[Label, State], ...]:
    """The steps to a state."""
    trail: list[tuple[Label, State]] = []
    while (came := parents[state]) is not None:
        trail.append((came[1], state))
        state = came[0]
    return tuple(reversed(trail))
