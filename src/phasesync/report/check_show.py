"""`check --show N`: so many different runs beside the shortest, as lanes.

Where a rule is broken they are further ways to break it; where all holds they are runs to the
end, so that what was proved can be looked at.
"""

from collections.abc import Iterator

from phasesync.checker.report import Case, Report
from phasesync.checker.samples import more_broken, sample_runs
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults
from phasesync.core.plan import Plan
from phasesync.core.verdict import Holds, Violated
from phasesync.report import lanes

__all__ = ("shown",)

STATES_MAX = 200_000


def shown(report: Report, many: int, faults: Faults, epochs: int) -> Iterator[str]:
    """Lines of up to `many` runs on the fewest ranks that the report looked at."""
    broken = report.counterexample
    if broken is not None and broken.plan is not None:
        yield from _broken(broken, broken.plan, many, faults)
        return
    holding = [c for c in report.cases if c.plan and isinstance(c.verdict, Holds) and not c.extra]
    if not holding:
        yield "nothing to show: no search with ranks counted out came to its end"
        return
    case = min(holding, key=lambda each: each.ranks or 0)
    assert case.plan is not None
    for number, path in enumerate(sample_runs(case.plan, faults, epochs, many), 1):
        yield ""
        yield f"run {number} at N = {case.ranks}, {len(path)} steps:"
        yield from lanes.draw(case.plan, path, shown=len(path))


def _broken(case: Case, plan: Plan, many: int, faults: Faults) -> Iterator[str]:
    assert isinstance(case.verdict, Violated)
    budget = Budget(states_max=STATES_MAX)
    found = more_broken(plan, faults._replace(restart=False), case.epochs or 1, many, budget=budget)
    for number, run in enumerate(found, 1):
        yield ""
        yield f"way {number} at N = {case.ranks}, {len(run.path)} steps:"
        yield from lanes.draw(plan, run.path, run.violations)
    if not found:
        yield "no other way: no single step breaks a rule"
