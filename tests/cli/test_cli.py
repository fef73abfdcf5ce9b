"""The command line as people and programs meet it: output, one-line errors, exit codes."""

from pathlib import Path

import orjson
import pytest

from phasesync import __version__

from .conftest import Run


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"phasesync, version {__version__}\n", "")
    said = run("--help")
    assert said.code == 0
    assert "demo" in said.out


def test_protocols_and_show(run: Run) -> None:
    said = run("protocols")
    assert said.code == 0
    assert said.out.startswith("basic ")
    names = [each["name"] for each in orjson.loads(run("protocols", "--json").out)]
    assert {"basic", "colocated"} <= set(names)
    assert "memory_released" in run("show", "colocated").out
    assert orjson.loads(run("show", "basic", "--json").out)["name"] == "basic"


@pytest.mark.parametrize(
    ("form", "starts"),
    [("text", "basic\n"), ("mermaid", "flowchart"), ("dot", "digraph"), ("svg", "<svg")],
)
def test_graph(run: Run, form: str, starts: str) -> None:
    said = run("graph", "basic", "--format", form)
    assert said.code == 0
    assert said.out.startswith(starts)


def test_diff_says_what_changes(run: Run) -> None:
    assert run("diff", "basic", "basic") == (0, "no difference in meaning\n", "")
    said = run("diff", "basic", "colocated")
    assert said.code == 1
    assert "+ option param_offload" in said.out
    assert orjson.loads(run("diff", "basic", "basic", "--json").out) == []


def test_init_then_lint(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("init", "mine", "--from", "colocated")
    assert said.code == 0
    assert "phasesync lint mine.yaml" in said.out
    assert run("lint", "mine.yaml").code == 0
    assert "protocol: mine" in (tmp_path / "mine.yaml").read_text()
    again = run("init", "mine")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "mine.yaml exists" in again.err


def test_lint_names_the_place(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("phasesync: 1\nprotocol: bad\nphases:\n  - sink: {usez: params}\n")
    said = run("lint", str(bad))
    assert said.code == 2
    assert f"{bad}:4:" in said.out
    found = orjson.loads(run("lint", str(bad), "--json").out)
    assert all(each["severity"] == "error" for each in found)
    assert {each["line"] for each in found} >= {4}


def test_doctor_tries_what_it_says(run: Run) -> None:
    found = {each["what"]: each for each in orjson.loads(run("doctor", "--json").out)}
    assert found["python"]["state"] == "ok"
    assert found["protocols"]["state"] == "ok"
    assert found["store fence"]["state"] in ("ok", "missing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shwo"], "no command 'shwo'; did you mean 'show'?"),
        (["show"], "Missing argument 'PROTOCOL'"),
        (["show", "colocatd"], "no such file or shipped protocol"),
        (["graph", "basic", "--format", "gif"], "formats are: mermaid, dot, text, svg"),
        (["lint", "--nope", "basic"], "No such option"),
        (["init", "a b"], "cannot name a protocol"),
        (["diff", "basic"], "Missing argument 'TWO'"),
        (["demo", "--ranks", "three"], "'three' is not a valid integer"),
        (["demo", "--kill", "3"], "3"),
        (["demo", "--slow", "trainer/x"], "trainer/x"),
        (["check", "basic", "--swap", "a"], "not of the form --swap A,B"),
        (["check", "basic", "--without-fence", "nope"], "no phase or fence 'nope'"),
        (["check", "basic", "--faults", "quake"], "unknown fault 'quake'"),
        (["check", "basic", "--option", "replica_size=x"], "must be of type int"),
        (["audit"], "Missing argument 'PATH...'"),
        (["audit", "/nosuch"], "no such file or folder"),
        (["audit", "--map", "/nosuch", "."], "cannot be read"),
    ],
)
def test_a_mistake_gets_one_line(run: Run, arguments: list[str], says: str) -> None:
    said = run(*arguments)
    assert said.code == 2
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


CASES = Path(__file__).parent.parent / "data" / "cases"


def test_audit_answers_for_people_and_programs(run: Run) -> None:
    said = run("audit", str(CASES / "b01.trace.jsonl"))
    assert said.code == 1
    assert said.out.splitlines()[0].startswith("violation R-FENCE")
    answer = orjson.loads(run("audit", "--json", str(CASES / "b01.trace.jsonl")).out)
    assert (answer["verdict"], answer["rule"], answer["guilty"]) == ("violation", "R-FENCE", [0])
    assert run("audit", str(CASES / "b01-fixed.trace.jsonl")).code == 0
    assert run("audit", str(CASES / "b44.trace.jsonl")).code == 3


def test_audit_reads_phases_through_a_map(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "mine.trace.jsonl"
    trace.write_text((CASES / "b01.trace.jsonl").read_text().replace("resume_kv", "swap_in"))
    renames = tmp_path / "map.json"
    renames.write_text('{"swap_in": "resume_kv"}')
    answer = orjson.loads(run("audit", "--json", "--map", str(renames), str(trace)).out)
    assert (answer["verdict"], answer["rule"]) == ("violation", "R-FENCE")
    renames.write_text("[1]")
    assert run("audit", "--map", str(renames), str(trace)).code == 2


def test_check_holds_is_violated_or_says_what_it_did_not_reach(run: Run) -> None:
    assert run("check", "basic", "--time-limit", "60").code == 0
    said = run("check", "basic", "--without-fence", "memory_released")
    assert said.code == 1
    assert "never" in said.out
    assert run("check", "colocated", "--time-limit", "0.01").code == 3
    found = orjson.loads(run("check", "basic", "--json", "--time-limit", "60").out)
    assert (found["check"], found["verdict"]) == (1, "holds")
