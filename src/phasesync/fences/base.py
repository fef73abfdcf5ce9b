"""What every fence transport promises.

Arrivals count once; an open fence stays open and a broken one broken; nobody passes unless
all members arrived in agreement, and no two ranks see different verdicts. The runtime and
the conformance suite know transports by this interface alone.
"""

import typing

from phasesync.core.fence_beats import Ask, Beat
from phasesync.core.model import Arrival, Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import PlanError

__all__ = ("FenceTransport", "Heartbeats", "Probe", "connected_already")


def connected_already(rank: Rank | None) -> PlanError:
    """What `connect` raises the second time."""
    return PlanError(f"the fences of {rank} are connected: make others to connect anew")


class FenceTransport(typing.Protocol):
    """One rank's connection to the fences of a run."""

    async def connect(self) -> None:
        """Be ready to arrive; done once, before the first fence.

        Raises:
            StoreLost: nothing answers at the other end.
        """

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        """Report `arrival`, then wait until the fence opens; `call.deadline_s` counts from here.

        A failed arrival breaks the fence at once. Cancelling the wait breaks it too, as
        `cancelled`: nobody leaves a fence in silence.

        Raises:
            FenceBroken: it broke; every member gets the same verdict.
            StaleArrival: it was decided without this arrival.
            StoreLost: the transport no longer answers.
        """

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        """Report a failed `arrival` without waiting; the verdict that the fence now has."""

    async def watch(self, call: FenceCall) -> Broken | Opened:
        """Wait, without arriving, for the verdict of a fence; cancel to stop watching."""

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        """The verdict if there is one, at once, without arriving."""

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        """The members that have not arrived, at once."""

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        """Say that the ranks of `cause` are gone, on behalf of whoever watches processes.

        Every fence, present or to come, of which one of them is a member and at which that
        incarnation has not arrived breaks at once with this cause.
        """

    async def close(self) -> None:
        """Leave no thread, socket, task or key behind; other ranks are not disturbed."""


class Probe(typing.Protocol):
    """What a transport asks of its rank. Called from a thread of the transport's own, whatever
    the rank's event loop does; it returns at once."""

    def beat(self) -> Beat:
        """Where the rank stands."""

    def asked(self, ask: Ask) -> bool:
        """Somebody waits for this rank: write down what its threads do. Whether it had to."""


@typing.runtime_checkable
class Heartbeats(typing.Protocol):
    """A transport that tells slow ranks from dead ones. It need not be one: where all ranks are in
    one process there is nothing to tell."""

    def heed(self, probe: Probe) -> None:
        """Beat on behalf of `probe`'s rank, from the time of `connect` on."""
