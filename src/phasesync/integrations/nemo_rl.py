"""NeMo-RL: a `WeightSynchronizer` for colocated engines whose steps are a declared protocol.

    from phasesync.integrations.nemo_rl import FencedSynchronizer
    synchronizer = FencedSynchronizer(policy, generation, refit_buffer_size_gb=4)

It goes where the factory returns `IPCWeightSynchronizer`, and has its interface. What must survive
edits: KV returns only after a transfer that succeeded, and a `prepare_for_generation` or a
`finish_generation` that answers False has failed.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import count
from typing import Any

from phasesync.errors import EngineError
from phasesync.runtime import RankRunner

__all__ = ("PROTOCOL", "FencedSynchronizer")

PROTOCOL = "colocated_controller"
_SYNCHRONIZERS = count(1)
_GIB = 1024**3


class FencedSynchronizer:
    """Weights from a colocated policy to vLLM over CUDA IPC, one declared step at a time.

    `refit_buffer_size_gb` as for `IPCWeightSynchronizer`, or the bytes as a function of the policy;
    `join` waits for futures, `ray.get` where nothing else is said; `runner` are arguments of
    `RankRunner` (`runs`, `run`).
    """

    def __init__(
        self,
        policy: Any,
        generation: Any,
        refit_buffer_size_gb: float | Callable[[Any], int] = 1.0,
        *,
        join: Callable[[Any], Any] | None = None,
        initialise: Callable[[Any, Any], None] | None = None,
        **runner: Any,
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._buffer = refit_buffer_size_gb
        self._join = join or import_module("ray").get
        self._initialise = initialise
        self._arguments = {"run": "nemo-rl", **runner}
        self._runner: RankRunner | None = None
        self._stale = True
        self._timer: Any = None
        self._kv_scales: dict[str, float] | None = None
        self._asked: list[str] = []
        self._woken: list[str] = []
        self._readers: Any = None

    def sync_weights(
        self, *, timer: Any = None, kv_scales: dict[str, float] | None = None
    ) -> dict[str, float] | None:
        """Transfer the latest policy weights to the generation backend.

        Raises:
            EpochFailed: a step failed. The engine sleeps, the policy is offloaded, and the sync
                may be run again; the weights are stale.
        """
        self._timer, self._kv_scales, self._stale = timer, kv_scales, True
        _in_a_loop_of_its_own(self._sync)
        self._stale = False
        return None

    @property
    def is_stale(self) -> bool:
        return self._stale

    def mark_stale(self) -> None:
        self._stale = True

    def init_communicator(self) -> None:
        """Negotiate the metadata of the transfer, as NeMo-RL does."""
        make = self._initialise
        if make is None:
            interfaces = import_module("nemo_rl.weight_sync.interfaces")
            make = interfaces.initialize_refit_metadata
        make(self._policy, self._generation)

    def shutdown(self) -> None:
        """Say goodbye in the journal."""
        runner, self._runner = self._runner, None
        if runner is not None:
            _in_a_loop_of_its_own(runner.close)

    async def _sync(self) -> None:
        if self._runner is None:
            run = f"{self._arguments['run']}-{next(_SYNCHRONIZERS)}"
            runner = RankRunner(
                PROTOCOL,
                rank=0,
                ranks=1,
                **{**self._arguments, "run": run, "actions": self._actions()},
            )
            await runner.start()
            self._runner = runner
        self._asked, self._woken, self._readers = [], [], None
        await self._runner.run_epoch()

    def _actions(self) -> dict[str, Callable[[], None]]:
        return {
            "make_room": self._policy.offload_before_refit,
            "resume_weights": lambda: self._prepare("weights"),
            "transfer": self._transfer,
            "offload": self._policy.offload_after_refit,
            "resume_kv": lambda: self._prepare("kv_cache"),
            "reclaim": self._reclaim,
            "reset": self._reset,
        }

    def _prepare(self, tag: str) -> None:
        self._asked.append(tag)
        if self._generation.prepare_for_generation(tags=[tag]) is False:
            raise EngineError(f"the engine did not wake {tag!r}: it answered False")
        self._woken.append(tag)

    def _transfer(self) -> None:
        named = "prepare_for_generation/transfer_and_update_weights"
        with nullcontext() if self._timer is None else self._timer.time(named):
            sent = self._policy.stream_weights_via_ipc_zmq(
                buffer_size_bytes=self._buffer_bytes(), kv_scales=self._kv_scales
            )
            self._readers = self._generation.update_weights_via_ipc_zmq()
            self._join(sent)
            received = self._join(self._readers)
            self._readers = None
            if not all(answer for answer in received if answer is not None):
                raise EngineError("a worker of the engine did not take the weights")

    def _buffer_bytes(self) -> int:
        buffer = self._buffer
        return buffer(self._policy) if callable(buffer) else int(buffer * _GIB)

    def _reset(self) -> None:
        if self._readers is not None:
            # Nothing that the engine may still read is given back; how the reading ends is known.
            with suppress(Exception):
                self._join(self._readers)
        self._policy.offload_after_refit()

    def _reclaim(self) -> None:
        if self._asked == self._woken == ["weights"]:
            # An engine that is half awake takes a release for done (vLLM 0.24).
            self._prepare("kv_cache")
        if self._asked and self._generation.finish_generation() is False:
            raise EngineError("the engine was not put to sleep: it answered False")


def _in_a_loop_of_its_own(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` to its end; the caller may be in a loop that must not be entered again."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="phasesync sync", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
