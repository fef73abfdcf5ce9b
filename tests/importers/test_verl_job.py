"""The logs of a real verl 0.9.0 job under Ray that died in its KV resume, as a user has them.

`tests/verl/ray_job.py` made them: four workers, one of them six seconds late in its offload, the
leader's resume refused on that worker's device. What is left to read differs from user to user.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from phasesync.audit import Answer
from phasesync.cli import main
from phasesync.importers import as_lines, guess, import_logs
from tests.audit.variants import audit_lines

DATA = Path(__file__).parent.parent / "data" / "verl"
DIED = DATA / "ray-0.9.0"
LEADER, LATE = "pid1196", "pid1267"


def answer_of(*paths: Path) -> Answer:
    return audit_lines(as_lines(import_logs("verl", paths)))


def kept(tmp_path: Path, *globs: str) -> Path:
    for glob in globs:
        for path in DIED.glob(glob):
            shutil.copy(path, tmp_path / path.name)
    return tmp_path


def without(folder: Path, pattern: str) -> Path:
    for path in folder.iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not re.search(pattern, line)))
    return folder


def is_right(answer: Answer) -> None:
    assert (answer.verdict, answer.rule, answer.phase) == ("violation", "R-FENCE", "resume_kv")
    assert answer.guilty == (LEADER,)
    assert f"{LATE} is still in update_weights" in answer.because
    assert answer.certainty.startswith("in every order")
    others = re.findall(r"pid\d+", answer.because)
    assert set(others) == {LEADER, LATE}  # Nobody else is spoken of.


def test_the_whole_folder() -> None:
    is_right(answer_of(DIED))


def test_the_workers_files_without_the_drivers_log(tmp_path: Path) -> None:
    is_right(answer_of(kept(tmp_path, "worker-*")))


def test_at_info_there_are_no_figures_and_the_traceback_names_the_leader(tmp_path: Path) -> None:
    is_right(answer_of(without(kept(tmp_path, "*"), "DEBUG:")))


def test_the_evidence_is_in_the_users_own_files() -> None:
    answer = answer_of(DIED)
    for line in answer.evidence:
        text = Path(line.file).read_text().splitlines()[line.line - 1]
        assert re.search("Memory cleanup attempt|out of memory", text)


def test_the_drivers_log_alone_is_not_enough_and_says_what_is() -> None:
    """Ray folds the lines of several workers into one there; what died is still told."""
    answer = answer_of(DIED / "driver.log")
    assert (answer.verdict, answer.guilty) == ("inconclusive", ())
    assert any("RAY_DEDUP_LOGS=0" in more for more in answer.record_next)
    told = " ".join((answer.because, *answer.consequences))
    assert LEADER in told
    assert "resume_kv" in told


def test_at_the_default_level_the_answer_is_what_to_turn_on(tmp_path: Path) -> None:
    folder = without(kept(tmp_path, "*"), "Memory cleanup|memory allocated")
    answer = answer_of(folder)
    assert (answer.verdict, answer.guilty) == ("inconclusive", ())
    assert any("VERL_LOGGING_LEVEL" in more for more in answer.record_next)


def test_a_sync_of_the_same_job_in_which_nobody_was_late_is_ok_and_was_lucky() -> None:
    """verl 0.9.0 has no fence there: the leader began while others emptied their caches."""
    answer = answer_of(DATA / "ray-0.9.0-healthy")
    assert (answer.verdict, answer.guilty) == ("ok", ())
    assert ["it fitted this time" in found["what"] for found in answer.findings] == [True]


@pytest.mark.parametrize("paths", [[DIED], [DIED / "driver.log"]])
def test_raw_logs_are_told_apart(paths: list[Path]) -> None:
    assert guess(paths) == "verl"


def test_audit_reads_the_folder_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["audit", "--json", str(DIED)])
    assert end.value.code == 1
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert (answer["verdict"], answer["rule"]) == ("violation", "R-FENCE")
    assert answer["guilty"] == [LEADER]
    assert "read as logs of verl" in said.err
