"""The verl part of the migration guide, word for word."""

import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
ASK = (
    "from verl.workers.engine_workers import ActorRolloutRefWorker\n"
    "print(ActorRolloutRefWorker.update_weights.__code__.co_filename)\n"
)


def test_one_import_is_enough(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    job = tmp_path / "job.py"
    job.write_text(snippet + ASK)
    ran = subprocess.run(
        [sys.executable, str(job)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "phasesync" in ran.stdout.splitlines()[-1]


def test_one_environment_variable_is_enough(tmp_path: Path) -> None:
    (line,) = re.findall(r"^export VERL_USE.*$", GUIDE, re.MULTILINE)
    job = tmp_path / "job.py"
    job.write_text(ASK)
    ran = subprocess.run(
        ["bash", "-c", f"{line}\nexec {sys.executable} job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "phasesync" in ran.stdout.splitlines()[-1]
