"""What is no log is one clear line and exit 2, whatever it is; a log beside it is still read."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phasesync.cli import main
from phasesync.demo.tail import Tail
from tests.bench.journal_maker import write

LOGGED = Path(__file__).parent.parent / "data" / "verl" / "ray-0.9.0" / "driver.log"


class Runs:
    """A pickle that would run a program."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return (os.system, ("false",))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", 2, 2)
    shutil.copy("run/trainer-0.0.jsonl", "good.jsonl")
    Path("empty").mkdir()
    Path("pictures").mkdir()
    Path("pictures/shot.png").write_bytes(bytes(range(256)))
    Path("bytes.jsonl").write_bytes(os.urandom(4000))
    Path("zero.jsonl").write_bytes(b"")
    Path("plain.jsonl.gz").write_bytes(Path("good.jsonl").read_bytes())
    Path("newer.jsonl").write_bytes(Path("good.jsonl").read_bytes().replace(b'l":1', b'l":9'))
    Path("list.json").write_text("[1]")
    Path("torn.json").write_text("{torn")
    Path("torn.yaml").write_text("protocol: [")
    Path("text.log").write_text("hello\n")
    shutil.copy(LOGGED, "verl.log")
    Path("runs.pkl").write_bytes(pickle.dumps({"entries": [Runs()]}))
    Path("three.pkl").write_bytes(pickle.dumps(3))
    os.mkfifo("pipe.jsonl")
    Path("gone.jsonl").symlink_to("nowhere")
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("audit nowhere", "nowhere: no such file or folder"),
        ("audit empty", "empty: no log in this folder"),
        ("audit pictures", "pictures: no log in this folder"),
        ("audit bytes.jsonl", "bytes.jsonl: not a log"),
        ("audit zero.jsonl", "zero.jsonl: not a log"),
        ("audit plain.jsonl.gz", "plain.jsonl.gz: cannot be read"),
        ("audit newer.jsonl", "journal format 9; this phasesync reads up to 1: upgrade it"),
        ("audit pipe.jsonl", "pipe.jsonl: a pipe or a device"),
        ("audit gone.jsonl", "gone.jsonl: no such file"),
        ("audit good.jsonl --map list.json", "must be an object of names"),
        ("audit good.jsonl --map torn.json", "torn.json is not JSON"),
        ("audit good.jsonl --map nowhere", "nowhere cannot be read"),
        ("audit good.jsonl --protocol nope", "nope:1:1: no such file or shipped protocol"),
        ("audit good.jsonl --protocol torn.yaml", "torn.yaml:1:12: this is not YAML"),
        ("audit good.jsonl --html /dev/full", "/dev/full: cannot be written (No space left"),
        ("audit good.jsonl --perfetto /nowhere/x", "/nowhere/x: cannot be written (No such file"),
        ("audit good.jsonl --jobs 0", "0 is not in the range"),
        ("import martian text.log", "no importer 'martian'; importers are: flight-recorder"),
        ("import flight-recorder runs.pkl", "runs.pkl: not a Flight Recorder dump (it names"),
        ("import flight-recorder three.pkl", "three.pkl: not a Flight Recorder dump"),
        ("import text text.log", "text needs --map FILE"),
        ("import text text.log --map torn.json", "torn.json: not TOML"),
        ("import verl pipe.jsonl", "pipe.jsonl: a pipe or a device"),
        ("import verl verl.log -o /dev/full", "/dev/full cannot be written"),
        ("import py-spy text.log", "text.log: no line of py-spy here, so that there is no trace"),
        ("import verl text.log -o new.jsonl", "text.log: no line of verl here"),
        ("collect nowhere", "nowhere: no such file or folder"),
        ("collect empty", "empty: no log in this folder"),
        ("collect run -o pack.tar.xz", "pack.tar.xz: name the pack with one of: .pack.tar"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_2(
    here: Path, capsys: pytest.CaptureFixture[str], asked: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(asked.split())
    assert ended.value.code == 2
    rows = capsys.readouterr().err.splitlines()
    assert said in rows[-1]
    assert len(rows) == 1
    assert not Path("new.jsonl").exists()


def test_who_follows_a_run_is_not_stopped_by_rotation_or_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 2, 1)
    with (tmp_path / "trainer-0.0.jsonl").open("ab") as file:
        file.write(b'{"event":"phase.st\n')
    rotated = tmp_path / "trainer-1.0.jsonl"
    glob = Path.glob

    def then_rotated(self: Path, pattern: str) -> list[Path]:
        found = list(glob(self, pattern))
        rotated.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", then_rotated)
    tail = Tail(tmp_path)
    assert {line["rank"] for line in tail.poll()} == {0}
    assert tail.poll() == []
