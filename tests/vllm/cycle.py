"""One colocated epoch against any engine port, as a leader drives it, and the fences it passes."""

from collections.abc import Awaitable, Callable, Sequence

from phasesync.core.fence import judged_list, ticket_hash
from phasesync.core.model import (
    Arrival,
    Digest,
    Epoch,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    RoleName,
    Ticket,
    Version,
)
from phasesync.engines.base import KV_CACHE, WEIGHTS, EnginePort, Floor
from phasesync.engines.tickets import TicketRules, VerdictTable

__all__ = ("LEADER", "Fences", "colocated_epoch")

LEADER = Rank(RoleName("trainer"), 0)


class Fences:
    """Opens a fence at once, keeps its verdict where the engine can ask, hands out the ticket."""

    def __init__(self, *, on_open: Callable[[Opened], None] | None = None) -> None:
        self.table = VerdictTable()
        self.generation = 0
        self._on_open = on_open

    def rules(self, scope: str = "replica/0") -> TicketRules:
        return TicketRules(run="run", scope=scope, verdicts=self.table)

    def open(
        self,
        fence: str,
        epoch: int = 0,
        *,
        scope: str = "replica/0",
        attempt: int = 0,
        incarnation: int = 1,
    ) -> Ticket:
        self.generation += 1
        leader = Arrival(
            rank=LEADER,
            incarnation=incarnation,
            nonce="",
            fence=FenceName(fence),
            epoch=Epoch(epoch),
            version=Version(epoch),
            digest=Digest(""),
            seq=self.generation,
        )
        ticket = Ticket(
            key=FenceKey("run", attempt, scope, self.generation),
            fence=leader.fence,
            epoch=leader.epoch,
            count=1,
            hash=ticket_hash(judged_list((leader,))),
        )
        opened = Opened(ticket=ticket, arrivals=(leader,))
        self.table.record(opened)
        if self._on_open is not None:
            self._on_open(opened)
        return ticket

    def bad(self, fence: str, epoch: int, *, replaced: bool = False) -> dict[str, Ticket | None]:
        """Tickets that must not do at a floor of `epoch`, by what the refusal must say.

        `replaced` says that the guard knows of the leader's incarnation 1.
        """
        real = self.open(fence, epoch)
        late = {"has been replaced": self.open(fence, epoch, incarnation=0)} if replaced else {}
        return {
            **late,
            "none was given": None,
            "floor": self.open(fence, epoch - 1),
            "scope": self.open(fence, epoch, scope="replica/1"),
            "no verdict": Ticket(
                key=real.key._replace(generation=10_000),
                fence=real.fence,
                epoch=real.epoch,
                count=1,
                hash=real.hash,
            ),
        }


async def colocated_epoch(
    port: EnginePort,
    fences: Fences,
    epoch: int,
    buckets: Sequence[object],
    *,
    send: Callable[[], Awaitable[None]] | None = None,
    update: bool = True,
) -> None:
    """Pause, release, wake weights, load, wake KV, serve. `send` runs beside the loads."""
    version = Version(epoch + 1)
    await port.pause("abort")
    await port.release((WEIGHTS, KV_CACHE))
    await port.resume(WEIGHTS, fences.open("ready_for_weights", epoch))
    if update:
        await port.begin(version)
        for bucket in buckets:
            await port.load(bucket)
        if send is not None:
            await send()
        await port.finish(version)
    await port.resume(KV_CACHE, fences.open("memory_released", epoch))
    await port.resume_generation(fences.open("ready_to_serve", epoch))
    await port.raise_floor(Floor(0, epoch))
