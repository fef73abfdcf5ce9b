"""The sync after one that failed: what may be put back is, and what may not says why each time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from phasesync.errors import EpochFailed, describe
from phasesync.integrations.verl.probe import worker_class
from phasesync.integrations.verl.settings import Settings
from phasesync.integrations.verl.worker import worker_body
from tests.integrations.written_down import module, worker

RANKS = 2


def job(runs: Path) -> list[Any]:
    """Two ranks of one replica, in one process."""
    store = FileStore(str(runs / "store"), RANKS)
    found = module()
    cls: Any = worker_class(found)
    settings = Settings.make(runs=str(runs), run=runs.name, store=lambda worker: store)
    cls.update_weights = worker_body(cls.update_weights, found, settings)
    workers = [worker(cls, "plain")[0] for _ in range(RANKS)]
    for rank, made in enumerate(workers):
        made.rank, made.world_size = rank, RANKS
        made.config.rollout.tensor_model_parallel_size = RANKS
    return workers


async def sync(workers: list[Any], step: int) -> list[str]:
    async def one(made: Any) -> str:
        try:
            async with asyncio.timeout(30):
                await made.update_weights(global_steps=step)
        except EpochFailed as failed:
            return describe(failed.cause)
        return ""

    return list(await asyncio.gather(*map(one, workers)))


async def end(workers: list[Any]) -> None:
    """What the end of their processes does to real workers."""
    runners = [made._phasesync._runner for made in workers]
    await asyncio.gather(*(runner.close() for runner in runners if runner is not None))


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


async def takes_long(*_: Any, **__: Any) -> None:
    await asyncio.sleep(60)


#: What fails on one rank while the other, which is cut off, is at what it is at; and why the engine
#: cannot be put back then.
UNKNOWN = [
    ("update_weights", 0, "update_weights", "trainer/1 failed in phase 'reset'"),
    ("update_weights", 1, "update_weights", "trainer/0 failed in phase 'quiesce'"),
    ("resume", 1, "resume", "trainer/0 failed in phase 'reclaim'"),
]


@pytest.mark.parametrize(("call", "who", "other", "why"), UNKNOWN)
def test_what_was_cut_off_is_not_taken_from_under_the_engine(
    tmp_path: Path, call: str, who: int, other: str, why: str
) -> None:
    async def main() -> None:
        workers = job(tmp_path)
        well = [vars(made.rollout).copy() for made in workers]
        assert await sync(workers, 1) == ["", ""]
        setattr(workers[who].rollout, call, fails)
        setattr(workers[1 - who].rollout, other, takes_long)
        first = await sync(workers, 2)
        assert first[0] == first[1]
        assert first[0].startswith(f"trainer/{who} failed")
        assert first[0].endswith("boom")
        for made, rollout in zip(workers, well, strict=True):
            vars(made.rollout).update(rollout)
        for step in (3, 4):
            told = await sync(workers, step)
            assert told[0] == told[1]
            assert told[0].startswith(why)
            assert "start the job again" in told[0]
        await end(workers)

    asyncio.run(main())


@pytest.mark.parametrize("who", range(RANKS))
@pytest.mark.parametrize("call", ["get_per_tensor_param", "update_weights", "to"])
def test_what_has_ended_badly_everywhere_is_put_back(tmp_path: Path, call: str, who: int) -> None:
    async def main() -> None:
        workers = job(tmp_path)
        made = workers[who]
        owner = made.rollout if call == "update_weights" else made.actor.engine
        stock = getattr(owner, call)
        for step in (1, 2, 3, 4):
            setattr(owner, call, stock if step % 2 else fails)
            told = await sync(workers, step)
            assert [bool(each) for each in told] == [step % 2 == 0] * 2, told
        await end(workers)

    asyncio.run(main())
