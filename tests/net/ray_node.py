"""A Ray node whose cable is cut: when our fences know, and when Ray does. Run in its namespace.

    ip netns exec NEAR python -m tests.net.ray_node NEAR-ADDRESS CABLE [SECONDS]

Prints one JSON object. Whoever calls this has started Ray's nodes, with a resource `near` or `far`.
"""

import json
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

from tests.fences.faults.matrix import Member
from tests.fences.faults.ranks import Record, lives_of, until_entered
from tests.workers import PATHS

SIZE = 4


def main(address: str, link: str, patience_s: float) -> dict[str, Any]:
    ray: Any = import_module("ray")
    ray.init(
        address=f"{address}:6379",
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": PATHS},
    )
    late = {"act": "late", "late_s": 60.0}
    with lives_of(SIZE, 3, late, transport="ray", address=None, deadline_s=60.0) as lives:
        member = ray.remote(num_cpus=0)(Member)
        places = ["near", "near", "far", "far"]
        actors = [member.options(resources={place: 1}).remote() for place in places]
        ray.get([actor.seen.remote() for actor in actors], timeout=120)
        answers = [actor.live.remote(each) for actor, each in zip(actors, lives, strict=True)]
        until_entered(lives[0], SIZE - 1)
        cut = time.monotonic()
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        ray.get(answers[:2], timeout=90)
        seen = [ray.get(actor.seen.remote(), timeout=30)[1] for actor in actors[:2]]
        breaks = [r for said in seen for r in said if isinstance(r, Record) and r.kind == "broken"]
        return {
            "kinds": sorted({r.said.kind for r in breaks}),
            "ranks": sorted({str(rank) for r in breaks for rank in r.said.ranks}),
            "known_s": max(r.ended_at for r in breaks) - cut,
            "ray_knows_s": _dead_in_ray(ray, cut, patience_s),
        }


def _dead_in_ray(ray: Any, cut: float, patience_s: float) -> float | None:
    """When Ray says that a node is dead; None if it has not within the time."""
    while time.monotonic() < cut + patience_s:
        if not all(node["Alive"] for node in ray.nodes()):
            return time.monotonic() - cut
        time.sleep(0.2)
    return None


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], float((sys.argv[3:] or ["1"])[0]))))
