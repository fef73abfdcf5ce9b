"""A verl job under Ray that dies in its KV resume, and the logs that it leaves.

`python -m tests.verl.ray_job OUT [--late RANK]`, in an environment with verl 0.9.0. Real Ray
actors run verl's own `ActorRolloutRefWorker.update_weights` with the log level people turn on; the
engine is a fake that prints what vLLM prints. What Ray and verl wrote is copied to OUT as it is.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.verl.ledger import CAPACITY, GIB, OutOfMemory

__all__ = ("main",)

RANKS = 4
LATE_S = 6.0


class FileLedger:
    """Device memory that really refuses, in a file that all processes lock."""

    def __init__(self, path: str) -> None:
        self._path = path

    @contextlib.contextmanager
    def _held(self) -> Any:
        with Path(self._path).open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            held = json.loads(stream.read() or "{}")
            yield held
            stream.seek(0)
            stream.truncate()
            stream.write(json.dumps(held))

    def take(self, device: int, what: str) -> None:
        with self._held() as held:
            mine = held.setdefault(str(device), {})
            used = sum(mine.values())
            if used + GIB[what] > CAPACITY:
                raise OutOfMemory(f"device {device}: {what} {GIB[what]} GiB beside {mine}")
            mine[what] = GIB[what]

    def give(self, device: int, what: str) -> None:
        with self._held() as held:
            held.setdefault(str(device), {}).pop(what, None)

    def has(self, device: int, what: str) -> bool:
        with self._held() as held:
            return what in held.get(str(device), {})

    def of(self, device: int) -> dict[str, int]:
        with self._held() as held:
            return dict(held.get(str(device), {}))

    def free_bytes(self, device: int) -> int:
        return (CAPACITY - sum(self.of(device).values())) << 30


class vLLMHttpServer:  # Ray prints the name of the class, and this is verl's
    """The engine of the replica: one leader, a worker a device, in vLLM's words."""

    def __init__(self, ledger: str) -> None:
        self._ledger = FileLedger(ledger)

    def _say(self, level: str, where: str, what: str, worker: str = "EngineCore_DP0") -> None:
        when = time.strftime("%m-%d %H:%M:%S")
        print(f"({worker} pid={os.getpid()}) {level} {when} [{where}] {what}", flush=True)

    def wake_up(self, tags: list[str]) -> None:
        began = time.time()
        for device in range(RANKS):
            try:
                self._ledger.take(device, tags[0])
            except OutOfMemory:
                where = "multiproc_executor.py:671"
                worker = f"Worker_TP{device}"
                error = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
                self._say("ERROR", where, "WorkerProc hit an exception.", worker)
                for line in (
                    "Traceback (most recent call last):",
                    '  File "/vllm/v1/worker/gpu_worker.py", line 165, in wake_up',
                    "    allocator.wake_up(tags)",
                    '  File "/vllm/device_allocator/cumem.py", line 228, in wake_up',
                    "    create_and_map(handle)",
                    f"RuntimeError: {error}",
                ):
                    self._say("ERROR", where, line, worker)
                raise RuntimeError(error) from None
        took = time.time() - began
        said = f"It took {took:.6f} seconds to wake up tags {set(tags)!r}."
        self._say("INFO", "abstract.py:331", said)


class WorkerDict:
    """One worker of the job: verl's class under its own name, with its own method."""

    def __init__(self, rank: int, ledger: str, meet: str, late: int, engine: Any) -> None:
        import torch.distributed as dist
        import verl.workers.engine_workers as ew

        from tests.verl import rank as ranks

        dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=RANKS)
        job = ranks.Job(ranks=RANKS, late={late: LATE_S})
        store = FileLedger(ledger)
        run = self._run = ranks.Run(job, rank, store)  # type: ignore[arg-type]
        device = run.device

        class Measured(ranks.Device):
            """As on a GPU: what this process holds is what its allocator reserved."""

            def memory_reserved(self, *_: Any) -> int:
                mine = store.of(rank)
                return sum(mine.get(what, 0) for what in ("params", "cache", "staging")) << 30

            memory_allocated = memory_reserved

        device.__class__ = Measured

        async def resume(tags: list[str]) -> None:
            if rank == 0:
                await engine.wake_up.remote(tags=tags)

        run.worker.rollout.resume = resume
        for module in list(ranks.modules_with_device()):
            module.get_torch_device = lambda: device
        ew.set_expandable_segments = lambda on: None
        self._method = ew.ActorRolloutRefWorker.update_weights

    def actor_rollout_update_weights(self, step: int) -> None:
        self._run.begin()
        asyncio.run(self._method(self._run.worker, global_steps=step))


def _drive(late: int) -> None:
    """The driver, in a process of its own, so that its output is a log."""
    import ray

    # By their module's name: what is defined in __main__ travels without what it needs.
    from tests.verl.ray_job import WorkerDict, vLLMHttpServer

    scratch = tempfile.mkdtemp()
    ledger = f"{scratch}/ledger"
    Path(ledger).write_text("{}")
    engine = ray.remote(num_cpus=0)(vLLMHttpServer).remote(ledger)
    meet = f"{scratch}/meet"
    workers = [
        ray.remote(num_cpus=0)(WorkerDict).remote(rank, ledger, meet, late, engine)
        for rank in range(RANKS)
    ]
    ray.get([worker.actor_rollout_update_weights.remote(1) for worker in workers])


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("out", type=Path)
    given.add_argument("--late", type=int, default=2)
    given.add_argument("--drive", action="store_true")
    said = given.parse_args()
    import ray

    root = str(Path(__file__).parents[2])
    if said.drive:
        env = {"VERL_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            runtime_env={"env_vars": env},
            _temp_dir=str(said.out),
        )
        try:
            _drive(said.late)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        return
    with tempfile.TemporaryDirectory(prefix="r") as temp:
        command = [sys.executable, "-m", "tests.verl.ray_job", temp, "--drive"]
        done = subprocess.run(
            [*command, "--late", str(said.late)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=240,
        )
        said.out.mkdir(parents=True, exist_ok=True)
        (said.out / "driver.log").write_bytes(done.stdout)
        for path in sorted(Path(temp).glob("session_2*/logs/worker-*")):
            if path.is_file() and path.stat().st_size:
                shutil.copy(path, said.out / path.name)


if __name__ == "__main__":
    main()
