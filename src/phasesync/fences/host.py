"""Who of the ranks of one host brings the arrivals of all: the lowest live one of each scope.

Each finds it by what the others have announced, and may be wrong: then there are two that bring, or
a rank comes by itself. Nothing but the number of messages depends on it.
"""

from collections.abc import Iterable
from typing import TypeAlias

from phasesync.core.fence_gather import Word
from phasesync.core.fence_keys import Process
from phasesync.core.model import FenceCall, Rank
from phasesync.fences.follower import Follower
from phasesync.fences.leader import Leader, can_lead
from phasesync.fences.slots import Scope, Slot, Slots

__all__ = ("TOGETHER_FROM", "Host")

TOGETHER_FROM = 2

Brings: TypeAlias = Leader | Follower


class Host:
    """The ranks of this host, as one of them sees them."""

    def __init__(
        self, slots: Slots, *, rank: Rank, incarnation: int, run: tuple[str, int], least: int
    ) -> None:
        self._slots = slots
        self._rank = rank
        self._incarnation = incarnation
        self._run = run
        self._least = least
        self._leader: Leader | None = None
        self._is_closed = False
        self._mates: dict[Rank, Process] = {}
        self._gone: set[tuple[Rank, int]] = set()
        self._followers: dict[tuple[Rank, int], Follower] = {}
        self._chosen: dict[str, tuple[tuple[Rank, ...], Process | None]] = {}

    async def open(self) -> str:
        """Let the others hand their arrivals over; where. Empty if they cannot or shall not."""
        if not self._least or not can_lead():
            return ""
        self._leader = Leader(self._slots, self._rank)
        return await self._leader.open()

    async def close(self) -> None:
        """Bring nothing any more, and have nothing brought; no connection is begun from now on."""
        self._is_closed = True
        if self._leader is not None:
            self._leader.close()
        followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.cut()
        for follower in followers:
            await follower.ended.wait()

    def meet(self, here: Iterable[Process]) -> None:
        """These have announced themselves; of a rank its last incarnation counts."""
        for process in here:
            who = (process.rank, process.incarnation)
            known = self._mates.get(process.rank)
            is_newer = known is None or known.incarnation < process.incarnation
            if process.door and is_newer and who not in self._gone:
                self._mates[process.rank] = process
                self._chosen.clear()
        for name, scope in self._slots.scopes.items():
            self._choose(name, scope.members)

    def gone(self, rank: Rank, incarnation: int) -> None:
        """That process has ended."""
        self._gone.add((rank, incarnation))
        mate = self._mates.get(rank)
        if mate is not None and mate.incarnation <= incarnation:
            del self._mates[rank]
            self._chosen.clear()
        follower = self._followers.pop((rank, incarnation), None)
        if follower is not None:
            follower.cut()

    def who_brings(self, call: FenceCall, scope: Scope) -> Brings | None:
        """Who brings this rank's arrival; None if it has to come by itself."""
        if self._leader is None:
            return None
        chosen = self._chosen.get(call.key.scope)
        if chosen is None or (chosen[0] is not call.members and chosen[0] != call.members):
            chosen = self._choose(call.key.scope, call.members)
        process = chosen[1]
        if process is None or process.rank == self._rank:
            return self._leader if self._leader.leads(call) else None
        follower = self._followers.get((process.rank, process.incarnation))
        return follower if follower is not None and follower.is_ready else None

    def watch(self, call: FenceCall, scope: Scope, slot: Slot, *, register: bool) -> bool:
        """Have the one who brings this rank's arrivals watch the fence, too; whether it does."""
        brings = self.who_brings(call, scope)
        if slot.watched or not isinstance(brings, Follower):
            return False

        def hear(word: Word | None) -> None:
            slot.watched = False
            if word is not None:
                slot.settle(word.verdict)
                self._slots.drop(call.key)
            elif slot.hearers:
                self._slots.wait(slot, register=register)

        slot.watched = True
        brings.watch(call, hear, register=register)
        return True

    def leave_to_parent(self) -> None:
        """In a fork: let go of what tells others that this rank lives."""
        if self._leader is not None:
            self._leader.leave_to_parent()
        for follower in self._followers.values():
            follower.leave_to_parent()

    def _choose(
        self, scope: str, members: tuple[Rank, ...]
    ) -> tuple[tuple[Rank, ...], Process | None]:
        """Who of the members on this host brings; a connection to it is begun ahead."""
        here = [self._mates[rank] for rank in members if rank in self._mates]
        process = min(here, default=None) if len(here) >= self._least else None
        self._chosen[scope] = chosen = (members, process)
        if process is not None and process.rank != self._rank:
            who = (process.rank, process.incarnation)
            if who not in self._followers and not self._is_closed:
                self._followers[who] = Follower(
                    process, rank=self._rank, run=self._run, over=self._over
                )
        return chosen

    def _over(self, leader: Process) -> None:
        """The connection to one who brought has ended: it brings no more."""
        if self._followers.pop((leader.rank, leader.incarnation), None) is not None:
            self._gone.add((leader.rank, leader.incarnation))
            if self._mates.get(leader.rank) == leader:
                del self._mates[leader.rank]
            self._chosen.clear()
