"""A leader that was frozen between pass and resume, replaced, and woke up: the guard refuses it.

Its ticket is genuine and of the epoch under way; only who was judged tells that it is stale.
"""

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from phasesync.core import wire
from phasesync.core.fence import judged_list, ticket_hash
from phasesync.core.model import (
    Arrival,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    RoleName,
    Ticket,
    Version,
)
from phasesync.engines.base import Verdicts
from phasesync.engines.guard import FLOOR_PATH, GuardMiddleware, guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import TICKET_HEADER, TicketRules, VerdictTable, ticket_text
from phasesync.engines.verdicts import JournalVerdicts, StoreVerdicts
from phasesync.errors import EngineRefused
from phasesync.fences.store import StoreFences
from phasesync.journal import Journal

from .surfaces import AsyncSurface, SyncSurface

LEADER, PEER = (Rank(RoleName("trainer"), number) for number in range(2))
KV = ["kv_cache"]
REPLACED = "judged with incarnation 0 of trainer/0, which has been replaced: it is incarnation 1"


def arrival(rank: Rank, incarnation: int, fence: str) -> Arrival:
    return Arrival(
        rank=rank, incarnation=incarnation, nonce=f"{rank}.{incarnation}", fence=FenceName(fence),
        epoch=Epoch(3), version=Version(3), digest=Digest("d"), seq=7,
    )  # fmt: skip


def opened(fence: str, generation: int, incarnation: int, scope: str = "replica/0") -> Opened:
    """The verdict of a fence that the leader passed as this incarnation."""
    arrivals = (arrival(LEADER, incarnation, fence), arrival(PEER, 0, fence))
    ticket = Ticket(
        key=FenceKey("run", 0, scope, generation), fence=FenceName(fence), epoch=Epoch(3), count=2,
        hash=ticket_hash(judged_list(arrivals)),
    )  # fmt: skip
    return Opened(ticket=ticket, arrivals=arrivals)


class Told:
    """The stale ticket, and what its replacement has passed in another scope since."""

    def __init__(self) -> None:
        self.table = VerdictTable()
        self.stale = self._told(opened("memory_released", 4, 0))
        self.replacement = self._told(opened("ready_for_weights", 9, 1, scope="world"))
        self.fresh = self._told(opened("memory_released", 5, 1))

    def _told(self, verdict: Opened) -> Ticket:
        self.table.record(verdict)
        return verdict.ticket


async def value_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@pytest.mark.parametrize("surface", [SyncSurface, AsyncSurface])
@pytest.mark.parametrize("learns", ["from its replacement's ticket", "from whoever restarts ranks"])
def test_an_engine_object_refuses_it(surface: type[Any], learns: str) -> None:
    told = Told()
    engine = surface(SimulatedEngine([Budget(16)]))
    keeper = guard(engine, run="run", scope="replica/0", verdicts=told.table)

    async def story() -> None:
        await value_of(engine.sleep(level=2))
        if "ticket" in learns:
            await value_of(engine.wake_up(["weights"], ticket=told.replacement))
        else:
            keeper.expect(0, {LEADER: 1})
            await value_of(engine.wake_up(["weights"]))
        reached = list(engine.simulated.calls)
        with pytest.raises(EngineRefused, match=REPLACED):
            await value_of(engine.wake_up(KV, ticket=told.stale))
        assert engine.simulated.calls == reached
        await value_of(engine.wake_up(KV, ticket=told.fresh))

    asyncio.run(story())


def test_recovery_tells_the_guard_who_is_there(tmp_path: Path) -> None:
    told = Told()
    engine = SyncSurface(SimulatedEngine([Budget(16)]))
    keeper = guard(engine, run="run", scope="replica/0", verdicts=told.table)
    engine.sleep(level=2)
    engine.wake_up(["weights"])
    keeper.spend(told.replacement)
    with pytest.raises(EngineRefused, match=REPLACED):
        engine.wake_up(KV, ticket=told.stale)  # type: ignore[call-arg]


def test_another_attempt_counts_its_incarnations_anew() -> None:
    told = Told()
    engine = SyncSurface(SimulatedEngine([Budget(16)]))
    keeper = guard(engine, run="run", scope="replica/0", verdicts=told.table)
    keeper.expect(1, {LEADER: 1})
    engine.sleep(level=2)
    engine.wake_up(["weights"])
    engine.wake_up(KV, ticket=told.stale)  # type: ignore[call-arg]


def test_a_server_refuses_it() -> None:
    told = Told()

    class OfReplica(GuardMiddleware):
        rules = TicketRules(
            run="run", scope="replica/0", verdicts=told.table,
            fences={"kv_cache": ("memory_released",)},
        )  # fmt: skip

    reached: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    server = OfReplica(app)

    async def post(
        path: str, body: Mapping[str, Any] | None = None, ticket: Ticket | None = None
    ) -> tuple[int, bytes]:
        said: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": wire.encode(body or {}), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        headers = [(TICKET_HEADER.encode(), ticket_text(ticket).encode())] if ticket else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await server({**scope, "query_string": b"tags=kv_cache"}, receive, send)
        return said[0]["status"], said[1]["body"]

    async def story() -> None:
        wrong = await post(FLOOR_PATH, {"attempt": 0, "epoch": 3, "incarnations": ["trainer/0"]})
        assert wrong[0] == 422
        told_of = {"attempt": 0, "epoch": 3, "incarnations": {"trainer/0": 1}}
        assert (await post(FLOOR_PATH, told_of))[0] == 200
        status, why = await post("/wake_up", ticket=told.stale)
        assert (status, reached) == (409, [])
        assert REPLACED in why.decode()
        assert (await post("/wake_up", ticket=told.fresh))[0] == 200
        assert reached == ["/wake_up"]

    asyncio.run(story())


def test_verdicts_of_store_and_journal_say_who_was_judged(tmp_path: Path) -> None:
    """Fences as they are: the arrivals are read where the verdict is."""
    store = HashStore()
    key = FenceKey("run", 0, "replica/0", 0)
    call = FenceCall(
        key=key, fence=FenceName("memory_released"), epoch=Epoch(3), version=Version(3),
        digest=Digest("d"), members=(LEADER, PEER), deadline_s=20.0,
    )  # fmt: skip

    async def come(fences: StoreFences, rank: Rank, incarnation: int) -> Opened:
        await fences.connect()
        said = await fences.arrive(call, arrival(rank, incarnation, "memory_released"))
        journal = Journal(tmp_path, run="run", rank=rank, ranks=2, incarnation=incarnation)
        if said.decided:
            journal.bind(epoch=3, attempt=0)
            judged = judged_list(said.arrivals)
            journal.write(
                "fence.decide", fence=call.fence, scope=key.scope, generation=0, verdict="open",
                judged=judged,
            )  # fmt: skip
        journal.close()
        return said

    async def story() -> None:
        who = ((LEADER, 1), (PEER, 0))
        fences = [StoreFences(store, rank=rank, run="run", incarnation=n) for rank, n in who]
        said = [come(each, *one) for each, one in zip(fences, who, strict=True)]
        ticket = (await asyncio.gather(*said))[0].ticket
        readers: tuple[Verdicts, ...] = (StoreVerdicts(store), JournalVerdicts(tmp_path))
        for verdicts in readers:
            found = verdicts(key)
            assert isinstance(found, Opened)
            assert found.ticket == ticket
            assert {each.rank: each.incarnation for each in found.arrivals} == {LEADER: 1, PEER: 0}
        for each in fences:
            await each.close()

    asyncio.run(story())
