"""One controller drives trainers that are Ray actors: python examples/04_ray_driver.py"""

import os
import time

import ray

from phasesync import EpochFailed
from phasesync.integrations.ray import Errand, RayDriver

RANKS = 4


class Trainer:
    """Stands for your worker; each phase of the protocol is a method, the sleeps are the work."""

    def __init__(self, number: int) -> None:
        self.number = number

    def sync(self, errand: Errand) -> None:
        time.sleep(0.05)

    def offload(self, errand: Errand) -> None:
        time.sleep(0.1 * self.number)  # Without a fence a leader would run ahead of the others.
        if errand.epoch == 3 and self.number == 3:
            os._exit(1)

    def empty_cache(self, errand: Errand) -> None:
        time.sleep(0.01)

    def resume_kv(self, errand: Errand) -> str:
        assert errand.ticket is not None  # Whoever maps KV has waited, and can prove it.
        return f"trainer/{self.number} maps KV behind {errand.ticket.fence}"


if __name__ == "__main__":
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level="ERROR",
    )
    workers = [ray.remote(num_cpus=0)(Trainer).remote(number) for number in range(RANKS)]
    options = {"replica_size": 2}
    # You train before an epoch and generate after it, so the driver joins nobody there.
    with RayDriver("basic", workers, options=options, caller_joins=True).blocking() as driver:
        for step in range(1, 4):
            try:
                report = driver.run_epoch(version=step)
            except EpochFailed as failed:
                print(failed)
                break
            longest = max(report.ranks, key=lambda rank: report.ranks[rank].phases_s["offload"])
            print(f"epoch {report.epoch}: {longest} took longest to offload")
    ray.shutdown()
