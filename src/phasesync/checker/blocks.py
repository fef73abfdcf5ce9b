"""Which ranks can touch each other's memory: a plan falls into blocks that only fences join.

A block is a smallest set of ranks and devices such that no action of a member reaches a device
outside, and no scope but the world's joins two of them. Blocks of one shape are interchangeable,
so are siblings within a block whose swap changes nothing. Both follow from the plan's programs
alone; nothing may be assumed that is not read off them here.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from phasesync.core.model import Rank
from phasesync.core.plan import Act, Plan, Step, Wait

__all__ = ("NOBODY", "Block", "Slot", "blocks", "shape", "siblings")

NOBODY = -1
Shape: TypeAlias = tuple[object, ...]


class Slot(NamedTuple):
    """A rank with the device it is the first on; either may be absent (NOBODY)."""

    rank: int
    device: int


class Block(NamedTuple):
    """Slots that belong together, in the plan's order."""

    slots: tuple[Slot, ...]


class _Union:
    """Sets that grow together, by the smallest member."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, one: int, two: int) -> None:
        one, two = sorted((self.find(one), self.find(two)))
        self.parent[two] = one


def blocks(plan: Plan) -> tuple[Block, ...]:
    """The blocks of a plan, in the order of their first rank."""
    count = len(plan.members)
    width = len(plan.protocol.resources)
    union = _Union(count + len(plan.devices))
    for rank in range(count):
        union.join(rank, count + plan.place[rank])
        for act in _acts(plan, rank):
            for touch in act.touches:
                union.join(rank, count + touch.cell // width)
    numbers = {rank: at for at, rank in enumerate(plan.members)}
    engines: dict[Rank, int] = {}
    for number, owner in enumerate(plan.owner):
        device = count + number // width
        # An engine is one, also where nothing reaches across it: it is poisoned for all its ranks.
        union.join(numbers.get(owner, engines.setdefault(owner, device)), device)
    for at, scope in enumerate(plan.scopes):
        if at != plan.world and any(_stands(plan, rank, at) for rank in scope.members):
            for member in scope.members[1:]:
                union.join(scope.members[0], member)
    found: dict[int, list[Slot]] = {}
    first: set[int] = set()
    for rank in range(count):
        device = plan.place[rank]
        slot = Slot(rank, NOBODY if device in first else device)
        first.add(device)
        found.setdefault(union.find(rank), []).append(slot)
    for device in range(len(plan.devices)):
        if device not in first:
            found.setdefault(union.find(count + device), []).append(Slot(NOBODY, device))
    return tuple(Block(tuple(slots)) for slots in found.values())


def _acts(plan: Plan, rank: int) -> Iterator[Act]:
    for program in (plan.programs[rank], plan.recover[rank]):
        for item in program:
            if isinstance(item, Act):
                yield item


def _stands(plan: Plan, rank: int, scope: int) -> bool:
    """Whether the rank ever comes to a fence of that scope."""
    programs = (plan.programs[rank], plan.recover[rank])
    return any(isinstance(item, Wait) and item.scope == scope for prog in programs for item in prog)


def shape(plan: Plan, slots: tuple[Slot, ...]) -> Shape:
    """All that the kernel reads of these slots, named by their order alone."""
    return _Shaper(plan, slots).shape()


class _Shaper:
    """Translates what a plan says of some slots into their own numbering."""

    def __init__(self, plan: Plan, slots: tuple[Slot, ...]) -> None:
        self.plan = plan
        self.slots = slots
        self.width = len(plan.protocol.resources)
        self.of_rank = {slot.rank: at for at, slot in enumerate(slots) if slot.rank != NOBODY}
        self.of_device = {slot.device: at for at, slot in enumerate(slots) if slot.device != NOBODY}

    def shape(self) -> Shape:
        return tuple(self._slot(slot) for slot in self.slots)

    def _slot(self, slot: Slot) -> Shape:
        plan = self.plan
        programs: Shape = ()
        if slot.rank != NOBODY:
            programs = (
                plan.members[slot.rank].role,
                self._program(plan.programs[slot.rank]),
                self._program(plan.recover[slot.rank]),
            )
        memory: Shape = ()
        if slot.device != NOBODY:
            base = slot.device * self.width
            cells = range(base, base + self.width)
            memory = (
                tuple((plan.start[at], plan.content[at], self._owner(at)) for at in cells),
                tuple(
                    tuple(at - base for at in pair.cells)
                    for pair in plan.never
                    if pair.device == slot.device
                ),
            )
        return programs, memory

    def _owner(self, cell: int) -> object:
        owner = self.plan.owner[cell]
        if owner in self.plan.members:
            return self.of_rank.get(self.plan.members.index(owner), str(owner))
        return owner.role

    def _program(self, steps: tuple[Step, ...]) -> Shape:
        return tuple(self._step(item) for item in steps)

    def _step(self, item: Step) -> Shape:
        match item:
            case Act(phase=phase, touches=touches, outside=outside, enqueued=enqueued, led=led):
                reached: dict[tuple[int, int], list[str]] = {}
                for touch in touches:
                    reached.setdefault(self._cell(touch.cell), []).append(touch.verb)
                effects = frozenset((at, *verbs) for at, verbs in reached.items())
                return (phase, effects, outside, enqueued, led)
            case Wait():
                where = self._scope(item.scope)
                return (item.fence, where, item.established, item.evidence, item.joined)

    def _cell(self, cell: int) -> tuple[int, int]:
        device, resource = divmod(cell, self.width)
        return self.of_device[device], resource

    def _scope(self, scope: int) -> object:
        if scope == self.plan.world:
            return "world"
        return frozenset(self.of_rank[rank] for rank in self.plan.scopes[scope].members)


def siblings(plan: Plan, slots: tuple[Slot, ...], *, same_scopes: bool = True) -> tuple[int, ...]:
    """A class a slot: slots of one class may be swapped and nothing changes; with `same_scopes`
    not even which fence is whose."""
    base = shape(plan, slots)
    classes: list[int] = []
    for at in range(len(slots)):
        classes.append(
            next(
                (
                    rep
                    for rep in sorted(set(classes))
                    if (not same_scopes or _together(plan, slots[rep].rank, slots[at].rank))
                    and _swaps(plan, slots, base, rep, at)
                ),
                at,
            )
        )
    return tuple(classes)


def _swaps(plan: Plan, slots: tuple[Slot, ...], base: Shape, one: int, two: int) -> bool:
    swapped = list(slots)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    return shape(plan, tuple(swapped)) == base


def _together(plan: Plan, one: int, two: int) -> bool:
    """Whether two ranks stand in the same scopes; a fence of one alone would change hands."""
    return all(
        (one in scope.members) == (two in scope.members)
        for at, scope in enumerate(plan.scopes)
        if any(_stands(plan, rank, at) for rank in (one, two) if rank != NOBODY)
    )
