"""Blocking calls beside the event loop: daemon threads that are never joined.

The event loop is never blocked, and the default executor, whose threads may all be busy, is never
waited for. Cancelling does not reach a thread: the cancelled wait lasts until the call has ended,
or for a grace at most, because whoever stops must not leave work behind that touches memory.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from phasesync.fences import driver

__all__ = ("GRACE_S", "BlockingCalls", "in_thread", "waited")

GRACE_S = 30.0


class _Job(NamedTuple):
    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"


class BlockingCalls:
    """One thread for the blocking calls of one rank, made when first needed.

    A call that outlives its wait keeps the thread, and the next call gets another one.
    """

    def __init__(self, name: str, *, grace_s: float = GRACE_S) -> None:
        self._name = name
        self._grace_s = grace_s
        self._jobs: SimpleQueue[_Job | None] | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, made in the thread."""
        future = self.begin(call)
        try:
            return await waited(future, self._grace_s)
        finally:
            if not future.done():
                self.close()

    def begin(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        """`call`, under way in the thread; who stops waiting for it is to say so with `outlive`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._jobs is None:
            self._jobs = SimpleQueue()
            args = (self._jobs,)
            threading.Thread(target=_work, args=args, name=self._name, daemon=True).start()
        self._jobs.put(_Job(call, loop, future))
        return future

    async def outlive(self, future: "asyncio.Future[Any]") -> None:
        """Wait until a call that nobody wants any more is over, whatever becomes of this task
        meanwhile; for a grace at most, after which the call keeps the thread."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_s
        was_cancelled = False
        while not future.done() and (left_s := until - loop.time()) > 0:
            try:
                await asyncio.wait((future,), timeout=left_s)
            except asyncio.CancelledError:
                was_cancelled = True
        if not future.done():
            self.close()
        elif not future.cancelled():
            future.exception()  # It is over; what it raised is nobody's any more.
        if was_cancelled:
            raise asyncio.CancelledError

    def close(self) -> None:
        """Let the thread end once what it does is over."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


async def in_thread(call: Callable[[], Any], *, name: str, grace_s: float = GRACE_S) -> Any:
    """The result of one blocking call, made in a thread of its own; cancelled, it waits for the
    call to end. `fences.driver.in_thread` is the one that lets go."""
    return await waited(driver.in_thread(call, name=name), grace_s)


async def waited(
    future: "asyncio.Future[Any]",
    grace_s: float = GRACE_S,
    *,
    tell: Callable[[], object] = lambda: None,
) -> Any:
    """The result; a wait that is cancelled lasts until the work is over, `grace_s` at most.

    `tell` says to whoever works that nobody wants it any more.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        tell()
        await asyncio.wait((future,), timeout=grace_s)
        if future.done() and not future.cancelled():
            future.exception()  # It is over; what it raised is nobody's any more.
        raise


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.call()
        except StopIteration as stop:
            error = RuntimeError(f"the call raised {stop!r}")  # A future refuses StopIteration.
        except BaseException as caught:
            error = caught
        try:
            job.loop.call_soon_threadsafe(_settle, job.future, result, error)
        except RuntimeError:
            return  # The loop is closed: nobody waits any more.
        del job, result, error


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
