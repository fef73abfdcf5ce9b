"""A check's report for other programs: SARIF, JUnit, and a pytest file.

Undecided is never a pass: an error in JUnit, a warning in SARIF.
"""

from html import escape
from xml.sax.saxutils import quoteattr

from phasesync import __version__
from phasesync.checker.report import Case, Report
from phasesync.core.plan import Plan
from phasesync.core.verdict import Holds, Undecided, Violated
from phasesync.report import lanes

__all__ = ("junit", "sarif", "written_test")


def _title(case: Case) -> str:
    ranks = "any N" if case.ranks is None else f"N = {case.ranks}"
    epochs = "" if case.epochs is None else f", {case.epochs} epochs"
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in case.options)
    return f"{ranks}, faults: {case.faults}{epochs} ({options})"


# ------------------------------------------------------------------------------------- SARIF


def sarif(report: Report, file: str, line: int = 1) -> dict[str, object]:
    """SARIF 2.1.0: one result a case that does not hold, its run as a code flow."""
    results = [_result(case, file, line) for case in report.cases if _tells(case)]
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


def _result(case: Case, file: str, line: int) -> dict[str, object]:
    location = {
        "physicalLocation": {
            "artifactLocation": {"uri": file},
            "region": {"startLine": line},
        }
    }
    match case.verdict:
        case Violated() as broken:
            text = f"{broken.says}; {_title(case)}"
            flow = [
                {"location": {**location, "message": {"text": _step(case.plan, at, broken)}}}
                for at in range(len(broken.path))
            ]
            return {
                "ruleId": broken.property,
                "level": "error",
                "message": {"text": text},
                "locations": [location],
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
        "locations": [location],
    }


def _step(plan: Plan | None, at: int, broken: Violated) -> str:
    event = broken.path[at]
    who = plan.members[event.rank] if plan else event.rank
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

Written by `phasesync check`. The run must not be possible: mend the protocol, and this passes.
"""

from phasesync.core.plan import resolve
from phasesync.errors import Refused
from phasesync.simulator import events_of, replay
from phasesync.spec import load

OPTIONS = {options}
PATH = [
{path}
]


def test_{name}() -> None:
    plan = resolve(load({protocol!r}), {ranks}, OPTIONS)
    try:
        _, broken = replay(plan, events_of(plan, PATH))
    except Refused:
        return
    assert not broken, "; ".join(f"{{each.property}}: {{each.says}}" for each in broken)
'''


def written_test(case: Case, protocol: str) -> str:
    """A counterexample as a test that fails while the protocol allows it."""
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
    return _TEST.format(
        title=f"{broken.property}: {broken.says}."[:98],
        options=repr(dict(case.options)),
        path="\n".join(steps),
        name=f"{plan.protocol.name}_{broken.property}".replace("-", "_"),
        protocol=protocol,
        ranks=repr(counts),
    )
