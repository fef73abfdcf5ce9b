"""How long one rank waits at a fence of a store, and what it finds out meanwhile.

None of the timers depends on the store's answer to another: a frozen store keeps no time.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phasesync.core.fence_beats import LATE_SHARE, Beat, Sign, patience
from phasesync.core.fence_gather import Word
from phasesync.core.fence_steps import UNJUDGED
from phasesync.core.model import Arrival, FenceCall, Rank
from phasesync.errors import StoreLost
from phasesync.fences.jobs import settle
from phasesync.fences.lines import GRACE_S
from phasesync.fences.slots import Slot

if TYPE_CHECKING:
    from phasesync.fences.store import StoreFences

__all__ = ("Deadline",)

LOOK_AHEAD_S = 2.5  # To tell silent from slow takes two looks, so far apart.
LATE_S = 0.2  # A timer that fires so late tells of the event loop, not of the store.


class Deadline:
    """The timers of one arrival: a look at who is missing, the fence's deadline, and the store's
    last chance."""

    def __init__(
        self, fences: "StoreFences", call: FenceCall, arrival: Arrival, slot: Slot
    ) -> None:
        self._job: asyncio.Future[Any] | None = None
        self._is_handed = False
        self._fences = fences
        self._call = call
        self._arrival = arrival
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._works: list[asyncio.Task[None]] = []
        self._seen: dict[Rank, tuple[Beat | None, float]] = {}
        self._look_timer: asyncio.TimerHandle | None = None
        if fences.beats:
            ahead = min(LATE_SHARE * call.deadline_s, call.deadline_s - LOOK_AHEAD_S)
            look_s = max(ahead, (1 - LATE_SHARE) * call.deadline_s)
            self._look_timer = self._loop.call_later(look_s, self._do, self._look)
        self._until = self._loop.time() + call.deadline_s
        self._timer = self._loop.call_at(self._until, self._expire)

    def over(self, job: "asyncio.Future[Any]", *, is_handed: bool = False) -> "asyncio.Future[Any]":
        """What is waited for; `is_handed` says that another rank brings the arrival."""
        self._job, self._is_handed = job, is_handed
        return job

    def end(self) -> None:
        self._timer.cancel()
        if self._look_timer is not None:
            self._look_timer.cancel()
        for work in self._works:
            work.cancel()

    def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._works.append(self._loop.create_task(work(), name=f"late at {self._call.fence}"))

    async def _look(self) -> None:
        """Ask the ranks that are missing what they do, and see who beats."""
        with suppress(StoreLost):
            await self._fences.ask(self._call, "deadline")
            await self._signs()

    async def _signs(self) -> tuple[tuple[Rank, ...], dict[Rank, Sign]]:
        """Who is missing, and how long ago each was heard of, as far as one has watched."""
        missing, beats = await self._fences.look(self._call)
        now = self._loop.time()
        signs: dict[Rank, Sign] = {}
        for rank, beat in beats.items():
            before, since = self._seen.setdefault(rank, (beat, now))
            if beat != before:
                self._seen[rank], since = (beat, now), now
            is_known = beat is not None and since < now
            signs[rank] = Sign(beat, now - since if is_known else None)
        return missing, signs

    def _expire(self) -> None:
        self._last_chance()
        self._do(self._decide)

    async def _decide(self) -> None:
        """Break the fence, unless all who are missing make progress."""
        with suppress(StoreLost):
            signs: dict[Rank, Sign] = {}
            if self._fences.beats:
                missing, signs = await self._signs()
                left_s = patience(self._call.deadline_s, missing, signs)
                if left_s > 0:
                    self._timer.cancel()
                    self._until = self._loop.time() + left_s
                    self._timer = self._loop.call_at(self._until, self._expire)
                    return
            # The line that waits hears the verdict itself, unless it was tidied up long ago, or
            # it is another rank's.
            own = self._arrival if self._is_handed else None
            verdict = await self._fences.expire(self._call, signs, own)
            self._slot.settle(verdict)
            if self._job is None:
                return
            if self._is_handed:
                settle(self._job, Word(None, False, verdict or UNJUDGED.verdict), None)
            elif verdict is None:
                settle(self._job, UNJUDGED, None)

    def _last_chance(self) -> None:
        self._until = self._loop.time() + GRACE_S
        self._timer = self._loop.call_at(self._until, self._give_up)

    def _give_up(self) -> None:
        if self._loop.time() > self._until + LATE_S:
            # The loop itself stood still: what the store said meanwhile is not read yet.
            self._last_chance()
            return
        error = self._fences.give_up(self._call)
        if self._job is not None:
            settle(self._job, None, error)
        self._slot.fail(error)
