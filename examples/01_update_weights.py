"""Around your own update_weights: torchrun --nproc-per-node 2 examples/01_update_weights.py"""

import asyncio
import os
import time

import torch.distributed as dist

from phasesync import EpochFailed, RankRunner
from phasesync.fences.store import default_store


class Worker:
    """Stands for your trainer rank; the sleeps stand for the work."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send_weights(self) -> None:
        time.sleep(0.05)

    def offload(self) -> None:
        time.sleep(0.1 * self.rank)  # Rank 1 is late: without a fence rank 0 would run ahead.

    def empty_cache(self) -> None:
        time.sleep(0.01)

    def resume_kv(self) -> None:
        print(f"rank {self.rank} maps KV on every device of its replica", flush=True)


# README's lines begin here.
async def train(worker: Worker, rank: int, ranks: int, steps: int) -> None:
    runner = RankRunner(
        "basic",
        rank=rank,
        ranks=ranks,
        fences=default_store(),  # the store of your process group; its collectives stay free
        actions={
            "sync": worker.send_weights,  # plain or async; what blocks gets a thread of its own
            "offload": worker.offload,
            "empty_cache": worker.empty_cache,
            "resume_kv": worker.resume_kv,  # called on the leader, when all of the replica let go
        },
        caller_joins=True,  # you train before, generate after, and join all ranks yourself
    )
    async with runner:
        for _ in range(steps):
            try:
                await runner.run_epoch()
            except EpochFailed as failed:  # the same root cause on every rank
                raise SystemExit(failed.EXIT_CODE) from failed


if __name__ == "__main__":
    dist.init_process_group("gloo")
    me = int(os.environ["RANK"])
    asyncio.run(train(Worker(me), me, dist.get_world_size(), steps=3))
    dist.destroy_process_group()
