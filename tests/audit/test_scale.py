"""Large runs: several processes read, few lines are gone through one by one, nothing is missed."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from phasesync.cli import main
from phasesync.logs import pool
from phasesync.report.audit import audit_paths
from phasesync.report.stats import as_json, as_text, stats_of
from tests.bench.journal_maker import write


def skew(path: Path, seconds: int) -> None:
    """Set the wall clock of one journal's host forward (its lines are of the same minute)."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        at = line["timestamp"]
        line["timestamp"] = f"{at[:17]}{int(at[17:19]) + seconds:02}{at[19:]}"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in found))


def edit(path: Path, event: str, nth: int, **fields: Any) -> None:
    """Change fields of the nth line of `event` in one journal."""
    text = path.read_text().splitlines()
    at = [number for number, line in enumerate(text) if f'"event":"{event}"' in line][nth]
    text[at] = json.dumps({**json.loads(text[at]), **fields}, separators=(",", ":"))
    path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    write(folder, 8, 6, 2, 2)
    return folder


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def test_one_part_of_the_run_is_gone_through_and_the_rest_taken_as_a_whole(
    run: Path, gone_through: list[str]
) -> None:
    (answer,) = audit_paths([run])
    lines = sum(path.read_bytes().count(b"\n") for path in run.iterdir())
    assert answer.verdict == "ok"
    assert answer.events > 0.9 * lines
    assert len(gone_through) < 0.15 * lines


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_what_is_odd_is_found_in_any_epoch_by_any_number_of_processes(
    run: Path, epoch: int
) -> None:
    edit(run / "trainer-5.0.jsonl", "fence.arrive", 1 + 7 * epoch, free_bytes=1)
    one, two = (audit_paths([run], jobs=jobs)[0] for jobs in (1, 2))
    assert (one.verdict, one.rule, one.epoch) == ("violation", "R-EPOCH", epoch + 1)
    assert one == two


def test_a_reader_that_dies_is_gone_on_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = audit_paths([run], jobs=1)[0]
    read = pool._Reader._read
    times: list[None] = []

    def dying(self: pool._Reader) -> bool:
        times.append(None)
        if len(times) > 2:
            self.stop()
        return read(self)

    monkeypatch.setattr(pool._Reader, "_read", dying)
    assert audit_paths([run], jobs=2)[0] == whole
    assert len(times) > 2


def test_a_reader_that_does_not_start_is_done_without(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert audit_paths([run], jobs=2)[0].verdict == "ok"


def test_the_hosts_whose_journals_are_missing_are_named(run: Path) -> None:
    for number in range(4, 8):
        (run / f"trainer-{number}.0.jsonl").unlink()
    (answer,) = audit_paths([run])
    assert (answer.verdict, answer.rule) == ("inconclusive", "R-DUMPSET")
    assert "every journal of host host1 is missing" in answer.because
    assert "trainer/4, trainer/5, trainer/6, trainer/7" in answer.because


def test_skew_is_told_with_its_bounds(run: Path) -> None:
    for number in range(4, 8):
        skew(run / f"trainer-{number}.0.jsonl", 7)
    (answer,) = audit_paths([run])
    assert answer.verdict == "ok"
    (pair,) = answer.to_json()["clocks"]
    assert (pair["ahead"], pair["behind"]) == ("host1", "host0")
    assert 6999 < pair["least_ms"] <= 7000 <= pair["most_ms"] < 7001
    stats = stats_of([run])
    assert as_json(stats)["clocks"] == [pair]
    assert any("host1 is 6999." in row for row in as_text(stats))


def test_stats_name_who_was_waited_for_and_where(run: Path) -> None:
    path = run / "trainer-3.0.jsonl"
    ended = '"phase":"train","duration_s":'
    path.write_text(path.read_text().replace(f"{ended}0.0009", f"{ended}2.0"))
    found = as_json(stats_of([run]))
    assert (found["epochs"], found["ranks"]) == (6, 8)
    assert found["phases"]["train"]["count"] == 48
    assert {each["rank"] for each in found["slow"]} == {"trainer/3"}
    assert set(found["fences"]["asleep"]["lost_s"]) == set(found["fences"]["asleep"]["last"])
    assert set(found["waited_for_hosts_s"]) == {"host0", "host1"}


def test_lines_of_another_run_in_a_journal_are_told(run: Path) -> None:
    path = run / "trainer-0.0.jsonl"
    other = path.read_text().replace('"run":"made"', '"run":"other"')
    path.write_text(path.read_text() + other)
    (answer,) = audit_paths([run])
    assert answer.verdict == "inconclusive"
    assert "of run 'other'" in answer.because


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"# A title\n\nand text\n"),
        ("shot.png", b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    ],
)
def test_what_is_no_log_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        main(["audit", str(path)])
    (said,) = capsys.readouterr().err.splitlines()
    assert name in said


def test_a_journal_without_a_line_is_its_ranks(run: Path) -> None:
    (run / "trainer-2.0.jsonl").write_bytes(b"")
    (answer,) = audit_paths([run])
    assert answer.verdict == "inconclusive"
    assert "trainer/2" in answer.because
