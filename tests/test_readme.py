"""What the README shows is what is there: its lines are a file, counted, and they run."""

import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
EXAMPLE = HOME / "examples" / "01_update_weights.py"


def readme_lines() -> str:
    text = EXAMPLE.read_text()
    return text.split("# README's lines begin here.\n")[1].split("\n\n\nif __name__")[0]


def test_the_readme_shows_the_example() -> None:
    assert f"```python\n{readme_lines().strip()}\n```" in (HOME / "README.md").read_text()


def test_it_is_about_twenty_lines() -> None:
    assert len(readme_lines().strip().splitlines()) <= 24


def test_examples_are_short() -> None:
    for example in sorted((HOME / "examples").glob("*.py")):
        assert len(example.read_text().splitlines()) <= 60, example


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rank 0 maps KV on every device of its replica"] * 3
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == ["trainer-0.0.jsonl", "trainer-1.0.jsonl"]
