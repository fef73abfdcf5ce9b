"""Every interleaving of healthy ranks, searched as plainly as can be: what lint is held against."""

from phasesync.core import kernel
from phasesync.core.kernel import Status
from phasesync.core.plan import Plan
from phasesync.core.properties import violations


def broken(plan: Plan, states_max: int) -> tuple[str | None, bool]:
    """The first property that breaks in two epochs, if any, and whether all states were seen."""
    first = kernel.initial(plan)
    seen, todo = {first}, [first]
    while todo and len(seen) < states_max:
        system = todo.pop()
        stuck = True
        for happens in kernel.enabled(plan, system, epochs=2):
            stuck = False
            after = kernel.step(plan, system, happens)
            found = violations(plan, system, happens, after)
            if found:
                return f"{found[0].property}: {found[0].says}", False
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if stuck and any(state.status is not Status.FINISHED for state in system.ranks):
            return "hang", False
    return None, not todo
