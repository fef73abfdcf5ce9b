"""The product of all blocks: the checker's states, and the steps between them.

A state is (world fences open, broken, faults so far, blocks). Blocks of one shape are sorted, and
siblings within a block, so that what differs only by a renaming of ranks is one state (`symmetry`).
A block whose next moves nobody else can change is explored alone (`reduction`): whatever the
others do commutes with it, for blocks share fences only and what is decided of one stays.
"""

from functools import cached_property
from typing import NamedTuple, TypeAlias

from phasesync.checker.blocks import Block, blocks, shape
from phasesync.checker.moves import Moves, Summary
from phasesync.checker.rows import NEVER, Around, Bits, Move
from phasesync.checker.tables import Tables
from phasesync.core.kernel import Faults, Kind, System, Verdict, initial
from phasesync.core.plan import Defect, Plan

__all__ = ("NO_OTHERS", "ON_MEMORY", "Others", "Space", "State", "Step")

State: TypeAlias = tuple[int, ...]
#: What happened, its name, the state after it, whether it broke a rule, whether it is a fault.
Step: TypeAlias = tuple[Kind, str, State, bool, bool]


#: So many fences of the world fit into a column of numbers.
_COLUMN_BITS = 62
ON_MEMORY = frozenset((Kind.START, Kind.END, Kind.FAIL, Kind.LAND, Kind.ABORT, Kind.PASS))


class Others(NamedTuple):
    """Who else there is, beside the tracked ranks: in the world, in scopes of the block's own, each
    given by its tracked slots.

    Where there are any, faults are without end: each is one more rank's, or one more epoch's.
    """

    world: bool = False
    own: frozenset[frozenset[int]] = frozenset()


NO_OTHERS = Others()


class Space:
    """The states of a plan under given faults, and what follows each."""

    def __init__(
        self,
        plan: Plan,
        faults: Faults,
        epochs: int,
        *,
        symmetry: bool = True,
        reduction: bool = True,
        whole: bool = False,
        others: Others = NO_OTHERS,
        only: int | None = None,
    ) -> None:
        if Defect.NO_ABORT in plan.defects:
            faults = faults._replace(aborts=False)
        self.plan = plan
        self.faults = faults
        self.epochs = epochs
        self.pairs = len(plan.elsewhere)
        self.lone = reduction and bool(self.pairs) and not (faults.most or faults.deadlines)
        # The death of an engine is nobody's own step: it may come between any two.
        self.reduction = reduction = reduction and not (self.pairs or faults.engine)
        self._apart: dict[tuple[int, int, int, int], bool] = {}
        self.symmetry = symmetry
        self.whole = whole
        self.world = Bits()
        found = blocks(plan)
        self.blocks = found if only is None else (found[only],)
        self.others = others
        self.late = Defect.LATE_ABORT in plan.defects
        self.calm = reduction and not (faults.most or faults.deadlines or others.world)
        kinds: dict[object, int] = {}
        self.kind = tuple(kinds.setdefault(shape(plan, b.slots), len(kinds)) for b in self.blocks)
        self.moves = tuple(
            Moves(
                Tables(plan, self._first(number), faults, epochs, self.world, blur=others.world),
                faults,
                epochs,
                symmetry=symmetry,
                whole=whole,
                others=others.own,
                endless=others.world,
            )
            for number in range(len(kinds))
        )
        self.of = tuple(self.moves[number] for number in self.kind)
        alike: dict[int, list[int]] = {}
        for at, number in enumerate(self.kind):
            alike.setdefault(number, []).append(at)
        self.alike = tuple(tuple(g) for g in alike.values() if len(g) > 1) if symmetry else ()

    def _first(self, number: int) -> Block:
        return self.blocks[self.kind.index(number)]

    @property
    def fits_columns(self) -> bool:
        """Whether a state is a row of numbers, and what follows it can be read off columns."""
        return not self.others.world and not self.lone and len(self.world.of) <= _COLUMN_BITS

    # -------------------------------------------------------------------------- successors

    def successors(self, state: State) -> list[Step]:
        """Every step from a state, in the order of blocks."""
        if self.others.world:
            return self._tracked(state)
        opened, broken, faults, *parts = state
        sums = [moves.summaries[part] for moves, part in zip(self.of, parts, strict=True)]
        awaited, arrived, came, led, all_live = 0, -1, 0, 0, True
        missing = NEVER
        for each in sums:
            awaited |= each.awaits
            arrived &= each.arrived
            came |= each.came
            led |= each.leads
            all_live = all_live and not each.gone
            missing = min(missing, each.missing)
        missed = 0 if all_live else (arrived | led) & came
        orphaned = missed & awaited & ~(opened | broken)
        left = faults < self.faults.most
        around = Around(opened, broken, awaited, left, missing, orphaned)
        rests = any(each.resting for each in sums)
        if self.reduction and not rests:
            for at, part in enumerate(parts):
                if moves := self.of[at].alone(part, around):
                    return [self._step(parts, sums, around, faults, at, move) for move in moves]
            for at, each in enumerate(sums):
                if self._private(each) and (moves := self.of[at].of(parts[at], around)):
                    return [self._step(parts, sums, around, faults, at, move) for move in moves]
        if self.lone:
            for at, part in enumerate(parts):
                if (moves := self.of[at].of(part, around)) and self._alone(at, parts):
                    return [self._step(parts, sums, around, faults, at, move) for move in moves]
        found: list[Step] = []
        seen: set[tuple[int, int]] = set()
        for at, part in enumerate(parts):
            if (self.kind[at], part) in seen:
                continue
            if self.symmetry:
                seen.add((self.kind[at], part))
            for move in self.of[at].of(part, around):
                found.append(self._step(parts, sums, around, faults, at, move))
        return found

    def _tracked(self, state: State) -> list[Step]:
        """The same where one block is tracked, and others stand for the rest of the world."""
        opened, broken, faults, part = state
        (moves,) = self.of
        each = moves.summaries[part]
        left = faults < self.faults.most
        around = Around(opened, broken, each.awaits, left, each.missing)
        first = moves.alone(part, around) if self.reduction else ()
        found: list[Step] = []
        for move in first or moves.of(part, around):
            after = moves.summaries[move.block]
            if move.arrives or move.breaks or move.earlier or after.awaits != each.awaits:
                found.append(self._step([part], [each], around, faults, 0, move))
            else:
                there = (opened, broken, faults + move.faults, move.block)
                found.append((move.kind, move.name, there, move.bad, move.faults > 0))
        if not first:
            found += self._others(state, each, around)
        return found

    def _others(self, state: State, each: Summary, around: Around) -> list[Step]:
        """What the untracked ranks of the world do: arrive last, or fail."""
        opened, broken, faults, part = state
        found: list[Step] = []
        for bit in self.world.lowest(each.heeds & around.awaited & ~(opened | broken), broken):
            name = f"others at {self.world.key(bit)[3]}"
            if each.arrived & bit and not each.leads & bit:
                after = (opened | bit, broken, faults, part)
                found.append((Kind.ARRIVE, name, after, False, False))
            after = (opened, broken | bit, faults, part)
            found.append((Kind.DEADLINE, name, after, False, False))
        return found

    def _alone(self, at: int, parts: list[int]) -> bool:
        """Whether nothing that other blocks do before this one moves excludes what it does."""
        kind, part = self.kind[at], parts[at]
        others = {(self.kind[n], each) for n, each in enumerate(parts) if n != at}
        return all(self._far(kind, part, *other) for other in others)

    def _far(self, kind: int, part: int, other_kind: int, other: int) -> bool:
        key = (kind, part, other_kind, other)
        found = self._apart.get(key)
        if found is None:
            mine, theirs = self.moves[kind], self.moves[other_kind]
            found = self._apart[key] = mine.apart.elsewhere(
                mine.blocks[part], theirs.apart, theirs.blocks[other]
            )
        return found

    def _private(self, summary: Summary) -> bool:
        return self.calm or summary.private

    def _step(
        self,
        parts: list[int],
        sums: list[Summary],
        around: Around,
        faults: int,
        at: int,
        move: Move,
    ) -> Step:
        opened, broken = around.open, around.broken
        after = self.of[at].summaries[move.block]
        if move.arrives and not (opened | broken) & move.arrives:
            opened, broken = self._decided(sums, at, after, move.arrives, opened, broken)
        bad = move.bad
        if self.late:
            bad = bad or bool(move.breaks & opened)
            opened &= ~move.breaks
        broken |= move.breaks & ~opened
        if move.earlier:
            opened, broken = self.world.earlier(opened), self.world.earlier(broken)
        if after.awaits != sums[at].awaits or move.breaks:
            awaits = after.awaits
            for other, rest in enumerate(sums):
                if other != at:
                    awaits |= rest.awaits
            opened &= awaits
            broken &= awaits
        if self.pairs and move.kind in ON_MEMORY:
            bad = bad or self._elsewhere(sums, at, after)
        blocks_after = parts.copy()
        blocks_after[at] = move.block
        for group in self.alike:
            if at in group:
                ordered = sorted([blocks_after[each] for each in group])
                for each, block in zip(group, ordered, strict=True):
                    blocks_after[each] = block
        state = (opened, broken, faults + move.faults, *blocks_after)
        return (move.kind, move.name, state, bad, move.faults > 0)

    def _elsewhere(self, sums: list[Summary], at: int, after: Summary) -> bool:
        """Whether one of a pair is held while the other is held on another device."""
        held = [after if other == at else each for other, each in enumerate(sums)]
        for pair in range(self.pairs):
            one, two, both = (sum(e.held[3 * pair + n] for e in held) for n in range(3))
            if one and two and (one, two, both) != (1, 1, 1):
                return True
        return False

    def _decided(
        self, sums: list[Summary], at: int, after: Summary, bit: int, opened: int, broken: int
    ) -> tuple[int, int]:
        leads = after.leads
        for other, each in enumerate(sums):
            leads |= each.leads if other != at else 0
        if leads & bit:
            return opened, broken | bit
        if self.others.world:
            return opened, broken
        rest = all(each.arrived & bit for other, each in enumerate(sums) if other != at)
        return (opened | bit, broken) if rest and after.arrived & bit else (opened, broken)

    def stuck(self, state: State) -> bool:
        """Whether somebody alive stands before or at a step that it has not done."""
        return any(
            moves.summaries[part].stuck for moves, part in zip(self.of, state[3:], strict=True)
        )

    # ------------------------------------------------------------- the kernel's own values

    def encode(self, system: System) -> State:
        """The state that stands for a system."""
        opened, broken = self._world(system)
        parts = [self._block(system, at) for at in range(len(self.blocks))]
        for group in self.alike:
            for at, block in zip(group, sorted(parts[at] for at in group), strict=True):
                parts[at] = block
        return (opened, broken, system.faults, *parts)

    def _world(self, system: System) -> tuple[int, int]:
        """The world fences that are open, and those that are broken."""
        opened = broken = 0
        for entry in system.fences:
            if entry.scope == self.plan.world:
                bit = self.world[(entry.epoch, entry.stage, "", entry.fence)]
                opened |= bit * (entry.verdict is Verdict.OPEN)
                broken |= bit * (entry.verdict is Verdict.BROKEN)
        return opened, broken

    def orbit(self, system: System) -> object:
        """What is equal for systems that differ by a renaming of ranks, engines and the calls of
        older incarnations included; no state of this space holds these."""
        if any(not self._told_apart(call.rank) for call in system.late):
            return system
        parts = [
            (
                self._block(system, at),
                tuple(system.engines[number] for number in self._engines[at]),
                tuple(
                    (slot, call.state)
                    for call in system.late
                    for slot, here in enumerate(block.slots)
                    if here.rank == call.rank
                ),
            )
            for at, block in enumerate(self.blocks)
        ]
        for group in self.alike:
            for at, part in zip(group, sorted(parts[at] for at in group), strict=True):
                parts[at] = part
        return (*self._world(system), system.faults, *parts)

    def _told_apart(self, rank: int) -> bool:
        """Whether no sibling within its block may change places with the rank."""
        for at, block in enumerate(self.blocks):
            for slot, here in enumerate(block.slots):
                if here.rank == rank:
                    return all(slot not in group for group in self.of[at].groups)
        return True

    @cached_property
    def _engines(self) -> tuple[tuple[int, ...], ...]:
        """The engines of each block, in the order of its devices."""
        width = len(self.plan.protocol.resources)
        return tuple(
            tuple(
                dict.fromkeys(
                    self.plan.engines.index(owner)
                    for slot in block.slots
                    if slot.device >= 0
                    for owner in self.plan.owner[slot.device * width : (slot.device + 1) * width]
                    if owner in self.plan.engines
                )
            )
            for block in self.blocks
        )

    def _block(self, system: System, at: int) -> int:
        moves, slots = self.moves[self.kind[at]], self.blocks[at].slots
        tables = moves.tables
        of_rank = {slot.rank: number for number, slot in enumerate(slots)}
        opened = broken = 0
        for entry in system.fences:
            members = self.plan.scopes[entry.scope].members
            if entry.scope != self.plan.world and members[0] in of_rank:
                scope = frozenset(of_rank[rank] for rank in members)
                bit = tables.own[(entry.epoch, entry.stage, scope, entry.fence)]
                opened |= bit * (entry.verdict is Verdict.OPEN)
                broken |= bit * (entry.verdict is Verdict.BROKEN)
        units = []
        for number in range(len(slots)):
            state = tables.state_in(number, system, slots)
            units.append(tables.unit(state, tables.cells_in(number, system, slots)))
        return moves.number((opened, broken, *moves.canonical(units)))

    def initial(self) -> State:
        """Before the first epoch."""
        return self.encode(initial(self.plan))
