"""The integration with verl, without verl: against calls recorded from its own body."""

import asyncio
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phasesync.errors import EpochFailed, PlanError
from phasesync.integrations.verl.observer import Observer
from phasesync.integrations.verl.place import options_of, replicas
from phasesync.integrations.verl.probe import worker_class
from phasesync.integrations.verl.settings import Settings
from phasesync.integrations.verl.worker import worker_body
from phasesync.report.audit import audit_paths
from tests.integrations.written_down import Old, module, worker

RECORDED = json.loads(
    (Path(__file__).parent.parent / "data" / "verl" / "calls-0.9.1.json").read_text()
)


def installed(tmp_path: Path, **chosen: Any) -> tuple[Any, Any]:
    """The written-down module with the body that `install` would put there, and its class."""
    found = module()
    cls: Any = worker_class(found)
    settings = Settings.make(runs=str(tmp_path), run=tmp_path.name, **chosen)
    cls.update_weights = worker_body(cls.update_weights, found, settings)
    return found, cls


@pytest.mark.parametrize("mode", ["enforce"])
@pytest.mark.parametrize("case", RECORDED)
def test_calls_equal_those_of_verls_own_body(tmp_path: Path, case: str, mode: str) -> None:
    found, cls = installed(tmp_path, mode=mode)
    made, calls = worker(cls, case)

    async def two_syncs() -> list[list[str]]:
        seen = []
        for step in (1, 2):
            await made.update_weights(global_steps=step)
            seen.append(list(calls))
            calls.clear()
        return seen

    leaders = RECORDED[case][::2]
    assert asyncio.run(two_syncs()) == leaders
    assert found.segments == [False, True] * 2
    assert made.base_sync_done
    assert [answer.verdict for answer in audit_paths([tmp_path])] == ["ok"]


def test_other_modes_are_left_to_verl(tmp_path: Path) -> None:
    _, cls = installed(tmp_path)
    made, calls = worker(cls, "plain")
    asyncio.run(made.update_weights(7, mode="nccl"))
    assert made.stock_ran == (7, "nccl")
    assert not calls


def test_a_failure_restores_segments_and_keeps_the_base_due(tmp_path: Path) -> None:
    found, cls = installed(tmp_path)
    made, calls = worker(cls, "lora adapter")

    def boom(device: str, **named: Any) -> None:
        raise RuntimeError("boom")

    made.actor.engine.to = boom
    with pytest.raises(EpochFailed, match="failed in phase 'offload': RuntimeError: boom"):
        asyncio.run(made.update_weights(1))
    assert found.segments == [False, True]
    assert not made.base_sync_done
    assert not any("kv_cache" in call for call in calls)


@pytest.mark.parametrize("ends", ["raises", "is cancelled"])
@pytest.mark.parametrize(
    ("owner", "call"),
    [
        ("rollout", "resume"),
        ("engine", "get_per_tensor_param"),
        ("rollout", "update_weights"),
        ("engine", "to"),
    ],
)
def test_segments_are_expandable_again_on_every_way_out(
    tmp_path: Path, owner: str, call: str, ends: str
) -> None:
    found, cls = installed(tmp_path)
    made, _ = worker(cls, "plain")

    def out(*_: Any, **named: Any) -> Any:
        raise RuntimeError("boom") if ends == "raises" else asyncio.CancelledError

    setattr(made.rollout if owner == "rollout" else made.actor.engine, call, out)
    with pytest.raises((EpochFailed, asyncio.CancelledError)):
        asyncio.run(made.update_weights(1))
    assert found.segments == [False, True]


BREAK: dict[str, Callable[[Any, Path, pytest.MonkeyPatch], object]] = {
    "runs is a file": lambda made, runs, patch: runs.write_text(""),
    "a limit that is no number": lambda made, runs, patch: patch.setenv(
        "PHASESYNC_KEEP_EPOCHS", "all"
    ),
    "a protocol file that is none": lambda made, runs, patch: patch.setattr(
        "phasesync.integrations.verl.observer._PROTOCOL", "no/such.yaml"
    ),
    "a rollout of another shape": lambda made, runs, patch: delattr(made.rollout, "release"),
    "a device that cannot be asked": lambda made, runs, patch: patch.setattr(
        "phasesync.integrations.verl.place.TorchDevice.free_bytes", lambda self: 1 / 0
    ),
    "no place to meet": lambda made, runs, patch: setattr(made, "world_size", 2),
    "an engine without a flag": lambda made, runs, patch: delattr(
        made.actor.engine, "is_param_offload_enabled"
    ),
}


@pytest.mark.parametrize("broken", BREAK)
@pytest.mark.filterwarnings("error")
def test_whatever_is_wrong_with_phasesync_observe_lets_verl_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Even where warnings are errors; twice, since what is blind stays so."""
    runs = tmp_path / "runs"
    _, cls = installed(runs, mode="observe")
    made, _ = worker(cls, "plain")
    BREAK[broken](made, runs, monkeypatch)
    for step in (1, 2):
        asyncio.run(made.update_weights(step))
        assert made.stock_ran == (step, "naive")


@pytest.mark.parametrize("full_after", range(12))
def test_a_disk_that_fills_up_does_not_reach_the_observed(tmp_path: Path, full_after: int) -> None:
    """`full_after` lines are written, and not one more."""
    _, cls = installed(tmp_path, mode="observe")
    made, _ = worker(cls, "plain")
    kept = made._phasesync = Observer(made, stock_body, module(), settings_of(tmp_path))
    notes = kept._open()
    kept._notes = notes
    left = iter(range(full_after))

    def write(*_: Any, **__: Any) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")

    notes._journal.write = write  # type: ignore[method-assign,assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert asyncio.run(made.update_weights(1)) == "stock"


async def stock_body(self: Any, **_: Any) -> str:
    """A body that makes the calls which are watched."""
    await self.rollout.resume(tags=["weights"])
    self.actor.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    await self.rollout.update_weights(iter(()), base_sync_done=True)
    self.actor.engine.to("cpu", model=True)
    await self.rollout.resume(tags=["kv_cache"])
    return "stock"


def settings_of(runs: Path) -> Settings:
    return Settings.make(mode="observe", runs=str(runs), run="job")


def test_observe_makes_no_place_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 would wait for rank 0 there; the run is named after the place."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = module()
    cls: Any = worker_class(found)
    settings = Settings.make(mode="observe", runs=str(tmp_path))
    cls.update_weights = worker_body(cls.update_weights, found, settings)
    made, _ = worker(cls, "plain")
    made.rank, made.world_size = 1, 2
    asyncio.run(asyncio.wait_for(made.update_weights(1), 20))
    assert made.stock_ran == (1, "naive")
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["trainer-1.0.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["verl-127.0.0.1-1"]


def test_releases_that_do_not_fit_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.7.1"))
    with pytest.raises(PlanError) as caught:
        worker_class(module(Old))
    assert str(caught.value) == (
        "verl 0.7.1: ActorRolloutRefWorker.update_weights takes (self, global_steps), not "
        "(self, global_steps, mode); phasesync fits verl 0.8.0 and newer"
    )


def test_what_ray_adds_to_an_actors_methods_is_nobodys_argument() -> None:
    async def update_weights(
        self: Any, global_steps: Any = None, mode: str = "auto", _ray_trace_ctx: Any = None
    ) -> None:
        """As Ray leaves it."""

    found: Any = module()
    found.ActorRolloutRefWorker.update_weights = update_weights
    assert worker_class(found) is found.ActorRolloutRefWorker


def test_the_signature_is_kept(tmp_path: Path) -> None:
    stock = module().ActorRolloutRefWorker.update_weights
    _, cls = installed(tmp_path)
    assert inspect.signature(cls.update_weights) == inspect.signature(stock)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(PlanError, match="no setting 'folder'; settings are: mode, runs"):
        Settings.make(folder="x")
    with pytest.raises(PlanError, match="on_start_failure is 'go'; it must be one of: stop, stock"):
        Settings.make(on_start_failure="go")


class Mesh:
    """A device mesh as far as it is read: `.mesh` of (dp, infer_tp, infer_pp)."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.mesh = self
        self._rows = rows

    def numel(self) -> int:
        return sum(map(len, self._rows))

    def __iter__(self) -> Any:
        return iter(SimpleNamespace(flatten=lambda row=row: _Row(row)) for row in self._rows)


class _Row:
    def __init__(self, row: list[int]) -> None:
        self._row = row

    def tolist(self) -> list[int]:
        return self._row


@pytest.mark.parametrize(
    ("rollout", "mesh", "groups"),
    [
        ({}, Mesh([[0, 1], [2, 3]]), [[0, 1], [2, 3]]),
        ({"tensor_model_parallel_size": 4}, None, [[0, 1, 2, 3]]),
        ({"tensor_model_parallel_size": 1, "data_parallel_size": 2}, None, [[0, 1], [2, 3]]),
        ({}, None, [[0, 1, 2, 3]]),
        (
            {
                "tensor_model_parallel_size": 1,
                "disaggregation": {
                    "enabled": True,
                    "prefill_replicas": 1,
                    "decode_replicas": 1,
                    "decode_tensor_model_parallel_size": 3,
                },
            },
            Mesh([[0, 1], [2, 3]]),
            [[0], [1, 2, 3]],
        ),
    ],
    ids=["mesh", "tensor parallel", "data parallel", "nothing said", "prefill and decode apart"],
)
def test_a_replica_is_who_shares_an_engine(
    rollout: dict[str, Any], mesh: Any, groups: list[list[int]]
) -> None:
    made = SimpleNamespace(
        config=SimpleNamespace(rollout=rollout), rollout=SimpleNamespace(device_mesh=mesh)
    )
    assert replicas(made, 4) == groups


def test_options_come_from_verls_configuration() -> None:
    _, cls = module(), module().ActorRolloutRefWorker
    made, _ = worker(cls, "lora adapter on sglang")
    assert options_of(made, [[0, 1]]) == {
        "replica_size": 2,
        "param_offload": True,
        "optimizer_offload": False,
        "free_cache_engine": True,
        "sleep_keeps": "weights",
        "lora": "adapter",
    }
