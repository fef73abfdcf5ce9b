"""Who goes next: by seed, by priorities (PCT), from a written schedule, or each in turn.

A scheduler is asked only where more than one rank could go on; its answers are the schedule. Two
runs with the same answers are the same run, so a schedule written down replays exactly. Under a
`timeless` one named places take no time, so that every order of them is the scheduler's to choose;
written down it begins with `~`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ("InTurn", "Pct", "Replay", "Scheduler", "Seeded", "read_schedule", "write_schedule")


class Scheduler(ABC):
    """Chooses among the ranks that can go on; `last` is the place of who went last, or None."""

    timeless = False

    @abstractmethod
    def pick(self, ranks: Sequence[str], last: int | None) -> int:
        """The place in `ranks` of who goes next."""


class Seeded(Scheduler):
    """Any of them, by seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def pick(self, ranks: Sequence[str], last: int | None) -> int:
        return self._chance.randrange(len(ranks))


class InTurn(Scheduler):
    """Whoever went last goes on; else the first."""

    def pick(self, ranks: Sequence[str], last: int | None) -> int:
        return 0 if last is None else last


class Replay(Scheduler):
    """The choices of an earlier run; past their end, as `InTurn`."""

    def __init__(self, choices: Sequence[int], *, timeless: bool = False) -> None:
        self._choices = list(choices)
        self._at = 0
        self.timeless = timeless

    def __repr__(self) -> str:
        return f"Replay({self._choices}, timeless={self.timeless})"

    def pick(self, ranks: Sequence[str], last: int | None) -> int:
        if self._at < len(self._choices):
            self._at += 1
            return min(self._choices[self._at - 1], len(ranks) - 1)
        return 0 if last is None else last


class Pct(Scheduler):
    """Priorities by chance, changed at `depth - 1` moments among the first `steps` choices.

    A bug that takes `depth` ordering constraints is found with probability at least
    1 / (ranks * steps ** (depth - 1)) a run.
    """

    def __init__(self, seed: int, *, depth: int = 3, steps: int = 200) -> None:
        self._chance = random.Random(seed)
        self._priority: dict[str, float] = {}
        self._changes = {self._chance.randrange(steps) for _ in range(depth - 1)}
        self._step = 0

    def pick(self, ranks: Sequence[str], last: int | None) -> int:
        for rank in ranks:
            self._priority.setdefault(rank, self._chance.random() + 1)
        best = max(range(len(ranks)), key=lambda at: self._priority[ranks[at]])
        if self._step in self._changes:
            self._priority[ranks[best]] = self._chance.random() / (self._step + 1)
        self._step += 1
        return best


def write_schedule(choices: Sequence[int], *, timeless: bool = False) -> str:
    """Choices as text: `0*12.1.0*3`."""
    parts: list[str] = []
    at = 0
    while at < len(choices):
        end = at
        while end < len(choices) and choices[end] == choices[at]:
            end += 1
        parts.append(f"{choices[at]}*{end - at}" if end - at > 1 else str(choices[at]))
        at = end
    return "~" * timeless + ".".join(parts)


def read_schedule(text: str) -> tuple[int, ...]:
    """The choices that `write_schedule` wrote.

    Raises:
        ValueError: it is no schedule.
    """
    choices: list[int] = []
    text = text.removeprefix("~")
    for part in text.split(".") if text else ():
        choice, _, times = part.partition("*")
        choices += [int(choice)] * (int(times) if times else 1)
    return tuple(choices)
