"""What ranks under torchrun leave behind: their tracebacks, the watchdog's lines, and the
launcher's word on who ended first.

A rank's lines begin with `[rank3]:`, or are in a file of its own that has its number. Lines of
nobody in a file of many are the launcher's: it reports, and is not at fault.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from phasesync.importers.base import Course, Imported, LogLine, all_lines
from phasesync.importers.errors import Errors, error_of
from phasesync.importers.watchdog import Watchdog

__all__ = ("read",)

# `torch/distributed/elastic/multiprocessing/errors`, the table that ends a failed job.
_ROOT: Final = re.compile(r"^Root Cause \(first observed failure\):")
_WHO: Final = re.compile(r"^\s+rank\s*: (?P<rank>\d+) \(local_rank: \d+\)")
_CODE: Final = re.compile(r"^\s+exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")


def read(paths: Sequence[Path]) -> Imported:
    """The trace of a job under torchrun, from its output or from a file for each rank."""
    watchdog = Watchdog()
    shared: set[str] = set()
    for line in all_lines(paths):
        watchdog.see(line)
        if line.said:
            shared.add(line.file)
    reader = _Reader(watchdog, shared)
    for line in all_lines(paths):
        if not reader.line(line):
            reader.course.out.skipped += 1
    return reader.done()


class _Reader:
    def __init__(self, watchdog: Watchdog, shared: set[str]) -> None:
        self.course = Course("torchrun")
        self._watchdog = watchdog
        self._shared = shared
        self._errors = Errors(self.course)
        self._table = False
        self._rank: int | None = None
        self._ended: dict[int, tuple[LogLine, str]] = {}

    def line(self, line: LogLine) -> bool:
        """Whether the line meant anything."""
        if self._watchdog.line(self.course, line):
            return True
        if self._launcher(line):
            return True
        if (error := error_of(line.text)) is None or self._watchdog.waits(line):
            return False
        if line.rank is None and line.file in self._shared:
            self._errors.unplaced(line, error)
        else:
            self._errors.of(self.course.process(line), line, error)
        return True

    def done(self) -> Imported:
        for rank, (line, text) in self._ended.items():
            number = self.course.process(line._replace(rank=rank, said=f"rank{rank}"))
            self._errors.of(number, line, text, "exit")
        self._errors.done()
        return self.course.done()

    def _launcher(self, line: LogLine) -> bool:
        """The table at the end: of all that failed, the first, and how it ended."""
        if _ROOT.match(line.text):
            self._table = True
            return True
        if not self._table:
            return False
        if (found := _WHO.match(line.text)) is not None:
            self._rank = int(found["rank"])
            return True
        if self._rank is not None and (found := _CODE.match(line.text)) is not None:
            code = int(found["code"])
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            self._ended[self._rank] = (line, f"{how}, the first to end (pid {found['pid']})")
            self._table, self._rank = False, None
            return True
        return False
