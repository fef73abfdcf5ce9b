"""User code as actions: sync or async callables, bound to phase names.

A blocking call has a daemon thread of its own that is never joined: the event loop is never
blocked, and the default executor, whose threads may all be busy, is never waited for.
"""

import asyncio
import concurrent.futures
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from phasesync.core.model import Phase, Rank, Ticket
from phasesync.core.plan import Plan
from phasesync.errors import PlanError
from phasesync.journal import Journal

__all__ = ("Action", "Turn", "bind", "in_thread")

Action: TypeAlias = Callable[..., Any]
_Call: TypeAlias = Callable[["Turn"], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an action is told: who, when, and the ticket of the fence that it stands behind.

    `retry` is 0 on the first try. An action that the protocol calls `retry: safe` is tried once
    more when it raises; one that is `after_query` too, and must then ask first how things stand.
    """

    rank: Rank
    phase: Phase
    epoch: int
    version: int
    ticket: Ticket | None
    plan: Plan
    journal: Journal
    retry: int = 0

    def progress(self, **marks: Any) -> None:
        """Write a mark to the journal, with whatever figures it is given: `bytes`, `bucket`..."""
        self.journal.write("phase.progress", phase=self.phase, **marks)


def bind(phases: Mapping[str, bool], actions: Mapping[str, Action]) -> dict[str, _Call]:
    """The actions by phase, each awaitable with its Turn.

    `phases` are the rank's phases, with whether each is outside.

    Raises:
        PlanError: an action is bound to no phase, a phase lacks one, or it is not callable.
    """
    for name, action in actions.items():
        if not callable(action):
            raise PlanError(f"the action of phase {name!r} is {action!r}; it must be callable")
    calls = {name: _callable(actions[name]) for name in phases if name in actions}
    for name, outside in phases.items():
        if name not in calls and not outside:
            raise PlanError(
                f"phase {name!r} has no action; bind one with actions={{{name!r}: ...}}"
            )
    return calls


def check_names(known: frozenset[str], actions: Mapping[str, Action]) -> None:
    """Refuse actions of phases that no rank has.

    Raises:
        PlanError: the protocol has no such phase.
    """
    for name in actions:
        if name not in known:
            have = ", ".join(sorted(known))
            raise PlanError(f"no phase {name!r} to bind an action to; phases are: {have}")


def _callable(action: Action) -> _Call:
    takes_turn = _takes_argument(action)
    is_async = inspect.iscoroutinefunction(action) or inspect.iscoroutinefunction(
        getattr(action, "__call__", None)  # noqa: B004
    )

    async def call(turn: Turn) -> Any:
        arguments = (turn,) if takes_turn else ()
        if is_async:
            return await _settled(await action(*arguments))
        return await _settled(
            await in_thread(lambda: action(*arguments), name=f"phasesync {turn.phase}")
        )

    return call


async def _settled(found: Any) -> Any:
    """What an action's answer comes to, where that is not there yet.

    It may be an awaitable, a future of an executor, or what a call of a Ray actor gives.
    """
    ray = sys.modules.get("ray")  # Who has an answer of Ray's has imported it.
    if ray is not None and isinstance(found, ray.ObjectRef):
        return await import_module("phasesync.fences.ray").answer(found, grace_s=GRACE_S)
    if isinstance(found, concurrent.futures.Future):
        return await _waited(asyncio.wrap_future(found), GRACE_S, tell=found.cancel)
    return await found if inspect.isawaitable(found) else found


def _takes_argument(action: Action) -> bool:
    try:
        parameters = inspect.signature(action).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


GRACE_S = 30.0


async def in_thread(call: Callable[[], Any], *, name: str, grace_s: float = GRACE_S) -> Any:
    """The result of a blocking call, made in a daemon thread of its own.

    Cancelling does not reach the thread: the cancelled wait lasts until it has ended, or for
    `grace_s` at most, because whoever stops must not leave work behind that touches memory.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            result, error = call(), None
        except StopIteration as stop:
            result, error = None, _as_runtime(stop)
        except BaseException as caught:
            result, error = None, caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # The loop is closed: nobody waits any more.

    threading.Thread(target=work, name=name, daemon=True).start()
    return await _waited(future, grace_s)


async def _waited(
    future: "asyncio.Future[Any]", grace_s: float, *, tell: Callable[[], object] = lambda: None
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


def _as_runtime(stop: StopIteration) -> BaseException:
    """A future refuses StopIteration; its text is what matters."""
    return RuntimeError(f"the call raised {stop!r}")
