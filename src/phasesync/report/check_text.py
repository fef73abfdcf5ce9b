"""What `check` says to people: each property, then the run that goes wrong, then the bounds."""

from collections.abc import Mapping, Sequence

from phasesync.checker.growth import grows
from phasesync.checker.mutants import Survey
from phasesync.checker.report import Case, Report, word
from phasesync.core.verdict import Holds, Undecided, Violated
from phasesync.lint import Finding
from phasesync.report import lanes

__all__ = ("lint_lines", "report_lines", "survey_lines")

LEFT_MAX = 3


def report_lines(report: Report, gib: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """A report as lines of text; `gib` are figures by resource, if there are any."""
    under = f" ({report.mutation})" if report.mutation else ""
    lines = [f"{report.protocol}{under}: {word(report.verdict)}"]
    for each in report.summaries:
        lines.append(f"  {each.property:<10} {each.verdict:<10} {each.reach}")
    if (case := report.counterexample) is not None:
        lines += ["", *_run(case, gib)]
        if len(report.lengths) > 1:
            lines.append(f"length: {grows(report.lengths)}; {_smallest(report)}")
    lines += ["", *_bounds(report)]
    return tuple(lines)


def _smallest(report: Report) -> str:
    """The smallest number of ranks that goes wrong."""
    fails = next((size for size, steps in report.lengths if steps is not None), None)
    fine = [size for size, steps in report.lengths if steps is None and (fails or 0) > size]
    but = f"; none at N = {', '.join(map(str, fine))}" if fine else ""
    return f"the smallest N that fails is {fails}{but}" if fails else "no size tried fails"


def _run(case: Case, gib: Mapping[str, float] | None) -> list[str]:
    assert isinstance(case.verdict, Violated)
    broken = case.verdict
    size = "shortest run" if broken.shortest else "a run"
    head = (
        f"{broken.property}: {size} at N = {case.ranks}: {len(broken.path)} steps, faults: "
        f"{case.faults}"
    )
    if case.plan is None or not broken.path:
        return [head, f"broken: {broken.says}"]
    drawn = lanes.draw(case.plan, broken.path, broken.violations, says=broken.says, gib=gib)
    return [head, *drawn]


def _bounds(report: Report) -> list[str]:
    """How much was looked at, within which bounds, and what was not."""
    lines = [_seen(report)]
    counted = [case for case in report.cases if case.ranks is not None and not case.extra]
    for ranks in dict.fromkeys(case.ranks for case in counted):
        within = (_within(case) for case in counted if case.ranks == ranks)
        lines.append(f"bounds: N = {ranks}: {'; '.join(dict.fromkeys(within))}")
    for case in report.cases:
        if isinstance(case.verdict, Undecided) and not case.extra:
            lines.append(f"undecided: {_asked(case)}: {case.verdict.bound}")
    left = [c for c in report.cases if isinstance(c.verdict, Undecided) and c.extra]
    lines += [f"not reached: {_asked(case)}" for case in left[:LEFT_MAX]]
    if len(left) > LEFT_MAX:
        more = "a rule is broken already" if report.counterexample else "give it more --time-limit"
        lines.append(f"not reached: {len(left) - LEFT_MAX} more; {more}")
    return lines


def _seen(report: Report) -> str:
    """States and the product states that they stand for, depth, and how fast."""
    holding = [case.verdict for case in report.cases if isinstance(case.verdict, Holds)]
    states = sum(case.verdict.states for case in report.cases)
    product = sum(case.product or case.verdict.states for case in report.cases)
    parts = [f"{_many(len(report.cases), 'search', 'es')}: {states:,} states"]
    if product > states:
        parts.append(f"which stand for {_large(product)}")
    if steps := sum(each.transitions for each in holding):
        parts.append(f"{steps:,} transitions")
    if depth := max((each.depth for each in holding), default=0):
        parts.append(f"depth {depth}")
    if report.elapsed_s is not None:
        parts.append(f"{report.elapsed_s:.2f} s")
    if took := sum(case.elapsed_s or 0 for case in report.cases):
        parts.append(f"{states / took:,.0f} states/s")
    return ", ".join(parts)


def _many(count: int, word: str, plural: str) -> str:
    return f"{count} {word}{plural if count != 1 else ''}"


def _large(count: int) -> str:
    return (
        f"{count:,}" if count < 10**9 else f"{str(count)[0]}.{str(count)[1]}e{len(str(count)) - 1}"
    )


def _within(case: Case) -> str:
    faults = "no faults" if case.faults == "none" else case.faults
    return f"{faults}, {_many(case.epochs or 0, 'epoch', 's')}"


def lint_lines(doubts: Sequence[Finding]) -> tuple[str, ...]:
    """What lint has against the file, if anything."""
    return tuple(f"lint: {found.severity}: {found}" for found in doubts)


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
    for fence, needed, idle in survey.carries:
        lines.append(f"arrivals that carry {fence}: {_arrivals(needed, idle)}")
    count = len(survey.survivors)
    if survey.undecided:
        lines.append(f"{len(survey.undecided)} undecided: give it more --time-limit")
    lines.append("no survivor" if not count else f"{count} survive: decoration, or no property")
    return tuple(lines)


def _arrivals(needed: Sequence[str], idle: Sequence[str]) -> str:
    if not idle:
        return "all"
    without = f"; it does without {', '.join(idle)}"
    return (", ".join(needed) or "none that was left out") + without


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
