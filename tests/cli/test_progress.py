"""How far an audit has come: the share of bytes that were read, as they lie on disk."""

import asyncio
import gzip
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from phasesync.report.audit import audit_paths
from tests.runtime.world import World


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    world = World(4, folder, epochs=12, pause_s=0.0)
    asyncio.run(world.go())
    return folder / world.run


def plain(data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("ending", "pack"),
    [("", plain), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)],
)
def test_all_bytes_on_disk_are_told_and_none_twice(
    run_folder: Path, tmp_path: Path, ending: str, pack: Callable[[bytes], bytes], jobs: int
) -> None:
    for file in run_folder.glob("*.jsonl"):
        (tmp_path / f"{file.name}{ending}").write_bytes(pack(file.read_bytes()))
    told: list[tuple[int, int]] = []
    (answer,) = audit_paths([tmp_path], progress=lambda *each: told.append(each), jobs=jobs)
    assert answer.verdict == "ok"
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert {total for _, total in told} == {size}
    done = [each for each, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == size
    assert len(done) > 3, "it is told on the way"


def audit_on_terminal(*paths: Path) -> tuple[str, str]:
    """What the command says on stdout, and what is seen on the terminal that is its stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "phasesync", "audit", *map(str, paths)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:
            pass  # Linux says so when the other end is closed.
        os.close(ours)
        assert process.stdout is not None
        out = process.stdout.read().decode()
    return out, seen.decode()


def test_a_terminal_shows_a_bar_and_nothing_else_does(run_folder: Path) -> None:
    out, seen = audit_on_terminal(run_folder)
    assert out.startswith("ok: ")
    assert "%" not in out
    assert "100%" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    said = subprocess.run(
        [sys.executable, "-m", "phasesync", "audit", str(run_folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.stdout == out
    assert said.stderr == ""
