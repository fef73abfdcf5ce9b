"""`AsyncLLM`, one rank, engine and worker in processes of their own: vLLM's weight-update session,
requests in flight, the guard."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank, RoleName, Version
from phasesync.engines.actions import engine_actions
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import guard
from phasesync.engines.tickets import TicketRules
from phasesync.engines.vllm import Rpc, VllmEngine
from phasesync.errors import EngineRefused, EpochFailed
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import RankRunner, Turn

from .conftest import PROMPT, Models
from .cycle import LEADER, Fences, colocated_epoch
from .sender import Sender, children, end

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One event loop for the module: an `AsyncLLM` belongs to the loop that it was made in."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 110))


@pytest.fixture(scope="module")
def llm(run: Run, models: Models, engine_options: dict[str, Any]) -> Iterator[Any]:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def make() -> Any:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=models.folders[0],
                weight_transfer_config=WeightTransferConfig(backend="test_gloo"),
                **engine_options,
            )
        )

    before = children()
    engine = run(make())
    yield engine
    engine.shutdown()
    end(children() - before)


@pytest.fixture(scope="module")
def sender(run: Run, llm: Any) -> Iterator[Sender]:
    engine = VllmEngine(llm, tickets=Fences().rules())
    with Sender(receivers=1) as made:
        run(made.join(engine.init_transfer))
        run(llm.resume_generation())
        yield made


def params(count: int = 8) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


_requests = iter(range(10_000))


async def say(stream: Any) -> list[int]:
    last: Any = None
    async for output in stream:
        last = output
    return list(last.outputs[0].token_ids)


def ask(engine: Any, count: int = 8, **more: Any) -> Any:
    prompt = {"prompt_token_ids": PROMPT}
    return engine(prompt, params(count), f"r{next(_requests)}", **more)


def test_whole_epochs_serve_exactly_what_the_trainer_holds(
    run: Run, llm: Any, sender: Sender, models: Models
) -> None:
    fences = Fences()
    engine = VllmEngine(llm, tickets=fences.rules())

    async def story() -> list[list[int]]:
        said = [await say(ask(engine.stream))]
        for epoch in range(3):
            model = models.references[(epoch + 1) % 3]
            await engine.pause()
            await engine.release((WEIGHTS, KV_CACHE))
            await engine.resume(WEIGHTS, fences.open("ready_for_weights", epoch))
            await engine.begin(Version(epoch + 1))
            await sender.push(model, engine.load)
            evidence = await engine.finish(Version(epoch + 1))
            assert evidence.versions == (str(epoch + 1),)
            await engine.resume(KV_CACHE, fences.open("memory_released", epoch))
            assert await llm.is_paused(), "fully awake, vLLM scheduled by itself"
            await engine.resume_generation(fences.open("ready_to_serve", epoch))
            said.append(await say(ask(engine.stream)))
        status = await engine.status()
        assert (status.version, status.unverified) == (3, ())
        assert await llm.get_weight_version() == "3"
        return said

    assert run(story()) == [models.say(index % 3, PROMPT) for index in range(4)]


@pytest.mark.parametrize(("policy", "length"), [("abort", None), ("wait", 60)])
def test_a_pause_deals_with_what_is_in_flight(
    run: Run, llm: Any, policy: Any, length: int | None
) -> None:
    engine = VllmEngine(llm, tickets=Fences().rules())

    async def story() -> int:
        asking = asyncio.ensure_future(say(ask(engine.stream, 60)))
        await asyncio.sleep(0.05)
        await engine.pause(policy)
        with pytest.raises(EngineRefused, match="not serving"):
            await say(ask(engine.stream))
        got = len(await asking)
        await llm.resume_generation()
        return got

    got = run(story())
    assert got == length if length else got < 60


def test_a_late_request_is_parked_and_answered_by_the_new_weights(
    run: Run, llm: Any, sender: Sender, models: Models
) -> None:
    fences = Fences()
    engine = VllmEngine(llm, tickets=fences.rules(), late="park")

    async def story() -> list[int]:
        await engine.pause()
        late = asyncio.ensure_future(say(ask(engine.stream)))
        await asyncio.sleep(0.05)
        await engine.begin(Version(1))
        await sender.push(models.references[2], engine.load)
        await engine.finish(Version(1))
        assert not late.done()
        await engine.resume_generation(fences.open("ready_to_serve"))
        return list(await late)

    assert run(story()) == models.say(2, PROMPT)


def test_the_guard_refuses_whoever_calls_and_the_engine_stays_usable(
    run: Run, llm: Any, models: Models
) -> None:
    fences = Fences()
    keeper = guard(llm, run="run", scope="replica/0", verdicts=fences.table, floor=Floor(0, 3))
    keeper.expect(0, {LEADER: 1})
    assert keeper.unverified == ()  # No method of this release that the guard does not know.

    async def story() -> None:
        for call in (
            llm.engine_core.resume_scheduler_async,
            partial(llm.engine_core.call_utility_async, "wake_up", ["kv_cache"]),
            llm.checkpoint_restore,
        ):
            with pytest.raises(EngineRefused):
                await call()
        for said, ticket in fences.bad("ready_to_serve", 3, replaced=True).items():
            with pytest.raises(EngineRefused, match=said):
                ask(llm.generate, ticket=ticket)
        await llm.sleep(level=1)
        await llm.wake_up(["weights"])
        for said, ticket in fences.bad("memory_released", 3, replaced=True).items():
            with pytest.raises(EngineRefused, match=said):
                await llm.wake_up(["kv_cache"], ticket=ticket)
            with pytest.raises(EngineRefused, match=said):
                await llm.wake_up(ticket=ticket)
            with pytest.raises(EngineRefused, match=said):
                await llm.engine_core.wake_up_async(["kv_cache"], ticket=ticket)
        assert (await llm.collective_rpc("held_bytes"))[0]["kv_cache"] == 0
        engine = VllmEngine(llm, tickets=fences.rules(), level=1)
        await colocated_epoch(engine, fences, 3, (), update=False)
        assert len(await say(ask(llm.generate))) == 8

    try:
        run(story())
    finally:
        keeper.remove()


def test_a_worker_killed_in_mid_update_is_audited_right(run: Run, llm: Any, tmp_path: Path) -> None:
    """Last in this file: the engine is gone afterwards. The second epoch kills its worker."""
    fences = InProcessFences()
    rank = Rank(RoleName("trainer"), 0)
    engine = VllmEngine(
        llm,
        tickets=TicketRules(run="killed", scope="replica/0"),
        transfer=Rpc(load="die_if_rank"),
        deadlines_s={"load": 30.0},
    )
    survives, dies = 99, 0

    def buckets(turn: Turn) -> list[int]:
        return [survives] if turn.epoch == 1 else [survives, dies]

    async def nothing() -> None:
        """What the trainer itself does is not what this test is about."""

    own = ("load_back", "train", "trim_cache", "stage", "offload", "empty_cache", "reset")
    actions: dict[str, Any] = {
        **engine_actions(engine, buckets=buckets),
        **dict.fromkeys(own, nothing),
    }

    async def story() -> EpochFailed:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        async with RankRunner(
            "colocated",
            rank=0,
            ranks=1,
            options={"replica_size": 1},
            actions=actions,
            fences=fences.endpoint(rank, 0),
            run="killed",
            runs=tmp_path,
        ) as runner:
            await runner.run_epoch()
            with pytest.raises(EpochFailed) as caught:
                await runner.run_epoch()
        return caught.value

    failed = run(story())
    assert failed.cause.phase == "load"
    assert not failed.can_retry, "an engine that died cannot be reclaimed"
    status = run(engine.status())
    assert (status.health, status.content) == ("unknown", "partial")
    answer = audit(tmp_path)
    assert (answer["verdict"], answer["epoch"], answer["phase"]) == ("failure", 2, "load")
    assert answer["guilty"] == ["trainer/0"], "the leader, whose action it was"
    assert "the engine died" in answer["because"]


def audit(folder: Path) -> Any:
    """The auditor's answer on the journals of the one run in `folder`."""
    command = [sys.executable, "-m", "phasesync", "audit", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)
