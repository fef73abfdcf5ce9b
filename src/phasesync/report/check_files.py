"""A check's report for other programs: SARIF, JUnit, and a pytest file.

Undecided is never a pass: an error in JUnit, a warning in SARIF.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from phasesync import __version__
from phasesync.checker.planted import Planted
from phasesync.checker.report import Case, Report
from phasesync.core.protocol import Protocol
from phasesync.core.verdict import Holds, Undecided, Violated
from phasesync.lint import Finding
from phasesync.report import lanes

__all__ = ("junit", "sarif", "written_test")


def _title(case: Case) -> str:
    ranks = "any N" if case.ranks is None else f"N = {case.ranks}"
    epochs = "" if case.epochs is None else f", {case.epochs} epochs"
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in case.options)
    return f"{ranks}, faults: {case.faults}{epochs} ({options})"


# ------------------------------------------------------------------------------------- SARIF


def sarif(report: Report, protocol: Protocol, doubts: Sequence[Finding] = ()) -> dict[str, object]:
    """SARIF 2.1.0: one result a case that does not hold, its run as a code flow, each step at its
    line of the protocol; then what lint doubts."""
    lines = {str(step.name): step.place[0] for step in (*protocol.steps, *protocol.recover)}
    at = _At(protocol.file, lines)
    results = [_result(case, at) for case in report.cases if _tells(case)]
    results += [_doubt(found, at) for found in doubts]
    rules = sorted({str(result["ruleId"]) for result in results})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "phasesync",
                        "version": __version__,
                        "rules": [{"id": rule} for rule in rules],
                    }
                },
                "results": results,
            }
        ],
    }


def _tells(case: Case) -> bool:
    if isinstance(case.verdict, Undecided):
        return not case.extra
    return isinstance(case.verdict, Violated)


class _At(NamedTuple):
    """Where the steps of a protocol stand in its file."""

    file: str
    lines: Mapping[str, int]

    def line(self, number: int) -> dict[str, object]:
        return {
            "physicalLocation": {
                "artifactLocation": {"uri": self.file},
                "region": {"startLine": max(number, 1)},
            }
        }

    def step(self, name: str) -> dict[str, object]:
        return self.line(self.lines.get(name, 1))


def _doubt(found: Finding, at: _At) -> dict[str, object]:
    return {
        "ruleId": f"lint-{found.rule}",
        "level": str(found.severity),
        "message": {"text": f"{found.wrong}; {found.right}"},
        "locations": [at.line(found.place[0])],
    }


def _result(case: Case, at: _At) -> dict[str, object]:
    match case.verdict:
        case Violated() as broken:
            text = f"{broken.says}; {_title(case)}"
            flow = [
                {"location": {**at.step(event.name), "message": {"text": _step(case, n, broken)}}}
                for n, event in enumerate(broken.path)
            ]
            last = broken.path[-1].name if broken.path else ""
            return {
                "ruleId": broken.property,
                "level": "error",
                "message": {"text": text},
                "locations": [at.step(last)],
                "codeFlows": [{"threadFlows": [{"locations": flow}]}] if flow else [],
            }
        case Undecided(bound=bound):
            text = f"undecided: {bound}; {_title(case)}"
        case Holds():
            text = "holds"
    return {
        "ruleId": "undecided",
        "level": "warning",
        "message": {"text": text},
        "locations": [at.line(1)],
    }


def _step(case: Case, at: int, broken: Violated) -> str:
    event = broken.path[at]
    who = case.plan.members[event.rank] if case.plan else event.rank
    return f"{at + 1}: {who} {event.kind} {event.name}".rstrip()


# ------------------------------------------------------------------------------------- JUnit


def junit(report: Report) -> str:
    """JUnit XML: one test case a case; violated fails, undecided is an error."""
    failures = sum(isinstance(case.verdict, Violated) for case in report.cases)
    errors = sum(isinstance(case.verdict, Undecided) and not case.extra for case in report.cases)
    head = (
        f"<testsuite name={quoteattr('phasesync check ' + report.protocol)} "
        f'tests="{len(report.cases)}" failures="{failures}" errors="{errors}">'
    )
    lines = ['<?xml version="1.0" encoding="utf-8"?>', head]
    for case in report.cases:
        time = f' time="{case.elapsed_s}"' if case.elapsed_s is not None else ""
        name = f"classname={quoteattr(report.protocol)} name={quoteattr(_title(case))}{time}"
        match case.verdict:
            case Holds():
                lines.append(f"  <testcase {name}/>")
            case Undecided(bound=bound) if case.extra:
                lines.append(f"  <testcase {name}><skipped message={quoteattr(bound)}/></testcase>")
            case Undecided(bound=bound):
                lines.append(f"  <testcase {name}><error message={quoteattr(bound)}/></testcase>")
            case Violated() as broken:
                body = escape("\n".join(_drawn(case, broken)))
                message = quoteattr(f"{broken.property}: {broken.says}")
                lines.append(f"  <testcase {name}>")
                lines.append(f"    <failure message={message}>{body}</failure>")
                lines.append("  </testcase>")
    return "\n".join((*lines, "</testsuite>")) + "\n"


def _drawn(case: Case, broken: Violated) -> tuple[str, ...]:
    if case.plan is None or not broken.path:
        return (broken.says,)
    return lanes.draw(case.plan, broken.path, broken.violations, says=broken.says)


# -------------------------------------------------------------------------------- pytest file

_TEST = '''"""{title}

Written by `phasesync check`: {how}.
"""

{imports}from phasesync.checker.planted import Planted, plan_of
from phasesync.errors import Refused
from phasesync.simulator import events_of, replay, stuck
from phasesync.spec import load

PROTOCOL = {protocol}
RANKS = {ranks}
OPTIONS = {options}
# With None the protocol is asked as it is.
PLANTED: Planted | None = {planted}
PATH = [
{path}
]


def test_{name}() -> None:
    plan = plan_of(load(PROTOCOL), RANKS, OPTIONS, planted=PLANTED{settings})
    try:
        systems, broken = replay(plan, events_of(plan, PATH))
    except Refused:
        return
    assert not broken, "; ".join(f"{{each.property}}: {{each.says}}" for each in broken)
    waiting = stuck(plan, systems[-1], {epochs})
    assert not waiting, f"waits for ever: {{', '.join(map(str, waiting))}}"
'''


def written_test(
    case: Case, protocol: str, *, planted: Planted | None = None, apart: bool = False
) -> str:
    """A counterexample as a test that fails while the protocol, with what was `planted` in it,
    allows the run; `protocol` is a name, or a path from the folder of the test."""
    assert isinstance(case.verdict, Violated)
    assert case.plan is not None
    plan, broken = case.plan, case.verdict
    counts: dict[str, int] = {}
    for member in plan.members:
        counts[member.role] = counts.get(member.role, 0) + 1
    steps = [
        f'    {{"event": "{event.kind}", "rank": "{plan.members[event.rank]}", '
        f'"name": "{event.name}"}},'
        for event in broken.path
    ]
    is_file = "/" in protocol or "." in protocol
    how = f"a run of the protocol, {planted}" if planted else "mend the protocol, and this passes"
    return _TEST.format(
        title=f"{broken.property}: {broken.says}."[:98],
        how=how,
        imports="from pathlib import Path\n\n" if is_file else "",
        protocol=f"Path(__file__).parent / {protocol!r}" if is_file else repr(protocol),
        ranks=repr(counts),
        options=repr(dict(case.options)),
        planted=repr(planted),
        path="\n".join(steps),
        name=f"{plan.protocol.name}_{broken.property}".replace("-", "_"),
        settings=", apart=True" * apart + ", mixed=True" * ("mixed" in case.faults),
        epochs=case.epochs,
    )
