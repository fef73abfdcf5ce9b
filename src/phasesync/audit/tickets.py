"""One fence instance has one verdict: what was judged, who arrived, and all tickets must agree."""

from collections.abc import Mapping
from typing import Any, Final

from phasesync.audit.answer import BROKEN, Evidence, Finding
from phasesync.audit.events import text_of
from phasesync.core.wire import sha256

__all__ = ("Tickets",)

_OPEN_MAX: Final = 4096

_Instance = tuple[object, ...]
_Line = Mapping[str, Any]


class Tickets:
    """The fences of one run; `arrived` holds, per instance and rank, its own row."""

    def __init__(self) -> None:
        self.arrived: dict[_Instance, dict[str, tuple[Evidence, list[Any]]]] = {}
        self._hashes: dict[_Instance, tuple[str, str, Evidence]] = {}

    def arrive(self, where: Evidence, name: str, instance: _Instance, line: _Line) -> None:
        """A rank's own word of its arrival, as it should stand in the judged list."""
        _bound(self.arrived)
        status = "failed" if line.get("status") == "failed" else "ok"
        said = [line.get("incarnation", 0), status, line.get("seq"), line.get("free_bytes")]
        self.arrived.setdefault(instance, {})[name] = (where, [name, *said])

    def passed(
        self, at: int, where: Evidence, name: str, instance: _Instance, line: _Line
    ) -> list[Finding]:
        """A rank passed with a ticket: it must be the one that the others have."""
        ticket = line.get("ticket")
        if not isinstance(ticket, dict):
            return []
        found = str(ticket.get("hash"))
        known = self._hashes.get(instance)
        if known is None:
            _bound(self._hashes)
            self._hashes[instance] = (found, name, where)
        elif known[0] != found:
            what = f"{name} and {known[1]} hold different tickets"
            return [_split(at, line, what, where, known[2])]
        return []

    def decided(
        self, at: int, where: Evidence, name: str, instance: _Instance, line: _Line
    ) -> list[Finding]:
        """The list that was judged, against each rank's own line and against the tickets.

        Raises:
            ValueError: it is no such list.
        """
        judged = line.get("judged")
        if not isinstance(judged, list):
            return []
        arrived = self.arrived.get(instance, {})
        split = []
        for row in judged:
            if not isinstance(row, list) or len(row) < 4:
                raise ValueError("a judged list that is none")
            own = arrived.get(str(row[0]))
            if own is not None and row[2] == "ok" and own[1][1 : len(row)] != row[1:]:
                what = f"it judged {row[0]} by an arrival that is not in that rank's journal"
                split.append(_split(at, line, what, where, own[0]))
        if line.get("verdict") == "open":
            known = self._hashes.setdefault(instance, (sha256(judged), name, where))
            if known[0] != sha256(judged):
                what = f"the ticket of {known[1]} is not of the list that was judged"
                split.append(_split(at, line, what, where, known[2]))
        return split

    def broken(
        self, at: int, where: Evidence, name: str, instance: _Instance, line: _Line
    ) -> list[Finding]:
        """A rank was told that the fence broke: nobody may have passed it."""
        known = self._hashes.get(instance)
        if known is None:
            return []
        what = f"open for {known[1]}, broken for {name}"
        return [_split(at, line, what, where, known[2])]


def _bound(table: dict[_Instance, Any]) -> None:
    if len(table) > _OPEN_MAX:
        table.pop(next(iter(table)))


def _split(at: int, line: _Line, what: str, *lines: Evidence) -> Finding:
    fence = str(line.get("fence"))
    return Finding(
        rule="R-EPOCH",
        strength=BROKEN,
        at=at,
        because=(
            f"fence {fence!r} ({text_of(line.get('scope'), 60)}, generation "
            f"{text_of(line.get('generation'), 20)}): {what}"
        ),
        epoch=line.get("epoch") if type(line.get("epoch")) is int else None,
        fence=fence,
        evidence=lines,
    )
