"""Two Ray nodes on one machine, one of which is killed: python examples/05_ray_two_nodes.py"""

import asyncio
import time

import ray
from ray.cluster_utils import Cluster

from phasesync import EpochFailed, Rank, RankRunner
from phasesync.fences.ray import RayFences

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
RANKS = 4  # All of one replica, over both nodes.


class Trainer:
    """A rank as an actor. What its fences need is an actor too, on the node of rank 0."""

    def __init__(self, number: int) -> None:
        self.rank = Rank.parse(f"trainer/{number}")
        self.busy = asyncio.Event()

    async def offloads(self) -> bool:
        return await self.busy.wait()

    async def offload(self) -> None:
        self.busy.set()
        await asyncio.sleep(60 if self.rank.number >= 2 else 0)  # The second node is late.

    async def train(self) -> str:
        nothing = dict.fromkeys(("sync", "empty_cache", "resume_kv"), lambda: None)
        async with RankRunner(
            "basic",
            rank=self.rank,
            ranks=RANKS,
            options={"replica_size": RANKS},
            actions={**nothing, "offload": self.offload},
            fences=RayFences(rank=self.rank, run="two-nodes"),
            run="two-nodes",
        ) as runner:
            try:
                return str(await runner.run_epoch())
            except EpochFailed as failed:
                return str(failed)


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "resources": {"node0": 2}})
    second = cluster.add_node(**NODE, resources={"node1": 2})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    actor = ray.remote(num_cpus=0)(Trainer)
    ranks = [actor.options(resources={f"node{n // 2}": 1}).remote(n) for n in range(RANKS)]
    answers = [rank.train.remote() for rank in ranks]
    ray.get([rank.offloads.remote() for rank in ranks])
    killed = time.monotonic()
    cluster.remove_node(second, allow_graceful=False)
    for answer in answers[:2]:
        print(ray.get(answer), f"{time.monotonic() - killed:.2f} s after its node", sep="; known ")
    ray.shutdown()
    cluster.shutdown()
