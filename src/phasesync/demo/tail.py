"""Journals of a run as they grow: whole lines, each once."""

from pathlib import Path
from typing import Any

from phasesync.core import wire

__all__ = ("Tail",)


class Tail:
    """Follows all journals in a folder. `lines` is everything read so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lines: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        """Lines that are new since the last look. A line still being written waits."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    whole, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue  # Rotated away since it was listed.
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            found += filter(None, map(_line, whole.split(b"\n")))
        found.sort(key=lambda line: line["mono_ns"])
        self.lines += found
        return found


def _line(raw: bytes) -> dict[str, Any] | None:
    """What a line says; None where a full disk tore it off."""
    try:
        line = wire.decode(raw)
    except wire.JsonError:
        return None
    return line if isinstance(line, dict) and "mono_ns" in line else None
