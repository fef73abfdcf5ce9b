"""What `check` says to people: each property, then the run that goes wrong, then the bounds."""

from phasesync.checker.growth import grows
from phasesync.checker.mutants import Survey
from phasesync.checker.report import Case, Report, word
from phasesync.core.verdict import Holds, Undecided, Violated
from phasesync.report import lanes

__all__ = ("report_lines", "survey_lines")

LEFT_MAX = 3


def report_lines(report: Report) -> tuple[str, ...]:
    """A report as lines of text."""
    under = f" ({report.mutation})" if report.mutation else ""
    lines = [f"{report.protocol}{under}: {word(report.verdict)}"]
    for each in report.summaries:
        lines.append(f"  {each.property:<10} {each.verdict:<10} {each.reach}")
    if (case := report.counterexample) is not None:
        lines += ["", *_run(case)]
        if len(report.lengths) > 1:
            lines.append(f"length: {grows(report.lengths)}")
    lines += ["", *_bounds(report)]
    return tuple(lines)


def _run(case: Case) -> list[str]:
    assert isinstance(case.verdict, Violated)
    broken = case.verdict
    size = "shortest run" if broken.shortest else "a run"
    head = (
        f"{broken.property}: {size} at N = {case.ranks}: {len(broken.path)} steps, faults: "
        f"{case.faults}"
    )
    if case.plan is None or not broken.path:
        return [head, f"broken: {broken.says}"]
    return [head, *lanes.draw(case.plan, broken.path, broken.violations, says=broken.says)]


def _bounds(report: Report) -> list[str]:
    """How much was looked at, and what was not."""
    holding = [case.verdict for case in report.cases if isinstance(case.verdict, Holds)]
    states = sum(case.verdict.states for case in report.cases)
    steps = sum(each.transitions for each in holding)
    time = "" if report.elapsed_s is None else f", {report.elapsed_s:.2f} s"
    lines = [f"{len(report.cases)} searches, {states:,} states, {steps:,} transitions{time}"]
    for case in report.cases:
        if isinstance(case.verdict, Undecided) and not case.extra:
            lines.append(f"undecided: {_asked(case)}: {case.verdict.bound}")
    left = [c for c in report.cases if isinstance(c.verdict, Undecided) and c.extra]
    lines += [f"not reached: {_asked(case)}" for case in left[:LEFT_MAX]]
    if len(left) > LEFT_MAX:
        lines.append(f"not reached: {len(left) - LEFT_MAX} more; give it more --time-limit")
    return lines


def _asked(case: Case) -> str:
    ranks = "any N" if case.ranks is None else f"N = {case.ranks}"
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in case.options)
    return f"{ranks} ({options})"


def survey_lines(survey: Survey) -> tuple[str, ...]:
    """Every mutation, and what refutes it."""
    lines = [f"{survey.protocol}: {len(survey.mutants)} mutations, one at a time"]
    width = max(len(mutant.mutation) for mutant in survey.mutants)
    for mutant in survey.mutants:
        if mutant.bound is not None:
            note = f"undecided: {mutant.bound}"
        elif mutant.refuted is None:
            note = "survives" + (" (may rightly)" if mutant.may_survive else "")
        else:
            broken = mutant.refuted.verdict
            assert isinstance(broken, Violated)
            note = f"{broken.property} after {len(broken.path)} steps, N = {mutant.refuted.ranks}"
            odd = _unusual(mutant.refuted)
            note += f", {odd}" if odd else ""
        lines.append(f"  {mutant.mutation:<{width}}  {note}")
    count = len(survey.survivors)
    if survey.undecided:
        lines.append(f"{len(survey.undecided)} undecided: give it more --time-limit")
    lines.append("no survivor" if not count else f"{count} survive: decoration, or no property")
    return tuple(lines)


def _unusual(case: Case) -> str:
    """The options that are not the protocol's defaults."""
    if case.plan is None:
        return ""
    usual = {decl.name: decl.default for decl in case.plan.protocol.options}
    return ", ".join(
        f"{name}={str(value).lower()}"
        for name, value in case.options
        if usual.get(name) != value  # type: ignore[call-overload]
    )
