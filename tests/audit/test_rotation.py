"""Journals of long runs keep their last epochs: what was rotated away is no missing evidence."""

import asyncio
import shutil
from pathlib import Path

import pytest

from phasesync.report.audit import audit_paths
from tests.runtime.world import World

EPOCHS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve epochs of two ranks, of which the last four are surely kept."""
    folder = tmp_path_factory.mktemp("rotated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASESYNC_KEEP_EPOCHS", "4")
        asyncio.run(World(2, folder, epochs=EPOCHS, pause_s=0.0).go())
    return folder / "world"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "world"))


def first_epochs(folder: Path, rank: int) -> list[int]:
    """The first epoch in each file of a rank."""
    found = []
    for path in sorted(folder.glob(f"trainer-{rank}.0*.jsonl")):
        text = path.read_text()
        at = text.find('{"event":"epoch.begin"')
        found.append(int(text[text.index('"epoch":', at) + 8 :].partition(",")[0]))
    return sorted(found)


def test_the_last_epochs_are_kept_and_the_open_one(run: Path) -> None:
    assert first_epochs(run, 0) == [8, 9, 10, 11, 12]


def test_rotated_files_are_one_journal(run: Path) -> None:
    answer = audit_paths([run])[0]
    assert answer.verdict == "ok"
    assert ["epochs up to 7 were rotated away" in each["what"] for each in answer.findings] == [
        True
    ]
    assert answer.events > 4 * 60


def test_ranks_may_have_rotated_differently(run: Path) -> None:
    """One rank has deleted a file that its peer still has: judged from where both have lines."""
    (run / "trainer-0.0.part7.jsonl").unlink()
    kept = (run / "trainer-0.0.part11.jsonl").read_text().splitlines()
    seq = int(
        (run / "trainer-0.0.part8.jsonl").read_text().partition('"seq":')[2].partition(",")[0]
    )
    before = kept[0].partition('"kept_seq":')
    kept[0] = f"{before[0]}{before[1]}{seq}" + "}"
    (run / "trainer-0.0.part11.jsonl").write_text("\n".join(kept) + "\n")
    answer = audit_paths([run])[0]
    assert answer.verdict == "ok"
    assert any("up to 8 were rotated" in each["what"] for each in answer.findings)


@pytest.mark.parametrize("part", [7, 9, 11])
def test_a_file_that_rotation_kept_is_missed(run: Path, part: int) -> None:
    (run / f"trainer-1.0.part{part}.jsonl").unlink()
    answer = audit_paths([run])[0]
    assert answer.verdict == "inconclusive"
    assert "trainer/1" in answer.because


def test_a_violation_behind_rotated_epochs_is_found(run: Path) -> None:
    path = run / "trainer-1.0.part10.jsonl"
    text = path.read_text()
    at = text.index('"hash":"', text.index('"fence.pass"')) + 8
    path.write_text(text[:at] + "0" * 64 + text[at + 64 :])
    answer = audit_paths([run])[0]
    assert (answer.verdict, answer.rule, answer.epoch) == ("violation", "R-EPOCH", 11)
