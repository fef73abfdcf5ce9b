"""One action of one rank: performed, heeded, and cut off.

What must survive edits: an action that is under way when its rank leaves is cancelled and waited
for, because whoever stops must not leave work behind that touches memory; and an action that is
over soon costs neither a watch nor a timer, because most are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from phasesync.core.model import Broken, FenceCall
from phasesync.runtime.actions import Bound, Turn, is_to_come, settled
from phasesync.runtime.alarm import Alarm, ended

__all__ = ("HEED_AFTER_S", "CutOff", "Done", "End", "Late", "Performer", "Raised")

#: An action is this long under way before its next fence is watched for it: a watch takes a
#: connection and a thread on some transports, and most actions are over by then.
HEED_AFTER_S = 0.02


class Done(NamedTuple):
    """The action returned."""


class Raised(NamedTuple):
    """The action raised."""

    error: Exception


class Late(NamedTuple):
    """The action was cut off at its deadline."""

    after_s: float


class CutOff(NamedTuple):
    """The action was cut off because a peer failed: half done, and not this rank's fault."""

    broken: Broken


End: TypeAlias = Done | Raised | Late | CutOff


class Performer:
    """Performs a rank's actions, and heeds its next fence meanwhile."""

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm

    async def once(
        self,
        bound: Bound,
        turn: Turn | None,
        deadline_s: float | None,
        heed: Callable[[], FenceCall | None],
    ) -> End:
        """One try of an action, and how it ended. `heed` says which fence to watch."""
        loop = asyncio.get_running_loop()
        until = None if deadline_s is None else loop.time() + deadline_s
        found: object = None
        if bound.is_async or bound.at_once:
            try:
                found = bound.call_at_once(turn)
            except Exception as error:
                return Raised(error)
        else:
            call = bound.blocking.begin(partial(bound.call_at_once, turn))
            end = await self._over(call, bound.blocking.outlive, deadline_s, until, heed)
            if not isinstance(end, Done):
                return end
            found = call.result()
        if not is_to_come(found):
            return Done()
        action = asyncio.ensure_future(settled(found))
        return await self._over(action, ended, deadline_s, until, heed)

    async def _over(
        self,
        action: "asyncio.Future[Any]",
        stop: Callable[["asyncio.Future[Any]"], Awaitable[None]],
        deadline_s: float | None,
        until: float | None,
        heed: Callable[[], FenceCall | None],
    ) -> End:
        """How what is under way ends; `stop` ends it where somebody else does, and waits."""
        loop = asyncio.get_running_loop()
        left_alone = True
        try:
            if isinstance(action, asyncio.Task):
                await asyncio.sleep(0)  # Most coroutines are over after their first turn.
            if not action.done():
                await asyncio.wait((action,), timeout=_left(loop, until, HEED_AFTER_S))
            if not action.done():
                alarm = await self._alarm.watch(heed())
                await asyncio.wait(
                    (action,) if alarm is None else (action, alarm),
                    timeout=_left(loop, until),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if action.done():
                return _end(action)
            left_alone = False
            await stop(action)
            if action.done() and not action.cancelled():
                action.exception()  # What it raised on its way out is not why it was cut off.
            broken = self._alarm.broken
            return CutOff(broken) if broken is not None else Late(deadline_s or 0.0)
        finally:
            if left_alone and not action.done():
                await stop(action)


def _left(
    loop: asyncio.AbstractEventLoop, until: float | None, most_s: float | None = None
) -> float | None:
    if until is None:
        return most_s
    left_s = max(until - loop.time(), 0.0)
    return left_s if most_s is None else min(left_s, most_s)


def _end(action: "asyncio.Future[object]") -> End:
    error = action.exception()
    if error is None:
        return Done()
    if not isinstance(error, Exception):
        raise error
    return Raised(error)
