"""The example that is named after vLLM runs, and each of its versions answers differently."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_grpo.py"


def test_the_example_syncs_three_versions(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("version ")]
    assert [line[1] for line in said] == ["1", "2", "3"]
    assert len({" ".join(line[3:]) for line in said}) == 3
    assert (tmp_path / "runs" / "grpo" / "trainer-0.0.jsonl").exists()
