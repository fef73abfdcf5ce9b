"""py-spy dumps: in which call each process stands.

A dump is one moment, so that every phase in it is open. The innermost call that a row of the table
knows gives the phase; threads other than the main one count only where the main one is in none.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from phasesync.importers.base import Course, Imported, LogLine, read_lines

__all__ = ("read",)

_PROCESS: Final = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)$")
_THREAD: Final = re.compile(r'^Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: "(?P<name>[^"]*)")?')
_FRAME: Final = re.compile(r"^\s+(?P<function>\S+) \((?P<file>[^:()]+)(?::(?P<line>\d+))?\)")
_FROM_COMMAND: Final = re.compile(r"rank[=_ ]?(\d+)", re.IGNORECASE)
# Function, part of the file's name, and what it means; the innermost frame that matches wins.
_CALLS: Final[tuple[tuple[str, str, str], ...]] = (
    ("barrier", "distributed_c10d", "barrier"),
    ("monitored_barrier", "distributed_c10d", "barrier"),
    ("broadcast", "distributed_c10d", "broadcast"),
    ("broadcast_object_list", "distributed_c10d", "broadcast"),
    ("all_reduce", "distributed_c10d", "all_reduce"),
    ("all_gather", "distributed_c10d", "all_gather"),
    ("all_gather_into_tensor", "distributed_c10d", "all_gather"),
    ("all_gather_object", "distributed_c10d", "all_gather"),
    ("gather_object", "distributed_c10d", "gather"),
    ("reduce_scatter_tensor", "distributed_c10d", "reduce_scatter"),
    ("send", "distributed_c10d", "send"),
    ("recv", "distributed_c10d", "recv"),
    ("new_group", "distributed_c10d", "init_group"),
    ("init_process_group", "distributed_c10d", "init_group"),
    ("wake_up", "", "wake_up"),
    ("sleep", "gpu_worker", "sleep"),
    ("update_weights", "", "update_weights"),
    ("update_weights_from_ipc", "", "update_weights"),
    ("load_weights", "", "load_weights"),
    ("resume_memory_occupation", "", "resume_memory_occupation"),
    ("release_memory_occupation", "", "release_memory_occupation"),
    ("update_actor", "", "update_actor"),
    ("empty_cache", "", "empty_cache"),
)


def read(paths: Sequence[Path]) -> Imported:
    """The trace of a set of dumps, one or more processes a file."""
    course = Course("py-spy")
    for path in paths:
        _file(course, path)
    return course.done()


def _file(course: Course, path: Path) -> None:
    rank: int | None = None
    main = True
    found = False
    for line in read_lines(path):
        if (process := _PROCESS.match(line.text)) is not None:
            rank, found, main = _rank(course, path, process, line), False, True
        elif (thread := _THREAD.match(line.text)) is not None:
            main = thread["name"] in (None, "MainThread")
        elif rank is not None and not found and (frame := _FRAME.match(line.text)) is not None:
            phase = _phase(frame["function"], frame["file"]) if main else None
            if phase is not None:
                found = True
                course.put(rank, phase, "start", line, stack=line.text.strip()[:200])
        elif line.text.strip():
            course.out.skipped += 1


def _rank(course: Course, path: Path, process: re.Match[str], line: LogLine) -> int:
    said = _FROM_COMMAND.search(process["command"])
    wanted = int(said[1]) if said else line.rank
    return course.rank(f"{path}:{process['pid']}", wanted)


def _phase(function: str, file: str) -> str | None:
    for name, part, phase in _CALLS:
        if function == name and part in file:
            return phase
    return None
