"""The pytest plugin, run by pytest itself on small test files."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesync.errors import FenceBroken
from phasesync.simulator.faults import Fault
from phasesync.spec import find
from phasesync.world import Injected, SimRank, SimWorld
from phasesync.world.schedule import Scheduler
from phasesync.world.strategies import faults, schedules


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "phasesync.pytest_plugin"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


TEST = """
import pytest
from phasesync.errors import FenceBroken


@pytest.mark.phasesync(seed=3)
def test_ranks(sim_world, fault):
    async def main(rank):
        await rank.at("offload")
        await rank.fence("memory_released")

    assert sim_world(3).run(main).seed == 3
    sim_world(2, faults=[fault("crash:1@offload")]).run(main, allow=(FenceBroken,))


@pytest.mark.phasesync(sede=3)
def test_misspelled(sim_world):
    sim_world(2)


def test_wrong(sim_world):
    order = []

    async def main(rank):
        await rank.at("a")
        order.append(rank.number)
        await rank.at("b")

    sim_world(3).explore(main, runs=20, check=lambda _: check(order))


def check(order):
    wrong = order[-3:] == [2, 1, 0]
    assert not wrong, "ranks came in reverse"
"""


def test_fixtures_and_a_failure_that_replays(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    code, text = run(tmp_path)
    assert code == 1
    assert "1 failed, 1 passed, 1 error" in text
    assert "marker phasesync has no 'sede'; it has: blocking_s, faults, role, seed, spread" in text
    assert "ranks came in reverse" in text
    assert "sim.py" not in text.split("ranks came in reverse")[0].split("test_wrong")[-1]
    seed = next(line for line in text.splitlines() if "--phasesync-seed=" in line).split("=")[-1]
    assert "schedule: " in text
    again, text = run(tmp_path, "-k", "wrong", f"--phasesync-seed={seed}")
    assert again == 1
    assert "ranks came in reverse" in text


def test_protocol_files_are_tests_when_asked_for(tmp_path: Path) -> None:
    good = find("basic").read_text(encoding="utf-8")
    (tmp_path / "basic.yaml").write_text(good)
    (tmp_path / "other.yaml").write_text("key: value\n")
    bad = good.replace("- {fence: memory_released", "- {fence: later").replace("sync", "sinc", 0)
    lines = [line for line in bad.splitlines() if "fence: later" not in line]
    (tmp_path / "broken.yaml").write_text("\n".join(lines) + "\n")
    (tmp_path / "typo.yaml").write_text(good.replace("uses: params", "usez: params"))
    assert run(tmp_path)[0] == 5, "nothing is collected unasked"
    code, text = run(tmp_path, "--phasesync", "-k", "holds", "-rA")
    assert code == 1
    assert "2 failed, 1 passed" in text
    assert "typo.yaml:18:19: unknown key 'usez' in phase 'sync'; did you mean 'uses'?" in text
    assert "pluggy" not in text
    assert "kv_cache and params together" in text
    assert "other.yaml" not in text


def test_the_plugin_is_light() -> None:
    code = "import sys, phasesync.pytest_plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "hypothesis", "yaml", "structlog", "transitions"}
    assert "phasesync.world" not in loaded


async def fenced(rank: SimRank) -> None:
    await rank.at("offload")
    await rank.fence("memory_released")
    await rank.at("resume_kv")
    await rank.fence("ready_to_serve")


@settings(max_examples=40, deadline=None)
@given(schedule=schedules(), planted=faults(ranks=3, places=["offload", "resume_kv"], most=2))
def test_hypothesis_chooses_schedules_and_faults(schedule: Scheduler, planted: list[Fault]) -> None:
    world = SimWorld(3, faults=planted)
    outcome = world.run(fenced, schedule=schedule, allow=(FenceBroken, Injected))
    assert len(outcome.results) + len(outcome.raised) + len(outcome.crashed) == 3


@given(kind=st.sampled_from(["crash", "fail", "hang", "slow"]), rank=st.integers(0, 9999))
def test_a_fault_is_read_as_it_is_written(kind: str, rank: int) -> None:
    from phasesync.simulator.faults import parse_fault

    text = f"{kind}:{rank}@offload" + ("*8" if kind == "slow" else "")
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize("text", ["mixed:param_offload=false@2", "drop:arrive", "drop:arrive@f:1"])
def test_other_faults(text: str) -> None:
    from phasesync.simulator.faults import parse_fault

    assert str(parse_fault(text)) == text
