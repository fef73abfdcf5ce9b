"""Several runs in one trace file are judged apart: what one left is nothing to the next."""

import json
from itertools import chain, pairwise
from pathlib import Path

from phasesync.audit import audit_traces
from phasesync.report.audit import as_json, audit_paths
from tests.audit.variants import Raw, Trace, audit_lines, expected, read

CASES = Path(__file__).parent.parent / "data" / "cases"
FOLDER = Path(__file__).parent.parent / "data" / "traces"


def together(*traces: Trace) -> list[tuple[str, str | None, tuple[int | str, ...]]]:
    lines = [Raw(number, line) for number, line in enumerate(chain(*traces), 1)]
    answers = audit_traces("both.jsonl", lines)
    return [(answer.verdict, answer.rule, answer.guilty) for answer in answers]


def test_two_traces_in_one_file_are_answered_as_apart() -> None:
    names = sorted(expected(FOLDER))[::3]
    traces = [read(FOLDER / f"{name}.trace.jsonl") for name in names]
    apart = [audit_lines(trace) for trace in traces]
    for (one, first), (two, second) in pairwise(zip(traces, apart, strict=True)):
        assert together(one, two) == [
            (answer.verdict, answer.rule, answer.guilty) for answer in (first, second)
        ]


def test_a_second_run_of_one_name_begins_where_a_rank_speaks_again(tmp_path: Path) -> None:
    fixed, broken = CASES / "b01-fixed.trace.jsonl", CASES / "b01.trace.jsonl"
    both = tmp_path / "both.trace.jsonl"
    both.write_text(fixed.read_text() + broken.read_text())
    answers = audit_paths([both])
    assert [answer.verdict for answer in answers] == ["violation", "ok"]
    (worst, line), *_ = [(each.file, each.line) for each in answers[0].evidence]
    assert line > len(fixed.read_text().splitlines())
    assert worst == str(both)
    said = [finding["what"] for finding in answers[1].findings]
    assert any("another run begins here, and is judged apart" in what for what in said)
    assert [run["verdict"] for run in as_json(answers)["runs"]] == ["violation", "ok"]


def test_files_of_one_runs_ranks_put_together_are_one_run() -> None:
    trace = read(CASES / "b49.trace.jsonl")
    ranks = sorted({line["rank"] for line in trace[1:]})
    parts = [[trace[0], *(line for line in trace[1:] if line["rank"] == each)] for each in ranks]
    (answer,) = together(*parts)
    assert answer == ("hang", "R-ALLOK", (2,))


def test_what_a_run_left_asleep_is_nothing_to_the_next() -> None:
    def run(name: str, *phases: str) -> Trace:
        events = [
            {"rank": 0, "epoch": 1, "phase": phase, "event": event}
            for phase in phases
            for event in ("start", "end")
        ]
        return [json.loads(json.dumps(line)) for line in ({"trace": 1, "name": name}, *events)]

    slept, served = run("slept", "sleep"), run("served", "sleep", "wake_up", "generate")
    assert [verdict for verdict, _, _ in together(slept, served, slept)] == ["ok"] * 3
