"""A journal that breaks `always`, `agree` or `monotone` breaks it for the auditor too."""

import pytest

from phasesync.audit.answer import Evidence
from phasesync.audit.conformance import Conformance
from phasesync.core.plan import resolve
from phasesync.spec import loads

TEXT = """
phasesync: 1
protocol: asks
groups:
  replica: {of: trainer, size: 2}
roles:
  trainer: {place: one per device}
resources:
  weights: {owner: trainer, content: version, start: {mapped: true}}
  cache:   {owner: trainer}
%s
phases:
  - load:  {writes: weights}
  - map:   {acquires: cache}
  - serve: {uses: weights}
  - unmap: {releases: cache}
  - fence: over
    deadline_s: 60
"""
Line = tuple[int, str, str]


def judged(asks: str, lines: list[Line]) -> list[str]:
    """The rules that a run breaks: (rank, `start` or `end`, phase), or (rank, `epoch`, number)."""
    found = Conformance(lambda _: None)
    found.follow(resolve(loads(TEXT % asks), 2), Evidence("plan.jsonl", 1))
    for at, (rank, event, phase) in enumerate(lines):
        line = {"role": "trainer", "rank": rank, "seq": at}
        if event == "epoch":
            line |= {"event": "epoch.begin", "epoch": int(phase)}
        else:
            line |= {"event": f"phase.{event}", "phase": phase}
        found.see(at, Evidence("x.jsonl", at + 1), line)
    return [str(each.rule) for each in found.findings]


def ran(rank: int, *phases: str) -> list[Line]:
    return [(rank, event, phase) for phase in phases for event in ("start", "end")]


@pytest.mark.parametrize(
    ("asks", "broken", "kept", "rule"),
    [
        (
            "agree: [{content: weights, across: replica}]",
            [*ran(0, "load", "map", "serve")],
            [*ran(0, "load", "map"), *ran(1, "load", "map"), *ran(0, "serve")],
            "R-VERSION",
        ),
        (
            "always: [{together: [cache], during: load}]",
            ran(0, "load"),
            [],
            "R-MAPPED",
        ),
        (
            "monotone: [{content: weights}]",
            [
                *ran(0, "load"),
                (0, "epoch", "2"),
                *ran(0, "load"),
                (0, "epoch", "1"),
                *ran(0, "load"),
            ],
            [*ran(0, "load"), (0, "epoch", "2"), *ran(0, "load")],
            "R-MONOTONE",
        ),
    ],
)
def test_the_rule_that_is_broken(
    asks: str, broken: list[Line], kept: list[Line], rule: str
) -> None:
    assert judged(asks, kept) == []
    assert judged(asks, broken) == [rule]
