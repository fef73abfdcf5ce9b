"""`bench fence` over a Ray of its own, whose processes were begun before it."""

import json
import os
import subprocess
import sys
from typing import Any


def test_processes_older_than_the_cluster_are_let_in(ray_module: Any) -> None:
    asked = "bench fence --sizes 2 --json --only tcp,ray --rounds 1 --fences 2"
    ran = subprocess.run(
        [sys.executable, "-m", "phasesync", *asked.split()],
        # An address that a cluster once had must not be gone to.
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert {row["variant"] for row in json.loads(ran.stdout)["rows"]} == {"tcp", "ray"}
