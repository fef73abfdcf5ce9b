"""Files and second opinions that commands write on request."""

import json
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

from .conftest import Run
from .test_cli import CASES


def test_check_writes_what_ci_and_people_read(run: Run, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "sarif", "junit")}
    said = run(
        "check", "basic", "--without-fence", "memory_released", "--json",
        *(f"--{name}={path}" for name, path in files.items()),
        f"--write-test={tmp_path / 'test_out.py'}",
    )  # fmt: skip
    assert said.code == 1
    assert said.err.count("written") == 4
    assert json.loads(files["sarif"].read_text())["version"] == "2.1.0"
    assert ElementTree.parse(files["junit"]).getroot().get("failures") != "0"
    assert files["html"].read_text().startswith("<!doctype html>")
    compile((tmp_path / "test_out.py").read_text(), "test_out.py", "exec")
    report = tmp_path / "report.json"
    report.write_text(said.out)
    again = run("simulate", "basic", "--replay", str(report))
    assert again.code == 1
    assert "broken: never" in again.out
    sound = json.loads(said.out) | {"planted": None}
    report.write_text(json.dumps(sound))
    refused = run("simulate", "basic", "--replay", str(report))
    assert refused.code == 1
    assert "the fence is not open" in refused.err


def test_check_says_whether_it_fits_and_shows_more_runs(run: Run, tmp_path: Path) -> None:
    figures = {"capacity_gib": 50, "gib": {"params": 30, "cache": 25, "kv_cache": 40}}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    quick = ("check", "basic", "--ranks", "2", "--no-any-n", "--faults", "none")
    said = run(*quick, "--memory", str(tmp_path / "figures.json"), "--show", "1")
    assert said.code == 1
    assert "peak 55 GiB of 50 GiB in train: does not fit" in said.out
    assert "run 1 at N = 2" in said.out
    found = json.loads(run(*quick, "--memory", str(tmp_path / "figures.json"), "--json").out)
    assert (found["memory"]["fits"], found["lint"]) == (False, [])
    assert run(*quick, "--memory", "/nosuch").code == 2


def test_simulate_answers_what_ifs_and_says_which_fault_cannot_strike(run: Run) -> None:
    said = run(
        "simulate", "colocated", "--ranks", "16", "--epochs", "1", "--fault",
        "slow:8-15@empty_cache*20", "--fault", "fail:1@load", "--what-if", "fence_scope=world",
    )  # fmt: skip
    assert "what if:" in said.out
    assert "fence_scope=world" in said.out.split("what if:")[1]
    assert "  fence memory_released: " in said.out.split("fence_scope=world")[1]
    assert "note: fail:1@load never struck; load is done by trainer/0" in said.err


def test_a_what_if_that_is_neither_option_nor_fault_says_what_may_be_named(run: Run) -> None:
    said = run("simulate", "colocated", "--ranks", "2", "--what-if", "nosuch=1")
    assert said.code == 2
    assert "no option 'nosuch'; options are: replica_size, param_offload" in said.err
    assert "or name a fault" in said.err


def test_export_promela(run: Run) -> None:
    said = run("check", "basic", "--export", "promela")
    assert said.code == 0
    assert "proctype" in said.out or "init" in said.out


def test_simulate_is_the_same_under_the_same_seed(run: Run) -> None:
    one = run("simulate", "colocated", "--ranks", "32", "--seed", "7", "--json")
    two = run("simulate", "colocated", "--ranks", "32", "--seed", "7", "--json")
    other = run("simulate", "colocated", "--ranks", "32", "--seed", "8", "--json")
    assert (one.code, one.out) == (0, two.out)
    assert one.out != other.out
    slow = orjson.loads(
        run(
            "simulate",
            "colocated",
            "--ranks",
            "32",
            "--seed",
            "7",
            "--fault",
            "slow:2@load*8",
            "--json",
        ).out
    )
    assert slow["waited_s"] > orjson.loads(one.out)["waited_s"]


def test_audit_writes_a_page_and_a_trace(run: Run, tmp_path: Path) -> None:
    trace = str(CASES / "b01.trace.jsonl")
    page, perfetto = tmp_path / "page.html", tmp_path / "trace.json"
    said = run("audit", trace, f"--html={page}", f"--perfetto={perfetto}")
    assert said.code == 1
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert json.loads(perfetto.read_text())["traceEvents"]
    assert run("audit", trace, "--stats").err == (
        "phasesync: --stats needs journals: traces carry no times\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["import", "verl", "/nosuch"], "no such file or folder"),
        (["import", "word", __file__], "no importer 'word'"),
        (["collect", "/nosuch"], "/nosuch"),
        (["bench", "fence", "--sizes", "x"], "--sizes takes numbers from 1 on"),
        (["bench", "fence", "--sizes", "2,5000"], "--sizes takes numbers up to 1,024, not 5,000"),
        (["bench", "fence", "--clients", "999999"], "--clients takes numbers up to 100,000, not"),
    ],
)
def test_a_mistake_gets_one_line(run: Run, arguments: list[str], says: str) -> None:
    said = run(*arguments)
    assert said.code == 2
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
