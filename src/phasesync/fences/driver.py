"""A fence where one process drives all ranks: a join over everybody's work.

First failure wins, and nobody's future stays unread: the rest is cancelled and told. What joins
is anything that can be awaited; `in_thread` and `asyncio.wrap_future` make that of
threads and of executors, process pools included.
"""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phasesync.core.fence_hub import Hub, Instance
from phasesync.core.model import Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import FenceBroken, PlanError

__all__ = ("Joined", "cause_of", "in_thread", "join")

T = TypeVar("T")
CANCEL_S = 1.0  # What was cancelled has so long to end; then it is left to itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Generic[T]):
    """The open fence, and what each rank's work gave."""

    opened: Opened
    results: Mapping[Rank, T]


async def join(
    call: FenceCall,
    work: Mapping[Rank, Awaitable[T]],
    *,
    seq: int = 0,
    cause: Callable[[Rank, BaseException], RootCause] | None = None,
    cancel: Callable[[Rank], None] = lambda rank: None,
) -> Joined[T]:
    """Wait for the work of all members; each arrives when its work is done.

    `cause` puts an error into the words of a root cause. When the fence breaks, `cancel` is called
    for each rank that is not done, and what was awaited of it is cancelled.

    Raises:
        FenceBroken: work failed, or was not done before the deadline.
        PlanError: there is not work for each of the members, and for them alone.
    """
    if odd := set(work).symmetric_difference(call.members):
        for each in work.values():
            if asyncio.iscoroutine(each):
                each.close()  # Nobody awaits it.
        raise PlanError(
            f"fence {call.fence!r} joins the work of its members, each of which needs some; not a "
            f"member, or without work: {', '.join(map(str, sorted(odd)))}"
        )
    tasks = {rank: asyncio.ensure_future(_awaited(each)) for rank, each in work.items()}
    instance = Hub().instance(call)
    loop = asyncio.get_running_loop()
    until = loop.time() + call.deadline_s
    try:
        while instance.verdict is None:
            left = [task for rank, task in tasks.items() if rank not in instance.arrived]
            done: set[asyncio.Task[T]] = set()
            if left:
                done, _ = await asyncio.wait(
                    left, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
            for rank, task in tasks.items():
                if task in done and instance.verdict is None:
                    _arrive(instance, rank, task, seq, cause or cause_of)
            instance.judge([], None, expired=not done)
    finally:
        await _end(tasks, cancel)
    if isinstance(instance.verdict, Broken):
        raise FenceBroken(instance.verdict)
    results = {rank: tasks[rank].result() for rank in call.members}
    return Joined(opened=instance.verdict, results=results)


def cause_of(rank: Rank, error: BaseException) -> RootCause:
    """What an error says as the root cause of a break."""
    kind = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
    return RootCause(
        kind=kind, ranks=(rank,), error_type=type(error).__name__, error=str(error) or None
    )


def in_thread(work: Callable[[], T], *, name: str = "phasesync.work") -> "asyncio.Future[T]":
    """Run blocking work in a daemon thread of its own, and let go of it when the wait is cancelled:
    that does not reach the thread. `runtime.calls.in_thread` is the one that waits for its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            result = work()
        except StopIteration as stop:  # A future refuses it.
            error: BaseException = RuntimeError(f"the work raised {stop!r}")
            answer: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        except BaseException as caught:
            answer = (future.set_exception, caught)
        else:
            answer = (future.set_result, result)
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, *answer)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _arrive(
    instance: Instance,
    rank: Rank,
    task: "asyncio.Task[Any]",
    seq: int,
    cause: Callable[[Rank, BaseException], RootCause],
) -> None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    call = instance.call
    why = None if error is None else cause(rank, error)
    instance.take(call.arrival(rank, nonce=secrets.token_hex(8), seq=seq, cause=why))
    instance.judge([], None)


async def _end(tasks: Mapping[Rank, "asyncio.Task[Any]"], cancel: Callable[[Rank], None]) -> None:
    """Leave no task running and no error unread."""
    left = [(rank, task) for rank, task in tasks.items() if not task.done()]
    for rank, task in left:
        cancel(rank)
        task.cancel()
    if left:
        await asyncio.wait([task for _, task in left], timeout=CANCEL_S)
    for task in tasks.values():
        if task.done() and not task.cancelled():
            task.exception()
