"""The examples under Ray do what they say; each has a Ray of its own."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)
EXAMPLES = Path(__file__).parents[2] / "examples"


def said(example: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # What Ray says meanwhile may stand before it, on the same line.
    return re.findall(r"(?:epoch \d+: |trainer/\d+: epoch ).*", done.stdout)


def test_a_controller_names_the_worker_that_died(ray_module: Any, tmp_path: Path) -> None:
    *good, failed = said("04_ray_driver.py", tmp_path)
    assert good == [f"epoch {n}: trainer/3 took longest to offload" for n in (1, 2)]
    assert failed.startswith("trainer/3: epoch 3 failed: trainer/3 died in phase 'offload'")
    assert failed.endswith("(replace trainer/3)")


def test_a_node_that_is_killed_is_known_on_the_other(ray_module: Any, tmp_path: Path) -> None:
    lines = [line for line in said("05_ray_two_nodes.py", tmp_path) if "failed" in line]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        found = re.fullmatch(
            rf"trainer/{number}: epoch 1 failed: trainer/[23] died: its connection closed "
            r"\(replace trainer/[23]\); known (.*) s after its node",
            line,
        )
        assert found, line
        assert float(found[1]) < 5
