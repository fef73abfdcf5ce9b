"""The endpoint over a store of who watches processes and is no rank: a launcher, an agent."""

from contextlib import suppress
from typing import TYPE_CHECKING

from phasesync.core.fence import Lost
from phasesync.core.fence_keys import Space
from phasesync.core.fence_loss import reporting, sweeping
from phasesync.core.fence_steps import arrivals_in
from phasesync.core.model import Arrival, RootCause
from phasesync.errors import StoreLost
from phasesync.fences.lines import CONNECT_S, Lines, nothing

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("StoreObserver", "report")


class StoreObserver:
    """Tells the ranks of a run that one of them is gone. It is a member of nothing."""

    def __init__(self, store: "Store", *, run: str, attempt: int = 0, token: str = "") -> None:
        self._space = Space.of(run, attempt, token=token)
        self._lines = Lines(store, f"phasesync.{run}.observer")

    async def connect(self) -> None:
        await self._lines.ask(nothing(), CONNECT_S)

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        """As `FenceTransport.report_lost`."""
        await report(self._lines, self._space, cause, incarnation)

    async def arrivals_in(self, scope: str, generations: range) -> tuple[Arrival, ...]:
        """Who has arrived at these fences of a scope, as far as they are not tidied up."""
        steps = arrivals_in(self._space, scope, generations)
        found: tuple[Arrival, ...] = await self._lines.ask(steps)
        return found

    async def close(self) -> None:
        """Remove the keys of the run if all its ranks have left or are lost, then end."""
        if self._lines.lost is None:
            with suppress(StoreLost):
                await self._lines.ask(sweeping(self._space))
        await self._lines.close()


async def report(lines: Lines, space: Space, cause: RootCause, incarnation: int) -> None:
    """Say that the ranks of `cause` are gone."""
    for rank in cause.ranks:
        await lines.ask(reporting(space, Lost(rank=rank, incarnation=incarnation, cause=cause)))
