"""What one endpoint of a store knows of the fences that somebody here waits at.

One line waits for the verdict of a fence, however many want to hear it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from phasesync.core.fence_keys import Space, Verdict
from phasesync.core.fence_steps import VERDICTS_KEPT, watching
from phasesync.core.model import FenceCall, FenceKey, Rank
from phasesync.fences.lines import Lines

__all__ = ("HearVerdict", "Scope", "Slot", "Slots")

#: Hears a verdict, None if it was tidied up long ago; or why there will be none.
HearVerdict: TypeAlias = Callable[[Verdict | None, Exception | None], None]


@dataclass(eq=False, slots=True)
class Slot:
    """One fence: whether a line waits, and who wants to hear."""

    call: FenceCall
    watched: bool = False
    verdict: Verdict | None = None
    hearers: list[HearVerdict] = field(default_factory=list)

    def hear(self, hear: HearVerdict) -> None:
        """Call `hear` once: now, if there is a verdict, else when there is."""
        if self.verdict is not None:
            hear(self.verdict, None)
        else:
            self.hearers.append(hear)

    def settle(self, verdict: Verdict | None) -> None:
        self.verdict = verdict
        self._tell(verdict, None)

    def fail(self, error: Exception) -> None:
        self._tell(None, error)

    def _tell(self, verdict: Verdict | None, error: Exception | None) -> None:
        hearers, self.hearers = self.hearers, []
        for hear in hearers:
            hear(verdict, error)


@dataclass(slots=True)
class Scope:
    """What is remembered of one scope instance between fences."""

    members: tuple[Rank, ...] = ()
    registered: bool = False
    first: int | None = None
    last: int = -1
    opened: int | None = None
    opened_before: int | None = None

    def ends(self) -> tuple[int, int]:
        """The generations whose keys this rank may have left behind.

        Closing may cut the tidying up after the last fence, so that one's share counts too.
        """
        first = self.first or 0
        known = [n for n in (self.opened_before, self.opened, first) if n is not None]
        return max(min(first, known[0]), known[0] - VERDICTS_KEPT, 0), self.last


class Slots:
    """The slots and scopes of one endpoint."""

    def __init__(self, lines: Lines, space: Space, me: str) -> None:
        self.lines = lines
        self.space = space
        self.me = me
        self.scopes: dict[str, Scope] = {}
        self._slots: dict[FenceKey, Slot] = {}

    def of(self, call: FenceCall) -> Slot:
        """The slot of a fence."""
        slot = self._slots.get(call.key)
        if slot is None:
            slot = self._slots[call.key] = Slot(call)
        return slot

    def drop(self, key: FenceKey) -> None:
        self._slots.pop(key, None)

    def let_be(self, slot: Slot) -> None:
        """Drop a slot that nobody waits at."""
        if not slot.watched and not slot.hearers:
            self.drop(slot.call.key)

    def calls(self) -> list[FenceCall]:
        """The fences that somebody waits at."""
        return [slot.call for slot in self._slots.values()]

    def scope(self, call: FenceCall) -> Scope:
        """What is known of the scope, which uses this generation from now on."""
        scope = self.scopes.get(call.key.scope)
        if scope is None:
            scope = self.scopes[call.key.scope] = Scope()
        generation = call.key.generation
        if scope.first is None or generation < scope.first:
            scope.first = generation
        scope.last = max(scope.last, generation)
        return scope

    def wait(self, slot: Slot, *, register: bool) -> None:
        """Have a line wait for the verdict, unless one does."""
        if slot.watched:
            return
        slot.watched = True
        steps = watching(self.space, slot.call, self.me, register=register)
        waiting = self.lines.submit(steps, waits=True)
        waiting.add_done_callback(lambda job: self._heard(slot, job))

    def forget_registrations(self) -> None:
        """After a break somebody may be lost whom another verdict kept quiet about."""
        for scope in self.scopes.values():
            scope.registered = False

    def _heard(self, slot: Slot, job: Any) -> None:
        """A waiting line has come back."""
        slot.watched = False
        if self._slots.get(slot.call.key) is slot:
            del self._slots[slot.call.key]
        if job.cancelled():
            return
        error = job.exception()
        if isinstance(error, Exception):
            slot.fail(error)
        else:
            slot.settle(job.result())
