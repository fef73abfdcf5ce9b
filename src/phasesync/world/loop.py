"""An event loop in which time is virtual and a scheduler decides who runs next.

Sleeping costs nothing: when nobody can go on, the clock jumps to the next timer. When there is no
timer either, everybody waits for ever, and the loop says so instead of hanging. Only `call_soon` is
taken over; asyncio's own tasks, locks and timeouts run unchanged.
"""

import asyncio
import contextvars
import gc
import linecache
import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from phasesync.world.schedule import Scheduler

__all__ = ("RANK", "Deadlock", "Loop")

#: Which rank a callback belongs to; tasks hand it on to the tasks that they start.
RANK: contextvars.ContextVar[str] = contextvars.ContextVar("phasesync_rank", default="")

_LIBRARY = re.compile(
    rf"^<|/site-packages/|^{re.escape(str(Path(os.__file__).parent))}/|/phasesync/world/"
)
_PATIENCE_S = 5.0  # Real time that a thread may take before its world counts as stuck.


class Deadlock(Exception):
    """Nobody can go on, and no timer is left: somebody waits for ever."""


class _Ready(NamedTuple):
    handle: asyncio.Handle
    rank: str


class _Watch(threading.Thread):
    """Looks at what the loop's thread does while one callback takes too long, and where."""

    def __init__(self, blocking_s: float) -> None:
        super().__init__(name="phasesync-watch", daemon=True)
        self._main = threading.get_ident()
        self._blocking_s = blocking_s
        self._kernels_name = threading.get_native_id()
        self._over = threading.Event()
        self._delayed_s = 0.0
        self.began = 0.0  # When the present callback began; 0 between two.
        self.seen: tuple[float, str] = (0.0, "")

    def run(self) -> None:
        while not self._over.wait(self._blocking_s / 4):
            began = self.began
            if not began or time.perf_counter() - began <= self._blocking_s / 2:
                self._delayed_s = _delayed_s(self._kernels_name)
                continue
            frame = sys._current_frames().get(self._main)
            if frame is not None and self.began == began:
                self.seen = (began, _line(frame))

    def delayed_s(self) -> float:
        """For how long of the present callback, if that is long, the machine let it wait."""
        return _delayed_s(self._kernels_name) - self._delayed_s

    def stop(self) -> None:
        self._over.set()
        self.join()


def _delayed_s(thread: int) -> float:
    """For how long a thread of this process has waited for a processor, where the kernel tells."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _line(frame: FrameType | None) -> str:
    """The innermost line that is nobody's library: `test_it.py:12: subprocess.run(...)`."""
    inner = frame
    while frame is not None and _LIBRARY.search(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or inner
    assert frame is not None
    # The frame goes on while it is looked at, and between two lines it has no number.
    path, number = frame.f_code.co_filename, frame.f_lineno or 0
    text = linecache.getline(path, number).strip()
    return f"{path.rsplit('/', 1)[-1]}:{number}: {text}"


class _Collections:
    """What Python's collector has taken of this thread's time: more the more tests came before."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._thread = threading.get_ident()
        self._began = 0.0
        gc.callbacks.append(self._heard)

    def _heard(self, stage: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if stage == "start":
            self._began = time.thread_time()
        else:
            self.spent_s += time.thread_time() - self._began

    def stop(self) -> None:
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)


class _Selector(selectors.SelectSelector):
    """Never blocks: asks the loop what happens next instead."""

    loop: "Loop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            self.loop.turn(timeout)
        return events


class Loop(asyncio.SelectorEventLoop):
    """Virtual time, chosen order. `choices` is the schedule so far."""

    def __init__(self, scheduler: Scheduler, *, blocking_s: float = 0.2) -> None:
        self._now = 0.0
        self._pool: list[_Ready] = []
        self._wake = threading.Event()
        self.scheduler = scheduler
        self.choices: list[int] = []
        self.options: list[tuple[int, int]] = []  # How many there were, and the place of the last.
        self.steps = 0
        self.gone: set[str] = set()
        self.blocked: list[tuple[str, str, float]] = []
        self._blocking_s = blocking_s
        self._last = ""
        self._watch = _Watch(blocking_s)
        self._watch.start()
        self._collections = _Collections()
        self._threads = threading.active_count()
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.tasks: list[tuple[asyncio.Task[Any], str]] = []
        self.set_task_factory(self._task)  # type: ignore[arg-type]

    def _task(
        self,
        _: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """Every task, with the rank that started it."""
        task = asyncio.Task(coroutine, loop=self, context=context)
        self.tasks.append((task, RANK.get() if context is None else context.get(RANK, "")))
        return task

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        rank = RANK.get() if context is None else context.get(RANK, "")
        handle = asyncio.Handle(callback, args, self, context)
        self._pool.append(_Ready(handle, rank))
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        self._wake.set()
        return handle

    def turn(self, timeout: float | None) -> None:
        """Puts the next callback in line, or moves the clock, or finds that nobody can go on."""
        self._pool = [r for r in self._pool if not r.handle.cancelled() and r.rank not in self.gone]
        if self._pool:
            chosen = self._choose()
            super().call_soon(self._run, chosen)
        elif timeout is not None:
            self._now += max(timeout, 0.0)
        elif threading.active_count() > self._threads and self._wake.wait(_PATIENCE_S):
            self._wake.clear()
        elif not self.is_closed() and self._asked_to_stop is False:
            raise Deadlock
        # Else a stop was asked for, and the loop is on its way out.

    _asked_to_stop = False

    def stop(self) -> None:
        self._asked_to_stop = True
        super().stop()

    def _choose(self) -> _Ready:
        """One callback of the rank that the scheduler picks; a rank's own keep their order."""
        ranks = list(dict.fromkeys(ready.rank for ready in self._pool))
        at = 0
        if len(ranks) > 1:
            last = ranks.index(self._last) if self._last in ranks else None
            at = self.scheduler.pick(ranks, last)
            self.choices.append(at)
            self.options.append((len(ranks), -1 if last is None else last))
        self._last = ranks[at]
        place = next(n for n, ready in enumerate(self._pool) if ready.rank == ranks[at])
        return self._pool.pop(place)

    def _run(self, ready: _Ready) -> None:
        if ready.handle.cancelled() or ready.rank in self.gone:
            return
        self.steps += 1
        began, busy = time.perf_counter(), time.thread_time()
        collected = self._collections.spent_s
        self._watch.began = began
        ready.handle._run()
        took, busy = time.perf_counter() - began, time.thread_time() - busy
        if took > self._blocking_s:
            collected = self._collections.spent_s - collected
            self._look_back(ready, began, took - collected, busy - collected)
        self._watch.began = 0.0

    def _look_back(self, ready: _Ready, began: float, took: float, busy: float) -> None:
        """Much work, or a call that slept; a machine that gave the thread no time is neither."""
        slept = took - busy - self._watch.delayed_s()
        if took <= self._blocking_s:
            return
        if busy > self._blocking_s / 2 or (busy < took / 10 and slept > self._blocking_s / 2):
            at, line = self._watch.seen
            self.blocked.append((ready.rank, line if at == began else repr(ready.handle), took))

    def close(self) -> None:
        self._watch.stop()
        self._collections.stop()
        super().close()
