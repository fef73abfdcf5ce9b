"""Journals and figures of real runs on an H200, kept as they came back: what the auditor makes of
them, and what they say of the promises in ARCHITECTURE.md. See tests/data/gpu/README.md."""

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


def test_phasesync_takes_at_most_one_percent_of_an_epoch() -> None:
    pairs = figures("epochs.json")["pairs"]
    shares = sorted(pair["own_s"] / pair["synced_s"] for pair in pairs)
    assert len(pairs) >= 10
    assert shares[len(shares) // 2] <= 0.01
