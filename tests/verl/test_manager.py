"""The disaggregated path: verl's own `CheckpointEngineManager` over Ray actors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry

from phasesync.errors import EpochFailed
from phasesync.integrations import verl as integration
from tests.verl.checkpoint_worker import CheckpointWorker
from tests.verl.table import row
from tests.verl.test_ab import RELEASE
from tests.verl.verdict import verdict

STOCK = [
    "abort_all_requests",
    "release_kv_cache",
    "prepare",
    "init_process_group",
    "update_weights",
    "finalize",
    "resume_kv_cache",
    "resume_generation",
]


@CheckpointEngineRegistry.register("written_down")
class Backend:
    """A backend without a data plane."""

    @classmethod
    def build_topology(cls, actors: int, rollout: int, metadata: Any) -> Any:
        return {"rank": [0] * actors}, {"rank": [1] * rollout}


WORKER: Any = ray.remote(CheckpointWorker)


class Senders:
    """What the manager wants of the trainers' worker group."""

    world_size = 1

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._worker = WORKER.remote()

    def update_weights(self, **named: Any) -> list[Any]:
        self._log.append("update_weights")
        return [self._worker.update_weights.remote(**named)]

    def execute_checkpoint_engine(self, method: list[str], **_: Any) -> list[Any]:
        self._log.append(method[0])
        return [self._worker.execute_checkpoint_engine.remote(method[0])]


class Replica:
    """What the manager wants of a rollout replica; it knows whether it could serve."""

    def __init__(self, log: list[str], fails_in: str) -> None:
        self._log = log
        self.has_kv = self.generates = True
        self.workers = [WORKER.remote(fails_in)]

    async def abort_all_requests(self, **_: Any) -> None:
        self._log.append("abort_all_requests")
        self.generates = False

    async def release_kv_cache(self) -> None:
        self._log.append("release_kv_cache")
        self.has_kv = False

    async def resume_kv_cache(self) -> None:
        self._log.append("resume_kv_cache")
        self.has_kv = True

    async def resume_generation(self) -> None:
        self._log.append("resume_generation")
        self.generates = True


class Config:
    backend = "written_down"
    custom_backend_module = None


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    root = str(Path(__file__).parents[2])
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    yield
    ray.shutdown()


def manager(fails_in: str = "") -> tuple[Any, Replica, list[str]]:
    log: list[str] = []
    replica = Replica(log, fails_in)
    return CheckpointEngineManager(Config(), Senders(log), [replica]), replica, log


@pytest.fixture(params=["off", "enforce"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    integration.install(request.param, runs=str(tmp_path), run="job")
    yield request.param
    integration.uninstall()


def test_the_calls_are_verls_call_by_call(mode: str, tmp_path: Path) -> None:
    managed, replica, log = manager()
    for step in (1, 2):
        assert managed.update_weights(step) == {"sent": 1} or RELEASE < "0.9.1"
        assert log == STOCK
        assert replica.has_kv
        assert replica.generates
        log.clear()
    if mode == "enforce":
        assert verdict(tmp_path).verdict == "ok"


@pytest.mark.parametrize(
    ("fails_in", "generates"), [("update_weights", False), ("init_process_group", True)]
)
def test_a_failure_leaves_no_replica_without_kv(mode: str, fails_in: str, generates: bool) -> None:
    managed, replica, log = manager(fails_in)
    with pytest.raises(Exception, match=f"injected in {fails_in}") as caught:
        managed.update_weights(1)
    after = f"KV {'back' if replica.has_kv else 'gone'}, " + (
        "generating" if replica.generates else "closed"
    )
    if fails_in == "update_weights":
        _rows[mode] = after
    if mode == "off":
        assert (replica.has_kv, replica.generates) == (False, False)
        return
    failed = caught.value
    assert isinstance(failed, EpochFailed)
    assert failed.can_retry
    assert replica.has_kv
    assert replica.generates is generates, "partial weights serve nobody"
    assert log.count("finalize") == 1
    if fails_in == "update_weights" and len(_rows) == 2:
        row(f"verl {RELEASE}", "disaggregated: the transfer raises", _rows["off"], _rows["enforce"])


_rows: dict[str, str] = {}
