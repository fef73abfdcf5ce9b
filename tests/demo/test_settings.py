"""What a user can get wrong is one line, and nothing is started."""

from pathlib import Path
from typing import Any

import pytest

from phasesync.core.protocol import PhaseDecl
from phasesync.demo import DemoSettings, run_demo
from phasesync.demo.settings import script_of
from phasesync.demo.variant import text_of, without_wait
from phasesync.spec import load, loads

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"backend": "mpi"}, "the demo has no backend 'mpi'; it has: inprocess, ray, torch"),
    ({"protocol": "nosuch"}, "the demo has no protocol 'nosuch'; it has: basic, colocated"),
    ({"ranks": 3}, "3 trainer ranks do not make whole replicas of 2"),
    ({"ranks": 0}, "ranks is 0; the demo takes 1 to 16"),
    ({"epochs": 0}, "epochs is 0; the demo takes 1 to 100"),
    ({"slow": "x"}, "--slow: 'x' is no rank; write ROLE/NUMBER, as in 'trainer/3'"),
    ({"slow": "9"}, "--slow: there is no trainer/9; there are: trainer/0, trainer/1, trainer/2"),
    ({"slow": "driver/0"}, "--slow: there is no driver/0"),
    ({"kill": "3"}, "--kill '3' names no phase; write RANK@PHASE: 3@offload"),
    ({"kill": "4@offload"}, "--kill: there is no trainer/4"),
    (
        {"kill": "1@resume_kv"},
        "--kill: trainer/1 is never in phase 'resume_kv'; it does: load_back",
    ),
    ({"kill": "engine/0@train"}, "--kill: engine/0 is never in phase 'train'; it does: resume_w"),
    ({"kill": "1@offload", "backend": "inprocess"}, "--kill needs a process to kill"),
    ({"accident": "luck"}, "the demo has no accident 'luck'; it has: all_reduce, slow"),
    ({"accident": "all_reduce", "backend": "inprocess"}, "an all-reduce needs a process a rank"),
    ({"accident": "slow", "kill": "1@offload"}, "--accident goes with --protocol colocated"),
]


@pytest.mark.parametrize(("given", "told"), WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_argument_is_one_line(
    given: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DemoSettings(runs=tmp_path / "runs", **given)
    assert run_demo(settings, audit_run=lambda _: (0, ())) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("phasesync demo: ")
    assert err.count("\n") == 1
    assert told in err
    assert not (tmp_path / "runs").exists()


def test_runs_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    settings = DemoSettings(runs=tmp_path / "file" / "runs")
    assert run_demo(settings, audit_run=lambda _: (0, ())) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_breaking_the_fence_makes_trainer_1_slow_unless_another_is_named() -> None:
    def slow(**given: Any) -> str:
        settings = DemoSettings(**given)
        return str(script_of(settings, run="r", runs=Path("runs"), host="vm").slow)

    assert slow(break_fence=True) == "trainer/1"
    assert slow(break_fence=True, slow="3") == "trainer/3"
    assert slow(slow="engine/0") == "engine/0"
    assert slow() == "None"


@pytest.mark.parametrize("name", ["colocated", "basic"])
def test_the_wait_is_gone_and_its_preconditions_are_kept(name: str) -> None:
    before, after = load(name), loads(without_wait(name, "memory_released"))
    gone = [step.name for step in before.steps if step not in after.steps]
    assert "memory_released" in gone
    assert [step.name for step in after.steps] == [
        step.name for step in before.steps if step.name != "memory_released"
    ]
    alone = {str(step.name): step.enqueued for step in after.steps if isinstance(step, PhaseDecl)}
    assert not alone["offload"]
    assert not alone["empty_cache"]
    assert after.resources == before.resources
    assert after.invariants == before.invariants
    assert text_of(name) != without_wait(name, "memory_released")
