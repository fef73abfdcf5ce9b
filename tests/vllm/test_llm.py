"""`LLM`, one rank, in this process: whole epochs, every illegal order, the guard, LoRA."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from phasesync.core.model import Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import guard
from phasesync.engines.vllm import Rpc, VllmEngine
from phasesync.errors import EngineError, EngineRefused

from .conftest import PROMPT, Models
from .cycle import LEADER, Fences, colocated_epoch


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


def asked(**more: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return {
        "prompts": [{"prompt_token_ids": PROMPT}],
        "sampling_params": params,
        "use_tqdm": False,
    } | more


def tokens(outputs: Any) -> list[int]:
    return list(outputs[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def llm(models: Models, engine_options: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM

    engine = LLM(model=models.folders[0], **engine_options)
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def fresh(llm: Any, models: Models) -> Any:
    """The engine awake, with model 0, whatever the test before left."""
    llm.wake_up()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": models.folders[0]})
    llm.reset_prefix_cache()
    return llm


def folder(models: Models, index: int) -> dict[str, str]:
    return {"weights_path": models.folders[index]}


def test_whole_epochs_serve_exactly_what_the_trainer_holds(fresh: Any, models: Models) -> None:
    fences = Fences()
    engine = VllmEngine(fresh, tickets=fences.rules(), transfer=Rpc(), checksums=True)

    async def story() -> list[list[int]]:
        said = [tokens(await engine.generate(**asked()))]
        for epoch in range(3):
            await colocated_epoch(engine, fences, epoch, [folder(models, (epoch + 1) % 3)])
            said.append(tokens(await engine.generate(**asked())))
        status = await engine.status()
        assert (status.version, status.gate, status.unverified) == (3, "open", ())
        await engine.close()
        return said

    assert run(story()) == [models.say(index % 3, PROMPT) for index in range(4)]


def test_a_release_really_frees_and_discards(fresh: Any) -> None:
    fences = Fences()
    engine = VllmEngine(fresh, tickets=fences.rules(), transfer=Rpc())

    async def story() -> None:
        before = fresh.collective_rpc("held_bytes")[0]
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        assert fresh.collective_rpc("held_bytes") == [{"weights": 0, "kv_cache": 0}]
        await engine.resume(WEIGHTS, fences.open("ready_for_weights"))
        assert fresh.collective_rpc("held_bytes")[0] == {**before, "kv_cache": 0}
        with pytest.raises(EngineRefused, match="the weights are discarded"):
            await engine.resume(KV_CACHE, fences.open("memory_released"))
        await engine.close()

    run(story())


def test_every_illegal_order_is_refused_and_the_engine_lives(fresh: Any, models: Models) -> None:
    from phasesync.engines.conformance import check_engine_port
    from phasesync.engines.tickets import TicketRules

    made: list[VllmEngine] = []

    async def make(rules: TicketRules) -> VllmEngine:
        made.append(VllmEngine(fresh, tickets=rules, transfer=Rpc(), version=Version(0)))
        return made[0]

    run(check_engine_port(make, lambda version: folder(models, version)))
    assert tokens(fresh.generate(**asked())) == models.say(2, PROMPT)


def test_a_bucket_that_fails_leaves_no_way_to_serve_until_a_whole_version_is_there(
    fresh: Any, models: Models
) -> None:
    fences = Fences()
    engine = VllmEngine(fresh, tickets=fences.rules(), transfer=Rpc())

    async def story() -> None:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        await engine.resume(WEIGHTS, fences.open("ready_for_weights"))
        await engine.begin(Version(1))
        with pytest.raises(EngineError, match="failed to load"):
            await engine.load({"weights_path": "/no/such/folder"})
        for refused in (
            engine.finish(Version(1)),
            engine.resume(KV_CACHE, fences.open("memory_released")),
            engine.resume_generation(fences.open("ready_to_serve")),
        ):
            with pytest.raises(EngineRefused):
                await refused
        await engine.begin(Version(1))
        await engine.load(folder(models, 1))
        await engine.finish(Version(1))
        await engine.resume(KV_CACHE, fences.open("memory_released"))
        await engine.resume_generation(fences.open("ready_to_serve"))
        assert tokens(await engine.generate(**asked())) == models.say(1, PROMPT)
        await engine.close()

    run(story())


def test_an_update_in_place_does_not_answer_from_an_old_prefix_cache(
    fresh: Any, models: Models
) -> None:
    fences = Fences()
    engine = VllmEngine(fresh, tickets=fences.rules(), transfer=Rpc())

    async def story() -> None:
        assert tokens(await engine.generate(**asked())) == models.say(0, PROMPT)
        await engine.pause()
        await engine.begin(Version(1))
        await engine.load(folder(models, 2))
        await engine.finish(Version(1))
        await engine.resume_generation(fences.open("ready_to_serve"))
        assert tokens(await engine.generate(**asked())) == models.say(2, PROMPT)
        await engine.close()

    run(story())


def test_the_guard_refuses_whoever_calls_and_the_engine_stays_usable(
    fresh: Any, models: Models
) -> None:
    fences = Fences()
    keeper = guard(fresh, run="run", scope="replica/0", verdicts=fences.table, floor=Floor(0, 3))
    keeper.expect(0, {LEADER: 1})
    try:
        for said, ticket in fences.bad("ready_to_serve", 3, replaced=True).items():
            with pytest.raises(EngineRefused, match=said):
                fresh.generate(**asked(ticket=ticket))
        fresh.sleep(level=1)
        fresh.wake_up(["weights"])
        for said, ticket in fences.bad("memory_released", 3, replaced=True).items():
            wakes: tuple[Callable[..., Any], ...] = (
                partial(fresh.wake_up, ["kv_cache"]),
                fresh.wake_up,
                partial(fresh.llm_engine.wake_up, ["kv_cache"]),
                partial(fresh.llm_engine.model_executor.wake_up, ["kv_cache"]),
                partial(fresh.llm_engine.model_executor.collective_rpc, "wake_up"),
            )
            for wake in wakes:
                with pytest.raises(EngineRefused, match=said):
                    wake(ticket=ticket)
        for above in (type(fresh).wake_up, type(fresh.llm_engine).wake_up):
            owner = fresh if above is type(fresh).wake_up else fresh.llm_engine
            with pytest.raises(EngineRefused):  # The class's own method, past the object's.
                above(owner, ["kv_cache"])
        with pytest.raises(EngineRefused):
            type(fresh).generate(fresh, **asked())
        assert keeper.unverified == ()  # No method of this release that the guard does not know.
        assert fresh.collective_rpc("held_bytes")[0]["kv_cache"] == 0
        fresh.wake_up(["kv_cache"], ticket=fences.open("memory_released", 3))
        keeper.admit(fences.open("ready_to_serve", 3))
        assert tokens(fresh.generate(**asked())) == models.say(0, PROMPT)
    finally:
        keeper.remove()


def test_a_leader_frozen_between_pass_and_resume_is_refused(fresh: Any, models: Models) -> None:
    """It passed, froze, was replaced by attempt 1, which served; now it wakes up."""
    fences = Fences()
    keeper = guard(fresh, run="run", scope="replica/0", verdicts=fences.table)
    try:
        frozen = fences.open("memory_released", 5)
        for attempt in (1, 1):
            fresh.sleep(level=1)
            fresh.wake_up(["weights"])
            if attempt == 1 and keeper.floor == Floor(0, 0):
                new = fences.open("memory_released", 5, attempt=1)
                fresh.wake_up(["kv_cache"], ticket=new)
        with pytest.raises(EngineRefused, match="floor is attempt 1, epoch 5"):
            fresh.wake_up(["kv_cache"], ticket=frozen)
        fresh.wake_up(["kv_cache"], ticket=fences.open("memory_released", 6, attempt=1))
        again = fences.open("ready_to_serve", 6, attempt=1)
        assert tokens(fresh.generate(**asked(ticket=again))) == models.say(0, PROMPT)
    finally:
        keeper.remove()
