"""Installed in a process and in those that it starts, over modules that stand where verl's do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasesync.errors import PlanError
from phasesync.integrations import verl as integration

ROOT = Path(__file__).parents[2]
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
#: What verl's own package does with that variable, and the modules whose bodies are replaced.
PACKAGE = {
    "verl/__init__.py": (
        "import importlib, os\n"
        "__version__ = '0.9.1'\n"
        "for name in filter(None, os.environ.get('VERL_USE_EXTERNAL_MODULES', '').split(',')):\n"
        "    importlib.import_module(name)\n"
    ),
    "verl/workers/__init__.py": "",
    "verl/workers/engine_workers.py": (
        "get_torch_device = set_expandable_segments = log_gpu_memory_usage = None\n"
        "class ActorRolloutRefWorker:\n"
        "    async def update_weights(self, global_steps=None, mode='auto'):\n"
        "        pass\n"
    ),
    "verl/checkpoint_engine/__init__.py": "",
    "verl/checkpoint_engine/base.py": (
        "auto_await = lambda call: call\n"
        "class CheckpointEngineManager:\n"
        "    abort_replicas = release_kv_cache_replicas = build_process_group = None\n"
        "    resume_kv_cache_replicas = resume_generation_replicas = None\n"
        "    async def update_weights(self, global_steps=None):\n"
        "        pass\n"
    ),
}
SAYS = """
import verl.workers.engine_workers as workers
from phasesync.integrations import verl as integration
file = workers.ActorRolloutRefWorker.update_weights.__code__.co_filename
print("child", integration.installed(), "phasesync" in file, integration._chosen)
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PHASESYNC", "PHASESYNC_VERL", "PHASESYNC_START", EXTERNAL):
        monkeypatch.delenv(name, raising=False)
    yield
    integration.uninstall()


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A folder in which Python finds a verl."""
    for name, text in PACKAGE.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "there"


def child(verl: Path, code: str = SAYS) -> list[str]:
    """What a process says that inherits nothing but the environment."""
    found = [str(verl), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        cwd=verl,
        capture_output=True,
        text=True,
        check=False,
    )
    return (ran.stdout + ran.stderr).splitlines()


def group_of(worker: object) -> object:
    """A group that another process can find, since a module defines it."""
    return worker


def test_processes_that_this_one_starts_get_its_settings(verl: Path) -> None:
    integration.install(
        "observe",
        lazily=True,
        runs="journals",
        options={"fence_scope": "world"},
        group=group_of,
        store=lambda worker: worker,
    )
    said = child(verl)
    (line,) = [each for each in said if each.startswith("child")]
    assert line.startswith("child observe True")
    assert f"runs='{Path.cwd() / 'journals'}'" in line, "its working directory is another"
    assert "{'fence_scope': 'world'}" in line
    assert "group=<function group_of" in line
    assert any("install(store=...) of the process that started this one" in each for each in said)


def test_nor_are_they_touched_where_it_wants_none(
    verl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration.install(lazily=True)
    assert child(verl)[0].startswith("child enforce True")
    integration.uninstall()
    assert child(verl)[0].startswith("child off False")
    # Where the environment was somebody else's, it stays, and the mode is told all the same.
    monkeypatch.setenv(EXTERNAL, "phasesync.integrations.verl.auto")
    integration.install("off", lazily=True)
    assert child(verl)[0].startswith("child off False")
    integration.uninstall()
    assert os.environ[EXTERNAL] == "phasesync.integrations.verl.auto"
    monkeypatch.setenv("PHASESYNC", "observe")
    assert child(verl)[0].startswith("child observe True")


def test_the_module_and_a_call_together_install_once(verl: Path) -> None:
    """The module waits for verl's import; the call, which imports it, wants another mode."""
    code = """
import phasesync.integrations.verl.auto
from phasesync.integrations import verl as integration
integration.install("observe")
import verl.workers.engine_workers as workers
def ours(): return workers.ActorRolloutRefWorker.update_weights
print(integration.installed(), "phasesync" in ours().__wrapped__.__code__.co_filename)
integration.uninstall()
print("phasesync" in ours().__code__.co_filename)
"""
    assert child(verl, code) == ["observe False", "False"]


def test_without_verl_it_says_what_to_install(tmp_path: Path) -> None:
    code = "from phasesync.integrations import verl; verl.install()"
    assert child(tmp_path, code)[-1] == (
        "phasesync.errors.PlanError: verl is not installed here; pip install verl"
    )


def test_a_verl_without_such_workers_is_refused_in_one_line(verl: Path) -> None:
    (verl / "verl/workers/engine_workers.py").unlink()
    code = "from phasesync.integrations import verl; verl.install()"
    assert child(verl, code)[-1] == (
        "phasesync.errors.PlanError: this verl has no verl.workers.engine_workers; "
        "phasesync fits verl 0.8.0 and newer"
    )


def test_a_mode_that_is_none_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASESYNC", "garbage")
    with pytest.raises(PlanError, match=r"\$PHASESYNC is 'garbage'; it must be one of: off, obs"):
        integration.install()
