"""An event loop in which time is virtual and a scheduler decides who runs next.

Sleeping costs nothing: when nobody can go on, the clock jumps to the next timer. When there is no
timer either, everybody waits for ever, and the loop says so instead of hanging. Only `call_soon` is
taken over; asyncio's own tasks, locks and timeouts run unchanged.
"""

import asyncio
import contextvars
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from phasesync.world.schedule import Scheduler

__all__ = ("RANK", "Deadlock", "Loop")

#: Which rank a callback belongs to; tasks hand it on to the tasks that they start.
RANK: contextvars.ContextVar[str] = contextvars.ContextVar("phasesync_rank", default="")

_PATIENCE_S = 5.0  # Real time that a thread may take before its world counts as stuck.


class Deadlock(Exception):
    """Nobody can go on, and no timer is left: somebody waits for ever."""


class _Ready(NamedTuple):
    handle: asyncio.Handle
    rank: str


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
        began = time.perf_counter()
        ready.handle._run()
        took = time.perf_counter() - began
        if took > self._blocking_s:
            self.blocked.append((ready.rank, repr(ready.handle), took))
