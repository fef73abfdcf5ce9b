"""Signs of life: what a rank that has not arrived says of itself, and what is made of it.

A heartbeat is written from outside the rank's event loop, so that one that is busy still beats: a
rank is *slow* as long as it beats, *silent* when it does not, and *dead* only by the word of who
has seen its process end. Progress extends patience: a deadline counts from the last mark of the
rank that made the oldest one.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from phasesync.core import wire
from phasesync.core.model import Rank, RoleName

__all__ = ("HEARTBEAT_S", "LATE_SHARE", "SILENT_S", "Ask", "Beat", "Sign", "patience", "told")

HEARTBEAT_S = 0.5
#: Who has not beaten for so long is silent: stopped, stuck in native code, or out of reach.
SILENT_S = 4 * HEARTBEAT_S
#: At this share of a deadline the ranks that are missing write down what they do.
LATE_SHARE = 0.8


class Beat(NamedTuple):
    """What a rank says of itself, in durations of its own clock.

    `beats` grows with each; `doing` is `phase`, `fence` or `between` (after that phase);
    `marked_s` is how long ago the last mark of progress was; `where` the innermost frame of user
    code, once somebody has asked.
    """

    beats: int
    doing: str = "starting"
    name: str = ""
    since_s: float = 0.0
    marked_s: float | None = None
    where: str | None = None

    def encode(self) -> bytes:
        return wire.encode(list(self))

    @classmethod
    def decode(cls, text: bytes | None) -> "Beat | None":
        """The beat; None for what is none."""
        try:
            beats, doing, name, since_s, marked_s, where = wire.decode(text or b"")
            return cls(
                int(beats),
                str(doing),
                str(name),
                float(since_s),
                None if marked_s is None else float(marked_s),
                None if where is None else str(where),
            )
        except (wire.JsonError, TypeError, ValueError):
            return None


class Sign(NamedTuple):
    """A beat as somebody else has it: how long ago it was heard; None where that is not known."""

    beat: Beat | None
    heard_s: float | None = None

    @property
    def is_silent(self) -> bool:
        return self.heard_s is not None and self.heard_s > SILENT_S


class Ask(NamedTuple):
    """Asks whoever has not arrived at a fence to write down what it does."""

    scope: str
    generation: int
    fence: str
    why: str

    def line(self) -> bytes:
        return wire.encode(list(self)) + b"\n"

    @classmethod
    def lines(cls, log: bytes | None) -> list["Ask"]:
        asked = [wire.decode(line) for line in (log or b"").splitlines()]
        return [cls(str(a[0]), int(a[1]), str(a[2]), str(a[3])) for a in asked]


def rank_of(said: Any) -> Rank:
    role, number = said
    return Rank(RoleName(str(role)), int(number))


def patience(deadline_s: float, missing: Collection[Rank], signs: Mapping[Rank, Sign]) -> float:
    """How much longer to wait at the deadline: not at all, unless all who are missing make
    progress. Silence ends patience: a mark is worth nothing if its rank no longer beats."""
    left_s = []
    for rank in missing:
        sign = signs.get(rank)
        if sign is None or sign.beat is None or sign.beat.marked_s is None or sign.is_silent:
            return 0.0
        left_s.append(deadline_s - sign.beat.marked_s - (sign.heard_s or 0.0))
    return max(0.0, min(left_s, default=0.0))


_DOING: Mapping[str, str] = {
    "phase": "in phase {name!r} for {since}",
    "failed": "behind phase {name!r}, which failed, for {since}",
    "between": "behind phase {name!r} for {since}",
    "fence": "at fence {name!r} for {since}",
    "passed": "behind fence {name!r} for {since}",
    "starting": "before its first phase",
}


def told(sign: Sign | None, otherwise: str = "") -> str:
    """One rank in the report on who is missing: last phase, since when, alive or not, and where."""
    if sign is None:
        return otherwise or "not heard of"
    if sign.beat is None:  # The others beat: who has never done so is not known to run.
        return "silent, never heard of" + (f"; {otherwise}" if otherwise else "")
    beat = sign.beat
    since_s = beat.since_s + (sign.heard_s or 0.0)
    doing = _DOING.get(beat.doing, "{name!r}").format(name=beat.name, since=f"{since_s:.1f} s")
    if sign.is_silent:
        life = f"silent for {sign.heard_s:.1f} s (stopped, in native code, or out of reach), last"
        return f"{life} {doing}" + (f"; {otherwise}" if otherwise else "")
    parts = [f"alive, {doing}"]
    if beat.marked_s is not None:
        parts.append(f"last progress {beat.marked_s + (sign.heard_s or 0.0):.1f} s ago")
    if beat.where:
        parts.append(f"at {beat.where}")
    adds = otherwise and not otherwise.startswith("alive")
    return ", ".join(parts) + (f" ({otherwise})" if adds else "")
