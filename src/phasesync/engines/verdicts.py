"""The fences' verdicts, read from the journals of a run: what a guard asks, in whatever process.

Whoever closes a fence writes its judged list once, before anybody can act on it, so a journal on
this host (or on a shared folder) tells as much as the fence's transport does, and asks nobody.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phasesync.core import wire
from phasesync.core.fence import ticket_hash
from phasesync.core.model import (
    Broken,
    Epoch,
    FenceKey,
    FenceName,
    FenceVerdict,
    Opened,
    RootCause,
    Ticket,
)

__all__ = ("JournalVerdicts",)

_DECIDED = b'"fence.decide"'


class JournalVerdicts:
    """Verdicts by key, from the journals below `folder`; only what was added is read again."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._read: dict[Path, int] = {}
        self._known: dict[FenceKey, FenceVerdict] = {}

    def __call__(self, key: FenceKey) -> FenceVerdict | None:
        """What was decided at that fence instance, or None while no journal says."""
        if key not in self._known:
            for line in self._added():
                verdict = _verdict(line)
                if verdict is not None:
                    self._known.setdefault(*verdict)
        return self._known.get(key)

    def _added(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.rglob("*.jsonl")):
            with path.open("rb") as journal:
                journal.seek(self._read.get(path, 0))
                for line in journal:
                    if not line.endswith(b"\n"):
                        break  # It is still being written.
                    self._read[path] = self._read.get(path, 0) + len(line)
                    if _DECIDED in line:
                        yield wire.decode(line)


def _verdict(line: dict[str, Any]) -> tuple[FenceKey, FenceVerdict] | None:
    if line.get("event") != "fence.decide" or "generation" not in line:
        return None
    key = FenceKey(line["run"], line["attempt"], line["scope"], line["generation"])
    fence = FenceName(line["fence"])
    if line.get("verdict") != "open":
        cause = RootCause(kind=str(line.get("verdict")), ranks=(), fence=fence)
        return key, Broken(key=key, fence=fence, cause=cause)
    judged = line["judged"]
    ticket = Ticket(
        key=key,
        fence=fence,
        epoch=Epoch(line.get("epoch", 0)),
        count=len(judged),
        hash=ticket_hash(judged),
    )
    return key, Opened(ticket=ticket)
