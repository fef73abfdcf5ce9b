"""The port over a simulated engine: order, tickets, failures. The engine errs as real ones do."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from phasesync.core.model import (
    Broken,
    Epoch,
    FenceKey,
    FenceName,
    Opened,
    RootCause,
    Ticket,
    Version,
)
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.conformance import check_engine_port
from phasesync.engines.port import LedgerPort
from phasesync.engines.simulated import Budget, Quirks, SimulatedDriver, SimulatedEngine
from phasesync.engines.tickets import TicketRules, VerdictTable, Warden, parse_ticket, ticket_text
from phasesync.errors import EngineError, EngineRefused


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def rules(table: VerdictTable | None = None, scope: str = "replica/0") -> TicketRules:
    return TicketRules(run="run", scope=scope, verdicts=table)


def ticket(fence: str, epoch: int = 0, *, generation: int = 0, attempt: int = 0) -> Ticket:
    return Ticket(
        key=FenceKey("run", attempt, "replica/0", generation),
        fence=FenceName(fence),
        epoch=Epoch(epoch),
        count=2,
        hash="ab" * 32,
    )


def engine(ranks: int = 1, capacity: int = 16, **quirks: Any) -> SimulatedEngine:
    return SimulatedEngine([Budget(capacity) for _ in range(ranks)], quirks=Quirks(**quirks))


@pytest.mark.parametrize("wrong_tag", ["ignored", "key_error"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_port_keeps_every_promise(wrong_tag: str, ranks: int) -> None:
    async def make(given: TicketRules) -> LedgerPort:
        return LedgerPort(SimulatedDriver(engine(ranks, wrong_tag=wrong_tag)), tickets=given)

    run(check_engine_port(make, str))


def test_a_port_that_fails_where_it_should_refuse_is_told_what_to_do_instead() -> None:
    class Rude(LedgerPort):
        async def load(self, bucket: object) -> None:
            if (await self.status()).session is None:
                raise KeyError("session")
            await super().load(bucket)

    async def make(given: TicketRules) -> LedgerPort:
        return Rude(SimulatedDriver(engine()), tickets=given)

    with pytest.raises(
        AssertionError, match=r"bucket without a session raised KeyError: 'session'"
    ):
        run(check_engine_port(make, str))


def test_a_ticket_maps_kv_once_for_each_release() -> None:
    """A replay in the same epoch finds the memory in other hands."""
    port = LedgerPort(SimulatedDriver(engine()), tickets=rules())
    used = ticket("memory_released", generation=3)

    async def story() -> None:
        await port.pause()
        for again in (False, True):
            await port.release((WEIGHTS, KV_CACHE))
            await port.resume(WEIGHTS, ticket("ready_for_weights", generation=3))
            await port.begin(Version(1 + again))
            await port.load(str(1 + again))
            await port.finish(Version(1 + again))
            if again:
                with pytest.raises(EngineRefused, match="released since; after a release, a new"):
                    await port.resume(KV_CACHE, used)
                await port.resume(KV_CACHE, ticket("memory_released", generation=4))
            else:
                await port.resume(KV_CACHE, used)

    run(story())


def test_no_refused_call_reached_the_engine() -> None:
    simulated = engine()
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        for call in (
            port.release((KV_CACHE,)),
            port.resume(KV_CACHE, ticket("memory_released")),
            port.begin(Version(1)),
            port.load("1"),
            port.finish(Version(1)),
            port.flush(),
        ):
            with pytest.raises(EngineRefused):
                await call

    run(story())
    assert simulated.calls == []


async def _to_kv(port: LedgerPort, version: int = 1) -> None:
    await port.pause()
    await port.release((WEIGHTS, KV_CACHE))
    await port.resume(WEIGHTS, ticket("ready_for_weights"))
    await port.begin(Version(version))
    await port.load(str(version))
    await port.finish(Version(version))


def test_a_wake_that_does_not_fit_is_never_retried() -> None:
    """The race of a random non-leader OOM: a peer still holds its parameters on device 1."""
    simulated = engine(ranks=2)
    peer = simulated.devices[1]
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        await _to_kv(port)
        peer.take("trainer params", 10)
        with pytest.raises(EngineError, match=r"resume\('kv_cache'\): RuntimeError: CUDA Error"):
            await port.resume(KV_CACHE, ticket("memory_released"))
        peer.give("trainer params")
        reached = len(simulated.calls)
        with pytest.raises(EngineRefused, match=r"engine is unknown.*replace it"):
            await port.resume(KV_CACHE, ticket("memory_released"))
        assert len(simulated.calls) == reached
        assert (await port.status()).doubtful == {KV_CACHE}

    run(story())


@pytest.mark.parametrize(("ranks", "health"), [(1, "usable"), (2, "unknown")])
def test_a_failed_bucket_leaves_partial_weights(ranks: int, health: str) -> None:
    """One rank may load again from the start; with two, no later reply can be believed."""
    simulated = engine(ranks)
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        await port.pause()
        await port.release((WEIGHTS, KV_CACHE))
        await port.resume(WEIGHTS, ticket("ready_for_weights"))
        await port.begin(Version(1))
        simulated.fail_next["update"] = ValueError("bad shape")
        with pytest.raises(EngineError, match="ValueError: bad shape"):
            await port.load("1")
        status = await port.status()
        assert (status.content, status.session, status.health) == ("partial", None, health)
        with pytest.raises(EngineRefused, match=r"partial|unknown"):
            await port.resume(KV_CACHE, ticket("memory_released"))
        if ranks == 1:
            await port.begin(Version(1))
            await port.load("1")
            await port.finish(Version(1))
            await port.resume(KV_CACHE, ticket("memory_released"))

    run(story())


def test_ranks_that_disagree_on_the_version_fail_the_commit() -> None:
    simulated = engine(ranks=2)
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        await port.pause()
        await port.begin(Version(1))
        await port.load("something else")
        with pytest.raises(EngineError, match="told version 1; its ranks hold something else"):
            await port.finish(Version(1))
        with pytest.raises(EngineRefused, match="unknown"):
            await port.resume_generation(ticket("ready_to_serve"))

    run(story())


def test_an_update_in_place_drops_the_caches_that_older_weights_filled() -> None:
    simulated = engine()
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        assert simulated.generate("hello") == "hello@0"
        await port.pause("keep")
        await port.begin(Version(1))
        await port.load("1")
        await port.finish(Version(1))
        await port.resume_generation(ticket("ready_to_serve"))
        assert simulated.generate("hello") == "hello@1"

    run(story())


def test_a_full_wake_does_not_open_the_gate() -> None:
    """The engine resumes its scheduler by itself; the gate is ours and stays shut."""
    simulated = engine()
    port = LedgerPort(SimulatedDriver(simulated), tickets=rules())

    async def story() -> None:
        await _to_kv(port)
        await port.resume(KV_CACHE, ticket("memory_released"))
        assert simulated.paused
        assert (await port.status()).gate == "shut"

    run(story())


def test_a_call_that_runs_out_of_time_has_an_unknown_outcome() -> None:
    class Slow(SimulatedDriver):
        async def resume(self, tag: Any, ticket: Ticket | None) -> None:
            await asyncio.sleep(5)

    port = LedgerPort(Slow(engine()), tickets=rules(), deadlines_s={"resume": 0.05})

    async def story() -> None:
        await port.pause()
        await port.release((WEIGHTS, KV_CACHE))
        with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
            await port.resume(WEIGHTS, ticket("ready_for_weights"))
        with pytest.raises(EngineRefused, match="unknown"):
            await port.begin(Version(1))

    run(story())


def test_a_cancelled_call_has_an_unknown_outcome_and_a_second_call_waits_its_turn() -> None:
    class Slow(SimulatedDriver):
        async def load(self, bucket: object) -> None:
            await asyncio.sleep(5)

    port = LedgerPort(Slow(engine()), tickets=rules())

    async def story() -> None:
        await port.pause()
        await port.begin(Version(1))
        loading = asyncio.ensure_future(port.load("1"))
        await asyncio.sleep(0)
        with pytest.raises(EngineRefused, match="still under way"):
            await port.finish(Version(1))
        loading.cancel()
        await asyncio.wait([loading])
        assert (await port.status()).health == "unknown"

    run(story())


# --- tickets -------------------------------------------------------------------------------


def opened(table: VerdictTable, given: Ticket) -> Ticket:
    table.record(Opened(ticket=given))
    return given


def test_a_leader_that_wakes_late_is_refused() -> None:
    table = VerdictTable()
    warden = Warden(rules(table))
    old = opened(table, ticket("memory_released", 7, generation=41))
    new = opened(table, ticket("memory_released", 7, generation=3, attempt=1))
    assert warden.refusal("kv_cache", new) is None
    said = warden.refusal("kv_cache", old)
    assert said == "the ticket is of attempt 0, epoch 7; the engine's floor is attempt 1, epoch 7"


def test_recovery_inside_an_epoch_spends_its_tickets() -> None:
    table = VerdictTable()
    warden = Warden(rules(table))
    old = opened(table, ticket("memory_released", 7, generation=41))
    warden.spend(ticket("recovered", 7, generation=43).key)
    assert "generation 41" in str(warden.refusal("kv_cache", old))


def test_a_ticket_of_a_broken_fence_is_refused() -> None:
    table = VerdictTable()
    given = ticket("memory_released", generation=5)
    cause = RootCause(kind="deadline", ranks=())
    table.record(Broken(key=given.key, fence=given.fence, cause=cause))
    assert "broke" in str(Warden(rules(table)).refusal("kv_cache", given))


def test_a_ticket_with_another_hash_is_refused_and_says_what_differs() -> None:
    table = VerdictTable()
    real = opened(table, ticket("memory_released"))
    forged = Ticket(
        key=real.key, fence=real.fence, epoch=real.epoch, count=real.count, hash="cd" * 32
    )
    assert "hash" in str(Warden(rules(table)).refusal("kv_cache", forged))


def test_the_floor_never_sinks() -> None:
    warden = Warden(rules())
    warden.raise_floor(Floor(1, 3))
    assert warden.raise_floor(Floor(0, 9)) == Floor(1, 3)


def test_a_ticket_survives_a_header_and_nothing_else_is_one() -> None:
    given = ticket("memory_released", 3, generation=9)
    assert parse_ticket(ticket_text(given)) == given
    for text in ("", "{}", "[]", '{"key": ["r", 0, "world"]}', "null"):
        with pytest.raises(ValueError, match="is no ticket"):
            parse_ticket(text)
