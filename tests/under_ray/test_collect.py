"""Journals of all nodes in one pack, gathered by a task a node."""

from pathlib import Path
from typing import Any

import pytest

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
