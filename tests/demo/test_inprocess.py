"""The demo in one process: it holds with the fence and cannot hold without."""

from pathlib import Path

import pytest

from tests.demo.demos import played, same_screen, waited


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs go, short as a user's own."""
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def test_three_epochs_serve_what_was_trained(runs: Path) -> None:
    demo = played(runs, backend="inprocess")
    assert demo.code == 0, demo.shown
    same_screen(demo, "colocated")
    proofs = demo.of("phase.progress", phase="serve")
    assert len(proofs) == 3 * 4
    for epoch in (1, 2, 3):
        said = {line["checksum"] for line in proofs if line["epoch"] == epoch}
        assert len(said) == 1, "all ranks of all replicas hold the same model"
    assert len({line["checksum"] for line in proofs}) == 3, "every epoch says something new"
    losses = [line["loss"] for line in demo.of("phase.progress", phase="train") if "loss" in line]
    assert max(losses[-4:]) < min(losses[:4]), "it learns"


def test_basic_holds_too(runs: Path) -> None:
    demo = played(runs, backend="inprocess", protocol="basic", epochs=2, ranks=2)
    assert demo.code == 0, demo.shown
    same_screen(demo, "basic")
    assert len(demo.of("phase.progress", phase="rollout", outputs=768)) == 2


def test_with_the_fence_a_slow_rank_is_waited_for(runs: Path) -> None:
    demo = played(runs, backend="inprocess", ranks=2, epochs=1, slow="1")
    assert demo.code == 0, demo.shown
    assert waited(demo, "trainer/1").startswith("at memory_released")


def test_a_slow_engine_makes_its_leader_waited_for(runs: Path) -> None:
    demo = played(runs, backend="inprocess", ranks=2, epochs=1, slow="engine/0")
    assert demo.code == 0, demo.shown
    assert waited(demo, "trainer/0").startswith("at ready_to_serve")


@pytest.mark.parametrize("seed", range(20))
def test_without_the_fence_kv_never_fits(seed: int, runs: Path) -> None:
    demo = played(runs, backend="inprocess", ranks=2, break_fence=True, seed=seed)
    assert demo.code == 1
    (refused,) = demo.of("phase.fail", phase="resume_kv")
    assert refused["error_type"] == "DeviceOutOfMemory"
    assert "/cpu1 is out of memory: engine/0 asks for kv_cache" in refused["error"]
    assert "trainer/1 trainer_params 24.0 MiB" in refused["error"]
    told = " ".join(row.strip() for row in demo.screen)
    assert "violation R-FENCE at resume_kv in epoch 1; guilty: trainer/0" in told
    assert "/cpu1: kv_cache and staging together, held by trainer/1" in told


def test_without_the_fence_the_other_replica_goes_on(runs: Path) -> None:
    demo = played(runs, backend="inprocess", break_fence=True)
    assert demo.code == 1
    same_screen(demo, "break-fence")
    served = {line["rank"] for line in demo.of("phase.end", phase="serve")}
    assert served == {2, 3}
