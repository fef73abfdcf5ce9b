"""Journals and figures of real runs on an H200, kept as they came back: what the auditor makes of
them, and what they say of the promises in ARCHITECTURE.md. See tests/data/gpu/README.md."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "gpu"


def audit(folder: str, protocol: str) -> Any:
    """The auditor's answer on the journals in `folder`."""
    command = [sys.executable, "-m", "phasesync", "audit", "--json"]
    command += ["--protocol", f"{protocol}.yaml", folder]
    done = subprocess.run(
        command, cwd=DATA, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def figures(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def lines(folder: str, number: int) -> list[Any]:
    """The journal of one trainer."""
    packed = (DATA / folder / f"trainer-{number}.0.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def test_twenty_epochs_with_the_fence_and_random_delays_are_clean() -> None:
    assert audit("fenced", "shared_device")["verdict"] == "ok"
    rows = {row["what"]: row for row in figures("race.json")["rows"]}
    assert rows["fenced"]["epochs_done"] == 20


def test_without_the_fence_a_late_neighbour_is_a_real_out_of_memory_and_the_race_is_named() -> None:
    answer = audit("unfenced", "shared_device_unfenced")
    assert (answer["verdict"], answer["rule"], answer["phase"]) == (
        "violation",
        "R-FENCE",
        "resume_kv",
    )
    assert answer["guilty"] == ["trainer/0"]
    assert "held by neighbour/0" in answer["because"]
    assert "CUDA Error: out of memory" in " ".join(answer["consequences"])


def test_a_wake_that_failed_once_fails_for_ever() -> None:
    rows = {row["what"]: row for row in figures("race.json")["rows"]}
    assert "invalid argument" in rows["raw retry after the neighbour let go"]["error"]
    assert "health='unknown'" in rows["unfenced"]["status"]


def test_a_neighbour_killed_in_its_release_is_named_in_time_and_kv_is_untouched() -> None:
    answer = audit("killed", "shared_device")
    assert (answer["verdict"], answer["phase"], answer["guilty"]) == (
        "failure",
        "let_go",
        ["neighbour/0"],
    )
    rows = {row["what"]: row for row in figures("race.json")["rows"]}
    told = rows["told after the kill"]
    assert told["s"] < 2.0
    assert (told["kv_asleep"], told["health"]) == (True, "usable")
    assert "engine usable after the kill" in rows


@pytest.mark.parametrize(
    "case", ["plain, pinned", "plain, pageable", "tied", "FSDP1", "FSDP1, original parameters",
             "FSDP2"],
)  # fmt: skip
def test_an_offload_frees_what_it_moved(case: str) -> None:
    (row,) = (row for row in figures("offload.json")["cases"] if row["case"] == case)
    assert "error" not in row
    assert row["held_after"] == 0
    assert min(row[f"freed{turn}"] for turn in range(3)) >= 0.9 * row["held"] > 0
    assert row["same_output"]


def test_an_offload_that_an_alias_keeps_from_freeing_is_an_error() -> None:
    (row,) = (r for r in figures("offload.json")["cases"] if r["case"].endswith("alias is kept"))
    assert "Something refers to the old parameters" in row["error"]


def test_the_guard_on_the_real_engine_refuses_and_the_engine_stays_usable() -> None:
    rows = {row["what"]: row for row in figures("epochs.json")["rows"]}
    refused = rows["guard"]["refused"]
    assert set(refused) == {"kv", "everything", "generate", "rpc"}
    assert all("none was given" in reason for reason in refused.values())
    assert rows["engine usable after the refusals"]["match"] > 0


def test_whole_epochs_around_a_64_gib_cache_are_clean() -> None:
    assert audit("epochs", "colocated")["verdict"] == "ok"
    told = figures("epochs.json")
    assert told["versions"]["kv_gib"] >= 60
    assert told["versions"]["vllm"].startswith("0.24.")
    epochs = [row for row in told["rows"] if row["what"] == "epoch"]
    assert [row["weights_equal"] for row in epochs] == [True, True, True]


def test_an_engine_that_was_half_awake_is_whole_again_after_a_recovery() -> None:
    answer = audit("failed", "colocated")
    assert (answer["verdict"], answer["epoch"], answer["phase"]) == ("failure", 1, "stage")
    assert answer["guilty"] == ["trainer/0"]
    assert answer["consequences"] == [], "the second failure has a cause of its own"
    (later,) = answer["findings"]
    assert (later["epoch"], later["what"].endswith("cannot offload")) == (3, True)
    rows = figures("epochs.json")["rows"]
    failed = [row for row in rows if row["what"] == "failed epoch"]
    assert [row["where"] for row in failed] == ["stage", "offload"]
    for row in failed:
        assert row["can_retry"]
        assert row["free_gib"] == row["free_before_gib"] > 137
        assert "health='usable'" in row["status"]
    assert [row["weights_equal"] for row in rows if row["what"] == "epoch after it"] == [True, True]


def test_phasesync_takes_at_most_one_percent_of_an_epoch() -> None:
    pairs = figures("epochs.json")["pairs"]
    shares = sorted(pair["own_s"] / pair["synced_s"] for pair in pairs)
    assert len(pairs) >= 10
    assert shares[len(shares) // 2] <= 0.01


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_a_fence_with_a_core_for_each_rank_is_no_slower_than_a_barrier(size: int) -> None:
    rows = {
        row["variant"]: row
        for row in figures("fences_16_cores.json")["rows"]
        if row["size"] == size
    }
    barrier = rows["to_thread(dist.barrier)"]["p50_ms"]
    assert rows["store"]["p50_ms"] < barrier
    assert rows["tcp"]["p50_ms"] < barrier * 0.9


@pytest.mark.parametrize("scene", ["two_fenced", "two_replica", "two_world"])
def test_two_gpus_with_random_delays_are_clean(scene: str) -> None:
    assert audit(scene, "colocated_two")["verdict"] == "ok"
    told = figures("two.json")["scenes"][scene]
    assert {each["epochs_done"] for each in told.values()} == {20 if "fenced" in scene else 12}
    leaders = [each for each in told.values() if each["weights_equal"]]
    assert len(leaders) == (1 if "fenced" in scene else 2)
    assert all(all(each["weights_equal"]) for each in leaders)


def test_a_rank_killed_on_the_other_gpu_is_named_in_time_and_kv_is_untouched() -> None:
    answer = audit("two_killed", "colocated_two")
    assert (answer["verdict"], answer["epoch"], answer["phase"]) == ("failure", 2, "offload")
    assert answer["guilty"] == ["trainer/1"]
    survivor, victim = lines("two_killed", 0), lines("two_killed", 1)
    told = next(line for line in survivor if line["event"] == "fence.break")
    assert 0 < told["mono_ns"] - victim[-1]["mono_ns"] < 2e9
    after = [line for line in survivor if line["mono_ns"] > told["mono_ns"]]
    assert not [line for line in after if line.get("phase") == "resume_kv"]
    status = figures("two.json")["scenes"]["two_killed"]["trainer/0"]["status"]
    assert "health='usable'" in status
    assert "asleep=frozenset({'kv_cache'})" in status


def test_replica_scope_spares_the_other_replica_the_wait_for_a_late_rank() -> None:
    def waits(scene: str) -> list[float]:
        reports = figures("two.json")["scenes"][scene]["trainer/0"]["reports"]
        return sorted(report["waits"]["memory_released"] for report in reports)

    assert waits("two_replica")[-1] < waits("two_world")[0]
    assert waits("two_world")[-1] > 1.0, "the longest delay was waited for by the whole world"
