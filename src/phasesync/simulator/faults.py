"""Faults by name, as they are written on a command line: `crash:3@offload`, `slow:2@load*8`.

fault  := kind ":" rank ["@" place] ["*" factor] ["#" turn]     crash fail hang slow
        | kind ":" first "-" last ...                           each rank of a node
        | "drop:arrive" ["@" fence] [":" rank]
        | "mixed:" option "=" value "@" rank
"""

import re
from dataclasses import dataclass

from phasesync.core.model import OptionValue
from phasesync.errors import PlanError

__all__ = ("KINDS", "Fault", "parse_fault", "parse_faults")

KINDS = ("crash", "fail", "hang", "slow", "drop", "mixed")
_PLAIN = re.compile(
    r"(?P<kind>crash|fail|hang|slow):(?P<rank>\d+)"
    r"(?:@(?P<place>[A-Za-z_]\w*))?(?:\*(?P<factor>\d+(?:\.\d+)?))?(?:#(?P<turn>\d+))?"
)
_NODE = re.compile(r"(?P<kind>crash|fail|hang|slow):(?P<first>\d+)-(?P<last>\d+)(?P<rest>.*)")
_DROP = re.compile(r"drop:arrive(?:@(?P<place>[A-Za-z_]\w*))?(?::(?P<rank>\d+))?")
_MIXED = re.compile(r"mixed:(?P<option>[A-Za-z_]\w*)=(?P<value>[^@]+)@(?P<rank>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: what kind, which rank, at which phase or fence (any, if empty), in which turn."""

    kind: str
    rank: int | None = None
    place: str = ""
    factor: float = 1.0
    turn: int = 1
    option: str = ""
    value: OptionValue = ""

    def hits(self, rank: int, place: str, turn: int) -> bool:
        """Whether it strikes this rank, there, the so-manieth time that it comes there."""
        if self.rank is not None and self.rank != rank:
            return False
        if self.place and self.place != place:
            return False
        return self.kind == "slow" or self.turn == turn

    @property
    def change(self) -> str:
        """The option that a rank has another value of, as it is written."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.option}={value}"

    def __str__(self) -> str:
        match self.kind:
            case "mixed":
                return f"mixed:{self.change}@{self.rank}"
            case "drop":
                at = f"@{self.place}" if self.place else ""
                return f"drop:arrive{at}" + (f":{self.rank}" if self.rank is not None else "")
            case _:
                at = f"@{self.place}" if self.place else ""
                times = f"*{self.factor:g}" if self.kind == "slow" else ""
                turn = f"#{self.turn}" if self.turn != 1 else ""
                return f"{self.kind}:{self.rank}{at}{times}{turn}"


def parse_fault(text: str) -> Fault:
    """The fault that `text` writes.

    Raises:
        PlanError: it is none.
    """
    if found := _PLAIN.fullmatch(text):
        _doubted(text, found)
        return Fault(
            kind=found["kind"],
            rank=int(found["rank"]),
            place=found["place"] or "",
            factor=float(found["factor"] or (8 if found["kind"] == "slow" else 1)),
            turn=int(found["turn"] or 1),
        )
    if found := _DROP.fullmatch(text):
        rank = int(found["rank"]) if found["rank"] else None
        return Fault(kind="drop", rank=rank, place=found["place"] or "")
    if found := _MIXED.fullmatch(text):
        return Fault(
            kind="mixed",
            rank=int(found["rank"]),
            option=found["option"],
            value=_value(found["value"]),
        )
    raise PlanError(
        f"{text!r} is no fault; write KIND:RANK@PLACE, as in crash:3@offload, slow:2@load*8, "
        "fail:1@resume_kv, hang:0, drop:arrive@staged:1, mixed:param_offload=false@2"
    )


def _doubted(text: str, found: re.Match[str]) -> None:
    """What can be written and would do nothing."""
    if found["factor"] is not None and found["kind"] != "slow":
        raise PlanError(f"{text!r} is no fault: only slow:RANK*FACTOR takes a factor")
    if found["factor"] is not None and float(found["factor"]) <= 0:
        raise PlanError(f"{text!r} is no fault: the factor has to be more than 0")
    if found["turn"] is not None and (int(found["turn"]) < 1 or found["kind"] == "slow"):
        raise PlanError(f"{text!r} is no fault: #1 is the first turn, and slow is so in every one")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults that `text` writes: `slow:8-15*2` is one for each rank of a node of eight.

    Raises:
        PlanError: it is none.
    """
    found = _NODE.fullmatch(text)
    if found is None:
        return (parse_fault(text),)
    first, last = int(found["first"]), int(found["last"])
    if last < first:
        raise PlanError(f"{text!r} is no fault: {last} comes before {first}")
    return tuple(parse_fault(f"{found['kind']}:{n}{found['rest']}") for n in range(first, last + 1))


def _value(text: str) -> OptionValue:
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if text.lstrip("-").isdigit() else text
