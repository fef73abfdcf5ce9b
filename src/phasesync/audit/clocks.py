"""How far apart the clocks of hosts are, as fences prove it: nobody passes before the last arrival.

No fence can tell the offset itself, only that it lies between two bounds; zero outside them is
skew. Bounds that cross are the work of a clock that drifts.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from phasesync.audit.answer import NOTE, Finding
from phasesync.audit.gist import Gist, Key
from phasesync.audit.merge import wall_ns

__all__ = ("Clocks", "Skew")

_OPEN_MAX: Final = 4096
_SHOWN: Final = 64

_Instance = tuple[object, ...]


class Skew(NamedTuple):
    """By how many milliseconds the clock of `ahead` is before that of `behind`: between two bounds.

    Where the bounds hold zero, nothing says that the clocks differ.
    """

    ahead: str
    behind: str
    least_ms: float
    most_ms: float

    def to_json(self) -> dict[str, Any]:
        return {
            "ahead": self.ahead,
            "behind": self.behind,
            "least_ms": round(self.least_ms, 3),
            "most_ms": round(self.most_ms, 3),
        }


class Clocks:
    """Bounds on the offset between each pair of hosts that met at fences."""

    def __init__(self) -> None:
        self._open: dict[_Instance, dict[str, int]] = {}
        self._least: dict[tuple[str, str], int] = {}
        self._one: str | None = None
        self._many = False

    def arrive(self, instance: _Instance, line: Mapping[str, Any]) -> None:
        host = str(line.get("host"))
        if self._is_alone(host):
            return
        self._came(instance, host, wall_ns(line.get("timestamp")))

    def passed(self, instance: _Instance, line: Mapping[str, Any]) -> None:
        """Everybody who was judged had arrived before this, whatever the clocks say."""
        if self._many:
            self._went(instance, str(line.get("host")), wall_ns(line.get("timestamp")))

    def met(self, gists: Iterable[Gist]) -> None:
        """The last fence of an epoch that was taken as a whole: per host, who came last to it and
        who left first.
        """
        fences: dict[Key, dict[str, tuple[int, int]]] = {}
        for gist in gists:
            if gist.clock is not None:
                key, came, went = gist.clock
                hosts = fences.setdefault(key, {})
                known = hosts.get(gist.host, (came, went))
                hosts[gist.host] = (max(known[0], came), min(known[1], went))
        for hosts in fences.values():
            for host, (came, _) in hosts.items():
                for other, (_, went) in hosts.items():
                    self._bound(host, other, went - came)

    def _is_alone(self, host: str) -> bool:
        if not self._many:
            if self._one is None:
                self._one = host
            self._many = host != self._one
        return not self._many

    def _came(self, instance: _Instance, host: str, at: int) -> None:
        if len(self._open) > _OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        known = self._open.setdefault(instance, {})
        known[host] = max(known.get(host, at), at)

    def _went(self, instance: _Instance, host: str, at: int) -> None:
        for other, came in self._open.get(instance, {}).items():
            self._bound(other, host, at - came)

    def _bound(self, came: str, went: str, slack: int) -> None:
        if came != went:
            least = self._least.get((came, went))
            if least is None or slack < least:
                self._least[(came, went)] = slack

    def skews(self) -> tuple[Skew, ...]:
        """Every pair of hosts that met at fences, those that surely differ first."""
        found = []
        for (one, other), slack in self._least.items():
            if one < other and (other, one) in self._least:
                low, high = sorted((-slack / 1e6, self._least[(other, one)] / 1e6))
                if high < 0:
                    found.append(Skew(other, one, -high, -low))
                else:
                    found.append(Skew(one, other, low, high))
        return tuple(sorted(found, key=lambda each: -each.least_ms)[:_SHOWN])

    def findings(self) -> list[Finding]:
        return [
            Finding(
                rule=None,
                strength=NOTE,
                at=1 << 60,
                because=(
                    f"the clock of {each.ahead} is {each.least_ms:.3f} to {each.most_ms:.3f} ms "
                    f"ahead of that of {each.behind}; fences, not clocks, order them here"
                ),
            )
            for each in self.skews()
            if each.least_ms > 0
        ]
