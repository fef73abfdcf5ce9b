"""SkyRL's own `WorkerDispatch`: call by call, and what a transfer that raises leaves behind."""

import asyncio
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typing_extensions

if sys.version_info < (3, 12):  # SkyRL's models are made with the newer one.
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.workers.worker_dispatch import (  # type: ignore[import-not-found]
    WorkerDispatch,
)

from phasesync.errors import EpochFailed
from phasesync.integrations import skyrl as integration
from phasesync.report.audit import audit_paths
from tests.verl.table import row

WAYS = ("plain", "kv to the host", "kv dropped")


class Client:
    """An inference engine's client: what it was asked, and whether requests are served."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.generates = self.has_kv = True

    def __getattr__(self, name: str) -> Any:
        async def call(**named: Any) -> None:
            self.calls.append(f"{name} {named}" if named else name)
            tags = named.get("tags", [])
            self.generates &= name not in ("pause_generation", "sleep")
            self.has_kv &= name not in ("sleep", "sleep_for_weight_sync")
            self.has_kv |= "kv_cache" in tags
            self.generates |= name == "resume_generation" or (
                name == "wake_up" and "kv_cache" in tags
            )

        return call

    def increment_weight_version(self) -> None:
        self.calls.append("increment_weight_version")


class Actors:
    """The policy's workers: what they are asked to move, in the client's list of calls."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def backload_to_gpu(self, **what: bool) -> None:
        self._calls.append(f"policy onto the GPU {what}")

    def offload_to_cpu(self, *_: Any, **what: bool) -> None:
        self._calls.append(f"policy off the GPU {what}")


class Dispatch(WorkerDispatch):  # type: ignore[misc]
    """The real dispatch over no workers: the transfer is noted, or raises."""

    fails = False

    def empty_cache(self, model: Any = None) -> None:
        self._inference_engine_client.calls.append(f"empty_cache {model}")

    def _broadcast_to_inference_engines(self, client: Any, model_id: Any = None) -> None:
        client.calls.append(f"broadcast {model_id}")
        if self.fails:
            raise RuntimeError("injected in the transfer")


def dispatch(way: str) -> tuple[Any, Client]:
    config = SimpleNamespace(
        trainer=SimpleNamespace(
            placement=SimpleNamespace(
                colocate_all=way == "colocated", colocate_policy_ref=way == "colocated"
            ),
            strategy="fsdp2",
            policy=SimpleNamespace(
                model=SimpleNamespace(lora=SimpleNamespace(rank=0)),
                optimizer_config=SimpleNamespace(offload_after_step=True),
            ),
            fully_async=SimpleNamespace(
                enabled=way == "kv to the host", clear_kv_cache_on_weight_sync=False
            ),
        ),
        generator=SimpleNamespace(
            inference_engine=SimpleNamespace(
                offload_kv_for_weight_sync=way != "plain", weight_sync_backend="nccl"
            )
        ),
    )
    client = Client()
    actors = Actors(client.calls)
    return Dispatch(config, actors, inference_engine_client=client), client


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    yield
    integration.uninstall()


@pytest.mark.parametrize("way", [*WAYS, "colocated"])
def test_the_calls_are_skyrls_call_by_call(way: str, tmp_path: Path) -> None:
    made, stock = dispatch(way)

    async def twice() -> None:
        await made.save_weights_for_sampler()
        await made.save_weights_for_sampler()

    asyncio.run(twice())
    integration.install(Dispatch, runs=tmp_path, run=tmp_path.name)
    made, ours = dispatch(way)
    asyncio.run(twice())
    assert ours.calls == stock.calls
    assert ours.generates
    assert [answer.verdict for answer in audit_paths([tmp_path])] == ["ok"]


@pytest.mark.parametrize("way", WAYS)
def test_partial_weights_serve_nobody(way: str, tmp_path: Path) -> None:
    made, stock = dispatch(way)
    made.fails = True
    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(made.save_weights_for_sampler())
    assert stock.generates, "SkyRL's own body resumes in a finally"
    integration.install(Dispatch, runs=tmp_path, run=tmp_path.name)
    made, ours = dispatch(way)
    made.fails = True
    said = []

    async def fails_then_works() -> None:
        with pytest.raises(EpochFailed, match="injected in the transfer") as caught:
            await made.save_weights_for_sampler()
        said.append(caught.value)
        assert not ours.generates
        made.fails = False
        await made.save_weights_for_sampler()
        assert ours.generates
        assert ours.has_kv

    asyncio.run(fails_then_works())
    assert said[0].weights != "intact"
    assert said[0].can_retry == (way != "kv dropped")
    row("SkyRL 0.4.0", f"the transfer raises ({way})", "generation resumed", "stays paused")


def test_colocated_an_engine_with_partial_weights_stays_asleep(tmp_path: Path) -> None:
    """Stock leaves it half awake and says nothing of it; the next sync wakes it again."""
    made, stock = dispatch("colocated")
    made.fails = True
    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(made.save_weights_for_sampler())
    assert not stock.has_kv
    integration.install(Dispatch, runs=tmp_path, run=tmp_path.name)
    made, ours = dispatch("colocated")

    async def fails_then_works() -> EpochFailed:
        made.fails = True
        with pytest.raises(EpochFailed, match="injected in the transfer") as caught:
            await made.save_weights_for_sampler()
        failed: EpochFailed = caught.value
        assert (ours.generates, ours.has_kv) == (False, False)
        assert not any("kv_cache" in call for call in ours.calls)
        made.fails = False
        await made.save_weights_for_sampler()
        return failed

    failed = asyncio.run(fails_then_works())
    assert (failed.weights, failed.can_retry) == ("unknown", False)
    assert failed.poisoned
    assert "the next save_weights_for_sampler sends them all again" in failed.__notes__[0]
    assert (ours.generates, ours.has_kv) == (True, True)
    said = "stays asleep, and says so"
    row("SkyRL 0.4.0", "the transfer raises (colocated)", "half awake, nothing said", said)


class Sick(Client):
    """A client that fails once, in its first call of this kind."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self._bad = bad

    def __getattr__(self, name: str) -> Any:
        well = super().__getattr__(name)

        async def call(**named: Any) -> None:
            if f"{name} {' '.join(named.get('tags', ()))}".strip() == self._bad:
                self._bad = ""
                raise RuntimeError("injected in the client")
            await well(**named)

        return call


#: What fails; whether generation goes on, since the weights are whole; whether KV is there then.
SICK = [
    ("plain", "pause_generation", True, True),
    ("plain", "resume_generation", True, True),
    ("kv to the host", "pause_generation", True, True),
    # From here on SkyRL has discarded the weights, and nothing may be served until others came.
    ("kv to the host", "sleep_for_weight_sync", False, True),
    ("kv to the host", "wake_for_weight_sync weights", False, True),
    ("kv to the host", "wake_for_weight_sync kv_cache", True, True),
    ("kv to the host", "resume_generation", True, True),
    ("kv dropped", "wake_up weights", False, False),
    ("kv dropped", "wake_up kv_cache", True, True),
    ("colocated", "wake_up kv_cache", True, True),
]


@pytest.mark.parametrize(("way", "bad", "generates", "has_kv"), SICK)
def test_whole_weights_serve_and_others_do_not(
    way: str, bad: str, generates: bool, has_kv: bool, tmp_path: Path
) -> None:
    integration.install(Dispatch, runs=tmp_path, run=tmp_path.name)
    made, client = dispatch(way)
    made._inference_engine_client = sick = Sick(bad)
    sick.calls = client.calls

    async def fails_then_works() -> None:
        with pytest.raises(EpochFailed, match="injected in the client") as caught:
            await made.save_weights_for_sampler()
        assert (sick.generates, sick.has_kv) == (generates, has_kv)
        moved = any(call.startswith("broadcast") for call in sick.calls)
        assert (sick.calls.count("increment_weight_version") == 1) == (
            moved and sick.calls[-1] == "resume_generation"
        ), "what is cached is not of the weights that serve"
        notes = getattr(caught.value, "__notes__", [])
        assert bool(notes) is not generates
        if not generates:
            assert caught.value.weights != "intact"
        await made.save_weights_for_sampler()
        assert (sick.generates, sick.has_kv) == (True, True)
        await made.save_weights_for_sampler()

    asyncio.run(fails_then_works())


def test_the_lines_of_the_migration_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    (lines,) = re.findall(r"```python skyrl\n(.*?)```", guide, re.DOTALL)
    exec(lines, {})
    made, ours = dispatch("plain")
    asyncio.run(made.save_weights_for_sampler())
    assert ours.calls[-1] == "increment_weight_version"
    assert [answer.verdict for answer in audit_paths(["runs"])] == ["ok"]
