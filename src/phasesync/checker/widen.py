"""From a run that goes wrong on few ranks to one on many, step by step on the kernel.

Each rank of the many does what its like does among the few: leaders as the leader, members as the
member. It is a guess, and what the kernel does not confirm is no answer; but where many ranks are
too many to count out, it finds at once what every size has.
"""

from collections.abc import Sequence

from phasesync.checker.paths import Lifted
from phasesync.core.kernel import Event, Faults, Kind, enabled, initial, step
from phasesync.core.plan import Act, Plan, Step
from phasesync.core.properties import violations

__all__ = ("widened",)

_FAULTS = frozenset((Kind.CRASH, Kind.FAIL, Kind.HANG, Kind.LOSE, Kind.REFUSE, Kind.ENGINE))


def widened(
    few: Plan, path: Sequence[Event], many: Plan, faults: Faults, epochs: int
) -> Lifted | None:
    """The run of `many` that follows `path`, a run of `few`; None where it breaks no rule."""
    likes = _likes(few, many)
    system = initial(many)
    events: list[Event] = []
    systems = [system]
    for number, event in enumerate(path):
        last = number == len(path) - 1
        for each in _of_all(event, likes):
            if each not in enabled(many, system, faults, epochs):
                continue
            after = step(many, system, each)
            events.append(each)
            systems.append(after)
            broken = violations(many, system, each, after)
            if broken:
                return Lifted(tuple(events), tuple(systems), broken)
            system = after
            if last or event.kind in _FAULTS:
                break
    return None


def _of_all(event: Event, likes: dict[int, list[int]]) -> list[Event]:
    """What the many do where one of the few does this."""
    return [event._replace(rank=rank) for rank in likes.get(event.rank, ())]


def _likes(few: Plan, many: Plan) -> dict[int, list[int]]:
    """For each of the few, who is like it: in turn, where several of the few are alike."""
    sorts: dict[object, list[int]] = {}
    for rank, _ in enumerate(few.members):
        sorts.setdefault(_sort(few, rank), []).append(rank)
    found: dict[int, list[int]] = {}
    taken: dict[object, int] = {}
    for rank, _ in enumerate(many.members):
        sort = _sort(many, rank)
        if alike := sorts.get(sort):
            at = min(taken.get(sort, 0), len(alike) - 1)
            taken[sort] = at + 1
            found.setdefault(alike[at], []).append(rank)
    return found


def _sort(plan: Plan, rank: int) -> object:
    """A rank's role and the names of its steps, in order."""

    def names(steps: tuple[Step, ...]) -> tuple[str, ...]:
        return tuple(step.phase if isinstance(step, Act) else step.fence for step in steps)

    return plan.members[rank].role, names(plan.programs[rank]), names(plan.recover[rank])
