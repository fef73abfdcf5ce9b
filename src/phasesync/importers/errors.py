"""Errors in other people's logs: which lines are one, and whose.

An error is never lost: a process that ended with one has failed, and one that no line places makes
the audit `inconclusive`. One that its process outlived is let be.
"""

import re
from typing import Final, NamedTuple

from phasesync.audit.vocabulary import is_echo
from phasesync.importers.base import Course, LogLine

__all__ = ("Errors", "error_of", "is_death")

# The last line of a traceback, at its place or behind the header of an ERROR record.
_RAISED: Final = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:\[?(?:ERROR|CRITICAL|FATAL)\b.{0,120}?[\])]:?\s+)?"
    r"(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Timeout|Interrupt|Killed)"
    r"(?:\([A-Za-z.]*\))?(?::\s.*|$))"
)
# What these say is an error wherever it stands.
_ANYWHERE: Final = re.compile(
    r"(?P<error>(?:torch\.)?(?:cuda\.)?OutOfMemoryError\b.*|CUDA out of memory\b.*|"
    r"CUDA [Ee]rror: .*|NCCL error\b.*|ncclUnhandled\w+.*|EngineDeadError\b.*|"
    r"ray\.exceptions\.\w+.*|torch\.distributed\.\w+Error.*|RuntimeError: .*|"
    r"terminate called after throwing.*|Fatal Python error: .*|Segfault encountered.*|"
    r"Segmentation fault\b.*|Killed by signal .*)"
)
_DIED: Final = re.compile(
    r"The actor died|[Ww]orker died|SIGKILL|process exited unexpectedly|Worker proc .* died|"
    r"died or was killed while executing"
)
# What is said of a connection that the other end let go of, beside what the audit calls an echo.
_OF_PEERS: Final = re.compile(r"Broken pipe|failed to recv, got 0 bytes", re.IGNORECASE)
_QUIET: Final = re.compile(r"\b(?:INFO|DEBUG|WARN(?:ING)?)\b")
_QUOTED: Final = ("raise ", "except ", "#", "File ")
_ENDS: Final = ("fail", "exit", "timeout")
_KEPT: Final = 8


def error_of(text: str) -> str | None:
    """The error that a line says was raised; None for records of lesser levels and quoted code."""
    stripped = text.strip()
    if stripped.startswith(_QUOTED):
        return None
    found = _RAISED.match(stripped) or _ANYWHERE.search(stripped)
    if found is None or _QUIET.search(stripped[: found.start("error")]):
        return None
    return found["error"].strip()


def is_death(text: str) -> bool:
    """Whether a line says that a process is gone."""
    return _DIED.search(text) is not None


class _Held(NamedTuple):
    line: LogLine
    error: str
    event: str
    since: int


class Errors:
    """Errors of processes that were in no phase, until it is known whether they went on."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._held: dict[int, _Held] = {}
        self._unplaced: list[tuple[LogLine, str]] = []

    def of(self, rank: int, line: LogLine, error: str, event: str = "fail") -> None:
        """An error of that process: what it was in has failed, or the process as such."""
        if self._course.opened(rank) is not None:
            self._course.fail(rank, line, error, event=event)
        elif rank in self._held and event == "exit":
            return  # Why it ended has been said.
        elif rank not in self._held or self._outlived(rank):
            self._held[rank] = _Held(line, error, event, self._course.written(rank))

    def unplaced(self, line: LogLine, error: str) -> None:
        """An error that no line gives to a process."""
        self._unplaced.append((line, error))

    def done(self) -> None:
        """Write what is left: whoever had an error and did nothing since has failed. What comes of
        somebody else's end is written after it, however early it was printed.
        """
        held = [(rank, held) for rank, held in self._held.items() if not self._outlived(rank)]
        for rank, each in sorted(held, key=lambda one: _is_of_peers(one[1].error)):
            self._course.fail(rank, each.line, each.error, event=each.event)
        if not any(each["event"] in _ENDS for each in self._course.out.events):
            self._course.errors += [
                {"file": line.file, "line": line.number, "error": error[:300]}
                for line, error in self._unplaced[:_KEPT]
            ]

    def _outlived(self, rank: int) -> bool:
        """Whether a process did anything that is known here after its error."""
        held = self._held[rank]
        return held.event != "exit" and self._course.written(rank) > held.since


def _is_of_peers(error: str) -> bool:
    return is_echo(error) or _OF_PEERS.search(error) is not None
