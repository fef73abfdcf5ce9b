"""Journals of all nodes in one pack, gathered by a task a node."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phasesync.cli import cli
from phasesync.errors import LogError
from phasesync.report.audit import audit_paths
from tests.bench.journal_maker import write


def test_every_node_sends_its_journals(ray: Any, tmp_path: Path) -> None:
    from phasesync.integrations.ray_collect import collect_over_ray

    write(tmp_path / "run", 4, 2, 2, 2)
    out = tmp_path / "run.pack.tar.gz"
    manifest = collect_over_ray(tmp_path / "run", out)
    assert {host: each["files"] for host, each in manifest["hosts"].items()} == {
        "host0": 2,
        "host1": 2,
    }
    assert [each["files"] for each in manifest["nodes"].values()] == [4]
    assert audit_paths([out])[0].verdict == "ok"


def test_no_journal_on_any_node_is_told_with_the_node(ray: Any, tmp_path: Path) -> None:
    from phasesync.integrations.ray_collect import collect_over_ray

    with pytest.raises(LogError, match="no node has a journal there"):
        collect_over_ray(tmp_path / "none", tmp_path / "run.pack.tar.gz")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:99999", "nowhere.invalid:6379", None]
)
def test_a_cluster_that_is_not_there_is_said_in_one_line(
    ray_module: Any, tmp_path: Path, address: str | None
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "phasesync", "collect", "--ray", str(tmp_path)]
        + (["--address", address] if address else []),
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert f"no Ray cluster can be joined at {address or '127.0.0.1:2'} (" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_address_goes_with_ray(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["collect", str(tmp_path), "--address", "127.0.0.1:6379"])
    assert done.exit_code == 2
    assert "it goes with --ray" in done.output + str(done.exception)
