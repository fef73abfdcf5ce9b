"""A guard asks a store what its fences decided, and never waits for what is not there any more."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.fence import encode_arrival, judged_list, ticket_hash
from phasesync.core.fence_keys import Verdict
from phasesync.core.fence_steps import judged_in
from phasesync.core.model import Epoch, FenceKey, FenceName, Opened, Ticket
from phasesync.engines.tickets import TicketRules, Warden
from phasesync.engines.verdicts import StoreVerdicts
from phasesync.errors import EngineRefused
from phasesync.fences.store import StoreFences
from phasesync.testing import FenceWorld, arrives
from tests.fences.processes import hosted
from tests.fences.scopes import report_dead
from tests.fences.test_conformance import tcp_store

pytestmark = pytest.mark.timeout(60)
STORE_WAITS_S = 300  # As long as a store waits for a key that is not there.


def over(store: Any, size: int, story: Callable[[FenceWorld], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        world = FenceWorld(
            lambda run, rank, n: StoreFences(store, rank=rank, run=run, incarnation=n), size
        )
        try:
            await world.open()
            await story(world)
        finally:
            await world.close()

    asyncio.run(told())


async def passed(world: FenceWorld, generation: int, members: Any = None) -> Ticket:
    call = world.call(generation, members=members)
    got = await asyncio.gather(*(world.arrive(rank, call) for rank in call.members))
    (ticket,) = {each.ticket for each in got if isinstance(each, Opened)}
    return ticket


def test_a_ticket_of_a_fence_that_is_over_is_refused_at_once() -> None:
    store = tcp_store()
    verdicts = StoreVerdicts(store)

    async def story(world: FenceWorld) -> None:
        tickets = [await passed(world, generation) for generation in range(3)]
        await asyncio.sleep(0.3)  # Until what nobody needs has been tidied up.
        rules = TicketRules(
            run=world.run,
            scope="world",
            verdicts=verdicts,
            fences={"kv_cache": ("memory_released",)},
        )
        began = time.monotonic()
        refused = [Warden(rules).refusal("kv_cache", ticket) for ticket in tickets]
        assert time.monotonic() - began < STORE_WAITS_S / 10
        assert [bool(reason) for reason in refused] == [True, True, False]
        assert "the fence is over" in str(refused[0])

    over(store, 2, story)


def test_who_met_beside_a_broken_fence_has_a_good_ticket() -> None:
    store = tcp_store()
    verdicts = StoreVerdicts(store)

    async def story(world: FenceWorld) -> None:
        await passed(world, 0)
        await asyncio.sleep(0.1)
        await report_dead(world, 0, 2)
        ticket = await passed(world, 1, members=world.ranks[:2])
        found = verdicts(ticket.key)
        assert isinstance(found, Opened)
        assert (found.ticket, ticket.count) == (ticket, 2)
        assert [arrival.rank for arrival in found.arrivals] == list(world.ranks[:2])

    over(store, 3, story)


def test_a_store_that_is_frozen_refuses_and_does_not_hold_the_engine_up() -> None:
    with hosted() as host:
        dist: Any = import_module("torch.distributed")
        store = dist.TCPStore("127.0.0.1", host.port)
        verdicts = StoreVerdicts(store, within_s=0.5)
        key = FenceKey("run", 0, "world", 0)
        assert StoreVerdicts(store)(key) is None
        os.kill(host.process.pid, signal.SIGSTOP)
        while "State:\tT" not in Path(f"/proc/{host.process.pid}/status").read_text():
            time.sleep(0.01)  # Until it stands still, it may answer.
        with pytest.raises(EngineRefused, match="no answer within"):
            verdicts(key)


def test_a_ticket_that_is_none_of_ours_is_not_asked_about() -> None:
    def never(key: FenceKey) -> None:
        raise AssertionError("asked")

    rules = TicketRules(run="run", scope="replica/0", verdicts=never)
    ticket = Ticket(
        key=FenceKey("other", 0, "replica/0", 0),
        fence=FenceName("memory_released"),
        epoch=Epoch(1),
        count=2,
        hash="",
    )
    assert "is of run 'other'" in str(Warden(rules).refusal("kv_cache", ticket))


def test_what_was_judged_is_found_behind_the_line_of_somebody_else() -> None:
    world = FenceWorld(lambda *_: None, 3)  # type: ignore[arg-type]
    call = world.call(0)
    both = [replace(arrives(call, rank), incarnation=1) for rank in world.ranks[:2]]
    lines = b"".join(map(encode_arrival, both))
    digest = ticket_hash(judged_list(both))
    verdict = Verdict(by="trainer/0.1", count=2, hash=digest, log_bytes=len(lines))
    stranger = encode_arrival(arrives(call, world.ranks[0]))
    assert judged_in(stranger + lines, verdict) == tuple(both)
    assert judged_in(lines[1:], verdict) == ()
