"""The disaggregated path: verl's own `CheckpointEngineManager` over Ray actors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry

from phasesync.errors import EpochFailed, PlanError
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

    def __init__(self, log: list[str], worker: Any = None) -> None:
        self._log = log
        self._worker = WORKER.remote() if worker is None else worker

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
        self.config = SimpleNamespace(name="sglang", free_cache_engine=True)
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


@pytest.fixture(params=["off", "observe", "enforce"])
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
    if mode != "off":
        assert verdict(tmp_path).verdict == "ok"


@pytest.mark.parametrize(
    ("fails_in", "generates"),
    [("update_weights", False), ("init_process_group", True), ("finalize", None)],
)
def test_a_failure_leaves_no_replica_without_kv(
    mode: str, fails_in: str, generates: bool | None, tmp_path: Path
) -> None:
    managed, replica, log = manager(fails_in)
    with pytest.raises(Exception, match=f"injected in {fails_in}") as caught:
        managed.update_weights(1)
    after = f"KV {'back' if replica.has_kv else 'gone'}, " + (
        "generating" if replica.generates else "closed"
    )
    if fails_in == "update_weights":
        _rows[mode] = after
    if mode != "enforce":
        assert (replica.has_kv, replica.generates) == (False, False)
        assert not isinstance(caught.value, EpochFailed)
        if mode == "observe":
            found = verdict(tmp_path)
            phase = {"init_process_group": "connect", "update_weights": "transfer"}
            failed_in = phase.get(fails_in, fails_in)
            assert found.verdict == "failure"
            assert f"failed in {failed_in}:" in found.because
        return
    if generates is None:  # It never lets go of its buffers; how that ends is told further below.
        return
    failed = caught.value
    assert isinstance(failed, EpochFailed)
    assert failed.can_retry
    assert replica.has_kv
    assert replica.generates is generates, "partial weights serve nobody"
    assert log.count("finalize") == 1
    if fails_in == "update_weights" and len(_rows) == 3:
        row(f"verl {RELEASE}", "disaggregated: the transfer raises", _rows["off"], _rows["enforce"])


_rows: dict[str, str] = {}


# --- A fleet of several, of which one fails -----------------------------------------------------


class Late:
    """A replica that takes its time, knows what it has, and fails where and as often as told."""

    def __init__(
        self,
        number: int,
        worker: Any,
        fails: dict[str, int],
        log: list[str],
        rollout: str = "sglang",
    ) -> None:
        self.config = SimpleNamespace(name=rollout, free_cache_engine=True)
        self._name, self._fails, self._log = f"replica {number}", fails, log
        self.has_kv = self.generates = True
        self.workers = [worker]

    def __str__(self) -> str:
        kv = "kv" if self.has_kv else "no kv"
        return f"{kv}, {'generates' if self.generates else 'closed'}"

    async def abort_all_requests(self, **_: Any) -> None:
        await self._do("abort_all_requests")
        self.generates = False

    async def release_kv_cache(self) -> None:
        await self._do("release_kv_cache", 0.2)
        self.has_kv = False

    async def resume_kv_cache(self) -> None:
        # SGLang's scheduler dies of a tag that is resumed twice.
        twice = self.has_kv and "release_kv_cache" not in self._fails
        await self._do("resume_kv_cache")
        assert not twice, f"{self._name} has its KV"
        self.has_kv = True

    async def resume_generation(self) -> None:
        await self._do("resume_generation")
        self.generates = True

    async def _do(self, what: str, takes_s: float = 0.0) -> None:
        self._log.append(f"{self._name}: {what}")
        if self._fails.get(what):
            self._fails[what] -= 1
            raise RuntimeError(f"injected in {what}")
        await asyncio.sleep(takes_s)


@pytest.fixture(scope="module")
def workers(_ray: None) -> list[Any]:
    """Three workers of replicas and one of the trainers, for all that follow."""
    return [WORKER.remote() for _ in range(4)]


OFTEN = 99
WELL = ["kv, generates"] * 3
CLOSED = ["kv, closed"] * 3
#: Who fails where and how often; what each replica is after it, and after the sync that follows.
FAULTS: dict[str, tuple[dict[str, dict[str, int]], list[str], list[str], str]] = {
    "abort": ({"r0": {"abort_all_requests": 1}}, WELL, WELL, ""),
    "release": ({"r0": {"release_kv_cache": 1}}, WELL, WELL, ""),
    "prepare": ({"w1": {"prepare": 1}}, WELL, WELL, ""),
    "transfer": ({"w1": {"update_weights": 1}}, CLOSED, WELL, ""),
    "transfer, and one worker keeps its buffers": (
        {"sender": {"update_weights": 1}, "w1": {"finalize": 2}},
        CLOSED,
        WELL,
        "workers that did not let go of the transfer's buffers: 1, RuntimeError",
    ),
    "finalize": ({"w1": {"finalize": 1}}, WELL, WELL, ""),
    "resume_kv": ({"r1": {"resume_kv_cache": 1}}, WELL, WELL, ""),
    "resume_kv, and again in the recovery": (
        {"r0": {"resume_kv_cache": 3}},
        ["no kv, closed", "kv, generates", "kv, generates"],
        WELL,
        "replica 0 could not be put back: RuntimeError: injected in resume_kv_cache",
    ),
    "resume_generation": ({"r1": {"resume_generation": 1}}, WELL, WELL, ""),
    "prepare, and generation for ever": (
        {"w1": {"prepare": 1}, "r0": {"resume_generation": OFTEN}},
        ["kv, closed", "kv, generates", "kv, generates"],
        ["kv, closed", "kv, generates", "kv, generates"],
        "replica 0 could not be put back: RuntimeError: injected in resume_generation",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_fails_keeps_no_other_replica_from_its_kv(
    fault: str, workers: list[Any], tmp_path: Path
) -> None:
    fails, after, later, lacking = FAULTS[fault]
    names = ("w0", "w1", "w2", "sender")
    ray.get(
        [each.fail.remote(fails.get(name, {})) for name, each in zip(names, workers, strict=True)]
    )
    log: list[str] = []
    replicas = [Late(at, workers[at], fails.get(f"r{at}", {}).copy(), log) for at in range(3)]
    integration.install("enforce", runs=str(tmp_path), run="job")
    try:
        managed = CheckpointEngineManager(Config(), Senders([], workers[3]), replicas)

        async def both() -> None:
            with pytest.raises(EpochFailed, match="injected in") as caught:
                await managed.update_weights(1)
            assert [str(replica) for replica in replicas] == after
            notes = getattr(caught.value, "__notes__", [])
            assert not lacking or notes[-1].startswith(lacking)
            assert (caught.value.weights == "unknown") is (after == CLOSED)
            assert caught.value.can_retry is not bool(lacking)
            await asyncio.sleep(0.3)
            assert [str(replica) for replica in replicas] == after, "nothing goes on behind"
            for replica in replicas:  # What could not be put back has been mended.
                replica.has_kv = True
            if OFTEN in [count for each in fails.values() for count in each.values()]:
                with pytest.raises(EpochFailed, match="injected in"):
                    await managed.update_weights(2)
            else:
                await managed.update_weights(2)

        asyncio.run(both())
    finally:
        integration.uninstall()
    assert [str(replica) for replica in replicas] == later


def test_vllm_releases_its_weights_along_with_its_kv(workers: list[Any], tmp_path: Path) -> None:
    """verl makes it sleep at level 2, and wakes weights that are no longer there."""
    ray.get([each.fail.remote({}) for each in workers])
    ray.get(workers[0].fail.remote({"prepare": 1}))
    kinds = ("vllm", "sglang", "vllm")
    replicas = [Late(at, workers[at], {}, [], kinds[at]) for at in range(3)]
    replicas[2].config.free_cache_engine = False
    integration.install("enforce", runs=str(tmp_path), run="job")
    try:
        managed = CheckpointEngineManager(Config(), Senders([], workers[3]), replicas)

        async def both() -> None:
            with pytest.raises(EpochFailed, match="injected in prepare") as caught:
                await managed.update_weights(1)
            assert [str(replica) for replica in replicas] == [CLOSED[0], WELL[0], WELL[0]]
            assert caught.value.can_retry
            assert "1 of 3 replicas have weights that may not be whole" in caught.value.__notes__[0]
            await managed.update_weights(2)

        asyncio.run(both())
    finally:
        integration.uninstall()
    assert [str(replica) for replica in replicas] == WELL


def test_what_a_dead_worker_held_died_with_it(workers: list[Any], tmp_path: Path) -> None:
    ray.get([each.fail.remote({}) for each in workers])
    dead = WORKER.remote()
    replicas = [Late(at, (workers[0], dead)[at], {}, []) for at in range(2)]
    integration.install("enforce", runs=str(tmp_path), run="job")
    try:
        managed = CheckpointEngineManager(Config(), Senders([], workers[3]), replicas)
        ray.get(dead.die_in.remote("update_weights"))

        async def one() -> None:
            with pytest.raises(EpochFailed, match="'transfer'") as caught:
                await managed.update_weights(1)
            assert caught.value.can_retry

        asyncio.run(one())
    finally:
        integration.uninstall()
    assert [str(replica) for replica in replicas] == CLOSED[:2]


@pytest.mark.parametrize("chosen", ["stop", "stock"])
def test_a_driver_that_cannot_start_asks_no_replica(
    chosen: str, workers: list[Any], tmp_path: Path
) -> None:
    ray.get([each.fail.remote({}) for each in workers])
    log: list[str] = []
    replica = Late(0, workers[0], {}, log)
    integration.install(
        "enforce", runs=str(tmp_path), run="a/b", fsync="none", on_start_failure=chosen
    )
    try:
        managed = CheckpointEngineManager(Config(), Senders([], workers[3]), [replica])
        if chosen == "stop":
            with pytest.raises(PlanError, match="cannot name a folder"):
                managed.update_weights(1)
            assert not log
        else:
            with pytest.warns(RuntimeWarning, match="does not start .*own update_weights"):
                managed.update_weights(1)
            assert str(replica) == WELL[0]
    finally:
        integration.uninstall()
