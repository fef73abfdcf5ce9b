"""NeMo-RL's `WeightSynchronizer`, against signatures written down from commit 00fa128.

The stock body is written down too, as a list of its calls: `finally` wakes KV, whatever happened.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest

from phasesync.errors import EpochFailed
from phasesync.integrations.nemo_rl import FencedSynchronizer
from phasesync.report.audit import audit_paths
from tests.verl.table import row

#: nemo_rl/weight_sync/interfaces.py
INTERFACE = {
    "sync_weights": ("self", "timer", "kv_scales"),
    "mark_stale": ("self",),
    "init_communicator": ("self",),
    "shutdown": ("self",),
}
#: nemo_rl/weight_sync/ipc_weight_synchronizer.py, where all goes well.
STOCK = [
    "policy.offload_before_refit",
    "generation.prepare_for_generation weights",
    "policy.stream_weights_via_ipc_zmq 1024",
    "generation.update_weights_via_ipc_zmq",
    "policy.offload_after_refit",
    "generation.prepare_for_generation kv_cache",
]


class Side:
    """Policy or generation: what it was asked, and what it answers."""

    def __init__(self, name: str, calls: list[str], **answers: Any) -> None:
        self._name = name
        self._calls = calls
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(tags: Any = (), **named: Any) -> Any:
            said = ",".join(tags) or str(named.get("buffer_size_bytes", ""))
            self._calls.append(f"{self._name}.{name} {said}".strip())
            return self._answers.get(name, [True])

        return call


def made(tmp_path: Path, **answers: Any) -> tuple[FencedSynchronizer, list[str]]:
    calls: list[str] = []
    return FencedSynchronizer(
        Side("policy", calls),
        Side("generation", calls, **answers),
        lambda policy: 1024,
        join=lambda futures: futures,
        initialise=lambda policy, generation: calls.append("initialise"),
        runs=tmp_path,
        run=tmp_path.name,
    ), calls


def test_the_interface_is_nemo_rls() -> None:
    for name, takes in INTERFACE.items():
        assert tuple(inspect.signature(getattr(FencedSynchronizer, name)).parameters) == takes
    assert isinstance(FencedSynchronizer.is_stale, property)


def test_the_calls_are_nemo_rls_call_by_call(tmp_path: Path) -> None:
    synchronizer, calls = made(tmp_path)
    synchronizer.init_communicator()
    for _ in range(2):
        assert synchronizer.is_stale
        synchronizer.sync_weights()
        assert not synchronizer.is_stale
        synchronizer.mark_stale()
    synchronizer.shutdown()
    assert calls == ["initialise", *STOCK, *STOCK]
    assert [answer.verdict for answer in audit_paths([tmp_path])] == ["ok"]


@pytest.mark.parametrize(
    ("answers", "why", "kv_too"),
    [
        ({"update_weights_via_ipc_zmq": [True, False]}, "did not take the weights", True),
        ({"prepare_for_generation": False}, "did not wake 'weights': it answered False", False),
    ],
    ids=["a worker refuses", "a failure told as False"],
)
def test_kv_returns_on_weights_that_did_not_come_only_to_be_released_with_them(
    tmp_path: Path, answers: dict[str, Any], why: str, kv_too: bool
) -> None:
    synchronizer, calls = made(tmp_path, **answers)
    with pytest.raises(EpochFailed, match=why) as caught:
        synchronizer.sync_weights()
    assert synchronizer.is_stale
    assert caught.value.can_retry
    kv = "generation.prepare_for_generation kv_cache"
    assert calls.count(kv) == kv_too
    stock = "KV is woken in a finally" if kv_too else "goes on: the answer is not read"
    row("NeMo-RL 00fa128", why, stock, "raises, stays stale, may retry", how="written down")
    recovery = ["policy.offload_after_refit", *([kv] * kv_too), "generation.finish_generation"]
    assert calls[-len(recovery) :] == recovery
    synchronizer.shutdown()


def test_an_engine_that_was_not_put_to_sleep_is_not_called_recovered(tmp_path: Path) -> None:
    """NeMo-RL's `finish_generation` catches what it meets, and answers False."""
    synchronizer, _ = made(tmp_path, update_weights_via_ipc_zmq=[False], finish_generation=False)
    with pytest.raises(EpochFailed, match="did not take the weights") as caught:
        synchronizer.sync_weights()
    assert not caught.value.can_retry
    synchronizer.shutdown()
