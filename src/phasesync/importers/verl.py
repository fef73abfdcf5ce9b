"""verl under Ray: what its workers print of a weight sync, with the engine's own lines and errors.

`ActorRolloutRefWorker.update_weights` (verl 0.9) empties the cache of every rank twice, before the
weights come back and after its offload, and says so at INFO; the memory figures between are printed
at DEBUG, on rank 0 only. Who died in which line stands in the driver's traceback. All ranks run one
program, so that the n-th cleanup of one is the n-th of all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from phasesync.importers import enginelogs
from phasesync.importers.base import Course, Imported, LogLine, all_lines
from phasesync.importers.errors import Errors, error_of, is_death
from phasesync.importers.watchdog import Watchdog

__all__ = ("read",)

_MEMORY: Final = re.compile(
    r"(?P<when>Before|After) (?P<what>.+?), memory allocated \(GB\): (?P<allocated>[\d.]+), "
    r"memory reserved \(GB\): (?P<reserved>[\d.]+), "
    r"device memory used/total \(GB\): (?P<used>[\d.]+)/(?P<total>[\d.]+)"
)
# utils/memory_utils.py `aggressive_empty_cache`: one line an attempt, counted from 1 in each call.
_CLEANUP: Final = re.compile(
    r"Memory cleanup attempt (?P<attempt>\d+): Freed (?P<freed>-?[\d.]+) GB reserved"
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
_ENOUGH_GB: Final = 1.0  # an attempt that freed less is the last
_ATTEMPTS: Final = 3
_FIRST: Final = "resume weights"  # the head that follows the first cleanup of a sync
# The driver's traceback: "ray::WorkerDict.actor_rollout_update_weights() (pid=1196, ip=...".
_TASK: Final = re.compile(r"ray::(?P<actor>[\w.]+)\.(?P<method>\w+)\(\).{0,12}?\(pid=(?P<pid>\d+)")
# Ray's own words on a process that is gone, in one line or with its fields below.
_PID: Final = re.compile(r"(?:^\s+pid|Worker PID): (?P<pid>\d+)")
_GONE: Final = re.compile(r"The actor died|died or was killed while executing")
_FRAMES: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"rollout\.resume\(.*kv_cache"), "resume_kv"),
    (re.compile(r"rollout\.resume\(.*weights"), "resume_weights"),
    (re.compile(r"rollout\.update_weights\("), "update_weights"),
    (re.compile(r"engine\.to\(\W*cpu"), "offload"),
)
# The frame of an engine's own traceback that tells what it was doing.
_IN: Final = re.compile(r'File ".*", line \d+, in (wake_up|sleep|load_weights|update_weights\w*)$')
# Ray's own components beside the workers' files: what fails in them is not the job.
_COMPONENTS: Final = re.compile(
    r"^(?:raylet|gcs_server|dashboard|monitor|log_monitor|python-core-|runtime_env|ray_client|agent-|"
    r"debug_state|event_)"
)
_BACK: Final = 64
_TAKES: Final = ("resume_kv", "resume_weights")
_FOLDED: Final = (
    "every process's own lines: RAY_DEDUP_LOGS=0, or the worker-*.err files in the logs folder of "
    "Ray's session; here Ray folded lines of several processes into one"
)
_QUIET: Final = (
    "VERL_LOGGING_LEVEL=INFO or DEBUG in the workers' environment: then every rank says when it "
    "has emptied its cache, and rank 0 what its device holds"
)


@dataclass(slots=True)
class _Death:
    """A worker that raised, as the driver's traceback has it."""

    pid: str
    line: LogLine
    phase: str | None = None
    error: str = ""
    gone: bool = False
    outer: bool = False  # it waited for the one that raised


@dataclass(slots=True)
class _Known:
    """What must be known before the first event is written."""

    cleanups: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    offset: int | None = None
    folded: bool = False
    deaths: list[_Death] = field(default_factory=list)
    watchdog: Watchdog = field(default_factory=Watchdog)
    by_pid: bool = False
    gone: LogLine | None = None

    def see(self, line: LogLine) -> None:
        self.watchdog.see(line)
        self.by_pid = self.by_pid or bool(line.pid)
        if (found := _CLEANUP.search(line.text)) is not None:
            self.folded = self.folded or line.times > 1
            if found["attempt"] == "1":
                self.cleanups[line.who] = self.cleanups.get(line.who, 0) + 1
        elif (memory := _MEMORY.search(line.text)) is not None:
            self.heads[line.who] = self.heads.get(line.who, 0) + 1
            before = memory["when"] == "Before" and memory["what"] == _FIRST
            if before and self.offset is None and line.who in self.cleanups:
                self.offset = self.cleanups[line.who] - 1
        elif not line.pid:
            self._traceback(line)
            self._gone(line)

    def _traceback(self, line: LogLine) -> None:
        if (task := _TASK.search(line.text)) is not None:
            self.deaths.append(_Death(task["pid"], line))
        elif self.deaths and self.deaths[-1].error == "":
            death = self.deaths[-1]
            for frame, phase in _FRAMES:
                if frame.search(line.text):
                    death.phase = phase
            if (error := error_of(line.text)) is not None:
                for each in self.deaths[:-1]:
                    each.outer = each.outer or not each.error
                    each.error = each.error or error
                self.deaths[-1].error = error

    def _gone(self, line: LogLine) -> None:
        """A process of which Ray says that it is gone, and by what number it went."""
        if _GONE.search(line.text) is not None:
            self.gone = line
        if self.gone is not None and (found := _PID.search(line.text)) is not None:
            error = " ".join(self.gone.text.split())[:200]
            self.deaths.append(_Death(found["pid"], self.gone, error=error, gone=True))
            self.gone = None

    def settle(self) -> None:
        """Without figures, whoever died in its KV resume had just emptied its cache the second
        time.
        """
        if self.offset is None:
            died = [each for each in self.deaths if each.phase == "resume_kv"]
            counts = [self.cleanups.get(f":{each.pid}", 0) for each in died]
            self.offset = counts[0] % 2 if counts else 0
        self.offset %= 2

    def leads(self, line: LogLine) -> bool:
        """Whether a process resumes for others: verl's rank 0 prints figures, a leader dies in
        it.
        """
        if len(self.heads) == 1 and line.who in self.heads:
            return True
        return any(each.pid == line.pid and each.phase in _TAKES for each in self.deaths)


def read(paths: Sequence[Path]) -> Imported:
    """The trace of a verl job from its driver log, its Ray worker logs, or both."""
    known = _Known()
    for line in all_lines(paths):
        known.see(line)
    known.settle()
    reader = _Reader(known)
    for line in all_lines(paths):
        if not reader.line(line):
            reader.course.out.skipped += 1
    return reader.done()


class _Reader:
    """Lines into events, once it is known who leads and which cleanup is which."""

    def __init__(self, known: _Known) -> None:
        self.course = Course("verl")
        self._known = known
        self._errors = Errors(self.course)
        self._count: dict[str, int] = {}
        self._freed: dict[str, float] = {}
        self._trainers: dict[int, None] = {}
        self._failed: set[str] = set()
        self._frame: dict[str, str] = {}
        self._takes: list[dict[str, Any]] = []

    def line(self, line: LogLine) -> bool:
        """Whether the line meant anything."""
        if (found := _MEMORY.search(line.text)) is not None:
            return self._memory(line, found)
        if (found := _CLEANUP.search(line.text)) is not None:
            return self._cleanup(line, found)
        if enginelogs.engine_line(self.course, line):
            return True
        if (frame := _IN.search(line.text)) is not None:
            self._frame[line.who] = frame[1]
        if self._known.watchdog.line(self.course, line):
            return True
        error = error_of(line.text)
        if error is None and not is_death(line.text):
            return False
        if not line.pid and self._known.by_pid:
            # A driver reports: told at the end, with the process that it names.
            if _COMPONENTS.match(Path(line.file).name) is None:
                self._errors.unplaced(line, error or line.text.strip()[:200])
        elif error is not None:
            self._error(line, error)
        else:
            self._errors.of(self.course.process(line), line, line.text.strip()[:200], "exit")
        return True

    def done(self) -> Imported:
        for death in self._known.deaths:
            self._died(death)
        self._errors.done()
        everybody = list(self._trainers)
        for attrs in self._takes:
            attrs["gpus"] = everybody
        out = self.course.done()
        folded = self._known.folded or self._known.watchdog.folded
        more = [_FOLDED] if folded else []
        if not self._known.cleanups:
            more.append(_QUIET)
        if more:
            out.header["record_next"] = more
        return out

    def _trainer(self, line: LogLine) -> int:
        rank = self.course.process(line, "trainer")
        self._trainers.setdefault(rank, None)
        return rank

    def _cleanup(self, line: LogLine, found: re.Match[str]) -> bool:
        if self._known.folded:
            return False  # Whose lines they are is not known any more.
        rank = self._trainer(line)
        attempt, freed = int(found["attempt"]), float(found["freed"])
        if attempt == 1:
            self._count[line.who] = self._count.get(line.who, 0) + 1
            self._freed[line.who] = 0.0
        self._freed[line.who] = self._freed.get(line.who, 0.0) + freed
        step = self._count.get(line.who, 0) - (self._known.offset or 0)
        if step < 1:
            return True
        first = step % 2 == 1
        phase = "trim_cache" if first else "empty_cache"
        if attempt == 1:
            self._cleanup_begins(rank, step, phase, line)
        if freed < _ENOUGH_GB or attempt == _ATTEMPTS:  # As verl's own loop ends.
            freed_gib = round(self._freed[line.who], 2)
            self.course.put(rank, phase, "end", line, freed_gib=freed_gib)
            if not first and self._known.leads(line):
                self._take(rank, "resume_kv", line)
            elif first and line.who not in self._known.heads:
                self.course.put(rank, "update_weights", "start", line)
        return True

    def _cleanup_begins(self, rank: int, step: int, phase: str, line: LogLine) -> None:
        course, first = self.course, step % 2 == 1
        for ended in ("resume_kv",) if first else ("update_weights", "offload"):
            # Only rank 0 says when it goes from its update to its offload; all of them do.
            if course.is_open(rank, ended) or ended == "offload":
                course.put(rank, ended, "end", line)
        if first:
            course.epoch(rank, (step + 1) // 2)
        course.put(rank, phase, "start", line)

    def _memory(self, line: LogLine, found: re.Match[str]) -> bool:
        known = _HEADS.get(found["what"].strip())
        course = self.course
        rank = self._trainer(line)
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
            if line.who not in self._count:
                course.turn(rank, phase)
            course.put(rank, phase, "start", line, **attrs)
            return True
        ended = course.is_open(rank, phase) or line.who not in self._count
        course.put(rank, phase, "end" if ended else "progress", line, **attrs)
        if then is not None and not course.is_open(rank, then):
            if then in _TAKES:
                self._take(rank, then, line)
            else:
                course.put(rank, then, "start", line)
        return True

    def _take(self, rank: int, phase: str, line: LogLine) -> None:
        """A leader's resume acts on the devices of all trainers; which those are shows later."""
        self.course.put(rank, phase, "start", line)
        if self._known.leads(line):
            self._takes.append(self.course.out.events[-1]["attrs"])

    def _error(self, line: LogLine, error: str) -> None:
        engine = enginelogs.is_engine(line)
        rank = self.course.process(line, "engine" if engine else "")
        if self._known.watchdog.waits(line) or _seen(self.course, rank, error):
            return
        worker = enginelogs.worker_of(line)
        waiting = [
            (each, phase)
            for each in self._trainers
            for phase in _TAKES
            if self.course.is_open(each, phase)
        ]
        if not engine:
            self._errors.of(rank, line, error)
            return
        within = self._frame.get(line.who, "wake_up" if waiting else "worker")
        self.course.put(rank, within, "fail", line, error=error[:500], worker=worker)
        if len(waiting) != 1:
            return
        # The engine acts for the trainer that called it, which dies of the same error.
        self.course.put(*waiting[0], "fail", line, error=error, worker=worker)
        self._failed.add(str(waiting[0][0]))

    def _died(self, death: _Death) -> None:
        known = [who for who in self.course.known() if who.endswith(f":{death.pid}")]
        ip = known[0].rpartition(":")[0] if len(known) == 1 else ""
        line = death.line._replace(pid=death.pid, ip=ip)
        if death.phase is None and (death.outer or len(known) > 1):
            self._errors.unplaced(line, death.error)
            return
        rank = self.course.process(line)
        if str(rank) in self._failed or _seen(self.course, rank, death.error):
            return
        self._failed.add(str(rank))
        if death.phase is None:
            self._errors.of(rank, line, death.error, "exit" if death.gone else "fail")
        else:
            self.course.put(rank, death.phase, "fail", line, error=death.error[:500])


def _seen(course: Course, rank: int, error: str) -> bool:
    """Whether that process has failed of the same before: a traceback is printed more than once."""
    return any(
        each["rank"] == rank
        and each["event"] == "fail"
        and str(each["attrs"].get("error", ""))[:60] == error[:60]
        for each in course.out.events[-_BACK:]
    )
