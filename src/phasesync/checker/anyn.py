"""Safety for every number of ranks, faults and epochs: one block tracked, all others one token.

What a property mentions are the devices of one block, and by closure only its own ranks act on
them; a leader and one member stand for every member, since members are interchangeable. The other
ranks can do one thing that matters: arrive at shared fences, all of them, or fail there. Whatever
is found broken is only a candidate: it counts once it has been found on explicit ranks too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from phasesync.checker.blocks import blocks, shape, siblings
from phasesync.checker.search import NO_BUDGET, Budget, Found, search
from phasesync.checker.space import Others, Space
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.plan import Act, Plan, Step, Wait, resolve
from phasesync.core.protocol import (
    ELSEWHERE,
    EVERYWHERE,
    WORLD,
    Invariant,
    InvariantKind,
    Protocol,
    Verb,
)
from phasesync.errors import PlanError

__all__ = (
    "Closure",
    "Mutate",
    "closure",
    "counts",
    "gist",
    "sized",
    "tracked",
    "tracked_plan",
    "unclosed",
)

Mutate = Callable[[Plan], Plan]
#: Faults without end: the space counts none of them where others are untracked.
_ALL = Faults(most=1, crash=True, fail=True, notices=False)
_READ = frozenset((Verb.NEEDS, Verb.USES, Verb.HOLDS))


def counts(protocol: Protocol, size: int) -> dict[str, int]:
    """So many ranks of each active role."""
    return dict.fromkeys(protocol.active_roles, size)


def sized(
    protocol: Protocol, options: Mapping[str, OptionValue], size: int
) -> dict[str, OptionValue]:
    """The options with every group's size, where it is one of them, set to `size`."""
    sizes = {group.size for group in protocol.groups if isinstance(group.size, str)}
    return {**options, **dict.fromkeys(sizes, size)}


def unclosed(protocol: Protocol, options: Mapping[str, OptionValue], mutate: Mutate) -> str | None:
    """Why the argument does not apply, or None if it does."""
    found = closure(protocol, options, mutate)
    return found if isinstance(found, str) else None


class Closure(NamedTuple):
    """What is tracked: the plan, of whose blocks one of each shape is, and for each of these the
    scopes, as slots, in which there are more ranks than that."""

    plan: Plan
    blocks: tuple[tuple[int, frozenset[frozenset[int]]], ...]


def closure(
    protocol: Protocol, options: Mapping[str, OptionValue], mutate: Mutate
) -> Closure | str:
    """The smallest part of every plan that answers for all of it, or why there is none.

    A group is tracked by its leader and one member of each sort; that further members are of a
    sort that is tracked is read off plans with one and two more. A group whose size the protocol
    fixes is tracked whole. All groups are alike.
    """
    if any(effect.reach == EVERYWHERE for phase in protocol.phases for effect in phase.effects):
        return "a phase reaches the devices of all ranks, so that no finite part is closed"
    never = [each for each in protocol.invariants if each.kind is InvariantKind.NEVER]
    if any(each.on == ELSEWHERE for each in never):
        return "a never speaks of other devices, so that no finite part is closed"
    if any(each.on == WORLD for each in _agreeing(protocol)):
        return "an agree speaks of the devices of all ranks, so that no finite part is closed"
    if len(protocol.groups) > 1:
        return "ranks belong to more than one group, so that they are not interchangeable"
    sizes = [options[g.size] if isinstance(g.size, str) else g.size for g in protocol.groups]
    size = sizes[0] if sizes else 1
    assert isinstance(size, int)
    fixed = size == 1 or any(isinstance(group.size, int) for group in protocol.groups)
    reason = "members of a group are not interchangeable"
    least = _members_min(protocol)
    for members in (size,) if fixed else (least, least + 1):
        try:
            plan = mutate(_grouped(protocol, options, members, 1))
            three = mutate(_grouped(protocol, options, members, 3))
            more = (
                []
                if fixed
                else [mutate(_grouped(protocol, options, members + n, 1)) for n in (1, 2)]
            )
        except PlanError as error:
            return str(error)
        sorts = len({shape(three, block.slots) for block in blocks(three)})
        if protocol.groups and sorts > len(protocol.active_roles):
            found = _each_alone(protocol, options, mutate) if size == 1 else None
            return found or "groups of ranks differ from each other"
        if fixed or all(_of_a_sort(each, members) for each in more):
            larger = plan if fixed else more[0]
            return Closure(plan, tuple(_tracked(plan, larger, members)))
    return reason


def _each_alone(
    protocol: Protocol, options: Mapping[str, OptionValue], mutate: Mutate
) -> Closure | None:
    """Groups of one rank that differ, as where a fence of the world does without one of them: each
    sort is tracked by itself. Whatever scope holds somebody else too is, seen from there, a world.

    That further ranks are of a sort that is tracked is read off plans with one and two more.
    """
    plans = [_worldly(mutate(_grouped(protocol, options, 1, groups))) for groups in (3, 4, 5)]
    sorts: list[dict[object, int]] = []
    for plan in plans:
        found = blocks(plan)
        if any(sum(slot.rank >= 0 for slot in block.slots) > 1 for block in found):
            return None
        sorts.append({shape(plan, block.slots): at for at, block in enumerate(found)})
    if any(each.keys() != sorts[0].keys() for each in sorts):
        return None
    return Closure(plans[0], tuple((at, frozenset()) for at in sorted(sorts[0].values())))


def _worldly(plan: Plan) -> Plan:
    """The plan with every scope of several ranks as the world."""
    wide = {at for at, scope in enumerate(plan.scopes) if len(scope.members) > 1}

    def program(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            step._replace(scope=plan.world)
            if isinstance(step, Wait) and step.scope in wide
            else step
            for step in steps
        )

    return replace(
        plan,
        programs=tuple(map(program, plan.programs)),
        recover=tuple(map(program, plan.recover)),
    )


def _agreeing(protocol: Protocol) -> list[Invariant]:
    return [each for each in protocol.invariants if each.kind is InvariantKind.AGREE]


def _members_min(protocol: Protocol) -> int:
    """How many members of a group speak for all: the leader and one more. What agrees does so in
    pairs: where that is asked, one who asks and the two whose contents differ."""
    return 4 if _agreeing(protocol) else 2


def _grouped(
    protocol: Protocol, options: Mapping[str, OptionValue], members: int, groups: int
) -> Plan:
    return resolve(protocol, counts(protocol, members * groups), sized(protocol, options, members))


def _of_a_sort(plan: Plan, members: int) -> bool:
    """Whether every member beyond so many is as one of those, the leader apart."""
    for block in blocks(plan):
        sorts = siblings(plan, block.slots, same_scopes=False)
        if len(sorts) > members and not set(sorts[members:]) <= set(sorts[1:members]):
            return False
    return True


def _tracked(
    plan: Plan, larger: Plan, members: int
) -> Iterator[tuple[int, frozenset[frozenset[int]]]]:
    """One block of each shape, and its scopes that go on beyond the tracked members."""
    seen: set[object] = set()
    for at, (block, wide) in enumerate(zip(blocks(plan), blocks(larger), strict=False)):
        kind = shape(plan, block.slots)
        if kind in seen:
            continue
        seen.add(kind)
        slots = {slot.rank: number for number, slot in enumerate(wide.slots) if slot.rank >= 0}
        scopes = (
            frozenset(slots[member] for member in scope.members)
            for number, scope in enumerate(larger.scopes)
            if number != larger.world and slots.keys() >= set(scope.members)
        )
        here = frozenset(range(len(block.slots)))
        yield at, frozenset(each & here for each in scopes if each & here and each - here)


def tracked_plan(protocol: Protocol, options: Mapping[str, OptionValue]) -> Plan:
    """The plan whose blocks are tracked, but for mistakes that are planted in it."""
    members = 1
    for group in protocol.groups:
        size = options[group.size] if isinstance(group.size, str) else group.size
        assert isinstance(size, int)
        members = size if isinstance(group.size, int) or size == 1 else _members_min(protocol)
    return _grouped(protocol, options, members, 1)


def gist(plan: Plan) -> Plan:
    """A tracked plan without what no search of it tells apart; plans of one gist hold or break
    together.

    In a group that goes on beyond what is tracked, a fence of the group waits for its tracked
    members and for somebody else, and so does one of the world. And an action that reads and
    writes what the next one does is the same action, taking longer.
    """
    sizes = [group.size for group in plan.protocol.groups]
    open_ended = len(plan.members) > 1 and any(isinstance(size, str) for size in sizes)
    whole = {at for at, scope in enumerate(plan.scopes) if scope.members == plan.scopes[0].members}
    of_all = whole if open_ended and plan.world == 0 else set()
    compared = {at for part in plan.agree for at in part}
    compared |= {at for at, rises in enumerate(plan.monotone) if rises}

    def program(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        kept = [
            step
            for step, following in zip(steps, (*steps, None)[1:], strict=True)
            if not _goes_on(step, following, compared)
        ]
        return tuple(
            step._replace(scope=0) if isinstance(step, Wait) and step.scope in of_all else step
            for step in kept
        )

    return replace(
        plan,
        programs=tuple(map(program, plan.programs)),
        recover=tuple(map(program, plan.recover)),
    )


def _goes_on(step: Step, following: Step | None, compared: set[int]) -> bool:
    """Whether an action is but the first part of the next one."""
    if not isinstance(step, Act) or not isinstance(following, Act):
        return False
    if set(step.touches) != set(following.touches) or step.led or following.led:
        return False
    written = {touch.cell for touch in step.touches if touch.verb is Verb.WRITES}
    read = {touch.cell for touch in step.touches if touch.verb in _READ}
    return (
        len(written) + len(read) == len(step.touches)
        and not written & (read | compared)
        and not read & compared
        and (step.outside, step.enqueued) == (following.outside, following.enqueued)
    )


def tracked(
    protocol: Protocol,
    options: Mapping[str, OptionValue],
    *,
    epochs: int = 2,
    mutate: Mutate,
    budget: Budget = NO_BUDGET,
) -> Found:
    """What a search of all tracked parts finds.

    Raises:
        PlanError: there is no closure.
    """
    found = closure(protocol, options, mutate)
    if isinstance(found, str):
        raise PlanError(found)
    total = Found()
    for at, own in found.blocks:
        space = Space(found.plan, _ALL, epochs, others=Others(world=True, own=own), only=at)
        each = search(space, budget, deadlocks=False)
        total.states += each.states
        total.transitions += each.transitions
        total.depth = max(total.depth, each.depth)
        total.trail = total.trail or each.trail
        total.bound = total.bound or each.bound
    return total
