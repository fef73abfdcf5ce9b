"""The product of all blocks: the checker's states, and the steps between them.

A state is (world fences open, broken, faults so far, blocks). Blocks of one shape are sorted, and
siblings within a block, so that what differs only by a renaming of ranks is one state (`symmetry`).
Where nothing can fail, one block that can move is explored alone (`reduction`): whatever the
others do commutes with it, for blocks share fences only, arrivals commute, and open stays open.
"""

from typing import NamedTuple, TypeAlias

from phasesync.checker.blocks import Block, blocks, shape
from phasesync.checker.moves import Around, Moves, Summary
from phasesync.checker.tables import Bits, BlockState, Move, Tables
from phasesync.core.kernel import Faults, Kind, Stage, System, Verdict, initial
from phasesync.core.plan import STOPPED, Plan

__all__ = ("Space", "State", "Step")

State: TypeAlias = tuple[int, int, int, tuple[BlockState, ...]]


class Step(NamedTuple):
    """One step of the product."""

    kind: Kind
    name: str
    state: "State"
    bad: bool
    faulty: bool


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
    ) -> None:
        self.plan = plan
        self.faults = faults
        self.epochs = epochs
        self.calm = reduction and faults.most == 0
        self.world = Bits()
        self.blocks = blocks(plan)
        kinds: dict[object, int] = {}
        self.kind = tuple(kinds.setdefault(shape(plan, b.slots), len(kinds)) for b in self.blocks)
        self.moves = tuple(
            Moves(
                Tables(plan, self._first(number), faults, epochs, self.world),
                faults,
                epochs,
                symmetry=symmetry,
                whole=whole,
            )
            for number in range(len(kinds))
        )
        alike: dict[int, list[int]] = {}
        for at, number in enumerate(self.kind):
            alike.setdefault(number, []).append(at)
        self.alike = tuple(tuple(g) for g in alike.values() if len(g) > 1) if symmetry else ()

    def _first(self, number: int) -> Block:
        return self.blocks[self.kind.index(number)]

    # -------------------------------------------------------------------------- successors

    def summary(self, at: int, block: BlockState) -> Summary:
        return self.moves[self.kind[at]].summary(block)

    def successors(self, state: State) -> list[Step]:
        """Every step from a state, in the order of blocks."""
        opened, broken, faults, parts = state
        found: list[Step] = []
        sums = [self.summary(at, part) for at, part in enumerate(parts)]
        awaited = 0
        for each in sums:
            awaited |= each.awaits
        may_fault = faults < self.faults.most
        all_live = not any(each.gone for each in sums)
        around = Around(opened, broken, awaited, may_fault, all_live)
        seen: set[tuple[int, object]] = set()
        for at, part in enumerate(parts):
            if self.alike:
                if (self.kind[at], part) in seen:
                    continue
                seen.add((self.kind[at], part))
            for move in self.moves[self.kind[at]].of(part, around):
                found.append(self._step(parts, sums, around, faults, at, move))
            if self.calm and found:
                break
        return found

    def _step(
        self,
        parts: tuple[BlockState, ...],
        sums: list[Summary],
        around: Around,
        faults: int,
        at: int,
        move: Move,
    ) -> Step:
        opened, broken = around.open, around.broken
        after = self.summary(at, move.block)
        if move.arrives and not (opened | broken) & move.arrives:
            opened, broken = self._decided(sums, at, after, move.arrives, opened, broken)
        broken |= move.breaks & ~opened
        awaits = after.awaits
        for other, rest in enumerate(sums):
            if other != at:
                awaits |= rest.awaits
        blocks_after = [*parts[:at], move.block, *parts[at + 1 :]]
        for group in self.alike:
            if at in group:
                ordered = sorted(blocks_after[each] for each in group)
                for each, block in zip(group, ordered, strict=True):
                    blocks_after[each] = block
        state = (opened & awaits, broken & awaits, faults + move.faults, tuple(blocks_after))
        return Step(move.kind, move.name, state, move.bad, move.faults > 0)

    def _decided(
        self, sums: list[Summary], at: int, after: Summary, bit: int, opened: int, broken: int
    ) -> tuple[int, int]:
        leads = after.leads or any(e.leads for other, e in enumerate(sums) if other != at)
        if leads and self._led(bit):
            return opened, broken | bit
        rest = all(each.arrived & bit for other, each in enumerate(sums) if other != at)
        return (opened | bit, broken) if rest and after.arrived & bit else (opened, broken)

    def _led(self, bit: int) -> bool:
        """Whether a dead leader's part in the recovery keeps this world fence from opening."""
        key = next(key for key, number in self.world.of.items() if 1 << number == bit)
        return key[1] is Stage.RECOVER and key[3] != STOPPED

    def stuck(self, state: State) -> bool:
        """Whether somebody alive stands before or at a step that it has not done."""
        return any(self.summary(at, part).stuck for at, part in enumerate(state[3]))

    # ------------------------------------------------------------- the kernel's own values

    def encode(self, system: System) -> State:
        """The state that stands for a system."""
        width = len(self.plan.protocol.resources)
        opened = broken = 0
        for entry in system.fences:
            if entry.scope == self.plan.world:
                bit = self.world[(entry.epoch, entry.stage, "", entry.fence)]
                opened |= bit * (entry.verdict is Verdict.OPEN)
                broken |= bit * (entry.verdict is Verdict.BROKEN)
        parts = [self._block(system, at, width) for at in range(len(self.blocks))]
        for group in self.alike:
            for at, block in zip(group, sorted(parts[at] for at in group), strict=True):
                parts[at] = block
        return (opened, broken, system.faults, tuple(parts))

    def _block(self, system: System, at: int, width: int) -> BlockState:
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
        for number, slot in enumerate(slots):
            state = tables.state_in(number, system, slots)
            cells = system.cells[slot.device * width : (slot.device + 1) * width]
            units.append(tables.unit(state, cells if slot.device >= 0 else ()))
        return (opened, broken, *moves.canonical(units))

    def initial(self) -> State:
        """Before the first epoch."""
        return self.encode(initial(self.plan))
