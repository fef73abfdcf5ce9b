"""What a rank tells of itself while it keeps others waiting, from outside its event loop.

Threads of the transports call this, so it takes no lock that a stuck rank may hold but the
journal's, and touches no device: a stack is worth most where a device hangs.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from types import FrameType

from phasesync.core.fence_beats import Ask, Beat
from phasesync.journal import Journal
from phasesync.runtime.device import DevicePort, allocator_figures

__all__ = ("Probe",)

FRAMES_MAX = 16  # Of each thread, innermost first.
THREADS_MAX = 24

_DOING: Mapping[str, str] = {
    "phase.start": "phase",
    "phase.fail": "failed",
    "phase.end": "between",
    "fence.arrive": "fence",
    "fence.pass": "passed",
    "fence.break": "passed",
}
# Code that tells how somebody waits, and not what for.
_LIBRARIES = (f"{PurePath(threading.__file__).parent}/", "/site-packages/", "/dist-packages/", "<")
_OURS = f"{PurePath(__file__).parents[1]}/"


class Probe:
    """One rank's answers: where it stands, and what its threads do."""

    def __init__(
        self,
        journal: Journal,
        device: DevicePort | None = None,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._journal = journal
        self._device = device
        self._mono_ns = mono_ns
        self._beats = 0
        self._where: str | None = None
        self._looked: set[tuple[str, int, str]] = set()
        self._reached: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own = f"phasesync {journal.rank}"  # The thread of its actions is called so.

    def may_come(self, scope: str, generation: int) -> None:
        """This rank is a member of `scope`, and has not arrived at `generation` yet."""
        self._reached.setdefault(scope, generation - 1)
        self._loop = asyncio.get_running_loop()

    def arrived(self, scope: str, generation: int) -> None:
        """This rank keeps nobody waiting there any more."""
        self._reached[scope] = max(generation, self._reached.get(scope, generation))
        self._where = None

    def beat(self) -> Beat:
        """Where this rank stands, by its journal."""
        self._beats += 1
        stands = self._journal.stands
        if stands is None:
            return Beat(self._beats, where=self._where)
        now = self._mono_ns()
        return Beat(
            self._beats,
            _DOING[stands.event],
            stands.name,
            round((now - stands.since_ns) / 1e9, 3),
            None if stands.marked_ns is None else round((now - stands.marked_ns) / 1e9, 3),
            self._where,
        )

    def asked(self, ask: Ask) -> bool:
        """Write the stacks of all threads to the journal, once a question; whether it did so.

        A rank that is no member there, or has arrived, has nothing to say.
        """
        question = (ask.scope, ask.generation, ask.why)
        reached = self._reached.get(ask.scope)
        if reached is None or reached >= ask.generation or question in self._looked:
            return False
        self._looked.add(question)
        stacks = [*_stacks(self._own), *_tasks(self._loop)]
        self._where = next((line for _, lines in stacks if (line := _where(lines))), None)
        self._journal.write(
            "rank.stacks",
            level="warning",
            fence=ask.fence,
            scope=ask.scope,
            generation=ask.generation,
            why=ask.why,
            where=self._where,
            stacks=[{"thread": name, "frames": lines} for name, lines in stacks],
            **allocator_figures(self._device),
        )
        return True


def _stacks(own: str) -> Iterator[tuple[str, list[str]]]:
    """The name of each thread and its frames, innermost first; that called `own` leads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    found = [
        (names.get(ident, f"thread {ident}"), list(_lines(frame)))
        for ident, frame in sys._current_frames().items()
        if ident != mine
    ]
    found.sort(key=lambda each: (each[0] != own, each[0] != "MainThread", each[0]))
    yield from found[:THREADS_MAX]


def _tasks(loop: asyncio.AbstractEventLoop | None) -> Iterator[tuple[str, list[str]]]:
    """The same of the event loop's tasks that wait in somebody's own code: no thread shows them."""
    if loop is None:
        return
    tasks: set[asyncio.Task[object]] = set()
    with suppress(RuntimeError):  # The loop makes tasks meanwhile.
        tasks = asyncio.all_tasks(loop)
    for task in sorted(tasks, key=lambda task: task.get_name()):
        lines: list[str] = []
        coroutine: object = task.get_coro()
        while coroutine is not None and len(lines) < FRAMES_MAX:
            lines += list(_lines(getattr(coroutine, "cr_frame", None)))[:1]
            coroutine = getattr(coroutine, "cr_await", None)
        lines.reverse()
        if _where(lines) is not None:
            yield f"task {task.get_name()}", lines


def _lines(frame: FrameType | None) -> Iterator[str]:
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back


def _where(lines: list[str]) -> str | None:
    """The innermost frame of user code; None for one of ours that waits, or an idle event loop."""
    if not lines or lines[0].endswith(" in select"):
        return None
    own = next((line for line in lines if not _is_library(line)), None)
    return None if own is None or own.startswith(_OURS) else own


def _is_library(line: str) -> bool:
    if line.startswith(_OURS):
        return False
    return any(line.startswith(mark) or (mark[0] == "/" and mark in line) for mark in _LIBRARIES)
