"""Take it away and watch it fail: one mistake at a time, planted in a plan.

Each mutation must be refuted under at least one assignment of the options in which a group has two
ranks or more, which is named. One that survives means that the thing is decoration, or that a
property is missing; either way its author should know.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from phasesync.checker.anyn import Mutate, counts, sized
from phasesync.checker.explicit import explore
from phasesync.checker.report import Case
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.options import assignments
from phasesync.core.plan import Act, Defect, Plan, Scope, Step, Wait, resolve
from phasesync.core.protocol import (
    DEVICE,
    ELSEWHERE,
    FenceDecl,
    InvariantKind,
    PhaseDecl,
    Protocol,
    Verb,
)
from phasesync.core.verdict import DEADLOCK, SOMETIMES, Holds, Undecided, Violated
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
    """One planted mistake; `ranks` is how many ranks of one group it takes to plant it.

    `fence` and `arrival` say which arrival was left out, where that is the mistake.
    """

    name: str
    mutate: Mutate
    ranks: int = 2
    may_survive: bool = False
    restarts: bool = False
    fence: str = ""
    arrival: str = ""


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


def _left_out(fence: str, role: str, place: int) -> Mutate:
    """In every instance of its scope the fence goes on without that member of the role."""

    def mutate(plan: Plan) -> Plan:
        found, first = _alone(plan)
        scopes = list(found.scopes)
        fewer: dict[int, int] = {}

        def change(rank: int, program: tuple[Step, ...]) -> tuple[Step, ...]:
            wait = next((i for i in program if isinstance(i, Wait) and i.fence == fence), None)
            if wait is None:
                return program
            members = plan.scopes[wait.scope].members
            own = [member for member in members if plan.members[member].role == role]
            left = own[min(place, len(own) - 1)] if own else None
            if rank == left:
                return _scoped(program, fence, first + rank)
            if wait.scope not in fewer:
                fewer[wait.scope] = len(scopes)
                rest = tuple(member for member in members if member != left)
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
    names = tuple(dict.fromkeys(fence.name for fence in protocol.fences))
    for name in names:
        yield Mutation(f"fence {name} dropped", without_fence(name))
    for fence in protocol.fences:
        yield from _one_less(fence)
    for fence in protocol.fences:
        for precondition in fence.established if _enqueues(protocol, fence) else ():
            said = f"fence {fence.name} without {precondition}"
            yield Mutation(said, _unprepared(fence.name, precondition))
    yield from _misplaced(protocol)
    for each in names:
        yield Mutation(f"fence {each} for leaders only", _leaders_only(each))
    for phase in protocol.phases:
        if any(effect.verb is Verb.ACQUIRES for effect in phase.effects):
            yield Mutation(f"{phase.name} swallowed", _swallowed(phase.name))
    for defect in Defect:
        if _MISTAKEN.get(defect, _always)(protocol):
            restarts = defect in (Defect.NO_FLOOR, Defect.RESTARTS_EARLY)
            yield Mutation(defect.value, _defective(defect), restarts=restarts)


def _enqueues(protocol: Protocol, fence: FenceDecl) -> bool:
    """Whether anything is enqueued that the fence could wait for; else it establishes nothing."""
    enqueued = False
    for step in protocol.steps:
        match step:
            case PhaseDecl():
                enqueued = enqueued or step.enqueued
            case FenceDecl():
                if step is fence:
                    return enqueued
                enqueued = enqueued and not step.established
    return False


def _one_less(fence: FenceDecl) -> Iterator[Mutation]:
    """The fence on all ranks but one, each left out in turn: three make a group here."""
    for place in range(3):
        who = f"{fence.role}/{place}"
        yield Mutation(
            f"fence {fence.name} without {who}",
            _left_out(fence.name, fence.role, place),
            ranks=3,
            may_survive=True,
            fence=fence.name,
            arrival=who,
        )


def _always(_: Protocol) -> bool:
    return True


def _shares(protocol: Protocol) -> bool:
    """Whether a rank reaches other ranks' devices at all."""
    return any(isinstance(group.size, str) or group.size > 1 for group in protocol.groups)


def _owned(protocol: Protocol) -> frozenset[str]:
    """Resources of those who arrive at fences, which an abort could touch."""
    return frozenset(r.name for r in protocol.resources if r.owner in protocol.active_roles)


def _reached(protocol: Protocol) -> frozenset[str]:
    """Resources that a rank touches on other devices than its own."""
    if not _shares(protocol):
        return frozenset()
    far = (effect for phase in protocol.phases for effect in phase.effects)
    return frozenset(effect.resource for effect in far if effect.reach != DEVICE)


def _lends(protocol: Protocol) -> bool:
    """Whether others read what a rank has: only then is it wrong to release it in an abort."""
    return bool(_owned(protocol) & _reached(protocol))


def _excludes(protocol: Protocol) -> bool:
    """Whether what a rank had could meet what others map: only then may it not take it back."""
    own, reached = _owned(protocol), _reached(protocol)
    for each in protocol.invariants:
        if each.kind is not InvariantKind.NEVER or not own & set(each.resources):
            continue
        if each.on == ELSEWHERE or reached & set(each.resources):
            return True
    return False


def _goes_on(protocol: Protocol) -> bool:
    """Whether a phase follows a fence: only then can a fence be open that a failure comes after."""
    fences = [at for at, step in enumerate(protocol.steps) if isinstance(step, FenceDecl)]
    phases = [at for at, step in enumerate(protocol.steps) if isinstance(step, PhaseDecl)]
    return bool(fences and phases) and min(fences) < max(phases)


#: What has to be so in a protocol for a runtime's mistake to be one there.
_MISTAKEN: Mapping[Defect, Callable[[Protocol], bool]] = {
    Defect.ABORT_TAKES: _excludes,
    Defect.ABORT_RELEASES: _lends,
    Defect.LATE_ABORT: _goes_on,
}


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
    fence: str = ""
    arrival: str = ""

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

    @property
    def carries(self) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
        """For each fence: the arrivals that carry its guarantee, and those it does without.

        Without the one a run goes wrong; the other was left out and nothing was found.
        """
        found: dict[str, tuple[list[str], list[str]]] = {}
        for mutant in self.mutants:
            if mutant.fence and mutant.bound is None:
                needed, idle = found.setdefault(mutant.fence, ([], []))
                (idle if mutant.refuted is None else needed).append(mutant.arrival)
        return tuple((fence, tuple(one), tuple(two)) for fence, (one, two) in found.items())

    def to_json(self) -> dict[str, object]:
        return {
            "mutate": 1,
            "protocol": self.protocol,
            "mutants": [mutant.to_json() for mutant in self.mutants],
            "survivors": [mutant.mutation for mutant in self.survivors],
            "undecided": [mutant.mutation for mutant in self.undecided],
            "arrivals": [
                {"fence": fence, "carry": list(needed), "idle": list(idle)}
                for fence, needed, idle in self.carries
            ],
        }


_Menu: TypeAlias = tuple[tuple[Faults, str, int], ...]
_MENU: _Menu = (
    (Faults(), "none", 1),
    (Faults(most=1, crash=True, fail=True), "crash or fail", 1),
    (Faults(), "none", 2),
    (Faults(most=1, crash=True, fail=True), "crash or fail", 2),
)
_RESTARTS: _Menu = ((Faults(most=1, crash=True, restart=True), "crash and restart", 2),)


def survey(
    protocol: Protocol,
    *,
    options: Mapping[str, OptionValue] | None = None,
    budget: Callable[[], Budget] = Budget,
    only: Callable[[Mutation], bool] = lambda mutation: True,
) -> Survey:
    """Plants every mutation, or `only` some, and looks for a run that refutes it.

    `budget` is asked once a mutation.
    """
    fixed = dict(options or {})
    spans: list[dict[str, OptionValue]] = []
    for each in assignments(protocol):
        found = {**each, **fixed}
        if found not in spans:
            spans.append(found)
    chosen = filter(only, mutations(protocol))
    mutants = tuple(_mutant(protocol, spans, each, budget()) for each in chosen)
    return Survey(protocol=protocol.name, mutants=mutants)


class _Try(NamedTuple):
    """One search for a run that refutes a mutation."""

    plan: Plan
    options: Mapping[str, OptionValue]
    faults: Faults
    said: str
    epochs: int


#: All tries are looked at briefly before any is looked at for long: most mistakes show soon.
_PASSES = (10_000, 50_000, 5_000_000)


def _tries(
    protocol: Protocol, spans: list[dict[str, OptionValue]], mutation: Mutation
) -> Iterator[_Try]:
    """Every plan that the mutation changes, once; a mistake may take one rank more to show."""
    seen: set[object] = set()
    for span in spans:
        for menu, ranks in _menus(mutation):
            options = sized(protocol, span, ranks)
            sound = resolve(protocol, counts(protocol, ranks), options)
            plan = mutation.mutate(sound)
            if plan == sound or (key := _essence(plan)) in seen:
                continue
            seen.add(key)
            for faults, said, epochs in menu:
                yield _Try(plan, options, faults, said, epochs)


def _menus(mutation: Mutation) -> tuple[tuple[_Menu, int], ...]:
    if mutation.restarts:
        return ((_RESTARTS, mutation.ranks),)
    return ((_MENU, mutation.ranks), (_MENU[:2], mutation.ranks + 1))


def _essence(plan: Plan) -> tuple[object, ...]:
    """What of a plan a search sees: not the options' names, nor scopes where nobody waits."""
    waits = {step.scope for program in plan.programs for step in program if isinstance(step, Wait)}
    scopes = tuple(plan.scopes[at].members if at in waits else () for at in range(max(waits) + 1))
    programs = tuple(
        tuple(
            step._replace(scope=scopes.index(scopes[step.scope]))
            if isinstance(step, Wait)
            else step
            for step in program
        )
        for program in plan.programs
    )
    return programs, frozenset(scopes), plan.recover, plan.start, plan.never, plan.defects


def _mutant(
    protocol: Protocol, spans: list[dict[str, OptionValue]], mutation: Mutation, budget: Budget
) -> Mutant:
    left: Iterable[_Try] = _tries(protocol, spans, mutation)
    tried = 0
    refuted: Case | None = None
    bound: str | None = None
    for states_max in _PASSES:
        few = replace(budget, states_max=min(states_max, budget.states_max))
        ended, left, refuted, bound = _looked(left, few)
        tried += ended
        if refuted is not None or not left:
            break
    return Mutant(
        mutation=mutation.name,
        refuted=refuted,
        tried=tried,
        may_survive=mutation.may_survive,
        bound=None if refuted is not None else bound,
        fence=mutation.fence,
        arrival=mutation.arrival,
    )


def _looked(
    tries: Iterable[_Try], budget: Budget
) -> tuple[int, list[_Try], Case | None, str | None]:
    """How many tries came to an end, those that did not, the one that refutes, and the bound."""
    ended, bound = 0, None
    left: list[_Try] = []
    for each in tries:
        verdict, _ = explore(each.plan, each.faults, each.epochs, budget=budget, shortest=False)
        match verdict:
            case Undecided():
                left.append(each)
                bound = verdict.bound
            case Violated():
                return ended + 1, left, _case(each, verdict), None
            case Holds():
                ended += 1
    return ended, left, None, bound


def _case(tried: _Try, verdict: Violated) -> Case:
    return Case(
        ranks=len(tried.plan.members),
        options=tuple(sorted(tried.options.items())),
        faults=tried.said,
        epochs=tried.epochs,
        asks=("safety", DEADLOCK, SOMETIMES),
        verdict=verdict,
        plan=tried.plan,
    )
