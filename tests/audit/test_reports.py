"""What is printed and written: for people, for programs, for Perfetto, and as a page."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from phasesync.report.audit import as_json, as_text, audit_paths, audit_run, exit_code
from phasesync.report.audit_html import write_html
from phasesync.report.perfetto import write_perfetto
from phasesync.report.stats import as_json as stats_json
from phasesync.report.stats import as_text as stats_text
from phasesync.report.stats import stats_of
from tests.audit.test_fuzz import made
from tests.audit.variants import CASES

SCHEMA = json.loads((CASES.parent / "perfetto.schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
}


def conform(value: Any, schema: dict[str, Any], at: str = "$") -> None:
    """The part of JSON Schema that the schema uses."""
    if "type" in schema:
        assert isinstance(value, TYPES[schema["type"]]), at
        assert not isinstance(value, bool), at
    if "enum" in schema:
        assert value in schema["enum"], at
    if "minimum" in schema:
        assert value >= schema["minimum"], at
    for name in schema.get("required", ()):
        assert name in value, f"{at}.{name}"
    for name, inner in schema.get("properties", {}).items():
        if name in value:
            conform(value[name], inner, f"{at}.{name}")
    for number, each in enumerate(value) if "items" in schema else ():
        conform(each, schema["items"], f"{at}[{number}]")


def perfetto(paths: list[Path], out: Path) -> list[dict[str, Any]]:
    count = write_perfetto(paths, out)
    trace = json.loads(out.read_text())
    conform(trace, SCHEMA)
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert len(events) == count
    tracks: dict[tuple[int, int, str], float] = defaultdict(float)
    flows: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            continue
        track = (event["pid"], event["tid"], event["name"] if event["ph"] == "C" else "")
        assert event["ts"] >= tracks[track], "time goes back within a track"
        tracks[track] = event["ts"]
        if event["ph"] in "stf":
            flows[event["id"]].append(event["ph"])
    for ends in flows.values():
        assert ends.count("s") == 1
        assert ends.count("f") == 1
    return events


@pytest.mark.parametrize("path", sorted(CASES.glob("*.jsonl")), ids=lambda path: path.name[:-12])
def test_perfetto_of_a_trace(path: Path, tmp_path: Path) -> None:
    assert perfetto([path], tmp_path / "out.json")


def test_perfetto_of_a_run_has_a_track_a_rank(tmp_path: Path) -> None:
    made(tmp_path / "run")
    events = perfetto([tmp_path / "run"], tmp_path / "out.json")
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {f"trainer/{rank}" for rank in range(4)}
    assert any(e["ph"] == "s" for e in events)
    assert any(e["ph"] == "C" for e in events)


HOSTILE = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>"


def test_a_hostile_log_stays_data(tmp_path: Path) -> None:
    lines = [
        {"trace": 1, "name": HOSTILE, "ranks": [0, HOSTILE], "roles": {"0": HOSTILE}},
        {"rank": 0, "epoch": 1, "phase": HOSTILE, "event": "start"},
        {"rank": 0, "epoch": 1, "phase": HOSTILE, "event": "fail", "attrs": {"error": HOSTILE}},
        {
            "rank": HOSTILE,
            "epoch": 1,
            "phase": "fence",
            "event": "start",
            "attrs": {HOSTILE: "\x1b[2J"},
        },
    ]
    path = tmp_path / "x.trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = audit_paths([path])
    write_html([path], answers, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert len(re.findall(r"<script", page)) == 2
    assert len(re.findall(r"</script", page)) == 2
    assert "<img" not in page
    assert "\u2028" not in page
    assert "\x1b" not in "\n".join(as_text(answers))
    island = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(island)["answers"][0]["verdict"] == answers[0].verdict


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    path = CASES / "b01.trace.jsonl"
    write_html([path], audit_paths([path]), tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert not re.search(r"(?:src|href)\s*=", page)
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_first_line_says_what_and_who() -> None:
    rows = as_text(audit_paths([CASES / "b01.trace.jsonl"]))
    assert rows[0].startswith("violation R-FENCE at resume_kv in epoch 7; guilty: rank 0: rank 0")
    assert "3 is still in offload" in rows[0]


def test_exit_codes() -> None:
    def code(*names: str, strict: bool = False) -> int:
        paths = [CASES / f"{name}.trace.jsonl" for name in names]
        return exit_code(audit_paths(paths), strict=strict)

    assert code("b01-fixed") == 0
    assert code("b01") == 1
    assert code("b44") == 3
    assert code("b01-fixed", "b44") == 3
    assert code("b01-fixed", "b44", "b01") == 1


def test_several_runs_have_the_worst_on_top() -> None:
    answers = audit_paths([CASES / "b01-fixed.trace.jsonl", CASES / "b13.trace.jsonl"])
    said = as_json(answers)
    assert said["verdict"] == "hang"
    assert [run["verdict"] for run in said["runs"]] == ["hang", "ok"]


def test_statistics_of_a_run(tmp_path: Path) -> None:
    made(tmp_path / "run")
    stats = stats_of([tmp_path / "run"])
    said = stats_json(stats)
    assert said["epochs"] == 2
    assert said["ranks"] == 4
    assert said["phases"]["offload"]["count"] == 8
    assert said["phases"]["offload"]["p50_s"] == pytest.approx(0.0009, rel=0.05)
    assert said["fences"]["memory_released"]["count"] == 8
    assert stats_text(stats)[0] == "2 epochs, 4 ranks"


def test_a_folder_without_logs_is_one_line(tmp_path: Path) -> None:
    code, rows = audit_run(tmp_path)
    assert code == 1
    assert len(rows) == 1
    assert "no log in this folder" in rows[0]


def test_the_moments_around_a_fault() -> None:
    path = CASES / "b01.trace.jsonl"
    rows = as_text(audit_paths([path]), paths=[path])
    lanes = [row for row in rows if "|" in row]
    steps = "sync_weights | offload | empty_cache | resume_kv FAILED"
    assert " ".join(lanes[0].split()) == f"> 0 {steps}"
    assert any(row.rstrip().endswith("offload ...") for row in lanes)
    assert "  GiB held at the fault, by device: 0: 16.0, 1: 16.0, 2: 16.0, 3: 50.0" in rows


def test_memory_that_ran_out_before_the_root_is_told_too() -> None:
    """A peer that did not join and went on with the next epoch must not hide why there was none to
    join: the leader ran out of memory in the epoch before.
    """
    (answer,) = audit_paths([CASES.parent / "journals" / "not_joined"])
    assert (answer.rule, answer.epoch, answer.guilty) == ("R-FENCE", 2, ("trainer/1",))
    told = "also in epoch 1: rank trainer/0 failed in resume_kv: CUDA out of memory"
    assert any(told in row for row in as_text([answer]))
