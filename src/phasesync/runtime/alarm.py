"""How a rank in the middle of an action hears that its next fence broke.

One watch a fence, kept over all the phases before it: a watch costs a thread hop on some
transports, and a phase may be short.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from phasesync.core.fence_beats import Ask
from phasesync.core.model import Broken, FenceCall, FenceKey
from phasesync.errors import FenceError
from phasesync.fences.base import FenceTransport

__all__ = ("Alarm", "ended")


class Alarm:
    """Watches one fence at a time; when it breaks, `asked` writes down what this rank does."""

    def __init__(
        self,
        transport: FenceTransport,
        name: str,
        asked: Callable[[Ask], object] = lambda ask: None,
    ) -> None:
        self._transport = transport
        self._name = name
        self._asked = asked
        self._key: FenceKey | None = None
        self._task: asyncio.Task[Broken] | None = None

    async def watch(self, call: FenceCall | None) -> asyncio.Task[Broken] | None:
        """A task that ends when the fence of `call` breaks, and never otherwise."""
        if call is None:
            await self.off()
            return None
        if self._key != call.key:
            await self.off()
            self._key = call.key
            self._task = asyncio.create_task(self._heed(call), name=f"{self._name} {call.fence}")
        return self._task

    @property
    def is_on(self) -> bool:
        """Whether a fence is watched."""
        return self._task is not None

    @property
    def broken(self) -> Broken | None:
        """What the watched fence's verdict is, if it broke."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.result()

    async def off(self) -> None:
        """Stop watching."""
        task, self._task, self._key = self._task, None, None
        if task is not None:
            await ended(task)

    async def _heed(self, call: FenceCall) -> Broken:
        with contextlib.suppress(FenceError):
            verdict = await self._transport.watch(call)
            if isinstance(verdict, Broken):
                self._asked(Ask(call.key.scope, call.key.generation, call.fence, "break"))
                return verdict
        return await asyncio.Future()


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it is over, whatever becomes of this one meanwhile."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
