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

__all__ = ("Mutate", "closed", "counts", "tracked", "tracked_plan", "unclosed")

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
    if len(protocol.groups) > 1:
        return "ranks belong to more than one group, so that they are not interchangeable"
    fixed = next((g.size for g in protocol.groups if isinstance(g.size, int)), None)
    ranks = 6 if fixed is None else 3 * fixed
    try:
        plan = mutate(resolve(protocol, counts(protocol, ranks), sized(protocol, options, 3)))
    except PlanError as error:
        return str(error)
    found = blocks(plan)
    if protocol.groups and len({shape(plan, block.slots) for block in found}) > len(
        protocol.active_roles
    ):
        return "groups of ranks differ from each other"
    for block in found if fixed is None else ():
        classes = siblings(plan, block.slots)
        if len(set(classes[1:])) > 1:
            return "members of a group are not interchangeable"
    return None


def tracked_plan(protocol: Protocol, options: Mapping[str, OptionValue]) -> Plan:
    """The plan whose blocks are tracked: a group of one rank, of a leader and a member who stands
    for all, or of as many as the protocol fixes; the other groups are the token."""
    members = 1
    for group in protocol.groups:
        size = options[group.size] if isinstance(group.size, str) else group.size
        assert isinstance(size, int)
        members = size if isinstance(group.size, int) else min(size, 2)
    return resolve(protocol, counts(protocol, members), sized(protocol, options, members))


def tracked(
    protocol: Protocol,
    options: Mapping[str, OptionValue],
    *,
    epochs: int = 2,
    mutate: Mutate,
    budget: Budget = NO_BUDGET,
) -> Found:
    """What a search of all tracked parts finds."""
    total = Found()
    plan = mutate(tracked_plan(protocol, options))
    fixed = any(isinstance(group.size, int) for group in protocol.groups)
    seen: set[object] = set()
    for at, block in enumerate(blocks(plan)):
        kind = shape(plan, block.slots)
        if kind in seen:
            continue
        seen.add(kind)
        own = not fixed and len([slot for slot in block.slots if slot.rank >= 0]) > 1
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
