"""verl under Ray: `log_gpu_memory_usage` lines, vLLM's and SGLang's lines in worker output, and
errors.

The heads are those of `ActorRolloutRefWorker.update_weights` (verl 0.9); verl prints them at DEBUG
and on rank 0 only, unless told otherwise. Phases follow each other at once there, so that the end
of one is the start of the next, and an error between two heads belongs to the phase that had
begun.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from phasesync.importers import enginelogs
from phasesync.importers.base import Course, Imported, LogLine, all_lines

__all__ = ("read",)

_MEMORY: Final = re.compile(
    r"(?P<when>Before|After) (?P<what>.+?), memory allocated \(GB\): (?P<allocated>[\d.]+), "
    r"memory reserved \(GB\): (?P<reserved>[\d.]+), "
    r"device memory used/total \(GB\): (?P<used>[\d.]+)/(?P<total>[\d.]+)"
)
# What verl calls a step, what it is here, and what it goes on to at once.
_HEADS: Final[dict[str, tuple[str, str | None]]] = {
    "resume weights": ("resume_weights", "update_weights"),
    "update_weights": ("update_weights", "offload"),
    "offload model to cpu": ("offload", "resume_kv"),
    "resume kv_cache": ("resume_kv", None),
    "load_fsdp_model_to_gpu": ("load_back", None),
    "offload_fsdp_model_to_cpu": ("offload", None),
    "update_actor": ("train", None),
    "generate_sequences": ("generate_sequences", None),
}
_ERROR: Final = re.compile(
    r"(?P<type>(?:torch\.)?(?:cuda\.)?OutOfMemoryError|RuntimeError|ray\.exceptions\.\w+|"
    r"AssertionError|KeyError|TimeoutError|ValueError|AttributeError|torch\.distributed\.\w+):? ?"
    r"(?P<text>.*)"
)
_DIED: Final = re.compile(
    r"The actor died|worker died|SIGKILL|process exited unexpectedly|Worker proc .* died"
)


def read(paths: Sequence[Path]) -> Imported:
    """The trace of a verl job from its driver log or its Ray worker logs."""
    course = Course("verl")
    for line in all_lines(paths):
        if not _line(course, line):
            course.out.skipped += 1
    return course.done()


def _line(course: Course, line: LogLine) -> bool:
    if (found := _MEMORY.search(line.text)) is not None:
        return _memory(course, line, found)
    if enginelogs.engine_line(course, line):
        return True
    if (found := _ERROR.search(line.text)) is not None and _is_error(line):
        role = "engine" if enginelogs.is_engine(line) else ""
        rank = course.rank(line.who, line.rank, role)
        error = f"{found['type']}: {found['text']}"
        if not _seen(course, rank, error):
            course.fail(rank, line, error)
        return True
    if _DIED.search(line.text):
        rank = course.rank(line.who, line.rank)
        course.fail(rank, line, line.text.strip()[:200], event="exit")
        return True
    return False


def _memory(course: Course, line: LogLine, found: re.Match[str]) -> bool:
    known = _HEADS.get(found["what"].strip())
    rank = course.rank(line.who, line.rank, "trainer")
    total, used = float(found["total"]), float(found["used"])
    course.capacity = total
    attrs: dict[str, Any] = {
        "free_gib": round(total - used, 2),
        "reserved_gib": float(found["reserved"]),
        "used_gib": used,
    }
    if known is None:
        return False
    phase, then = known
    if found["when"] == "Before":
        course.turn(rank, phase)
        course.put(rank, phase, "start", line, **attrs)
        return True
    course.put(rank, phase, "end", line, **attrs)
    if then is not None:
        course.put(rank, then, "start", line)
    return True


def _is_error(line: LogLine) -> bool:
    """A raised error, not a line of somebody's traceback that quotes one."""
    return not line.text.lstrip().startswith(("raise ", "except ", "#", "File "))


def _seen(course: Course, rank: int, error: str) -> bool:
    last = course.out.events[-1] if course.out.events else None
    return (
        last is not None
        and last["rank"] == rank
        and last["event"] == "fail"
        and str(last["attrs"].get("error", ""))[:60] == error[:60]
    )
