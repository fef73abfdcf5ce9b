"""Take it away and watch it fail: one mistake at a time, planted in a plan.

Each mutation must be refuted under at least one assignment of the options in which a group has two
ranks or more, which is named. One that survives means that the thing is decoration, or that a
property is missing; either way its author should know.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from phasesync.checker.anyn import Mutate, counts, sized
from phasesync.checker.explicit import explore
from phasesync.checker.report import Case, word
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.options import assignments
from phasesync.core.plan import Act, Defect, Plan, Scope, Step, Wait, resolve
from phasesync.core.protocol import FenceDecl, PhaseDecl, Protocol, Verb
from phasesync.core.verdict import DEADLOCK, SOMETIMES, Undecided, Violated
from phasesync.errors import PlanError

__all__ = (
    "Mutant",
    "Mutation",
    "Survey",
    "mutations",
    "rescoped",
    "survey",
    "swapped",
    "without_fence",
)


class Mutation(NamedTuple):
    """One planted mistake; `ranks` is how many ranks of one group it takes to plant it."""

    name: str
    mutate: Mutate
    ranks: int = 2
    may_survive: bool = False
    restarts: bool = False


# --------------------------------------------------------------------------- mistakes in plans


def _each(plan: Plan, change: Callable[[int, tuple[Step, ...]], tuple[Step, ...]]) -> Plan:
    """The plan with every rank's program of the epoch changed."""
    programs = tuple(change(rank, program) for rank, program in enumerate(plan.programs))
    return replace(plan, programs=programs)


def _alone(plan: Plan) -> tuple[Plan, int]:
    """The plan with a scope for each rank alone, and the number of the first such scope."""
    alone = tuple(Scope(f"alone/{rank}", (rank,)) for rank in range(len(plan.members)))
    return replace(plan, scopes=(*plan.scopes, *alone)), len(plan.scopes)


def _known(plan: Plan, name: str) -> None:
    names = {
        item.fence if isinstance(item, Wait) else item.phase
        for program in plan.programs
        for item in program
    }
    if name not in names:
        declared = [step.name for step in plan.protocol.steps]
        if name in declared:
            return  # These options leave it out; there is nothing to change.
        raise PlanError(
            f"protocol {plan.protocol.name!r} has no phase or fence {name!r}; "
            f"it has: {', '.join(declared)}"
        )


def without_fence(fence: str) -> Mutate:
    """Nobody waits at the fence; what it establishes is still done."""

    def mutate(plan: Plan) -> Plan:
        _known(plan, fence)
        found, first = _alone(plan)
        return _each(found, lambda rank, program: _scoped(program, fence, first + rank))

    return mutate


def _scoped(program: tuple[Step, ...], fence: str, scope: int) -> tuple[Step, ...]:
    return tuple(
        item._replace(scope=scope) if isinstance(item, Wait) and item.fence == fence else item
        for item in program
    )


def rescoped(fence: str, scope: str) -> Mutate:
    """The fence spans `world`, or each rank's own instance of a group.

    Raises:
        PlanError: (when applied) there is no such fence or scope.
    """

    def mutate(plan: Plan) -> Plan:
        _known(plan, fence)
        return _each(plan, lambda rank, program: _scoped(program, fence, _own(plan, rank, scope)))

    return mutate


def _own(plan: Plan, rank: int, scope: str) -> int:
    for number, each in enumerate(plan.scopes):
        if each.name.split("/")[0] == scope and rank in each.members:
            return number
    known = ", ".join(dict.fromkeys(each.name.split("/")[0] for each in plan.scopes))
    raise PlanError(f"{plan.members[rank]} is in no scope {scope!r}; scopes are: {known}")


def swapped(one: str, two: str) -> Mutate:
    """Two steps change places in every rank's program that has both."""

    def mutate(plan: Plan) -> Plan:
        _known(plan, one)
        _known(plan, two)
        return _each(plan, lambda _, program: _swap(program, one, two))

    return mutate


def _named(item: Step) -> str:
    return item.fence if isinstance(item, Wait) else item.phase


def _swap(program: tuple[Step, ...], one: str, two: str) -> tuple[Step, ...]:
    places = {_named(item): at for at, item in enumerate(program)}
    if one not in places or two not in places:
        return program
    steps = list(program)
    steps[places[one]], steps[places[two]] = steps[places[two]], steps[places[one]]
    return tuple(steps)


def _left_out(fence: str, place: int) -> Mutate:
    """In every instance of its scope the fence goes on without the member at `place`."""

    def mutate(plan: Plan) -> Plan:
        found, first = _alone(plan)
        scopes = list(found.scopes)
        fewer: dict[int, int] = {}

        def change(rank: int, program: tuple[Step, ...]) -> tuple[Step, ...]:
            wait = next((i for i in program if isinstance(i, Wait) and i.fence == fence), None)
            if wait is None:
                return program
            members = plan.scopes[wait.scope].members
            if rank == members[min(place, len(members) - 1)]:
                return _scoped(program, fence, first + rank)
            if wait.scope not in fewer:
                rest = tuple(m for m in members if m != members[min(place, len(members) - 1)])
                fewer[wait.scope] = len(scopes)
                scopes.append(Scope(f"fewer/{wait.scope}", rest))
            return _scoped(program, fence, fewer[wait.scope])

        changed = _each(found, change)
        return replace(changed, scopes=tuple(scopes))

    return mutate


def _leaders_only(fence: str) -> Mutate:
    """Only the first member of each scope instance waits, for nobody."""
    return _left_out_all(fence)


def _left_out_all(fence: str) -> Mutate:
    def mutate(plan: Plan) -> Plan:
        found, first = _alone(plan)

        def change(rank: int, program: tuple[Step, ...]) -> tuple[Step, ...]:
            wait = next((i for i in program if isinstance(i, Wait) and i.fence == fence), None)
            if wait is None or rank == plan.scopes[wait.scope].members[0]:
                return _scoped(program, fence, first + rank)
            return tuple(item for item in program if item is not wait)

        return _each(found, change)

    return mutate


def _unprepared(fence: str, precondition: str) -> Mutate:
    """The fence is kept, one of its preconditions is not established."""

    def strip(item: Step) -> Step:
        if isinstance(item, Wait) and item.fence == fence:
            kept = tuple(each for each in item.established if each != precondition)
            return item._replace(established=kept)
        return item

    return lambda plan: _each(plan, lambda _, program: tuple(map(strip, program)))


def _too_early(fence: str) -> Mutate:
    """The fence stands before the releases that it should follow."""

    def change(_: int, program: tuple[Step, ...]) -> tuple[Step, ...]:
        at = next((n for n, item in enumerate(program) if _named(item) == fence), None)
        if at is None:
            return program
        target = at
        for number in range(at - 1, -1, -1):
            item = program[number]
            if isinstance(item, Wait):
                break
            if any(touch.verb is Verb.RELEASES for touch in item.touches):
                target = number
        steps = list(program)
        steps.insert(target, steps.pop(at))
        return tuple(steps)

    return lambda plan: _each(plan, change)


def _swallowed(phase: str) -> Mutate:
    """The call returns and has mapped nothing."""

    def strip(item: Step) -> Step:
        if isinstance(item, Act) and item.phase == phase:
            kept = tuple(touch for touch in item.touches if touch.verb is not Verb.ACQUIRES)
            return item._replace(touches=kept)
        return item

    return lambda plan: _each(plan, lambda _, program: tuple(map(strip, program)))


def _defective(defect: Defect) -> Mutate:
    return lambda plan: replace(plan, defects=plan.defects | {defect})


# -------------------------------------------------------------------------------- the survey


def mutations(protocol: Protocol) -> tuple[Mutation, ...]:
    """All mistakes that can be planted in this protocol, one at a time."""
    return tuple(_mutations(protocol))


def _mutations(protocol: Protocol) -> Iterator[Mutation]:
    for fence in protocol.fences:
        yield Mutation(f"fence {fence.name} dropped", without_fence(fence.name))
    for fence in protocol.fences:
        for place, who in ((0, "the leader"), (1, "a member")):
            name = f"fence {fence.name} without {who}"
            yield Mutation(name, _left_out(fence.name, place), 3, may_survive=True)
    for fence in protocol.fences:
        for precondition in fence.established:
            name = f"fence {fence.name} without {precondition}"
            yield Mutation(name, _unprepared(fence.name, precondition))
    yield from _misplaced(protocol)
    for fence in protocol.fences:
        yield Mutation(f"fence {fence.name} for leaders only", _leaders_only(fence.name))
    for phase in protocol.phases:
        if any(effect.verb is Verb.ACQUIRES for effect in phase.effects):
            yield Mutation(f"{phase.name} swallowed", _swallowed(phase.name))
    for defect in Defect:
        yield Mutation(
            defect.value,
            _defective(defect),
            may_survive=not protocol.recover,
            restarts=defect in (Defect.NO_FLOOR, Defect.RESTARTS_EARLY),
        )


def _misplaced(protocol: Protocol) -> Iterator[Mutation]:
    """Fences that stand after a release, with no other fence between."""
    releasing = False
    for step in protocol.steps:
        match step:
            case PhaseDecl(effects=effects):
                releasing |= any(effect.verb is Verb.RELEASES for effect in effects)
            case FenceDecl(name=name):
                if releasing:
                    yield Mutation(f"fence {name} before its releases", _too_early(name))
                releasing = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """What became of one mutation: the case that refutes it, or None if it survives, or if the
    budget in `bound` ended first."""

    mutation: str
    refuted: Case | None
    tried: int
    may_survive: bool = False
    bound: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "mutation": self.mutation,
            "refuted": self.refuted is not None,
            "tried": self.tried,
            "undecided": self.bound,
            "by": self.refuted.to_json() if self.refuted else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All mutants of a protocol."""

    protocol: str
    mutants: tuple[Mutant, ...]

    @property
    def survivors(self) -> tuple[Mutant, ...]:
        return tuple(m for m in self.mutants if m.refuted is None and m.bound is None)

    @property
    def undecided(self) -> tuple[Mutant, ...]:
        return tuple(mutant for mutant in self.mutants if mutant.bound is not None)

    def to_json(self) -> dict[str, object]:
        return {
            "mutate": 1,
            "protocol": self.protocol,
            "mutants": [mutant.to_json() for mutant in self.mutants],
            "survivors": [mutant.mutation for mutant in self.survivors],
        }


_MENU = (
    (Faults(), "none", 1),
    (Faults(most=1, crash=True, fail=True), "crash or fail", 1),
    (Faults(), "none", 2),
    (Faults(most=1, crash=True, fail=True), "crash or fail", 2),
)
_RESTARTS = ((Faults(most=1, crash=True, restart=True), "crash and restart", 2),)


def survey(
    protocol: Protocol,
    *,
    options: Mapping[str, OptionValue] | None = None,
    budget: Callable[[], Budget] = Budget,
) -> Survey:
    """Plants every mutation, and looks for a run that refutes it.

    `budget` is asked once a mutation.
    """
    fixed = dict(options or {})
    spans: list[dict[str, OptionValue]] = []
    for each in assignments(protocol):
        found = {**each, **fixed}
        if found not in spans:
            spans.append(found)
    mutants = tuple(_mutant(protocol, spans, each, budget()) for each in mutations(protocol))
    return Survey(protocol=protocol.name, mutants=mutants)


def _mutant(
    protocol: Protocol, spans: list[dict[str, OptionValue]], mutation: Mutation, budget: Budget
) -> Mutant:
    tried, bound = 0, None
    seen: list[dict[str, OptionValue]] = []
    for span in spans:
        options = sized(protocol, span, mutation.ranks)
        if options in seen:
            continue
        seen.append(options)
        for faults, said, epochs in _RESTARTS if mutation.restarts else _MENU:
            members = counts(protocol, mutation.ranks)
            plan = mutation.mutate(resolve(protocol, members, options))
            verdict, _ = explore(plan, faults, epochs, budget=budget, shortest=False)
            tried += 1
            if isinstance(verdict, Undecided):
                bound = verdict.bound
            if isinstance(verdict, Violated):
                case = Case(
                    ranks=len(plan.members),
                    options=tuple(sorted(options.items())),
                    faults=said,
                    epochs=epochs,
                    asks=("safety", DEADLOCK, SOMETIMES),
                    verdict=verdict,
                    plan=plan,
                )
                assert word(verdict) == "violated"
                return Mutant(mutation=mutation.name, refuted=case, tried=tried)
    return Mutant(
        mutation=mutation.name,
        refuted=None,
        tried=tried,
        may_survive=mutation.may_survive,
        bound=bound,
    )
