"""The colocated path as verl runs it: Ray actors of verl's own worker class, called through verl's
own worker group, ONE_TO_ALL and not blocking."""

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

import verl
from phasesync.errors import EpochFailed, describe
from phasesync.report.audit import audit_paths
from tests.verl.rank import Job
from tests.verl.ray_rank import RayRank
from tests.verl.table import row
from tests.verl.verdict import verdict

RELEASE = verl.__version__
ROOT = Path(__file__).parents[2]
RANKS = 2
OFFLOAD = "engine.to cpu"
HAS_BARRIER = "distributed.barrier" in inspect.getsource(RayRank.update_weights)
HANGS_AFTER_S = 6.0
WAITS = object()


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def group(runs: Path, job: Job, mode: str = "enforce", *, named: bool = True) -> Any:
    """verl's worker group over `RANKS` actors; phasesync comes by its environment variables."""
    environment = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))),
        "VERL_USE_EXTERNAL_MODULES": "phasesync.integrations.verl.auto" if named else "",
        "PHASESYNC": mode,
        "PHASESYNC_RUNS": str(runs),
        "PHASESYNC_RUN": "job",
        "OMP_NUM_THREADS": "1",
    }
    actor = ray.remote(RayRank)
    made = RayClassWithInitArgs(actor, job, str(runs.with_name("memory")))
    pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, made, device_name="cpu", worker_env=environment)


def sync(workers: Any, step: int, *, within_s: float = 60.0) -> list[Any]:
    """One call as verl's trainer makes it; what each rank's answer came to."""
    workers.begin(step)
    pending = workers.update_weights(global_steps=step)
    ray.wait(pending, num_returns=len(pending), timeout=within_s)
    answers: list[Any] = []
    for each in pending:
        try:
            answers.append(ray.get(each, timeout=1))
        except ray.exceptions.RayTaskError as error:
            answers.append(error.cause)
        except ray.exceptions.GetTimeoutError:
            answers.append(WAITS)
    return answers


def stock(tmp_path: Path, job: Job, fault: Callable[[Any], list[Any]]) -> str:
    """What the same fault does to verl's own body, in a few words."""
    where = tmp_path / "stock"
    where.mkdir()
    workers = group(where / "runs", job, "off")
    try:
        answers = fault(workers)
    finally:
        for worker in workers.workers:
            ray.kill(worker)
    waiting = [str(rank) for rank, answer in enumerate(answers) if answer is WAITS]
    raised = [str(answer) for answer in answers if isinstance(answer, Exception)]
    if waiting:
        return f"HANGS: rank {', '.join(waiting)} still waits"
    return f"{len(raised)} of {RANKS} fail: {raised[0]}" if raised else "passes"


def test_late_then_failing_then_well_again(tmp_path: Path) -> None:
    job = Job(ranks=RANKS, replica=RANKS, late={1: 1.0}, fail=(1, OFFLOAD), fail_at=2)
    workers = group(tmp_path / "runs", job)
    assert sync(workers, 1) == [None] * RANKS
    calls = workers.sleep()
    assert all(each[-1] == "expandable_segments True" for each in calls)
    failed = sync(workers, 2)
    assert all(isinstance(each, EpochFailed) for each in failed)
    assert {each.cause.phase for each in failed} == {"offload"}
    assert {str(rank) for each in failed for rank in each.cause.ranks} == {"trainer/1"}
    assert sync(workers, 3) == [None] * RANKS
    workers.sleep()
    found = verdict(tmp_path / "runs")
    assert (found.verdict, found.guilty) == ("failure", ("trainer/1",))
    own = Job(ranks=RANKS, replica=RANKS, fail=(1, OFFLOAD))
    told = stock(tmp_path, own, lambda workers: sync(workers, 1, within_s=HANGS_AFTER_S))
    assert told.startswith("HANGS: rank 0" if HAS_BARRIER else "2 of 2 fail"), told
    row(
        f"verl {RELEASE}, Ray actors",
        "rank 1 raises in offload",
        told,
        "all stop, then sync again",
    )


def test_a_plan_that_changes_between_syncs(tmp_path: Path) -> None:
    """On all ranks: they agree anew. On one alone: it and the others
    hear at once that they differ, and all go on from there."""
    workers = group(tmp_path / "runs", Job(ranks=RANKS, replica=RANKS, param_offload=False))
    assert sync(workers, 1) == [None] * RANKS
    workers.reconfigure(free_cache_engine=False)
    workers.sleep()
    assert sync(workers, 2) == [None] * RANKS
    assert not any("rollout.resume" in call for calls in workers.sleep() for call in calls)
    journals = [path.name for path in sorted((tmp_path / "runs").rglob("*.jsonl"))]
    assert journals == [f"trainer-{rank}.{plan}.jsonl" for rank in range(RANKS) for plan in (0, 1)]
    # Each plan is an attempt of its own, and has a verdict of its own.
    assert [each.verdict for each in audit_paths([tmp_path / "runs"])] == ["ok", "ok"]

    workers.execute_rank_zero_sync("reconfigure", name="sglang", free_cache_engine=True)
    told = sync(workers, 3)
    assert all(isinstance(answer, EpochFailed) for answer in told), told
    (why,) = {describe(answer.cause) for answer in told}
    assert why.startswith("trainer/0 failed")
    assert "free_cache_engine: True, was False" in why

    def alone(workers: Any) -> list[Any]:
        assert sync(workers, 1) == [None] * RANKS
        workers.execute_rank_zero_sync("reconfigure", name="sglang", free_cache_engine=True)
        return sync(workers, 2, within_s=HANGS_AFTER_S)

    serves = {"free_cache_engine": False}
    own = Job(ranks=RANKS, replica=RANKS, param_offload=False, rollout=serves)
    without = stock(tmp_path, own, alone)
    assert without == "1 of 2 fail: weights is mapped on device 0 already", "rank 1 goes on"
    row(
        f"verl {RELEASE}, Ray actors",
        "rank 0 alone is configured differently between two syncs",
        without,
        "all stop with the same cause",
    )
    # Who stayed behind has left that plan too: all begin anew as soon as all are told the same.
    workers.reconfigure(name="vllm", free_cache_engine=False)
    assert sync(workers, 4) == [None] * RANKS


def test_who_comes_after_ray_has_taken_the_methods_says_so(tmp_path: Path) -> None:
    """verl's configuration names the module late; workers that are actors themselves keep stock."""
    workers = group(tmp_path / "runs", Job(ranks=RANKS, replica=RANKS), named=False)
    for (said,) in workers.import_late():
        assert "too late to this actor: Ray has taken its methods" in said
        assert "in $VERL_USE_EXTERNAL_MODULES, in the job's runtime_env" in said
    assert sync(workers, 1) == [None] * RANKS
    assert not list(tmp_path.rglob("*.jsonl")), "as it says, verl's own body ran"
