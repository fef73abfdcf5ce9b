"""Our own traces: two that break each rule, two that nearly do, and its neighbour's.

Each names the public report it is reduced from, or says that the fault is planted. Run through the
same guises as the public cases.
"""

import ast
import random
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phasesync.audit import rules
from phasesync.audit.answer import RULES
from tests.audit.variants import (
    Trace,
    accuses_innocent,
    audit_lines,
    check,
    cloned,
    expected,
    innocents,
    read,
    relabelled,
    renamed,
    reordered,
    shifted,
    told_otherwise,
)

FOLDER = Path(__file__).parent.parent / "data" / "traces"
KEY = expected(FOLDER)
NAMES = sorted(KEY)


def trace_of(name: str) -> Trace:
    return read(FOLDER / f"{name}.trace.jsonl")


# In these the answer is a matter of how many stand on each side.
COUNTED = ("sameplan-two-and-two",)


@pytest.mark.parametrize("name", NAMES)
def test_in_every_guise(name: str) -> None:
    """As written, relabelled and shifted, reordered, renamed, told otherwise, and resized."""
    trace, want = trace_of(name), KEY[name]
    assert len(trace[0]["source"]) > 12  # The public report, or what was planted.
    check(trace, want)
    ranks = trace[0]["ranks"]
    names = dict(zip(ranks, random.Random(7).sample(range(200, 900), len(ranks)), strict=True))
    check(shifted(relabelled(trace, names), 50), want, names)
    check(reordered(trace, len(name), apart=False), want)
    check_renamed(trace, want)
    check(told_otherwise(trace, len(name)), want)
    if name not in COUNTED:
        check_resized(trace, want)


def check_renamed(trace: Trace, want: dict[str, Any]) -> None:
    phases = sorted({event["phase"] for event in trace[1:]})
    coined = {phase: f"Zq{index}x" for index, phase in enumerate(phases)}
    back = {coined[phase]: phase for phase in phases}
    fresh = renamed(trace, coined.__getitem__)
    for event in fresh[1:]:  # What names a phase in an attribute is renamed with it.
        for attr in ("waiting_for", "queued_behind"):
            value = event.get("attrs", {}).get(attr)
            if isinstance(value, str) and value in coined:
                event["attrs"][attr] = coined[value]
    check(fresh, want, vocabulary=back)


def check_resized(trace: Trace, want: dict[str, Any]) -> None:
    """Two more ranks that do as an innocent one does, where there is one."""
    innocent = innocents(trace, want)
    if not innocent:
        return
    for index in range(2):
        trace = cloned(trace, innocent[-1 - index % len(innocent)], 1500 + index)
    answer = audit_lines(trace)
    says = f"{answer.verdict} {answer.rule} guilty={answer.guilty}: {answer.because}"
    assert not accuses_innocent(answer, want), says
    rules = {rule for each in want["accept"] for rule in each["rules"]}
    assert answer.rule in rules or want["kind"] == "ok", says


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_log_makes_nobody_else_guilty(name: str) -> None:
    """Only who failed or exited by its own line may be named, and then by no rule."""
    trace, want = trace_of(name), KEY[name]
    for rank in {event["rank"] for event in trace[1:]}:
        left = [trace[0], *(event for event in trace[1:] if event["rank"] != rank)]
        if len(left) > 2:
            answer = audit_lines(left)
            says = f"without {rank}: {answer.verdict} {answer.rule} {answer.guilty}"
            plain = answer.verdict == "failure" and answer.rule is None
            assert plain or not accuses_innocent(answer, want), says


def test_every_rule_has_two_that_break_it_and_two_that_nearly_do() -> None:
    broken: dict[str, set[str]] = defaultdict(set)
    near: dict[str, set[str]] = defaultdict(set)
    for name, want in KEY.items():
        (near if want["kind"] == "ok" and want["rule"] is None else broken)[want["breaks"]].add(
            name
        )
    lacking = {
        rule: (len(broken[rule]), len(near[rule]))
        for rule in RULES
        if len(broken[rule]) < 2 or len(near[rule]) < 2
    }
    assert not lacking


# What each rule is not to be confused with.
NEIGHBOURS = [
    ("R-FENCE", "R-BUDGET"),
    ("R-FENCE-POST", "R-SAMEPLAN"),
    ("R-BUDGET", "R-FENCE"),
    ("R-PREREQ", "R-MAPPED"),
    ("R-PREREQ", "R-CONTENT"),
    ("R-CONTENT", "R-MAPPED"),
    ("R-ONCE", "R-ROLLBACK"),
    ("R-ALLOK", "R-MEMBERS"),
    ("R-REPORT", "R-ALLOK"),
    ("R-EPOCH", "R-COVERS"),
    ("R-COVERS", "R-NOCYCLE"),
    ("R-COVERS", "R-FREED"),
    ("R-CTRLPLANE", "R-EXCL"),
    ("R-DRIFT", "R-FREED"),
]


@pytest.mark.parametrize(("rule", "neighbour"), NEIGHBOURS)
def test_every_rule_leaves_its_neighbours_faults_to_it(rule: str, neighbour: str) -> None:
    alike = [
        name
        for name, want in KEY.items()
        if rule in want.get("near", ()) and want["breaks"] == neighbour
    ]
    assert alike
    for name in alike:
        assert audit_lines(trace_of(name)).rule == neighbour


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_trace_that_looks_like_its_fault_and_is_another(rule: str) -> None:
    alike = [
        name
        for name, want in KEY.items()
        if rule in want.get("near", ()) and want["breaks"] != rule and want["rule"] is not None
    ]
    assert alike
    for name in alike:
        check(trace_of(name), KEY[name])


@cache
def pages() -> dict[str, str]:
    """What the docstring of each rule says, by the ids that it opens with."""
    found: dict[str, str] = {}
    for path in Path(rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if text.startswith("R-") and "Sees: " in text:
                    found |= dict.fromkeys(re.findall(r"R-[A-Z-]+", text.partition(":")[0]), text)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_its_page(rule: str) -> None:
    page = pages()[rule]
    assert "Cannot see: " in page
    assert re.search(r"Sources?: ", page)
