"""A Ray node that is cut off: unavailable, and never called dead, long before Ray itself tells."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.namespaces import FAR, NEAR, Cable, cable
from tests.workers import PATHS

ROOT = Path(__file__).parents[2]
KNOWN_S = 12.0  # The kernel gives a silent host up after 5 s; a busy machine says so later.


@pytest.fixture
def link() -> Iterator[Cable]:
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("CI"):
            pytest.fail("this needs Ray: pip install -c constraints.txt ray")
        pytest.skip("Ray is not installed: pip install 'phasesync[ray]'")
    with cable() as link:
        try:
            _start(link.near, NEAR, "--head", "--port=6379", "--include-dashboard=false")
            _start(link.far, FAR, f"--address={NEAR}:6379")
            yield link
        finally:
            _stop(link)


def _ray() -> str:
    return str(Path(sys.executable).with_name("ray"))


def _start(host: str, address: str, *how: str) -> None:
    place = "near" if address == NEAR else "far"
    words = [
        *(_ray(), "start", *how, f"--node-ip-address={address}", "--num-cpus=1"),
        *("--object-store-memory=80000000", "--resources", json.dumps({place: 2})),
    ]
    environment = {**os.environ, **PATHS}
    done = subprocess.run(
        ["ip", "netns", "exec", host, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _stop(link: Cable) -> None:
    """End what runs in the two namespaces, and nothing else."""
    for host in (link.near, link.far):
        listed = subprocess.run(
            ["ip", "netns", "pids", host], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            subprocess.run(["kill", "-9", pid], capture_output=True, check=False)


@pytest.mark.timeout(240)
def test_a_node_that_is_cut_off_is_unavailable(link: Cable) -> None:
    done = subprocess.run(
        [
            "ip",
            "netns",
            "exec",
            link.near,
            sys.executable,
            "-m",
            "tests.net.ray_node",
            NEAR,
            "cable",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kinds"] == ["unavailable"]
    assert set(found["ranks"]) <= {"trainer/2", "trainer/3"}
    assert found["known_s"] < KNOWN_S
