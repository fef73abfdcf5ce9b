"""The units of a block, by number, and what a step does to one: a rank's state with its device's
memory.

The kernel says what becomes of memory and what is wrong with it; here the question is asked once
for each unit, and answered from a table ever after. Beside the memory of a device a unit holds
which of its cells belong to an engine that is dead: these stay as they are, whatever is done.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from phasesync.checker.blocks import NOBODY, Slot, siblings
from phasesync.checker.rows import Memo
from phasesync.core.kernel import (
    PARTIAL,
    Mapped,
    RankState,
    System,
    cell,
    content_of,
    input_lost,
    mapped_of,
)
from phasesync.core.model import Rank
from phasesync.core.plan import Act, Plan
from phasesync.core.properties import together, unmapped, wanted
from phasesync.core.protocol import Verb

__all__ = ("LOST", "Cells", "Units")

Cells: TypeAlias = tuple[int, ...]
#: The content of memory that died with its owner: it agrees with everything.
LOST = -9


class Units:
    """Numbers for the units of some slots, and functions of one."""

    def __init__(self, plan: Plan, slots: tuple[Slot, ...], *, blur: bool, dying: bool) -> None:
        self.plan = plan
        self.slots = slots
        self.width = len(plan.protocol.resources)
        self.blurred: frozenset[int] = self._unused() if blur else frozenset()
        self.dying = dying
        self.classes = siblings(plan, slots)
        self.device_slot = {s.device: at for at, s in enumerate(slots) if s.device >= 0}
        self._states: dict[tuple[int, RankState], int] = {}
        self._state_of: list[tuple[int, RankState]] = []
        self._units: dict[tuple[int, Cells], int] = {}
        self.unit_of: list[tuple[int, Cells]] = []
        self._ops: dict[tuple[object, ...], Memo] = {}
        self.earlier = Memo(self._earlier)
        self.never = tuple(self._never_of(slot) for slot in range(len(slots)))

    def _unused(self) -> frozenset[int]:
        """Resources whose content no action uses."""
        used = {
            touch.cell % self.width
            for programs in (self.plan.programs, self.plan.recover)
            for program in programs
            for act in program
            if isinstance(act, Act)
            for touch in act.touches
            if touch.verb in (Verb.USES, Verb.AGREES)
        }
        return frozenset(range(self.width)) - used

    # ------------------------------------------------------------------ numbers for values

    def state(self, slot: int, state: RankState) -> int:
        """The number of a rank's state; siblings share it."""
        key = (self.classes[slot], self._relative(slot, state))
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = len(self._state_of)
            self._state_of.append(key)
        return found

    def unit(self, state: int, cells: Cells) -> int:
        """The number of a rank's state with its device's memory."""
        key = (state, cells)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = len(self.unit_of)
            self.unit_of.append(key)
        return found

    def _relative(self, slot: int, state: RankState) -> RankState:
        if not state.pending:
            return state
        return state._replace(pending=tuple(sorted(self._near(slot, at) for at in state.pending)))

    def state_in(self, slot: int, system: System, slots: tuple[Slot, ...]) -> int:
        """The number of the state that a system's rank is in, for a block of this shape."""
        rank = slots[slot].rank
        if rank == NOBODY:
            return self.state(slot, RankState())
        state = system.ranks[rank]
        moved = tuple(sorted(self._moved(at, slots) for at in state.pending))
        return self.state(slot, state._replace(pending=moved))

    def _moved(self, cell: int, slots: tuple[Slot, ...]) -> int:
        """A cell of another block of this shape, as the cell of ours in its place."""
        device, resource = divmod(cell, self.width)
        at = next(at for at, slot in enumerate(slots) if slot.device == device)
        return self.slots[at].device * self.width + resource

    def _near(self, slot: int, cell: int) -> int:
        """A cell seen from a slot: its own device's come first."""
        device, resource = divmod(cell, self.width)
        at = self.device_slot[device]
        return resource if at == slot else (at + 1) * self.width + resource

    def _far(self, slot: int, near: int) -> int:
        at, resource = divmod(near, self.width)
        at = slot if at == 0 else at - 1
        return self.slots[at].device * self.width + resource

    def rank_state(self, slot: int, state: int) -> RankState:
        """The kernel's own value of a numbered state."""
        _, found = self._state_of[state]
        if not found.pending:
            return found
        return found._replace(pending=tuple(sorted(self._far(slot, at) for at in found.pending)))

    def _earlier(self, unit: int) -> int:
        """The unit with its epoch and its weight versions one less. A version is only ever
        compared with its epoch, so all that are older than the one before are alike."""
        state, cells = self.unit_of[unit]
        number, found = self._state_of[state]
        moved = (number, found._replace(epoch=found.epoch - 1))
        if moved not in self._states:
            self._states[moved] = len(self._state_of)
            self._state_of.append(moved)
        older = tuple(
            cell(mapped_of(value), content_of(value) - 1) if content_of(value) > 0 else value
            for value in cells
        )
        return self.unit(self._states[moved], older)

    # ------------------------------------------------------------------- one unit's functions

    def _op(
        self,
        slot: int,
        after: RankState | None,
        work: Callable[[Cells], Cells] | None,
        key: tuple[object, ...] = (),
    ) -> Memo:
        """unit -> unit: the rank's state replaced, its device's memory worked on."""
        number = None if after is None else self.state(slot, after)
        name = ("op", slot, number, key if work else ())
        memo = self._ops.get(name)
        if memo is None:
            base = self.slots[slot].device * self.width

            def run(unit: int) -> int:
                state, cells = self.unit_of[unit]
                if work is not None and cells:
                    cells = self._worked(work, base, cells)
                return self.unit(state if number is None else number, cells)

            memo = self._ops[name] = Memo(run)
        return memo

    def _worked(self, work: Callable[[Cells], Cells], base: int, cells: Cells) -> Cells:
        after = self._slice(work(self._spread(base, cells)), base)
        if self.blurred:
            after = tuple(map(self._blur, after, range(self.width)))
        if not self.dying:
            return after
        dead = cells[self.width]
        pairs = enumerate(zip(cells, after, strict=False))
        return (*(old if dead >> at & 1 else new for at, (old, new) in pairs), dead)

    def _blur(self, value: int, resource: int) -> int:
        """Partial content that nobody `uses` is as good as old: who needs it objects to both."""
        partly = resource in self.blurred and content_of(value) == PARTIAL
        return cell(mapped_of(value), 0) if partly else value

    def _spread(self, base: int, cells: Cells) -> Cells:
        """One device's memory within a plan's that is otherwise empty."""
        empty = len(self.plan.start)
        return (*(4,) * base, *cells[: self.width], *(4,) * (empty - base - self.width))

    def _slice(self, cells: Cells, base: int) -> Cells:
        return cells[base : base + self.width]

    def _judge(
        self, slot: int, judge: Callable[[Cells, int], bool], key: tuple[object, ...]
    ) -> Memo:
        """unit -> whether something is so of its memory, given the cells of it that are dead."""
        name = ("judge", slot, *key)
        memo = self._ops.get(name)
        if memo is None:
            base = self.slots[slot].device * self.width

            def run(unit: int) -> int:
                cells = self.unit_of[unit][1]
                return judge(self._spread(base, cells), self._dead_of(cells))

            memo = self._ops[name] = Memo(run)
        return memo

    def _dead_of(self, cells: Cells) -> int:
        """The cells of a unit that an engine owned which is dead, as bits."""
        return cells[self.width] if self.dying and cells else 0

    def dead_at(self, unit: int) -> int:
        """The same, by the number of the unit."""
        return self._dead_of(self.unit_of[unit][1])

    def dead(self, units: Sequence[int]) -> frozenset[int]:
        """All such cells of a block."""
        if not self.dying:
            return frozenset()
        return frozenset(
            slot.device * self.width + at
            for slot, unit in zip(self.slots, units, strict=True)
            for at in range(self.width)
            if self.dead_at(unit) >> at & 1
        )

    def _part(self, slot: int, act: Act, dead: int = 0) -> Act:
        """What an action does on the device of a slot, but for what is dead there."""
        device = self.slots[slot].device
        touches = tuple(
            touch
            for touch in act.touches
            if touch.cell // self.width == device and not dead >> touch.cell % self.width & 1
        )
        return act._replace(touches=touches)

    def _wants(self, slot: int, act: Act, epoch: int) -> Memo:
        part = self._part(slot, act)
        who = self.plan.members[0]

        def judge(cells: Cells, dead: int) -> bool:
            asked = self._part(slot, part, dead) if dead else part
            return next(wanted(self.plan, who, asked, cells, epoch), None) is not None

        return self._judge(slot, judge, ("wants", part, epoch))

    def _lost(self, slot: int, act: Act) -> Memo:
        """Whether what an action works on is gone, or the engine that it calls."""
        part = self._part(slot, act)

        def judge(cells: Cells, dead: int) -> bool:
            return input_lost(cells, part) or (dead > 0 and self._part(slot, part, dead) != part)

        return self._judge(slot, judge, ("lost", part))

    def _never_of(self, slot: int) -> Memo:
        """Whether a unit's device holds together what it must not."""
        device = self.slots[slot].device
        who = self.plan.members[0]

        def judge(cells: Cells, dead: int) -> bool:
            if next(together(self.plan, who, cells, {device}), None) is not None:
                return True
            return next(unmapped(self.plan, who, cells, {device}), None) is not None

        return self._judge(slot, judge, ("never",))

    def _starts_with(self, slot: int, act: Act) -> Memo:
        """The same, once an action has started there: one that reaches nothing changes nothing."""
        if not self.dying:
            return self.never[slot]
        part = self._part(slot, act)

        def run(unit: int) -> int:
            dead = self.dead_at(unit)
            return bool(self._part(slot, part, dead).touches) and self.never[slot][unit]

        return self._ops.setdefault(("starts", slot, part), Memo(run))

    def _holds(self, cell: int) -> Memo:
        """unit -> the content of a cell of its device."""
        slot, resource = self.device_slot[cell // self.width], cell % self.width

        def run(unit: int) -> int:
            cells = self.unit_of[unit][1]
            lost = mapped_of(cells[resource]) is Mapped.LOST or self._dead_of(cells) >> resource & 1
            return LOST if lost else content_of(cells[resource])

        return self._ops.setdefault(("content", slot, resource), Memo(run))

    # ------------------------------------------------------------------------ dead engines

    def cells_in(self, slot: int, system: System, slots: tuple[Slot, ...]) -> Cells:
        """The memory of a device in a system, as the unit of a slot of this shape holds it."""
        device = slots[slot].device
        if device < 0:
            return ()
        at = range(device * self.width, (device + 1) * self.width)
        cells = system.cells[at.start : at.stop]
        if not self.dying:
            return cells
        states = zip(self.plan.engines, system.engines, strict=True)
        gone = {engine for engine, state in states if state.dead}
        dead = sum(1 << number - at.start for number in at if self.plan.owner[number] in gone)
        return (*cells, dead)

    def _died(self, slot: int, engine: Rank) -> tuple[int, Memo]:
        """The cells of an engine on the device of a slot, and what its death does to the unit."""
        base = self.slots[slot].device * self.width
        own = range(self.width) if base >= 0 else ()
        bits = sum(1 << at for at in own if self.plan.owner[base + at] == engine)

        def run(unit: int) -> int:
            state, cells = self.unit_of[unit]
            after = [
                self._after_death(base + at, value) if bits >> at & 1 else value
                for at, value in enumerate(cells[: self.width])
            ]
            return self.unit(state, (*after, cells[self.width] | bits))

        return bits, self._ops.setdefault(("died", slot, engine), Memo(run))

    def _after_death(self, number: int, value: int) -> int:
        if mapped_of(value) is Mapped.NO:
            return value
        return cell(Mapped.NO if self.plan.freed[number] else Mapped.LOST)
