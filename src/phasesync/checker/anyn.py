"""Safety for every number of ranks, faults and epochs: one block tracked, all others one token.

What a property mentions are the devices of one block, and by closure only its own ranks act on
them; a leader and one member stand for every member, since members are interchangeable. The other
ranks can do one thing that matters: arrive at shared fences, all of them, or fail there. Whatever
is found broken is only a candidate: it counts once it has been found on explicit ranks too.
"""

from collections.abc import Callable, Mapping

from phasesync.checker.blocks import blocks, shape, siblings
from phasesync.checker.search import NO_BUDGET, Budget, Found, search
from phasesync.checker.space import Others, Space
from phasesync.core.kernel import Faults
from phasesync.core.model import OptionValue
from phasesync.core.plan import Plan, resolve
from phasesync.core.protocol import ELSEWHERE, EVERYWHERE, Protocol
from phasesync.errors import PlanError

__all__ = ("Mutate", "closed", "counts", "tracked", "unclosed")

Mutate = Callable[[Plan], Plan]
#: Faults without end: the space counts none of them where others are untracked.
_ALL = Faults(most=1, crash=True, fail=True, notices=False)


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
    """Why the argument does not apply, or None if it does.

    It is checked on plans of two and three: blocks of one shape, and within a block a leader and
    members who may be swapped.
    """
    if any(effect.reach == EVERYWHERE for phase in protocol.phases for effect in phase.effects):
        return "a phase reaches the devices of all ranks, so that no finite part is closed"
    if any(each.on == ELSEWHERE for each in protocol.invariants):
        return "a never speaks of other devices, so that no finite part is closed"
    if any(not isinstance(group.size, str) for group in protocol.groups):
        return "the size of a group is fixed in the protocol; ranks are counted out instead"
    if len(protocol.groups) > 1:
        return "ranks belong to more than one group, so that they are not interchangeable"
    try:
        plan = mutate(resolve(protocol, counts(protocol, 6), sized(protocol, options, 3)))
    except PlanError as error:
        return str(error)
    found = blocks(plan)
    if protocol.groups and len({shape(plan, block.slots) for block in found}) > len(
        protocol.active_roles
    ):
        return "groups of ranks differ from each other"
    for block in found:
        classes = siblings(plan, block.slots)
        if len(set(classes[1:])) > 1:
            return "members of a group are not interchangeable"
    return None


def tracked(
    protocol: Protocol,
    options: Mapping[str, OptionValue],
    *,
    epochs: int = 2,
    mutate: Mutate,
    budget: Budget = NO_BUDGET,
) -> Found:
    """What a search of all tracked parts finds: groups of one rank, and of two or more."""
    total = Found()
    size = next((options[g.size] for g in protocol.groups if isinstance(g.size, str)), 1)
    members = 1 if size == 1 else 2
    plan = mutate(resolve(protocol, counts(protocol, members), sized(protocol, options, members)))
    seen: set[object] = set()
    for at, block in enumerate(blocks(plan)):
        kind = shape(plan, block.slots)
        if kind in seen:
            continue
        seen.add(kind)
        own = len([slot for slot in block.slots if slot.rank >= 0]) > 1
        space = Space(plan, _ALL, epochs, others=Others(world=True, own=own), only=at)
        found = search(space, budget, deadlocks=False)
        total.states += found.states
        total.transitions += found.transitions
        total.depth = max(total.depth, found.depth)
        total.trail = total.trail or found.trail
        total.bound = total.bound or found.bound
    return total


def closed(protocol: Protocol, options: Mapping[str, OptionValue], mutate: Mutate) -> bool:
    return unclosed(protocol, options, mutate) is None
