"""How far apart the clocks of hosts are, as fences prove it: nobody passes before the last arrival.

No fence can tell the offset itself, only that it lies between two bounds; zero outside them is
skew.
"""

from collections.abc import Mapping
from typing import Any, Final

from phasesync.audit.answer import NOTE, Finding
from phasesync.audit.merge import wall_ns

__all__ = ("Clocks",)

_OPEN_MAX: Final = 4096


class Clocks:
    """Bounds on the offset between each pair of hosts that met at fences."""

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], dict[str, list[int]]] = {}
        self._least: dict[tuple[str, str], int] = {}
        self._one: str | None = None
        self._many = False

    def arrive(self, instance: tuple[object, ...], line: Mapping[str, Any]) -> None:
        host = str(line.get("host"))
        if not self._many:
            if self._one is None:
                self._one = host
            elif host != self._one:
                self._many = True
            else:
                return
        at = wall_ns(line.get("timestamp"))
        if len(self._open) > _OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        known = self._open.setdefault(instance, {}).setdefault(host, [at, 0])
        known[0] = max(known[0], at)

    def passed(self, instance: tuple[object, ...], line: Mapping[str, Any]) -> None:
        """Everybody who was judged had arrived before this, whatever the clocks say."""
        if not self._many:
            return
        hosts = self._open.get(instance)
        if hosts is None:
            return
        here, at = str(line.get("host")), wall_ns(line.get("timestamp"))
        for host, (arrived, _) in hosts.items():
            if host != here:
                least = self._least.get((host, here))
                if least is None or at - arrived < least:
                    self._least[(host, here)] = at - arrived

    def bounds_ms(self) -> dict[tuple[str, str], tuple[float, float]]:
        """For each pair of hosts, between which two offsets the first is ahead of the second."""
        bounds = {}
        for (one, other), slack in self._least.items():
            if one < other and (other, one) in self._least:
                bounds[(one, other)] = (-slack / 1e6, self._least[(other, one)] / 1e6)
        return bounds

    def findings(self) -> list[Finding]:
        found = []
        for (one, other), (low, high) in self.bounds_ms().items():
            if low <= 0 <= high:
                continue
            ahead, behind = (one, other) if low > 0 else (other, one)
            least, most = sorted((abs(low), abs(high)))
            found.append(
                Finding(
                    rule=None,
                    strength=NOTE,
                    at=1 << 60,
                    because=(
                        f"the clock of {ahead} is {least:.3f} to {most:.3f} ms ahead of that of "
                        f"{behind}; "
                        "fences, not clocks, order them here"
                    ),
                )
            )
        return found
