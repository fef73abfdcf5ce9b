"""The checker beside Spin, on the same models in the same run; compilation counted for both."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from phasesync.checker.anyn import tracked
from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.plan import resolve, settle
from phasesync.spec import load

DATA = Path(__file__).parents[1] / "data"
CRASH = Faults(most=1, crash=True)


def spin_s(model: str, flags: list[str], folder: Path) -> float:
    """Seconds from the model's text to Spin's verdict."""
    missing = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]
    if missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing[0]} is not installed: apt-get install spin gcc")
        pytest.skip(f"{missing[0]} is not installed")
    shutil.copy(DATA / "spin" / model, folder)
    began = time.perf_counter()
    subprocess.run(["spin", "-a", *flags, model], cwd=folder, check=True, capture_output=True)
    build = ["cc", "-O3", "-w", "-DSAFETY", "-DMEMLIM=4000", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    done = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True
    )
    assert "errors: 0" in done.stdout
    return time.perf_counter() - began


def ours_s(name: str, ranks: int, faults: Faults) -> float:
    began = time.perf_counter()
    protocol = load(DATA / "protocols" / name)
    roles = protocol.active_roles
    devices = [f"device/{at}" for at in range(ranks)]
    plan = resolve(protocol, dict.fromkeys(roles, ranks // len(roles)), devices=devices)
    found = search(Space(plan, faults, 1, whole=True))
    assert (found.trail, found.bound) == (None, None)
    return time.perf_counter() - began


@pytest.mark.timeout(300)
def test_a_crash_at_eight_ranks_is_ten_times_faster_than_spin(tmp_path: Path) -> None:
    theirs = spin_s("fence.pml", ["-DN=8", "-DCRASH"], tmp_path)
    ours = ours_s("fence_pml_abort.yaml", 8, CRASH)
    print(f"crash, N = 8: Spin {theirs:.1f} s, phasesync {ours:.2f} s")
    assert ours * 10 < theirs


def test_sixty_four_uniform_ranks() -> None:
    ours = ours_s("fence_pml.yaml", 64, Faults())
    print(f"N = 64: {ours:.2f} s")
    assert ours < 5


def test_sixty_four_ranks_in_two_groups() -> None:
    ours = ours_s("fence_two_roles.yaml", 64, Faults())
    print(f"N = 64 in two groups: {ours:.2f} s")
    assert ours < 10


def test_any_n() -> None:
    protocol = load("basic")
    began = time.perf_counter()
    assert tracked(protocol, settle(protocol), mutate=lambda plan: plan).trail is None
    assert time.perf_counter() - began < 1
