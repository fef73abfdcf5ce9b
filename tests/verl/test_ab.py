"""Stock verl and verl with phasesync, at the same faults: four ranks, one engine over them."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from verl.workers.engine_workers import ActorRolloutRefWorker

import verl
from tests.verl.rank import Job
from tests.verl.run import Outcome, run
from tests.verl.table import row
from tests.verl.verdict import verdict

RELEASE = verl.__version__
HAS_BARRIER = "distributed.barrier" in inspect.getsource(ActorRolloutRefWorker.update_weights)
OFFLOAD = "engine.to cpu"
STOP_WITHIN_S = 2.0


def both(fault: str, job: Job, tmp_path: Path, *, within_s: float) -> tuple[Outcome, Outcome]:
    """The same job under stock verl and under phasesync, and their row of the table."""
    stock = run(job, tmp_path / "stock", within_s=within_s)
    fenced = run(replace(job, mode="enforce"), tmp_path / "fenced", within_s=60)
    row(f"verl {RELEASE}", fault, stock.line, fenced.line)
    return stock, fenced


def test_a_late_rank(tmp_path: Path) -> None:
    stock, fenced = both("rank 2 offloads 3 s late", Job(late={2: 3.0}), tmp_path, within_s=20)
    if HAS_BARRIER:
        assert stock.line == "passes"
    else:
        assert stock.line.startswith("OOM: device 2: kv_cache 48 GiB beside params 34")
    assert fenced.line == "passes"
    assert fenced.outcomes() == ["ok"] * 4
    assert verdict(fenced.runs).verdict == "ok"


def test_a_rank_that_raises(tmp_path: Path) -> None:
    job = Job(fail=(1, OFFLOAD))
    stock, fenced = both("rank 1 raises in offload", job, tmp_path, within_s=8)
    if HAS_BARRIER:
        assert stock.waiting == (0, 2, 3)
    else:
        assert stock.line.startswith("OOM: device 1")
    assert fenced.outcomes() == ["EpochFailed"] * 4
    causes = {said.cause for said in fenced.said}
    assert causes == {
        "trainer/1 failed in phase 'offload': RuntimeError: injected: the offload failed"
    }
    assert all((said.since_failure_s or 0) < STOP_WITHIN_S for said in fenced.said)
    assert not any("resume kv_cache" in call for said in fenced.said for call in said.calls)
    found = verdict(fenced.runs)
    assert (found.verdict, found.guilty) == ("failure", ("trainer/1",))


def test_a_rank_that_is_configured_differently(tmp_path: Path) -> None:
    job = Job(other={2: {"free_cache_engine": False}})
    stock, fenced = both(
        "rank 2 has free_cache_engine=false", job, tmp_path, within_s=8 if HAS_BARRIER else 20
    )
    if HAS_BARRIER:
        assert stock.waiting == (0, 1, 3)
    assert fenced.outcomes() == ["EpochFailed"] * 4
    assert {said.cause for said in fenced.said} == {
        "ranks hold different plans (trainer/2): free_cache_engine: false on trainer/2, "
        "true on the others"
    }
    assert all(not _touches(said.calls) for said in fenced.said), "refused before memory is touched"
    found = verdict(fenced.runs)
    assert (found.rule, found.guilty) == ("R-SAMEPLAN", ("trainer/2",))


def _touches(calls: tuple[str, ...]) -> bool:
    return any(call.startswith(("engine.", "rollout.", "device.")) for call in calls)


def test_after_a_failure_the_same_workers_sync_again(tmp_path: Path) -> None:
    job = Job(fail=(1, OFFLOAD), fail_at=2, again=True, epochs=4, mode="enforce")
    outcome = run(job, tmp_path)
    assert [outcome.outcomes(epoch) for epoch in (1, 2, 3, 4)] == [
        ["ok"] * 4,
        ["EpochFailed"] * 4,
        ["ok"] * 4,
        ["ok"] * 4,
    ]
    assert "rollout.release" in outcome.of(3)[0].calls, "the engine gives back before it takes"
    assert verdict(outcome.runs).guilty == ("trainer/1",)


def test_a_replica_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """The driver's join over all ranks tells the job."""
    outcome = run(Job(fail=(1, OFFLOAD), replica=2, mode="enforce"), tmp_path, within_s=20)
    assert outcome.outcomes() == ["EpochFailed", "EpochFailed", "ok", "ok"]


@pytest.mark.parametrize("meet", ["group", "store", "environment"])
def test_no_default_group_is_needed(tmp_path: Path, meet: str) -> None:
    outcome = run(Job(meet=meet, mode="enforce", epochs=2), tmp_path)
    assert outcome.outcomes(1) == outcome.outcomes(2) == ["ok"] * 4
    assert verdict(outcome.runs).verdict == "ok"


def test_observe_finds_the_race_and_leaves_the_job_alone(tmp_path: Path) -> None:
    stock = run(Job(late={2: 3.0}), tmp_path / "stock", within_s=20)
    watched = run(Job(late={2: 3.0}, mode="observe"), tmp_path / "watched", within_s=20)
    assert watched.outcomes() == stock.outcomes()
    assert [said.calls for said in watched.said] == [said.calls for said in stock.said]
    found = verdict(watched.runs)
    row(
        f"verl {RELEASE}",
        "rank 2 offloads 3 s late, observed",
        stock.line,
        f"audit: {found.verdict} {found.rule or ''}",
    )
    if HAS_BARRIER:
        assert found.verdict == "ok"
    else:
        assert (found.verdict, found.rule) == ("violation", "R-FENCE")
        assert "kv_cache and trainer_params together, held by trainer/2" in found.because
