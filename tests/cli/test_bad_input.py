"""What people mistype: one line that says what to do instead, and exit code 2."""

from pathlib import Path

import pytest

from .conftest import Run

FILES = {
    "empty.yaml": "",
    "no.json": "x",
    "list.json": "[1]",
    "nan.json": '{"phases": {"sync": NaN}}',
    "inf.json": '{"phases": {"sync": 1e400}}',
    "minus.json": '{"phases": {"sync": -3}}',
    "laod.json": '{"phases": {"laod": 3}}',
    "kv.json": '{"gib": {"kv": 3}, "capacity_gib": 80}',
    "less.json": '{"gib": {"params": 1, "cache": 1, "kv_cache": -1}, "capacity_gib": 80}',
    "run.json": '{"cases": [{"path": [1], "ranks": 2}]}',
    "plant.json": '{"cases": [{"path": [1], "ranks": 2, "options": {}}], "planted": 3}',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


CHECK = [
    ("nosuch", "no such file or shipped protocol; give a file, or one of: basic"),
    ("empty.yaml", "the file is empty"),
    ("folder", "is a folder"),
    ("basic --without-fence nope", "no phase or fence 'nope'; it has: train"),
    ("basic --swap sync", "'sync' is not of the form --swap A,B"),
    ("basic --swap sync,b", "no phase or fence 'b'"),
    ("basic --scope memory_released=galaxy", "no scope 'galaxy'; scopes are: world, replica"),
    ("basic --scope memory_released=world --swap a,b", "one mutation at a time"),
    ("basic --faults meteor", "unknown fault 'meteor'; faults are: none, crash"),
    ("basic --faults-most 0", "0 is not in the range x>=1"),
    ("basic --option foo=1", "no option 'foo'; options are: replica_size"),
    ("basic --option replica_size", "is not of the form --option K=V"),
    ("basic --option replica_size=two", "must be of type int"),
    ("basic --option replica_size=0", "must be at least 1"),
    ("basic --ranks 0", "0 is not in the range"),
    ("basic --ranks 99999999999", "is not in the range 1<=x<=4096"),
    ("basic --ranks 3 --option replica_size=2", "do not make whole replicas of 2"),
    ("basic --epochs 0", "0 is not in the range"),
    ("basic --time-limit -1", "-1.0 is not in the range x>0"),
    ("basic --time-limit nan", "nan is no number of seconds"),
    ("basic --show 0", "0 is not in the range"),
    ("basic --memory nofile.json", "cannot be read: No such file"),
    ("basic --memory no.json", "is not JSON"),
    ("basic --memory list.json", 'memory figures are {"capacity_gib": 80'),
    ("basic --memory kv.json", "no resource 'kv'; resources are: params"),
    ("basic --memory less.json", "gib of kv_cache is -1"),
    ("basic --html folder", "'folder' is a directory"),
    ("basic --export tla", "'tla' is not 'promela'"),
    ("basic --mutate --without-fence memory_released", "--mutate does not heed --without-fence"),
    ("basic --mutate --html x.html", "--mutate does not heed --html"),
    ("basic --mutate --export promela", "--mutate does not heed --export"),
    ("basic --bogus", "No such option"),
]

SIMULATE = [
    ("nosuch", "no such file or shipped protocol"),
    ("basic --fault melt:1@offload", "is no fault; write KIND:RANK@PLACE"),
    ("basic --fault crash:9@offload", "there is no rank 9; there are 4"),
    ("basic --fault crash:1@offlaod", "no phase or fence 'offlaod'"),
    ("basic --fault fail:1@memory_released", "no phase 'memory_released'; it has: train"),
    ("basic --fault drop:arrive@offload", "no fence 'offload'; it has: memory_released"),
    ("basic --fault drop:arrive:99", "there is no rank 99"),
    ("basic --fault slow:1*0", "the factor has to be more than 0"),
    ("basic --fault slow:3-1*2", "1 comes before 3"),
    ("basic --fault mixed:foo=1@1", "no option 'foo'"),
    ("basic --fault mixed:replica_size=x@1", "must be of type int"),
    ("basic --what-if foo=1", "no option 'foo'; options are: replica_size; or name a fault"),
    ("basic --what-if slow:99", "there is no rank 99"),
    ("basic --without-fence nope", "no phase or fence 'nope'"),
    ("basic --ranks 99999999999", "is not in the range 1<=x<=65536"),
    ("basic --profile nofile", "cannot be read: No such file"),
    ("basic --profile folder", "no log in this folder"),
    ("basic --profile list.json", "must be an object"),
    ("basic --profile nan.json", "is not JSON"),
    ("basic --profile inf.json", "is not JSON"),
    ("basic --profile minus.json", "phase sync is -3; a profile is made of numbers"),
    ("basic --profile laod.json", "the protocol has no phase 'laod'; it has: empty_cache"),
    ("basic --replay list.json", "has no run; write one with: phasesync check ... --json"),
    ("basic --replay run.json", "is no report of check --json"),
    ("basic --replay plant.json", "3 is no mistake; mistakes are: without_fence"),
    ("basic --replay folder", "cannot be read: Is a directory"),
]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{command} {line}", says)
        for command, lines in (("check", CHECK), ("simulate", SIMULATE))
        for line, says in lines
    ],
)
def test_one_line_says_what_to_do_instead(run: Run, line: str, says: str) -> None:
    said = run(*line.split())
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert says in said.err
