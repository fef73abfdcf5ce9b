"""What a demo shows while it runs: lanes in a terminal, lines elsewhere.

It reads the journals as they grow and asks nobody. `tick` is called often; it says something at
least once a second, whatever happens.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phasesync.demo.settings import Script
from phasesync.demo.tail import Tail

__all__ = ("View",)

Line = Mapping[str, Any]

SOON_S = 0.4
AT_LEAST_S = 0.8
FRAME_S = 0.1
WORD = 26
STARTING = "starting"


@dataclass
class Standing:
    """Where a rank stands, by its journal."""

    epoch: int = 0
    doing: str = STARTING
    since_s: float = 0.0


class View:
    """The running demo on a console."""

    def __init__(self, script: Script, console: Console) -> None:
        self.tail = Tail(script.folder)
        self._console = console
        self._script = script
        self._began_s = time.monotonic()
        self._said_s = 0.0
        self._status = "starting"
        self._ranks = {str(rank): Standing() for rank in script.plan.members}
        self._free: dict[str, int] = {}
        self._changed = True
        self._live: Live | None = None

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def status(self, text: str) -> None:
        """What happens while no rank does anything yet, or any more."""
        self._status = text
        self._changed = True

    def news(self, text: str) -> None:
        """Something that happened and stays on the screen."""
        self._console.print(f"{self.elapsed_s:5.1f} s  {text}", style="bold", highlight=False)

    def phase_of(self, rank: str) -> str | None:
        """The phase that a rank is in, by its journal."""
        doing = self._ranks[rank].doing
        return doing.removeprefix("in ") if doing.startswith("in ") else None

    def tick(self) -> None:
        """Read what is new and show it."""
        for line in self.tail.poll():
            self._heed(line)
        now = self.elapsed_s
        if self._live is not None:
            if now - self._said_s >= FRAME_S:
                self._said_s = now
                self._live.update(self._lanes(), refresh=True)
        elif now - self._said_s >= (SOON_S if self._changed else AT_LEAST_S):
            self._said_s = now
            self._changed = False
            self._console.print(f"{now:5.1f} s  {self._summary()}", highlight=False, soft_wrap=True)

    def _heed(self, line: Line) -> None:
        rank = f"{line['role']}/{line['rank']}"
        standing = self._ranks.get(rank)
        if standing is None:
            return
        text = _SAYS.get(line["event"])
        if text is not None:
            doing = text.format_map({"phase": "", "fence": "", **line})
            standing.doing, standing.since_s = doing, self.elapsed_s
            self._changed = True
        standing.epoch = max(standing.epoch, int(line.get("epoch", 0)))
        if "free_bytes" in line:
            self._free[str(line["device"])] = int(line["free_bytes"])
        self._free.update(line.get("free_by_device", {}))
        if line["event"] == "phase.fail" and line.get("error_type") != "Cancelled":
            self.news(f"{rank} failed in {line['phase']}: {line['error_type']}")

    def _summary(self) -> str:
        """All ranks in one line: alike ones are counted."""
        alike: dict[str, list[str]] = {}
        for rank, standing in self._ranks.items():
            alike.setdefault(standing.doing, []).append(rank)
        if set(alike) == {STARTING}:
            return self._status
        parts = [f"{_named(ranks)} {_of(doing, len(ranks))}" for doing, ranks in alike.items()]
        return f"{self._epoch()}: {'; '.join(parts)}"

    def _epoch(self) -> str:
        """How far the furthest rank is."""
        epoch = max(standing.epoch for standing in self._ranks.values())
        return f"epoch {epoch} of {self._script.epochs}"

    def _lanes(self) -> Text:
        begun = any(standing.doing != STARTING for standing in self._ranks.values())
        head = self._epoch() if begun else self._status
        text = Text(f"{self.elapsed_s:5.1f} s  {head}\n", style="bold")
        for rank, standing in self._ranks.items():
            since = self.elapsed_s - standing.since_s
            text.append(f"{rank:<12}epoch {standing.epoch}  ", style="not bold")
            waits = standing.doing.startswith("waits")
            text.append(standing.doing.ljust(WORD), style="not bold dim" if waits else "cyan")
            text.append(f"{since:4.1f} s   " if since >= 0.5 else " " * 9, style="not bold")
            text.append(self._bar(self._script.plan.members.index(_rank(rank))) + "\n", "green")
        return text

    def _bar(self, number: int) -> str:
        """How full the rank's device is."""
        device, capacity = self._script.devices[number], self._script.sizes.capacity
        used = round(16 * (1 - self._free.get(device, capacity) / capacity))
        return f"cpu{number} {'█' * used}{'░' * (16 - used)}"


_SAYS = {
    "rank.start": "waits at plan",
    "epoch.begin": "begins",
    "phase.start": "in {phase}",
    "fence.arrive": "waits at {fence}",
    "fence.pass": "past {fence}",
    "phase.end": "after {phase}",
    "phase.fail": "stopped in {phase}",
    "recover.begin": "recovers",
    "rank.exit": "gone",
}


def _of(doing: str, ranks: int) -> str:
    return doing if ranks == 1 else doing.replace("waits", "wait").replace("begins", "begin")


def _named(ranks: list[str]) -> str:
    return ", ".join(ranks) if len(ranks) <= 2 else f"{len(ranks)} ranks"


def _rank(text: str) -> tuple[str, int]:
    role, _, number = text.rpartition("/")
    return role, int(number)
