"""Whole demos as tests see them: settings in, exit code, screen and journals out."""

import io
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from phasesync.core import wire
from phasesync.demo import DemoSettings, run_demo
from phasesync.report.audit import audit_run

__all__ = ("Played", "journals", "played", "waited")


class Played(NamedTuple):
    """A demo that is over."""

    code: int
    shown: list[str]
    folder: Path
    lines: list[dict[str, Any]]

    @property
    def screen(self) -> list[str]:
        """The last screen: what comes after the last line of progress."""
        last = max(at for at, row in enumerate(self.shown) if " s  " in row[:12])
        return self.shown[last + 1 :]

    def of(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The journal lines of that event which have these fields."""
        return [
            line
            for line in self.lines
            if line["event"] == event and all(line.get(k) == v for k, v in fields.items())
        ]


def played(runs: Path, **settings: Any) -> Played:
    """The demo that was played with these settings."""
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    code = run_demo(DemoSettings(runs=runs, **settings), audit_run=audit_run, console=console)
    assert isinstance(console.file, io.StringIO)
    folder = max(runs.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return Played(code, console.file.getvalue().splitlines(), folder, journals(folder))


def journals(folder: Path) -> list[dict[str, Any]]:
    """All lines of all journals, by the clock that one host's processes share."""
    lines = [
        wire.decode(text)
        for path in folder.glob("*.jsonl")
        for text in path.read_bytes().splitlines()
    ]
    return sorted(lines, key=lambda line: int(line["mono_ns"]))


def waited(demo: Played, rank: str) -> str:
    """Where others waited longest for a rank, as the screen says it."""
    start = f"waited for: {rank}, "
    return next(row for row in demo.screen if row.startswith(start)).partition("longest ")[2]
