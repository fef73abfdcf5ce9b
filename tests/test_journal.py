"""The journal takes what the disk does to it, and says what it lost."""

import os
import warnings
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from phasesync.core.model import Rank, RoleName
from phasesync.errors import PlanError
from phasesync.journal import ERROR_BYTES_MAX, Journal, JournalWarning

WHO = Rank(RoleName("trainer"), 3)


def journal(runs: Path, **more: Any) -> Journal:
    return Journal(runs, run="r1", rank=WHO, ranks=8, device="h/cpu3", host="h", **more)


def read(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_is_flat_and_says_who(tmp_path: Path) -> None:
    with journal(tmp_path, wall=lambda: 1.25, mono_ns=lambda: 42) as log:
        log.bind(epoch=7)
        assert log.write("phase.start", phase="offload", ticket=None) == 0
        assert log.write("phase.fail", level="error", error="no") == 1
    path = tmp_path / "r1" / "trainer-3.0.jsonl"
    first, second = read(path)
    assert first == {
        "event": "phase.start", "level": "info", "journal": 1,
        "timestamp": "1970-01-01T00:00:01.250000Z", "mono_ns": 42, "seq": 0, "run": "r1",
        "role": "trainer", "rank": 3, "incarnation": 0, "host": "h", "pid": os.getpid(),
        "device": "h/cpu3", "ranks": 8, "epoch": 7, "phase": "offload",
    }  # fmt: skip
    assert (second["level"], second["error"], second["seq"]) == ("error", "no", 1)


def test_an_error_is_cut_at_2_kib(tmp_path: Path) -> None:
    with journal(tmp_path) as log:
        log.write("phase.fail", error="ä" * 5000)
    (line,) = read(log.path)
    assert len(line["error"].encode()) <= ERROR_BYTES_MAX
    assert line["error"].endswith("...")


def test_a_folder_that_cannot_be_made_costs_lines_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "r1").write_text("a file where the folder should be")
    log = journal(tmp_path)
    with pytest.warns(JournalWarning, match="lines are lost and counted"):
        log.write("phase.start")
    log.write("phase.end")  # It has warned once.
    log.close()
    assert (log.lost, log.seq) == (2, 2)


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "trainer-3.0.jsonl").symlink_to("/dev/full")
    log = journal(tmp_path)
    with pytest.warns(JournalWarning, match="No space left on device"):
        log.write("phase.start")
    log.write("phase.end")
    log.close()
    assert (log.lost, log.seq) == (2, 2)


def test_a_line_cut_short_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = journal(tmp_path)
    log.write("epoch.begin")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JournalWarning)
        log.write("phase.start")
    monkeypatch.undo()
    log.write("phase.end")
    log.close()
    first, torn, last = log.path.read_bytes().splitlines()
    assert orjson.loads(first)["event"] == "epoch.begin"
    assert len(torn) == 20
    assert orjson.loads(last)["seq"] == 2
    assert log.lost == 1


@pytest.mark.parametrize(("fsync", "times"), [("none", 0), ("epoch", 1), ("line", 3)])
def test_fsync_is_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str, times: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    with journal(tmp_path, fsync=fsync) as log:
        for event in ("epoch.begin", "phase.start", "epoch.end"):
            log.write(event)
    assert len(calls) == times


def test_the_application_keeps_its_own_structlog(tmp_path: Path) -> None:
    before = structlog.get_config()
    with journal(tmp_path) as log:
        log.write("epoch.begin")
    assert structlog.get_config() == before
    assert not structlog.is_configured()


def test_a_second_incarnation_has_its_own_file(tmp_path: Path) -> None:
    for incarnation in (0, 1):
        with journal(tmp_path, incarnation=incarnation) as log:
            log.write("rank.start")
    assert sorted(path.name for path in (tmp_path / "r1").iterdir()) == [
        "trainer-3.0.jsonl",
        "trainer-3.1.jsonl",
    ]


def cycle(log: Journal, epochs: int) -> None:
    for epoch in range(1, epochs + 1):
        log.bind(epoch=epoch)
        log.write("epoch.begin")
        log.write("phase.start", phase="train")
        log.write("epoch.end")


def test_rotation_deletes_whole_epochs_and_says_so_first(tmp_path: Path) -> None:
    with journal(tmp_path, keep_epochs=8) as log:
        log.write("plan", epoch=0, members=["trainer/3"])
        cycle(log, 40)
    files = sorted(log.path.parent.iterdir(), key=lambda path: read(path)[0]["seq"])
    lines = [line for path in files for line in read(path)]
    begun = [line["epoch"] for line in lines if line["event"] == "epoch.begin"]
    assert begun == list(range(begun[0], 41))
    assert 8 <= len(begun) <= 8 + 2 + 2
    assert [line["seq"] for line in lines] == list(range(lines[0]["seq"], log.seq))
    for path in files:
        head, plan, begin = read(path)[:3]
        assert (head["event"], plan["event"], begin["event"]) == (
            "journal.part", "plan", "epoch.begin",
        )  # fmt: skip
        assert begin["epoch"] == head["after_epoch"] + 1
    assert read(files[-1])[0]["kept_seq"] == lines[0]["seq"]


def test_max_bytes_bounds_all_but_the_open_epoch(tmp_path: Path) -> None:
    with journal(tmp_path, max_bytes=8000) as log:
        cycle(log, 100)
        assert sum(path.stat().st_size for path in log.path.parent.iterdir()) <= 8000 + 1000
        log.bind(epoch=101)
        log.write("epoch.begin")
        for _ in range(100):
            log.write("phase.progress", phase="train")
    assert sum(line["event"] == "phase.progress" for line in read(log.path)) == 100


@pytest.mark.parametrize("limit", [{"keep_epochs": 0}, {"max_bytes": -1}])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="must be 1 or more"):
        journal(tmp_path, **limit)


def test_limits_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASESYNC_KEEP_EPOCHS", "4")
    with journal(tmp_path) as log:
        cycle(log, 9)
    assert log.path.name == "trainer-3.0.part8.jsonl"
    monkeypatch.setenv("PHASESYNC_KEEP_EPOCHS", "many")
    with pytest.raises(PlanError, match="'many'; it must be a number"):
        journal(tmp_path)


def test_without_limits_all_is_one_file(tmp_path: Path) -> None:
    with journal(tmp_path) as log:
        cycle(log, 50)
    assert [path.name for path in log.path.parent.iterdir()] == ["trainer-3.0.jsonl"]


def test_a_held_line_goes_to_the_disk_with_the_next_one(tmp_path: Path) -> None:
    log = journal(tmp_path)
    log.write("epoch.begin")
    assert log.hold("phase.end", phase="stage") == 1
    assert [line["seq"] for line in read(log.path)] == [0]
    assert log.stands is not None
    assert log.stands.event == "phase.end", "where the rank stands is known at once"
    log.write("phase.start", phase="load")
    assert [line["seq"] for line in read(log.path)] == [0, 1, 2]
    log.hold("phase.end", phase="load")
    log.push()
    assert len(read(log.path)) == 4
    log.hold("fence.pass", fence="staged")
    log.close()
    assert [line["seq"] for line in read(log.path)] == [0, 1, 2, 3, 4]


def test_held_lines_that_the_disk_does_not_take_are_counted_each(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "trainer-3.0.jsonl").symlink_to("/dev/full")
    log = journal(tmp_path)
    log.hold("phase.end")
    with pytest.warns(JournalWarning, match="No space left on device"):
        log.write("phase.start")
    log.close()
    assert log.lost == 2


def test_fsync_of_each_line_holds_none_back(tmp_path: Path) -> None:
    with journal(tmp_path, fsync="line") as log:
        log.hold("phase.end", phase="stage")
        assert len(read(log.path)) == 1


def test_a_field_of_a_line_beats_what_is_on_every_line(tmp_path: Path) -> None:
    with journal(tmp_path) as log:
        log.bind(epoch=7, digest="a")
        log.write("plan", epoch=0)
        log.bind(digest="b")
        log.write("epoch.begin")
    plan, begin = read(log.path)
    assert (plan["epoch"], plan["digest"]) == (0, "a")
    assert (begin["epoch"], begin["digest"]) == (7, "b")
    assert log.path.read_bytes().count(b'"epoch"') == 2, "no key is there twice"
