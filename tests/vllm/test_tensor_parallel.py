"""`AsyncLLM` over two ranks: every rank commits, and one failed call makes all unknown."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from phasesync.core.model import Version
from phasesync.engines.base import KV_CACHE, WEIGHTS
from phasesync.engines.vllm import Rpc, VllmEngine
from phasesync.errors import EngineError, EngineRefused

from .conftest import PROMPT, Models
from .cycle import Fences
from .sender import Sender, children, end
from .test_async_llm import ask, say

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 115))


@pytest.fixture(scope="module")
def llm(run: Run, models: Models, engine_options: dict[str, Any]) -> Iterator[Any]:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def make() -> Any:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=models.folders[0],
                tensor_parallel_size=2,
                weight_transfer_config=WeightTransferConfig(backend="test_gloo"),
                **engine_options,
            )
        )

    before = children()
    engine = run(make())
    yield engine
    engine.shutdown()
    end(children() - before)


def test_two_ranks_serve_exactly_what_the_trainer_holds(run: Run, llm: Any, models: Models) -> None:
    fences = Fences()
    engine = VllmEngine(llm, tickets=fences.rules(), checksums=True)

    async def story() -> list[list[int]]:
        said = []
        with Sender(receivers=2) as sender:
            await sender.join(engine.init_transfer)
            seen = set()
            for epoch in range(2):
                await engine.pause()
                await engine.release((WEIGHTS, KV_CACHE))
                held = await llm.collective_rpc("held_bytes")
                assert held == [{"weights": 0, "kv_cache": 0}] * 2
                await engine.resume(WEIGHTS, fences.open("ready_for_weights", epoch))
                await engine.begin(Version(epoch + 1))
                await sender.push(models.references[epoch + 1], engine.load)
                evidence = await engine.finish(Version(epoch + 1))
                assert evidence.versions == (str(epoch + 1),) * 2
                seen.add(evidence.checksums)
                await engine.resume(KV_CACHE, fences.open("memory_released", epoch))
                await engine.resume_generation(fences.open("ready_to_serve", epoch))
                said.append(await say(ask(engine.stream)))
        assert len(seen) == 2, "the checksums of two versions must differ"
        return said

    assert run(story()) == [models.say(1, PROMPT), models.say(2, PROMPT)]


def test_one_failed_call_makes_the_engine_unknown_and_nothing_is_sent_after_it(
    run: Run, llm: Any
) -> None:
    """Rank 0 fails; the answer of rank 1 is still queued, and the next call would get it."""
    fences = Fences()
    engine = VllmEngine(llm, tickets=fences.rules(), transfer=Rpc(load="fail_if_rank"))

    async def story() -> None:
        await engine.pause()
        await engine.begin(Version(1))
        with pytest.raises(EngineError, match="rank 0 was told to fail"):
            await engine.load(0)
        for refused in (
            engine.begin(Version(1)),
            engine.pause(),
            engine.release((WEIGHTS, KV_CACHE)),
            engine.resume_generation(fences.open("ready_to_serve")),
        ):
            with pytest.raises(EngineRefused, match="the engine is unknown"):
                await refused
        # What the port spares its caller: rank 1 answers this call with its answer to the last.
        assert await llm.collective_rpc("phasesync_version") == ["2", "fine"]

    run(story())
