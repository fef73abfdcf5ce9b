"""Why fences broke, as ranks were told: who failed, died, or never came, and in which phase.

A rank that waited is never to blame for it: in its place stands who was missing where it waited.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from phasesync.audit.answer import BROKEN, FAILED, SUSPECTED, Evidence, Finding
from phasesync.audit.events import text_of
from phasesync.audit.facts import Facts
from phasesync.audit.told import Told

__all__ = ("Arrived", "Breaks")

_CAUSES_MAX: Final = 1024
_NOBODY: Final = frozenset({"store_lost", "restarted", "duplicate"})

Arrived = Mapping[tuple[object, ...], Mapping[str, Any]]


class _Cause(NamedTuple):
    """Why a fence broke, as a `fence.break` line says it."""

    kind: str
    ranks: tuple[str, ...]
    phase: str | None
    epoch: int


class Breaks:
    """The causes of one run's broken fences, each once, as its first line has it."""

    def __init__(self, ranks: Mapping[str, Told], facts: Facts, arrived: Arrived) -> None:
        self._ranks, self._facts, self._arrived = ranks, facts, arrived
        self._causes: dict[_Cause, tuple[Evidence, Mapping[str, Any], int]] = {}
        self._missed: dict[_Cause, dict[str, str | None]] = {}
        self._stuck: dict[_Cause, tuple[object, ...]] = {}
        self._overdue: dict[tuple[object, ...], _Cause] = {}

    def __len__(self) -> int:
        return len(self._causes)

    @property
    def blamed(self) -> set[str]:
        """Whoever is named by a cause, or was missing."""
        named = {name for cause in self._causes for name in cause.ranks}
        for _, line, _ in self._causes.values():
            named |= set(map(str, line.get("missing") or ()))
        return named

    def note(
        self, at: int, where: Evidence, instance: tuple[object, ...], line: Mapping[str, Any]
    ) -> None:
        """Take in a line that says why a fence broke."""
        kind = str(line.get("cause_kind"))
        ranks = tuple(map(str, line.get("cause_ranks") or ()))
        phase, epoch = line.get("cause_phase"), line.get("epoch")
        cause = _Cause(
            kind, ranks, str(phase) if phase else None, epoch if type(epoch) is int else 0
        )
        if cause not in self._causes and len(self._causes) < _CAUSES_MAX:
            self._causes[cause] = (where, line, at)
            if kind == "deadline":
                told = ranks or tuple(map(str, line.get("missing") or ()))
                self._missed[cause] = self._absentees(instance, told, cause)
                if _origin(line) == line.get("fence"):
                    self._overdue.setdefault(instance, cause)

    def findings(self) -> list[Finding]:
        """Why fences broke, as all ranks were told: who failed, died, or never came."""
        found = []
        for cause, (where, line, at) in self._causes.items():
            told = [self._ranks[name].failed for name in cause.ranks if name in self._ranks]
            if cause.kind == "failed" and cause.ranks and all(told):
                continue  # That rank's own journal says it, and earlier.
            if self._overdue.get(self._stuck.get(cause, ()), cause) != cause:
                continue  # All it waited for had come elsewhere: that fence says who was not heard.
            found.append(self._cause(cause, where, line, at))
        return found

    def _cause(self, cause: _Cause, where: Evidence, line: Mapping[str, Any], at: int) -> Finding:
        """Who is to blame for a broken fence, and in which phase."""
        kind, ranks, phase = cause.kind, cause.ranks, cause.phase
        error = text_of(line.get("error") or "", 300)
        fence = str(_origin(line))
        missing = tuple(map(str, line.get("missing") or ()))
        guilty = ranks or missing if kind not in _NOBODY else ()
        if cause in self._missed:
            guilty = tuple(self._missed[cause])
        rule: str | None = None
        strength = FAILED
        lines = [where]
        place = phase
        for name in guilty:
            rank = self._ranks.get(name)
            if rank is not None and rank.last is not None:
                lines.append(rank.last)
                place = place or self._missed.get(cause, {}).get(name) or rank.phase
        who = ", ".join(guilty) or "nobody"
        if kind == "deadline":
            because = f"{who} did not come to fence {fence!r} before its deadline"
            if place:
                because += f"; its journal ends in {place}"
        elif kind == "dead":
            because = f"{who} died" + (f" in {place}" if place else "")
        elif kind == "digest":
            rule, strength = "R-SAMEPLAN", BROKEN
            guilty = self._minority(ranks)
            because = f"ranks hold different plans: {error}"
        elif kind == "evidence":
            rule = "R-FREED" if "free" in error else None
            strength = BROKEN if rule else FAILED
            because = f"{who} could not show what fence {fence!r} requires"
        elif kind == "store_lost":
            strength = SUSPECTED
            because = f"the fence transport was lost at {fence!r}; what it decided is not known"
        else:
            because = f"{who}: {kind}" + (f" in {place}" if place else "")
        if error and kind not in ("digest",):
            because += f": {error}"
        epoch = line.get("epoch")
        return Finding(
            rule=rule,
            strength=strength,
            at=self._since(guilty, at),
            because=because,
            epoch=epoch if type(epoch) is int else None,
            phase=place,
            fence=None if place else fence,
            guilty=guilty,
            evidence=tuple(dict.fromkeys(lines)),
            record_next=("progress marks in long phases",) if kind == "deadline" else (),
        )

    def _absentees(
        self, fence: tuple[object, ...], missing: tuple[str, ...], cause: _Cause
    ) -> dict[str, str | None]:
        """Who a fence waited for when it broke, and in which phase each was: in place of a rank
        that itself waited at another one, who was missing there. Where all of them had come to one
        by their own journals, an arrival was lost on its way, and that fence will say whose.
        """
        found: dict[str, str | None] = {}
        left = list(missing)
        seen = {fence}
        while left:
            name = left.pop(0)
            rank = self._ranks.get(name)
            at = rank.waits if rank is not None else None
            if at is None:
                found[name] = (rank.phase or rank.cut) if rank is not None else None
            elif at not in seen:
                seen.add(at)
                came = self._arrived.get(at, {})
                members = map(str, self._facts.members.get(str(at[1]), ()))
                left += [member for member in members if member not in came]
                self._stuck.setdefault(cause, at)
        if found:
            self._stuck.pop(cause, None)
        return found or dict.fromkeys(missing)

    def _since(self, guilty: tuple[str, ...], at: int) -> int:
        """When a cause began: at the last line of who is gone, not when peers were told."""
        facts = self._facts
        ends = [
            known.last.at
            for name in guilty
            if (known := facts.ranks.get(name)) is not None and known.last is not None
        ]
        return min([*ends, at])

    def _minority(self, ranks: tuple[str, ...]) -> tuple[str, ...]:
        world = self._facts.header.ranks
        return ranks if ranks and 2 * len(ranks) < len(world) else ()


def _origin(line: Mapping[str, Any]) -> object:
    """The fence at which it began; fences behind it break by the same cause."""
    return line.get("cause_fence") or line.get("fence")
