"""Every public report in `tests/data/cases`, as it is and in every guise it could have come in."""

import random
from typing import Any

import pytest

from tests.audit.variants import (
    CASES,
    SYNONYMS,
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
)

KEY = expected(CASES)
NAMES = sorted(KEY)
Want = dict[str, Any]


def trace_of(name: str) -> Trace:
    return read(CASES / f"{name}.trace.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_as_reported(name: str) -> None:
    check(trace_of(name), KEY[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_relabelled(name: str, seed: int) -> None:
    trace = trace_of(name)
    ranks = trace[0]["ranks"]
    names = dict(zip(ranks, random.Random(seed).sample(range(200, 900), len(ranks)), strict=True))
    check(relabelled(trace, names), KEY[name], names)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_relabelled_and_devices_not(name: str) -> None:
    trace = trace_of(name)
    names = {rank: rank + 40 for rank in trace[0]["ranks"]}
    check(relabelled(trace, names, devices=False), KEY[name], names)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_independent_events_reordered(name: str, seed: int) -> None:
    check(reordered(trace_of(name), seed), KEY[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", [1, 1000, -1])
def test_epochs_shifted(name: str, by: int) -> None:
    check(shifted(trace_of(name), by), KEY[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", SYNONYMS, ids=["verl", "slime"])
def test_phases_in_other_words(name: str, words: dict[str, str]) -> None:
    check(renamed(trace_of(name), lambda phase: words.get(phase, phase)), KEY[name])


@pytest.mark.parametrize("name", NAMES)
def test_phases_renamed_through_a_mapping(name: str) -> None:
    trace = trace_of(name)
    phases = sorted({event["phase"] for event in trace[1:]})
    coined = {phase: f"Zq{index}x" for index, phase in enumerate(phases)}
    back = {coined[phase]: phase for phase in phases}
    check(renamed(trace, coined.__getitem__), KEY[name], vocabulary=back)


@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("name", [n for n in NAMES if innocents(trace_of(n), KEY[n])])
def test_more_ranks_that_do_as_an_innocent_one_does(name: str, more: int) -> None:
    trace = trace_of(name)
    want = KEY[name]
    innocent = innocents(trace, want)
    for index in range(more):
        trace = cloned(trace, innocent[-1 - index % len(innocent)], 500 + index)
    answer = audit_lines(trace)
    says = f"{answer.verdict} {answer.rule} guilty={answer.guilty}: {answer.because}"
    assert not accuses_innocent(answer, want), says
    rules = {rule for each in want["accept"] for rule in each["rules"]}
    assert answer.rule in rules or want["kind"] == "ok", says
