"""The example that is named after verl runs: a sync, one that fails, and one that is well again."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl_update_weights.py"


def test_the_example_syncs_fails_and_syncs_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    syncs = re.split(r"^sync \d$", done.stdout, flags=re.MULTILINE)[1:]
    assert [sync.count("resume ['kv_cache']") for sync in syncs[:2]] == [1, 0]
    assert "failed: offload: the host has no memory left" in syncs[1]
    assert "update_weights" in syncs[2]
    journal = (tmp_path / "runs" / "job" / "trainer-0.0.jsonl").read_text()
    assert journal.count('"event":"epoch.end","level":"info"') == 2
    assert journal.count('"event":"phase.fail"') == 1
