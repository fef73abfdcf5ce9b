"""`VllmEngine` over objects that have vLLM's methods and faults; the real one is in tests/vllm."""

import asyncio
import sys
from collections.abc import Coroutine
from types import ModuleType
from typing import Any

import pytest

from phasesync.core.model import Epoch, FenceKey, FenceName, Opened, Ticket, Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.conformance import check_engine_port
from phasesync.engines.guard import guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import TicketRules, VerdictTable
from phasesync.engines.vllm import Lora, Rpc, VllmEngine
from phasesync.errors import EngineError, EngineRefused

from .surfaces import AsyncSurface, SyncSurface

RULES = TicketRules(run="run", scope="replica/0")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def simulated() -> SimulatedEngine:
    return SimulatedEngine([Budget(16)])


def bucket(version: int) -> dict[str, str]:
    return {"version": str(version)}


def ticket(fence: str, epoch: int = 0) -> Ticket:
    return Ticket(
        key=FenceKey("run", 0, "replica/0", 1),
        fence=FenceName(fence),
        epoch=Epoch(epoch),
        count=1,
        hash="00" * 32,
    )


class Streaming(AsyncSurface):
    """The update calls of an asynchronous engine."""

    async def start_weight_update(self) -> None:
        self.simulated.start_update()

    async def update_weights(self, request: Any) -> None:
        info = request["update_info"] if isinstance(request, dict) else request.update_info
        self.simulated.update(info["version"])

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.simulated.finish_update()

    async def get_weight_version(self) -> str | None:
        return self.simulated.version

    async def reset_prefix_cache(self) -> bool:
        return self.simulated.flush()


@pytest.mark.parametrize("surface", [SyncSurface, Streaming])
def test_the_port_over_vllm_keeps_every_promise(surface: type[Any]) -> None:
    async def make(rules: TicketRules) -> VllmEngine:
        return VllmEngine(surface(simulated()), tickets=rules, version=Version(0))

    run(check_engine_port(make, bucket))


def test_a_release_that_keeps_the_weights_needs_no_update() -> None:
    engine = VllmEngine(SyncSurface(simulated()), tickets=RULES, level=1)

    async def story() -> None:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.resume_generation(ticket("ready_to_serve"))
        await engine.close()

    run(story())


def test_kv_alone_is_released_only_where_vllm_can() -> None:
    engine = VllmEngine(SyncSurface(simulated()), tickets=RULES)

    async def story() -> None:
        await engine.pause()
        with pytest.raises(EngineRefused, match=r"releases only \{'kv_cache', 'weights'\}"):
            await engine.release((KV_CACHE,))
        with pytest.raises(EngineRefused, match="knows only"):
            await engine.pause("retract")
        await engine.close()

    run(story())


def test_an_engine_that_wakes_nothing_is_found_out() -> None:
    """One wrong tag: vLLM warns in its log, wakes nothing and returns."""

    class Deaf(SyncSurface):
        def wake_up(self, tags: list[str] | None = None) -> bool:
            return super().wake_up(["weights", "no_such_tag"])

    engine = VllmEngine(Deaf(simulated()), tickets=RULES)

    async def story() -> None:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        await engine.begin(Version(1))
        with pytest.raises(EngineError, match="setStorage"):
            await engine.load(bucket(1))
        await engine.close()

    run(story())


def test_a_guarded_engine_is_given_the_ticket() -> None:
    table = VerdictTable()
    for generation, fence in enumerate(("ready_for_weights", "memory_released", "ready_to_serve")):
        table.record(Opened(ticket=numbered(fence, generation)))
    raw = Streaming(simulated())
    keeper = guard(raw, run="run", scope="replica/0", verdicts=table)
    engine = VllmEngine(raw, tickets=RULES)

    async def story() -> None:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        await engine.resume(WEIGHTS, numbered("ready_for_weights", 0))
        await engine.begin(Version(1))
        await engine.load(bucket(1))
        await engine.finish(Version(1))
        with pytest.raises(EngineRefused, match="no verdict"):
            await engine.resume(KV_CACHE, numbered("memory_released", 99))
        # It never reached the engine, which is as usable as before and not in doubt.
        status = await engine.status()
        assert (status.health, status.doubtful, status.under_way) == ("usable", frozenset(), None)

    run(story())
    assert raw.simulated.asleep == {KV_CACHE}
    assert keeper.floor == Floor(0, 0)

    async def whole() -> None:
        again = VllmEngine(raw, tickets=RULES)
        await again.pause()
        await again.raise_floor(Floor(0, 1))

    run(whole())
    assert keeper.floor == Floor(0, 1)


def test_a_version_that_no_rank_tells_is_not_committed() -> None:
    """An answer without results is no evidence of a commit."""

    class Silent(Streaming):
        async def collective_rpc(self, method: str, **_: Any) -> None:
            """As a server whose answer has no results."""

    engine = VllmEngine(Silent(simulated()), tickets=RULES, extension=True)

    async def story() -> None:
        await engine.pause()
        await engine.begin(Version(1))
        await engine.load(bucket(1))
        with pytest.raises(EngineError, match="nothing that they tell"):
            await engine.finish(Version(1))
        assert (await engine.status()).version is None

    run(story())


def test_an_engine_that_died_in_an_actor_is_lost_by_the_name_that_ray_gives_it() -> None:
    class EngineDeadError(Exception):
        """vLLM's own."""

    class RayTaskError(Exception):
        """What Ray makes of any error; it inherits from the engine's as well."""

    died = type("RayTaskError(EngineDeadError)", (RayTaskError, EngineDeadError), {})

    class Dying(Streaming):
        async def start_weight_update(self) -> None:
            raise died

    engine = VllmEngine(Dying(simulated()), tickets=RULES)

    async def story() -> None:
        await engine.pause()
        with pytest.raises(EngineError, match="the engine died; whether it did start_weight"):
            await engine.begin(Version(1))
        assert (await engine.status()).health == "unknown"

    run(story())


def test_a_guard_that_does_not_answer_is_no_reason_to_wait_for_ever() -> None:
    class Frozen:
        """An actor whose methods never come back."""

        class Method:
            async def remote(self, *_: Any, **__: Any) -> None:
                await asyncio.sleep(30)

        sleep = wake_up = reset_prefix_cache = raise_floor = Method()
        start_weight_update = update_weights = finish_weight_update = Method()

    engine = VllmEngine(
        Frozen(), tickets=RULES, ranks=1, guarded=True, deadlines_s={"raise_floor": 0.05}
    )

    async def story() -> None:
        with pytest.raises(EngineError, match=r"was not told within 0.05 s that the floor is"):
            await engine.raise_floor(Floor(0, 3))
        assert (await engine.status()).floor == Floor(0, 3)

    run(story())


def numbered(fence: str, generation: int) -> Ticket:
    return Ticket(
        key=FenceKey("run", 0, "replica/0", generation),
        fence=FenceName(fence),
        epoch=Epoch(0),
        count=1,
        hash="00" * 32,
    )


def test_requests_pass_our_gate_and_a_pause_waits_for_them() -> None:
    engine = VllmEngine(Streaming(simulated()), tickets=RULES)
    order: list[str] = []

    async def story() -> None:
        async def request() -> None:
            async for text in engine.stream("a", None, "r0"):
                await asyncio.sleep(0.05)
                order.append(text)

        asking = asyncio.ensure_future(request())
        await asyncio.sleep(0.01)
        await engine.pause("wait")
        order.append("paused")
        with pytest.raises(EngineRefused, match="not serving"):
            await request()
        await asking

    run(story())
    assert order == ["a@0", "paused"]


def test_what_is_missing_is_said_before_anything_is_done() -> None:
    class Bare:
        def sleep(self) -> None: ...
        def wake_up(self) -> None: ...

    async def story(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=r"has no sleep\(level\), wake_up\(tags\), co"):
            await engine.pause()

    run(story(VllmEngine(Bare(), tickets=RULES, transfer=Rpc())))
    with pytest.raises(EngineError, match="is no vLLM engine"):
        VllmEngine(object(), tickets=RULES)
    with pytest.raises(EngineError, match="needs its base resident"):
        VllmEngine(Bare(), tickets=RULES, transfer=Lora())


def test_what_could_not_be_verified_is_listed() -> None:
    engine = VllmEngine(SyncSurface(simulated()), tickets=RULES)

    async def story() -> str:
        await engine.pause()
        await engine.close()
        return "\n".join((await engine.status()).unverified)

    said = run(story())
    assert "checked by name only" in said
    assert "how many ranks" in said
    assert "WorkerExtension" in said
    assert "no `verdicts`" in said


def test_a_release_that_nobody_has_tried_is_said_once_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = ModuleType("vllm")
    installed.__version__ = "0.40.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", installed)
    engine = VllmEngine(SyncSurface(simulated()), tickets=RULES)

    async def story() -> tuple[str, ...]:
        await engine.pause()
        await engine.close()
        return (await engine.status()).unverified

    with pytest.warns(RuntimeWarning, match=r"vLLM 0\.40\.1 is not one of 0\.24 to 0\.33") as said:
        listed = run(story())
    assert len(said) == 1
    assert str(said[0].message) in listed
