"""Installed and uninstalled, and what happens when phasesync itself cannot start."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import ActorRolloutRefWorker

from phasesync.errors import PlanError
from phasesync.integrations import verl as integration
from tests.verl.rank import Job
from tests.verl.run import run

AUTO = "phasesync.integrations.verl.auto"


@pytest.fixture(autouse=True)
def _leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv("PHASESYNC", raising=False)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "")
    yield
    integration.uninstall()


def test_signature_and_dispatch_are_verls_and_uninstall_puts_its_body_back() -> None:
    stock = ActorRolloutRefWorker.update_weights
    managed = CheckpointEngineManager.update_weights
    assert integration.install() == "enforce"
    ours = ActorRolloutRefWorker.update_weights
    assert ours is not stock
    assert inspect.signature(ours) == inspect.signature(stock)
    assert inspect.iscoroutinefunction(ours)
    assert getattr(ours, MAGIC_ATTR) == getattr(stock, MAGIC_ATTR)
    integration.install()
    integration.uninstall()
    assert ActorRolloutRefWorker.update_weights is stock
    assert CheckpointEngineManager.update_weights is managed
    assert integration.installed() == "off"


def test_the_environment_overrides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ActorRolloutRefWorker.update_weights
    monkeypatch.setenv("PHASESYNC", "off")
    assert integration.install("enforce") == "off"
    assert ActorRolloutRefWorker.update_weights is stock


def test_verls_own_configuration_can_name_it() -> None:
    """As `checkpoint_engine.custom_backend_module` does, in every worker's `init_model`."""
    sys.modules.pop(AUTO, None)
    import_external_libs(AUTO)
    assert integration.installed() == "enforce"


def test_an_environment_variable_is_enough() -> None:
    """verl imports what is named there while it is being imported itself."""
    code = (
        "from verl.workers.engine_workers import ActorRolloutRefWorker as worker\n"
        "from phasesync.integrations import verl\n"
        "print(verl.installed(), worker.update_weights.__code__.co_filename)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": AUTO, "PHASESYNC": "observe"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[-2] == "observe"
    assert "phasesync" in said[-1]


@pytest.mark.parametrize(("mode", "chosen"), [("observe", "stop"), ("enforce", "stock")])
def test_a_verl_that_does_not_fit_is_left_alone_where_the_job_is_to_go_on(
    mode: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def update_weights(self: object, global_steps: int | None = None) -> None:
        """As another release may have it."""

    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", update_weights)
    with pytest.raises(PlanError, match=r"takes \(self, global_steps\), not"):
        integration.install()
    assert integration.installed() == "off"
    stock = CheckpointEngineManager.update_weights
    with pytest.warns(RuntimeWarning, match="does not start .*verl's own update_weights runs"):
        integration.install(mode, on_start_failure=chosen)
    assert ActorRolloutRefWorker.update_weights is update_weights
    integration.uninstall()
    assert CheckpointEngineManager.update_weights is stock


def test_a_job_that_cannot_start_stops_before_it_touches_memory(tmp_path: Path) -> None:
    job = Job(ranks=2, replica=2, mode="enforce", settings={"options": {"fence_scope": "city"}})
    outcome = run(job, tmp_path, within_s=20)
    assert outcome.outcomes() == ["PlanError"] * 2
    assert "option 'fence_scope' is 'city'; it must be one of: replica, world" in outcome.line
    assert all(not said.calls for said in outcome.said)


def test_or_runs_verls_own_body_where_the_user_chose_so(tmp_path: Path) -> None:
    settings = {"options": {"fence_scope": "city"}, "on_start_failure": "stock"}
    job = Job(ranks=2, replica=2, mode="enforce", epochs=2, settings=settings)
    outcome = run(job, tmp_path, within_s=20)
    assert outcome.line == "passes"
    assert not list((tmp_path / "runs").rglob("*.jsonl"))
