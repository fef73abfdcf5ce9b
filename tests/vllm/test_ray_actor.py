"""An engine inside a Ray actor, guarded there: the ticket is an argument of the actor's methods."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from phasesync.core.model import FenceKey, FenceVerdict, Opened, Rank, Ticket
from phasesync.engines.base import Floor
from phasesync.engines.guard import guard
from phasesync.engines.vllm import Rpc, VllmEngine
from tests.workers import PATHS

from .conftest import PROMPT, Models
from .cycle import LEADER, Fences, colocated_epoch

ray = pytest.importorskip("ray")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


class Board:
    """The verdicts of the run's fences; here an actor, told by whoever closes a fence."""

    def __init__(self) -> None:
        self.opened: dict[FenceKey, Opened] = {}

    def record(self, verdict: Opened) -> None:
        self.opened[verdict.ticket.key] = verdict

    def verdict(self, key: FenceKey) -> Opened | None:
        return self.opened.get(key)


class Replica:
    """What a user's rollout actor looks like: an `LLM`, its guard, and what is called of it."""

    def __init__(self, folder: str, options: dict[str, Any], board: Any) -> None:
        from vllm import LLM

        self.llm: Any = LLM(model=folder, **options)

        def verdicts(key: FenceKey) -> FenceVerdict | None:
            found: FenceVerdict | None = ray.get(board.verdict.remote(key))
            return found

        self.guard = guard(self.llm, run="run", scope="replica/0", verdicts=verdicts)

    def sleep(self, level: int = 1) -> None:
        self.llm.sleep(level=level)

    def wake_up(self, tags: list[str] | None = None, ticket: Ticket | None = None) -> Any:
        return self.llm.wake_up(tags, ticket=ticket)

    def is_sleeping(self) -> Any:
        return self.llm.llm_engine.is_sleeping()

    def reset_prefix_cache(self) -> Any:
        return self.llm.reset_prefix_cache()

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)

    def admit(self, ticket: Ticket | None) -> None:
        self.guard.admit(ticket)

    def raise_floor(self, floor: Floor) -> Floor:
        return self.guard.raise_floor(floor)

    def expect(self, attempt: int, incarnations: dict[Rank, int]) -> None:
        self.guard.expect(attempt, incarnations)

    def say(self, prompt: list[int], ticket: Ticket | None = None) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt}]
        told = self.llm.generate(asked, params, use_tqdm=False, ticket=ticket)
        return list(told[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def board() -> Iterator[Any]:
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": PATHS},
    )
    yield ray.remote(num_cpus=0)(Board).remote()
    ray.shutdown()


@pytest.fixture(scope="module")
def replica(board: Any, models: Models, engine_options: dict[str, Any]) -> Iterator[Any]:
    actor = ray.remote(num_cpus=1)(Replica).remote(models.folders[0], engine_options, board)
    yield actor
    ray.kill(actor)


def test_epochs_through_an_actor_serve_exactly_what_the_trainer_holds(
    board: Any, replica: Any, models: Models
) -> None:
    fences = Fences(on_open=lambda opened: ray.get(board.record.remote(opened)))
    engine = VllmEngine(
        replica, tickets=fences.rules(), transfer=Rpc(), ranks=1, extension=True, guarded=True
    )

    async def story() -> list[list[int]]:
        said = []
        for epoch in range(2):
            bucket = {"weights_path": models.folders[epoch + 1]}
            await colocated_epoch(engine, fences, epoch, [bucket])
            said.append(await replica.say.remote(PROMPT))
        assert "which vLLM" in " ".join((await engine.status()).unverified)
        return said

    assert run(story()) == [models.say(1, PROMPT), models.say(2, PROMPT)]


def test_the_actor_refuses_whoever_calls_and_stays_usable(
    board: Any, replica: Any, models: Models
) -> None:
    fences = Fences(on_open=lambda opened: ray.get(board.record.remote(opened)))
    fences.generation = 1000
    ray.get(replica.raise_floor.remote(Floor(0, 7)))
    ray.get(replica.expect.remote(0, {LEADER: 1}))
    for said, ticket in fences.bad("ready_to_serve", 7, replaced=True).items():
        with pytest.raises(Exception, match=rf"EngineRefused[^$]*{said}"):
            ray.get(replica.say.remote(PROMPT, ticket))
    ray.get(replica.sleep.remote(level=1))
    ray.get(replica.wake_up.remote(["weights"]))
    for said, ticket in fences.bad("memory_released", 7, replaced=True).items():
        for tags in (["kv_cache"], None):
            with pytest.raises(Exception, match=rf"EngineRefused[^$]*{said}"):
                ray.get(replica.wake_up.remote(tags, ticket))
    ray.get(replica.wake_up.remote(["kv_cache"], fences.open("memory_released", 7)))
    good = fences.open("ready_to_serve", 7)
    assert ray.get(replica.say.remote(PROMPT, good)) == models.say(2, PROMPT)
