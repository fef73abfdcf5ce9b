"""A configuration that changes between two syncs, in a job of several replicas: nobody waits for
ranks that go on as before, and all meet again at the next sync."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from phasesync.errors import EpochFailed, describe
from phasesync.integrations.verl.probe import worker_class
from phasesync.integrations.verl.settings import Settings
from phasesync.integrations.verl.worker import worker_body
from phasesync.report.audit import audit_paths
from phasesync.runtime.parting import Elsewhere
from tests.integrations.written_down import module, worker

RANKS, REPLICA = 4, 2
SOON_S = 30.0  # A plan that nobody comes to is waited for ten times as long.


class Job:
    """The workers of a job in one process, called as verl's driver calls them."""

    def __init__(self, runs: Path) -> None:
        store = FileStore(str(runs / "store"), RANKS)
        settings = Settings.make(
            runs=str(runs), run="job", store=lambda worker: store, plan_deadline_s=300.0
        )
        found = module()
        cls: Any = worker_class(found)
        cls.update_weights = worker_body(cls.update_weights, found, settings)
        self.workers = [worker(cls, "plain")[0] for _ in range(RANKS)]
        for rank, made in enumerate(self.workers):
            made.rank, made.world_size = rank, RANKS
            made.config.rollout.tensor_model_parallel_size = REPLICA

    def configure(self, *ranks: int, **options: Any) -> None:
        for rank in ranks:
            vars(self.workers[rank].config.rollout).update(options)

    async def sync(self, step: int, *, late: dict[int, float] | None = None) -> list[str]:
        """What each rank says of the step: nothing, or why it failed."""

        async def one(rank: int) -> str:
            await asyncio.sleep((late or {}).get(rank, 0.0))
            try:
                async with asyncio.timeout(SOON_S):
                    await self.workers[rank].update_weights(global_steps=step)
            except EpochFailed as failed:
                return describe(failed.cause)
            return ""

        return list(await asyncio.gather(*map(one, range(RANKS))))

    async def end(self) -> None:
        """What the end of their processes does to real workers."""
        runners = [made._phasesync._runner for made in self.workers]
        await asyncio.gather(*(runner.close() for runner in runners if runner is not None))


def run(tmp_path: Path, story: Callable[[Job], Awaitable[None]]) -> None:
    async def main() -> None:
        job = Job(tmp_path)
        try:
            await story(job)
        finally:
            await job.end()

    asyncio.run(main())


@pytest.mark.parametrize("others_first", [True, False], ids=["others first", "others later"])
def test_a_replica_that_changes_alone_does_not_wait_for_the_others(
    tmp_path: Path, others_first: bool
) -> None:
    """They have finished the sync before it comes, or begin it while it waits for them."""

    async def main(job: Job) -> None:
        assert await job.sync(1) == [""] * RANKS
        job.configure(0, 1, free_cache_engine=False)
        late = (0, 1) if others_first else (2, 3)
        began = time.monotonic()
        told = await job.sync(2, late=dict.fromkeys(late, 0.5))
        assert time.monotonic() - began < SOON_S
        assert told[2:] == ["", ""], "they finish what is legal for them"
        assert told[0] == told[1]
        assert told[0].startswith("trainer/0 failed")
        assert "free_cache_engine: False, was True" in told[0]
        assert "and trainer/2 has begun sync 2 as before" in told[0]

        job.configure(2, 3, free_cache_engine=False)
        assert await job.sync(3) == [""] * RANKS, "all begin anew"
        assert await job.sync(4) == [""] * RANKS

    run(tmp_path, main)
    before, between, after = audit_paths([tmp_path])
    assert (before.verdict, between.verdict, after.verdict) == ("failure", "failure", "ok")
    assert set(before.guilty) <= {"trainer/0", "trainer/1"}, "whoever of them left first"
    assert between.guilty == ("trainer/0",), "who has looked"


def test_a_rank_that_changes_alone_stops_its_replica(tmp_path: Path) -> None:
    """The other replica finishes, and leaves the plan behind before its next sync."""

    async def main(job: Job) -> None:
        assert await job.sync(1) == [""] * RANKS
        job.configure(3, free_cache_engine=False)
        told = await job.sync(2)
        assert told[:2] == ["", ""]
        assert told[2] == told[3]
        assert told[2].startswith("trainer/3 failed")
        job.configure(3, free_cache_engine=True)
        assert await job.sync(3) == [""] * RANKS

    run(tmp_path, main)


def test_all_that_change_agree_anew_at_once(tmp_path: Path) -> None:
    async def main(job: Job) -> None:
        assert await job.sync(1) == [""] * RANKS
        job.configure(*range(RANKS), free_cache_engine=False)
        # One replica waits for the other, long enough to look whether it goes on without it.
        assert await job.sync(2, late={2: 0.6, 3: 0.6}) == [""] * RANKS

    run(tmp_path, main)
    assert [answer.verdict for answer in audit_paths([tmp_path])] == ["ok", "ok"]


def test_who_does_not_find_the_others_looks_further_away_each_time() -> None:
    """Scopes count their fences apart, and may be any number apart."""
    others = Elsewhere(attempt=0, epoch=9, scope="replica/1", own=range(400, 405))
    assert others.generations() == range(376, 429)
    assert others.generations(3) == range(208, 597)
    assert others.generations(10_000) == range(0, 1941)
