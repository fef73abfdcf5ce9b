"""What the rules are fed: one header, then events, whatever the log was written by.

The list order of a trace is the true order. A journal has none; its events come here already put
into an order that its tickets allow.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from phasesync.audit.vocabulary import Meaning, meaning, role_kind

_LAST_NUMBER: Final = re.compile(r"(\d{1,15})(?!.*\d)")
_FIGURE: Final = re.compile(
    r"\s*([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?:Gi?B?|s)?\s*\Z", re.IGNORECASE
)

__all__ = (
    "EMPTY",
    "KINDS",
    "Event",
    "Header",
    "Name",
    "number",
    "of_epoch",
    "text_of",
    "version_number",
)

Name: TypeAlias = int | str

KINDS: Final = frozenset({"start", "end", "fail", "timeout", "exit", "progress"})
EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


class Event(NamedTuple):
    """One thing that one rank did, with the line that says so."""

    at: int
    file: str
    line: int
    rank: Name
    epoch: int | None
    phase: str
    kind: str
    attrs: Mapping[str, Any]
    means: Meaning

    @property
    def action(self) -> str:
        return self.means.action


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a log says of itself before the first event."""

    name: str = ""
    ranks: tuple[Name, ...] = ()
    roles: Mapping[Name, str] = field(default_factory=dict)
    capacity_gib: float | Mapping[str, float] | None = None
    initial_gib: Mapping[str, float] = field(default_factory=dict)
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    journal: bool = False
    by_clock: bool = False  # the order of ranks is what clocks of `hosts` hosts say
    hosts: int = 1
    record_next: tuple[str, ...] = ()
    errors: tuple[tuple[str, int, str], ...] = ()  # of no rank: file, line, what it says

    def means(self, phase: str) -> Meaning:
        """The meaning of `phase`, after the renames that this log or its reader brought along."""
        return meaning(self.vocabulary.get(phase, phase))

    def role(self, rank: Name) -> str:
        return self.roles.get(rank, "")

    def kind(self, rank: Name) -> str:
        """`trainer`, `engine`, `controller`, another first word, or nothing where no role is
        given.
        """
        return role_kind(self.role(rank))

    def capacity(self, device: str) -> float | None:
        if isinstance(self.capacity_gib, Mapping):
            return self.capacity_gib.get(device)
        return self.capacity_gib

    def peers(self, rank: Name, ranks: Iterable[Name]) -> tuple[Name, ...]:
        """Those of `ranks` that do what `rank` does: the same kind of role."""
        kind = self.kind(rank)
        return tuple(other for other in ranks if self.kind(other) == kind)


def number(value: object) -> float | None:
    """`value` as a number, where it is one (a bool is none, nor is infinity).

    Logs print figures as text, with or without their unit.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e18 else None
    if isinstance(value, str) and len(value) < 32:
        found = _FIGURE.match(value)
        return float(found[1]) if found is not None else None
    return None


def version_number(value: object) -> float | None:
    """A version as something that can be compared: a number, or the last one in a label."""
    if isinstance(value, str):
        found = _LAST_NUMBER.search(value[:200])
        return float(found[1]) if found is not None else None
    return number(value)


def of_epoch(epoch: int | None, word: str = "of") -> str:
    """` of epoch 7`, or nothing where a log names none."""
    return "" if epoch is None else f" {word} epoch {epoch}"


def text_of(value: object, most: int = 200) -> str:
    """`value` in one short line, safe to print."""
    text = value if isinstance(value, str) else str(value)
    text = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"
