"""The migration guide, word for word in a scratch copy."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phasesync.errors import EpochOrderError
from phasesync.report.audit import audit_paths
from tests.integrations.test_nemo_rl import Side

GUIDE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the guide that are marked so."""
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


def load(tmp_path: Path, name: str, *texts: str) -> dict[str, Any]:
    """A module of these texts; its source is a file, as a user's is."""
    path = tmp_path / f"{name}.py"
    path.write_text("\n".join(texts))
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found


class Engine:
    """An engine that notes what it is asked."""

    leads = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call() -> None:
            self.calls.append(name)

        return call


def test_the_body_makes_the_same_calls_after_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHASESYNC_RUN", tmp_path.name)
    said = []
    for name in ("before", "after"):
        (text,) = blocks(f"python {name}")
        body = load(tmp_path, name, text)["sync"]
        engine = Engine()
        asyncio.run(asyncio.wait_for(body(engine), 10))
        said.append(engine.calls)
    assert said[0] == said[1] == ["send", "offload", "empty_cache", "resume_kv"]
    assert [answer.verdict for answer in audit_paths(["runs"])] == ["ok"]


def test_the_test_of_the_guide_finds_blocks_that_were_swapped(tmp_path: Path) -> None:
    (after,), (check,) = blocks("python after"), blocks("python test")
    name = "test_the_blocks_are_in_the_protocols_order"
    # A copy that pytest would run as it stands.
    (tmp_path / "test_guide.py").write_text(f"{after}\n{check}")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_guide.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    swapped = after.replace('phase("offload")', 'phase("resume_kv")', 1)
    swapped = swapped[::-1].replace('phase("resume_kv")'[::-1], 'phase("offload")'[::-1], 1)[::-1]
    load(tmp_path, "kept", after, check)[name]()
    with pytest.raises(EpochOrderError, match="stands after"):
        load(tmp_path, "swapped", swapped, check)[name]()


def test_the_synchronizer_of_nemo_rl_is_a_drop_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("python nemo after")
    calls: list[str] = []
    # The guide joins with ray.get; here answers are answers.
    ray = ModuleType("ray")
    ray.get = lambda futures: futures  # type: ignore[attr-defined]
    ray.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    sides = {name: Side(name, calls) for name in ("policy", "generation")}
    found = dict[str, Any](sides)
    exec(text, found)
    found["synchronizer"].sync_weights()
    assert not found["synchronizer"].is_stale
    found["synchronizer"].shutdown()
    assert calls[-1] == "generation.prepare_for_generation kv_cache"


def test_the_commands_name_what_exists() -> None:
    commands = "\n".join(blocks("sh"))
    auto = re.findall(r"=(phasesync\.[\w.]+)", commands)
    assert auto == ["phasesync.integrations.verl.auto"] * 2
    assert "phasesync audit runs" in commands
