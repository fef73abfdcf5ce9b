"""Whole demos as tests see them: settings in, exit code, screen and journals out.

Last screens are compared with stored ones; REWRITE=1 stores them anew.
"""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from phasesync.core import wire
from phasesync.demo import DemoSettings, run_demo
from phasesync.demo.screen import HEIGHT, WIDTH
from phasesync.report.audit import audit_run

__all__ = ("Played", "fits", "journals", "masked", "played", "same_screen", "waited")

STORED = Path(__file__).parent / "screens"


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


def fits(screen: Sequence[str]) -> None:
    assert len(screen) <= HEIGHT
    assert max(map(len, screen)) <= WIDTH


def same_screen(demo: Played, name: str) -> None:
    """The last screen is the stored one, but for what differs from run to run."""
    fits(demo.screen)
    stored = STORED / f"{name}.txt"
    if os.environ.get("REWRITE"):
        stored.write_text(masked(demo))
    assert masked(demo) == stored.read_text()


def masked(demo: Played) -> str:
    """The screen with what differs from run to run masked: times, lanes, bars, names of folders.

    Lines are joined again where they were broken, since that depends on what is masked.
    """
    rows: list[str] = []
    for row in demo.screen:
        if row.startswith(VARY):
            continue
        if row.startswith("  ") and not row.startswith(NEW) and "|epoch" not in row:
            rows[-1] += row[1:]
        else:
            rows.append(row)
    text = "\n".join(rows)
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.replace(demo.folder.name, "<run>") + "\n"


#: Whom a busy machine made late, and whether two noticed a death in their own words.
VARY = ("waited for: ", "  also trainer/3 died")
NEW = ("  because", "  see", "  also", "  waiting", "  record", "  possible")
MASKS = (
    (r"^(trainer/\d+|cpu\d+)  +.*(?<!: done)$", r"\1 <over time>"),
    (r"\|epoch (\d+) *", r"|epoch \1 "),
    (r"\d+\.\d s", "#.# s"),
    (r"\b[\w.-]+(?=/cpu\d)", "<host>"),
    (r"(jsonl):\d+", r"\1:#"),
    (r"(?<=trainer/3 died).*", " <as noticed first>"),
    (r"^! cut off  |  ! cut off", ""),  # Whether a break finds a rank in a phase or between two.
    (r" +$", ""),
)
