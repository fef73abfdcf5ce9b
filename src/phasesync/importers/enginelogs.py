"""vLLM's and SGLang's own lines about sleep, wake, memory and weight updates.

vLLM prints them from `v1/worker/gpu_worker.py`, `v1/executor/abstract.py` and `entrypoints`;
SGLang from its scheduler and its HTTP access log. vLLM says when a phase is over, not when it
began.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from phasesync.importers.base import Course, Imported, LogLine, all_lines
from phasesync.importers.errors import Errors, error_of, is_death
from phasesync.importers.watchdog import Watchdog

__all__ = ("engine_line", "is_engine", "read_sglang", "read_vllm", "worker_of")

_FREED: Final = re.compile(
    r"Sleep mode freed (?P<freed>[\d.]+) GiB memory, (?P<held>[\d.]+) GiB memory is still in use"
)
_ASLEEP: Final = re.compile(r"It took (?P<took>[\d.]+) seconds to fall asleep")
_AWAKE: Final = re.compile(
    r"It took (?P<took>[\d.]+) seconds to wake up(?: tags (?P<tags>.*?))?\.?$"
)
_TWICE: Final = re.compile(r"Executor is already sleeping")
_NOT_ASLEEP: Final = re.compile(
    r"Executor is not sleeping|Tag (?P<tag>\S+) is not in sleeping tags"
)
_RESET: Final = re.compile(r"Successfully reset prefix cache")
# SGLang's scheduler, `flush_cache`.
_FLUSHED: Final = re.compile(r"Cache flushed successfully")
_NOT_FLUSHED: Final = re.compile(
    r"Cache not flushed because there are pending requests\.? "
    r"#queue-req: (?P<queued>\d+), #running-req: (?P<running>\d+)"
)
_NOT_RESET: Final = re.compile(r"Failed to reset prefix cache because some .*not freed yet")
_DISCARDED: Final = re.compile(
    r"It took (?P<took>[\d.]+) seconds to discard tags (?P<tags>.*?)\.?$"
)
_ENGINE: Final = re.compile(
    r"^\s*\(?(?:EngineCore|vLLM|SGLang|VllmWorker|RayWorkerWrapper|Worker(?:_\w+)?(?:\s|$))",
    re.IGNORECASE,
)
_PREFIX: Final = re.compile(
    r"^\((?P<proc>(?:EngineCore|Worker|APIServer)\S*)\s+pid=(?P<pid>\d+)\)\s*"
)
_TP: Final = re.compile(r"(?:\b|_)TP(?P<tp>\d+)(?:\b|_)")
# uvicorn: 'INFO:     127.0.0.1:4321 - "POST /release_memory_occupation HTTP/1.1" 200 OK'
_HTTP: Final = re.compile(
    r'"(?:POST|GET) /(?P<path>[a-z_]+)(?:\?(?P<query>\S*))? HTTP/[\d.]+" (?P<status>\d+)'
)
_PATHS: Final = {
    "sleep": "sleep",
    "wake_up": "wake_up",
    "release_memory_occupation": "release_memory_occupation",
    "resume_memory_occupation": "resume_memory_occupation",
    "update_weights_from_tensor": "update_weights",
    "update_weights_from_distributed": "update_weights",
    "update_weights_from_disk": "update_weights",
    "update_weights_from_ipc": "update_weights",
    "update_weights": "update_weights",
    "start_weight_update": "start_weight_update",
    "finish_weight_update": "finish_weight_update",
    "begin_weight_update": "begin_weight_update",
    "end_weight_update": "end_weight_update",
    "init_weights_update_group": "init_weights_update_group",
    "destroy_weights_update_group": "destroy_weights_update_group",
    "init_weight_transfer_engine": "init_weights_update_group",
    "pause": "pause_generation",
    "pause_generation": "pause_generation",
    "resume": "continue_generation",
    "continue_generation": "continue_generation",
    "flush_cache": "flush_cache",
    "reset_prefix_cache": "reset_prefix_cache",
    "release_kv_cache_memory": "release_kv_cache",
}
_TAG: Final = re.compile(r"[a-z_]+")


def read_vllm(paths: Sequence[Path]) -> Imported:
    """The trace of a vLLM server or of engines in a trainer's log."""
    return _read("vllm", paths)


def read_sglang(paths: Sequence[Path]) -> Imported:
    """The trace of an SGLang server."""
    return _read("sglang", paths)


def _read(name: str, paths: Sequence[Path]) -> Imported:
    course = Course(name)
    errors, watchdog = Errors(course), Watchdog()
    for line in all_lines(paths):
        watchdog.see(line)
    for line in all_lines(paths):
        known = engine_line(course, line) or watchdog.line(course, line)
        if not known and not _crash(course, errors, line):
            course.out.skipped += 1
    errors.done()
    return course.done()


def is_engine(line: LogLine) -> bool:
    """Whether a process of an engine wrote the line."""
    return bool(_ENGINE.search(line.actor) or _PREFIX.match(line.text))


def worker_of(line: LogLine) -> str | None:
    """The engine's process that a line names, as vLLM puts it before each: `Worker_TP2`."""
    if (prefix := _PREFIX.match(line.text)) is not None:
        return prefix["proc"][:80]
    return line.actor[:80] if line.actor.startswith(("Worker_", "EngineCore")) else None


def engine_line(course: Course, line: LogLine) -> bool:
    """Write what an engine says of its memory and its calls; False if it says nothing of them."""
    text = line.text
    who = line.who
    if (prefix := _PREFIX.match(text)) is not None:
        who = f"{line.ip}:{prefix['pid']}"
        text = text[prefix.end() :]
    if (found := _FREED.search(text)) is not None:
        rank = _rank(course, line, who)
        freed, held = float(found["freed"]), float(found["held"])
        course.turn(rank, "sleep")
        course.put(rank, "sleep", "end", line, freed_gib=freed, held_gib=held)
        return True
    if (found := _AWAKE.search(text)) is not None:
        rank = _rank(course, line, who)
        tags = _tags(found["tags"])
        for each in (rank, *course.moved_by(line)):
            course.put(each, "wake_up", "end", line, tags=tags, took_s=float(found["took"]))
        return True
    if (found := _DISCARDED.search(text)) is not None:
        tags = _tags(found["tags"])
        for each in (_rank(course, line, who), *course.moved_by(line)):
            course.put(each, "sleep", "end", line, tags=tags, content_lost=tags)
        return True
    if (found := _ASLEEP.search(text)) is not None:
        rank = _rank(course, line, who)
        course.put(rank, "sleep_all_workers", "progress", line, took_s=float(found["took"]))
        return True
    if _TWICE.search(text) is not None:
        rank = _rank(course, line, who)
        course.put(rank, "sleep", "start", line, warning="already sleeping")
        course.put(rank, "sleep", "end", line)
        return True
    if (found := _NOT_ASLEEP.search(text)) is not None:
        rank = _rank(course, line, who)
        tags = [found["tag"]] if found["tag"] else None
        course.put(rank, "wake_up", "start", line, tags=tags, warning=text.strip()[-120:])
        course.put(rank, "wake_up", "fail", line, error="not sleeping: woke nothing")
        return True
    if _RESET.search(text) is not None:
        rank = _rank(course, line, who)
        course.put(rank, "reset_prefix_cache", "end", line)
        return True
    if _FLUSHED.search(text) is not None:
        course.put(_rank(course, line, who), "flush_cache", "end", line)
        return True
    if (found := _NOT_FLUSHED.search(text)) is not None:
        attrs = {"queued": int(found["queued"]), "running": int(found["running"])}
        rank = _rank(course, line, who)
        course.put(rank, "flush_cache", "fail", line, error="pending requests", **attrs)
        return True
    if _NOT_RESET.search(text) is not None:
        rank = _rank(course, line, who)
        course.put(rank, "reset_prefix_cache", "fail", line, error=text.strip()[-200:])
        return True
    return _http(course, line, text, who)


def _rank(course: Course, line: LogLine, who: str) -> int:
    """The rank of an engine's process: what it is called, where its worker has a number."""
    worker = worker_of(line)
    rank = course.rank(who, line.rank if line.rank is not None else _tp(line), "engine")
    course.engine(rank, worker)
    return rank


def _http(course: Course, line: LogLine, text: str, who: str) -> bool:
    found = _HTTP.search(text)
    if found is None or found["path"] not in _PATHS:
        return False
    rank = course.rank(who, line.rank, "engine")
    status = int(found["status"])
    phase = _PATHS[found["path"]]
    tags = _tags(found["query"]) if found["query"] and "tags=" in found["query"] else None
    level = re.search(r"level=(\d)", found["query"] or "")
    if phase in ("sleep", "release_memory_occupation"):
        course.turn(rank, phase)
    attrs = {"tags": tags, "level": int(level[1]) if level else None, "status": status}
    course.put(rank, phase, "start", line, **attrs)
    if status < 400:
        course.put(rank, phase, "end", line, **attrs)
    else:
        course.put(rank, phase, "fail", line, error=f"HTTP {status}", http=status)
    return True


def _crash(course: Course, errors: Errors, line: LogLine) -> bool:
    text, who = line.text, line.who
    if (prefix := _PREFIX.match(text)) is not None:
        who, text = f"{line.ip}:{prefix['pid']}", text[prefix.end() :]
    error = error_of(text)
    if error is None and not is_death(text):
        return False
    rank = course.rank(who, line.rank, "engine")
    errors.of(rank, line, error or text.strip()[:200], "fail" if error else "exit")
    return True


def _tags(text: str | None) -> list[str] | None:
    """The tags that a printed list, set or query names; None means all."""
    if not text or text.strip() in ("None", ""):
        return None
    words = [word for word in _TAG.findall(text) if word not in ("tags", "level", "mode")]
    return words or None


def _tp(line: LogLine) -> int | None:
    """The number of a tensor-parallel worker: vLLM's `Worker_TP2`, SGLang's `[... TP2]`."""
    found = _TP.search(line.actor) or _TP.search(line.text[:80])
    return int(found["tp"]) if found else None
