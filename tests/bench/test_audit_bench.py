"""`phasesync bench audit` makes a healthy run and audits every line of it."""

from pathlib import Path

import pytest
from tests.bench import audit_faults

from phasesync.bench.audit import bench_audit, table


def test_every_reader_is_given_the_same_lines(tmp_path: Path) -> None:
    rows = bench_audit(4, 20, jobs=2, folder=tmp_path / "journals")
    names = [row.name for row in rows]
    assert names[:2] == ["phasesync audit, 1 process", "phasesync audit, 2 processes"]
    kept = sorted((tmp_path / "journals").glob("*.jsonl"))
    lines = sum(path.read_bytes().count(b"\n") for path in kept)
    assert len(kept) == 4
    assert {row.lines for row in rows} == {lines}
    assert all(row.lines_a_second > 0 and row.memory_mb > 1 for row in rows)
    assert "phasesync audit, 1 process" in table(rows)


@pytest.mark.parametrize("seed", [11, 71])
def test_who_was_not_heard_at_an_inner_fence_is_named_and_no_rank_that_waited(seed: int) -> None:
    assert audit_faults.main(1, seed) == 0
