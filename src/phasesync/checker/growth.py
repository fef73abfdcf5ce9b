"""How the shortest run that goes wrong grows with the number of ranks, and where it begins."""

from collections.abc import Callable, Iterable, Sequence

from phasesync.checker.explicit import explore
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults
from phasesync.core.plan import Plan
from phasesync.core.verdict import Holds, Violated
from phasesync.errors import PlanError

__all__ = ("grows", "growth")

Lengths = Sequence[tuple[int, int | None]]


def growth(
    plan_of: Callable[[int], Plan],
    faults: Faults,
    epochs: int,
    sizes: Iterable[int],
    budget: Budget,
) -> tuple[tuple[int, int | None], ...]:
    """The length of a shortest broken run at each size (None: none is); it ends with the budget."""
    found: list[tuple[int, int | None]] = []
    for size in sizes:
        try:
            plan = plan_of(size)
        except PlanError:
            continue  # So many ranks make no whole groups.
        verdict, _ = explore(plan, faults, epochs, budget=budget)
        match verdict:
            case Violated(path=path, shortest=True):
                found.append((len(plan.members), len(path)))
            case Holds():
                found.append((len(plan.members), None))
            case _:
                break
    return tuple(found)


def grows(lengths: Lengths) -> str:
    """`38 steps whatever N`, or `7N + 6 steps from N = 3 on`, or each size by itself."""
    broken = [(size, steps) for size, steps in lengths if steps is not None]
    if not broken:
        return "no size tried goes wrong"
    first = f" from N = {broken[0][0]} on" if len(broken) < len(lengths) else ""
    if len(broken) > 1:
        (one, short), (two, long) = broken[0], broken[-1]
        slope, rest = divmod(long - short, two - one)
        base = short - slope * one
        if not rest and all(steps == slope * size + base for size, steps in broken):
            law = f"{slope}N {'+' if base >= 0 else '-'} {abs(base)}" if slope else f"{base}"
            return f"{law} steps{'' if slope else ' whatever N'}{first}"
    return ", ".join(f"{steps} steps at N = {size}" for size, steps in broken)
