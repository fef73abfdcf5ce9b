"""A block of a plan, compiled: local states and memory by number, moves by table.

The kernel stays the one source of truth: every table here is filled by asking it, on the first
use of an entry. What the tables add is that nothing is asked twice. A *unit* is one number for a
rank's state and its device's memory; a block is a tuple of two masks (its own fences that are
open, and broken) and its units. Whether a rank has arrived at a shut fence is read off its state.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from phasesync.checker.blocks import NOBODY, Block, Slot, siblings
from phasesync.checker.rows import NEVER, Bits, Facts, Go, Memo, Row, Rows
from phasesync.core.kernel import (
    PARTIAL,
    Faults,
    Kind,
    Mapped,
    Moment,
    RankState,
    Stage,
    Status,
    System,
    abort_touches,
    aborted,
    advance,
    cell,
    content_of,
    crashed,
    fence_epoch,
    fences_failed,
    fences_left,
    heard,
    input_lost,
    landed,
    last_counted,
    lost_leaders,
    mapped_of,
    missing_from,
    next_step,
    synchronised,
    touched,
)
from phasesync.core.model import Phase
from phasesync.core.plan import Act, Defect, Plan, Wait
from phasesync.core.properties import (
    agreements,
    poisoned,
    raced,
    together,
    unmapped,
    wanted,
)
from phasesync.core.protocol import Retry, Verb

__all__ = ("LOST", "BlockState", "Tables")

BlockState: TypeAlias = tuple[int, ...]
Cells: TypeAlias = tuple[int, ...]
#: The content of memory that died with its owner: it agrees with everything.
LOST = -9
_GONE = frozenset((Status.DEAD, Status.DEAD_ACTING))
_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))


class Tables:
    """The moves of one block; blocks of the same shape share it."""

    def __init__(
        self,
        plan: Plan,
        block: Block,
        faults: Faults,
        epochs: int,
        world: Bits,
        *,
        blur: bool = False,
    ) -> None:
        self.plan = plan
        self.slots = block.slots
        self.faults = faults
        self.epochs = epochs
        self.width = len(plan.protocol.resources)
        self.world = world
        self.blurred: frozenset[int] = self._unused() if blur else frozenset()
        self.reused = Defect.KEY_REUSED in plan.defects
        self.late = Defect.LATE_ABORT in plan.defects
        self.own = Bits()
        self.classes = siblings(plan, block.slots)
        self.slot_of = {slot.rank: at for at, slot in enumerate(block.slots) if slot.rank >= 0}
        self.device_slot = {s.device: at for at, s in enumerate(block.slots) if s.device >= 0}
        self._states: dict[tuple[int, RankState], int] = {}
        self._state_of: list[tuple[int, RankState]] = []
        self._units: dict[tuple[int, Cells], int] = {}
        self.unit_of: list[tuple[int, Cells]] = []
        self._rows: list[dict[int, Row]] = [{} for _ in block.slots]
        self.rows = tuple(Rows(partial(self._row_of, slot)) for slot in range(len(block.slots)))
        self._facts: dict[int, Facts] = {}
        self._fences: dict[tuple[int, int], list[tuple[int, Stage, int, int, int, bool]]] = {}
        self._races: dict[tuple[int, int, int, int], bool] = {}
        self._poisons: dict[tuple[int, int, int, int], bool] = {}
        self._ops: dict[tuple[object, ...], Memo] = {}
        self.earlier = Memo(self._earlier)
        self.never = tuple(self._never_of(slot) for slot in range(len(block.slots)))

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

    def row(self, slot: int, unit: int) -> Row:
        """Where the rank of a unit stands."""
        return self.rows[slot][unit]

    def _row_of(self, slot: int, unit: int) -> Row:
        state = self.unit_of[unit][0]
        found = self._rows[slot].get(state)
        if found is None:
            found = self._rows[slot][state] = self._row(slot, state)
        return found

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

    # ------------------------------------------------------------------------ one row's table

    def _row(self, slot: int, number: int) -> Row:
        rank = self.slots[slot].rank
        state = self.rank_state(slot, number)
        row = Row(state, self._fact(slot, number, state))
        if rank == NOBODY:
            return row
        here = next_step(self.plan, rank, state)
        left = fences_left(self.plan, rank, state)
        for wait in fences_failed(self.plan, rank, state):
            own, world = self.bit(state, wait)
            row.breaks |= own
            row.breaks_world |= world
        if left:
            row.first, row.first_world = self.bit(state, left[0])
            row.first_name = left[0].fence
            row.hears = heard(self.plan, rank, state, left)
        counted = last_counted(self.plan, rank, state)
        row.again = "" if counted is None else counted.fence
        row.recovers = bool(self.plan.recover[rank]) and state.stage is Stage.EPOCH
        match here:
            case Act():
                row.act = here
            case Wait():
                row.wait = here
                row.bit, row.bit_world = self.bit(state, here)
                if row.bit:
                    members = self.plan.scopes[here.scope].members
                    row.members = tuple(self.slot_of[member] for member in members)
            case None:
                pass
        self._moves(slot, rank, state, row)
        return row

    def bit(self, state: RankState, wait: Wait) -> tuple[int, int]:
        """The fence that a rank comes to there: a bit of the block's own, or of the world's."""
        key = (fence_epoch(self.plan, state.epoch), state.stage)
        if wait.scope == self.plan.world:
            return 0, self.world[(*key, "", wait.fence)]
        members = self.plan.scopes[wait.scope].members
        return self.own[(*key, frozenset(self.slot_of[at] for at in members), wait.fence)], 0

    def _fact(self, slot: int, number: int, state: RankState) -> Facts:
        found = self._facts.get(number)
        if found is None:
            found = self._facts[number] = self._facts_of(slot, state)
        return found

    def _facts_of(self, slot: int, state: RankState) -> Facts:
        """Bits by every fence the rank has, in every epoch: awaited, and arrived at."""
        rank = self.slots[slot].rank
        if rank == NOBODY:
            return Facts(0, 0, -1, -1, 0, 0, False, NEVER, 0, 0)
        gone = state.status in _GONE
        awaits = awaits_world = arrived = arrived_world = leads = leads_world = 0
        came = came_world = 0
        mine = (state.epoch, state.stage)
        for epoch, stage, at, own, world, led in self._fences_of(rank, state):
            here = (epoch, stage)
            passed = mine > here or (mine == here and at < state.at)
            waits = mine == here and at == state.at and state.status is Status.WAITING
            if (not passed or self.reused) and not gone:
                awaits |= own
                awaits_world |= world
            if gone and led:
                leads |= own
                leads_world |= world
            if stage is Stage.RECOVER:
                # Who went on to the next epoch without it was not there.
                there = mine == here and (passed or waits)
                came |= own * there
                came_world |= world * there
                counts = there or gone
            else:
                counts = passed or waits
            arrived |= own * counts
            arrived_world |= world * counts
        missing = missing_from(self.plan, rank, state) if gone else NEVER
        return Facts(
            awaits,
            awaits_world,
            arrived,
            arrived_world,
            came,
            came_world,
            gone,
            missing,
            leads,
            leads_world,
        )

    def _fences_of(
        self, rank: int, state: RankState
    ) -> list[tuple[int, Stage, int, int, int, bool]]:
        """Every fence the rank has: epoch, stage, place, its two bits, and whether the rank's part
        of a recovery before it can be done by nobody else."""
        epochs = (state.epoch,) if self.reused else range(1, self.epochs + 2)
        found = self._fences.get((rank, epochs[0]))
        if found is None:
            found = self._fences[rank, epochs[0]] = []
            for epoch in epochs:
                for stage in Stage:
                    other = RankState(Status.READY, epoch, stage)
                    for at, wait in enumerate(self._steps(rank, stage)):
                        if isinstance(wait, Wait):
                            own, world = self.bit(other, wait)
                            (self.own if own else self.world).place(own or world, at)
                            recovers = stage is Stage.RECOVER
                            led = recovers and bool(lost_leaders(self.plan, wait, (rank,)))
                            found.append((epoch, stage, at, own, world, led))
        return found

    def _steps(self, rank: int, stage: Stage) -> tuple[object, ...]:
        return self.plan.programs[rank] if stage is Stage.EPOCH else self.plan.recover[rank]

    def _moves(self, slot: int, rank: int, state: RankState, row: Row) -> None:
        """Asks the kernel for each move that the state has, and keeps the answer as tables."""
        act, status, plan = row.act, row.status, self.plan
        name = act.phase if act else row.wait.fence if row.wait else ""
        match status:
            case Status.READY if act:
                after = advance(plan, rank, state, Kind.START, name)
                row.go[Kind.START] = self._acted(slot, act, after, Moment.START, wants=True)
            case Status.ACTING if act:
                for kind in (Kind.END, Kind.FAIL):
                    after = advance(plan, rank, state, kind, name)
                    row.go[kind] = self._acted(slot, act, after, Moment(kind))
                row.go[Kind.HANG] = Go(self._op(slot, state._replace(status=Status.HUNG), None))
            case Status.READY if row.wait:
                after = advance(plan, rank, state, Kind.ARRIVE, name)
                synced = "device_synchronised" in row.wait.established
                row.go[Kind.ARRIVE] = self._synced(slot, state, after, synced)
                after = advance(plan, rank, state, Kind.LOSE, name)
                row.go[Kind.LOSE] = self._synced(slot, state, after, synced)
                after = advance(plan, rank, state, Kind.REFUSE, name)
                row.go[Kind.REFUSE] = Go(self._op(slot, after, None))
            case Status.WAITING:
                after = advance(plan, rank, state, Kind.PASS, name)
                row.go[Kind.PASS] = Go(self._op(slot, after, None))
            case Status.STOPPED | Status.ABORTED if row.recovers:
                after = advance(plan, rank, state, Kind.RECOVER, "")
                row.go[Kind.RECOVER] = Go(self._op(slot, after, None))
            case Status.FINISHED:
                after = advance(plan, rank, state, Kind.BEGIN, "")
                row.go[Kind.BEGIN] = Go(self._op(slot, after, None))
            case Status.DEAD_ACTING if act:
                row.go[Kind.LAND] = self._landed(slot, rank, state, act)
            case _:
                pass
        if status in (Status.READY, Status.WAITING, Status.CUT) and name:
            after = advance(plan, rank, state, Kind.ABORT, name)
            row.go[Kind.ABORT] = self._aborted(slot, rank, state, after)
        if status not in _GONE and status is not Status.FINISHED:
            row.go[Kind.CRASH] = self._crashed(slot, rank, state)
        if status in _GONE:
            self._absent(rank, state, row)

    def _absent(self, rank: int, state: RankState, row: Row) -> None:
        """Where the dead rank is missing: as the kernel's notice sees it."""
        row.judges = self._judges(rank)
        if not fences_left(self.plan, rank, state):
            row.breaks = row.breaks_world = 0
            state = RankState(state.status, state.epoch + 1)
            for wait in fences_failed(self.plan, rank, state):
                own, world = self.bit(state, wait)
                row.breaks |= own
                row.breaks_world |= world
        for wait in fences_left(self.plan, rank, state):
            own, world = self.bit(state, wait)
            row.misses |= own
            row.misses_world |= world

    def _judges(self, rank: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """The fences of recoveries that the rank has, in the order in which the kernel judges."""
        waits = [step for step in self.plan.recover[rank] if isinstance(step, Wait)]
        waits.sort(key=lambda wait: (wait.scope, wait.fence))
        epochs = (1,) if self.reused else range(1, self.epochs + 1)
        return tuple(
            (*self.bit(RankState(epoch=epoch, stage=Stage.RECOVER), wait), self._members(wait))
            for epoch in epochs
            for wait in waits
        )

    def _members(self, wait: Wait) -> tuple[int, ...]:
        """The slots of a fence's members; none of one that is the world's."""
        if wait.scope == self.plan.world:
            return ()
        return tuple(self.slot_of[member] for member in self.plan.scopes[wait.scope].members)

    def _devices(self, act: Act) -> tuple[int, ...]:
        return tuple(sorted({self.device_slot[touch.cell // self.width] for touch in act.touches}))

    def _acted(
        self, slot: int, act: Act, after: RankState, moment: Moment, *, wants: bool = False
    ) -> Go:
        epoch = after.epoch

        def work(cells: Cells) -> Cells:
            return touched(self.plan, cells, act, moment, epoch)

        devices = self._devices(act)
        key = ("act", act, moment, epoch)
        judged = tuple((at, self._wants(at, act, epoch)) for at in devices) if wants else ()
        if moment is not Moment.START:
            judged = tuple((at, self._lost(at, act)) for at in devices)
        went = self._went(slot, after, devices, key, work, judged, devices)
        return went._replace(agrees=self._agrees(act)) if wants else went

    def _agrees(self, act: Act) -> tuple[tuple[tuple[int, Memo], ...], ...]:
        """For each set of cells that must agree: where they are, and what they hold."""
        return tuple(
            tuple((self.device_slot[at // self.width], self._holds(at)) for at in part)
            for part in agreements(self.plan, act)
        )

    def _holds(self, cell: int) -> Memo:
        """unit -> the content of a cell of its device."""
        slot, resource = self.device_slot[cell // self.width], cell % self.width

        def run(unit: int) -> int:
            value = self.unit_of[unit][1][resource]
            return LOST if mapped_of(value) is Mapped.LOST else content_of(value)

        name = ("content", slot, resource)
        if name not in self._ops:
            self._ops[name] = Memo(run)
        return self._ops[name]

    def _aborted(self, slot: int, rank: int, state: RankState, after: RankState) -> Go:
        touches = abort_touches(self.plan, rank, state)
        if not touches:
            return Go(self._op(slot, after, None))

        def work(cells: Cells) -> Cells:
            return aborted(self.plan, cells, rank, state)

        row_act = Act(Phase("abort"), touches, False, False, False, Retry.NEVER, None)
        devices = self._devices(row_act)
        return self._went(slot, after, devices, ("abort", rank, state), work, (), devices)

    def abort_races(self, slot: int, unit: int, other: int, other_unit: int) -> bool:
        """Whether aborting touches what another's action in progress uses."""
        rank = self.slots[slot].rank
        touches = abort_touches(self.plan, rank, self.row(slot, unit).state)
        theirs = self.row(other, other_unit).act
        if not touches or theirs is None:
            return False
        act = Act(Phase("abort"), touches, False, False, False, Retry.NEVER, None)
        who = self.plan.members
        pair = ((who[self.slots[other].rank], theirs),)
        return next(raced(self.plan, who[rank], act, pair), None) is not None

    def _synced(self, slot: int, state: RankState, after: RankState, synced: bool) -> Go:
        if not synced or not state.pending:
            return Go(self._op(slot, after, None))
        pending = state.pending

        def work(cells: Cells) -> Cells:
            return synchronised(self.plan, cells, pending)

        devices = tuple(sorted({self.device_slot[at // self.width] for at in pending}))
        return self._went(slot, after, devices, ("sync", pending), work)

    def _crashed(self, slot: int, rank: int, state: RankState) -> Go:
        here = next_step(self.plan, rank, state)
        acting = state.status in (Status.ACTING, Status.HUNG) and isinstance(here, Act)
        led = acting and isinstance(here, Act) and here.led
        if state.status is Status.WAITING:
            after = state._replace(at=state.at + 1, status=Status.DEAD, pending=())
        else:
            status = Status.DEAD_ACTING if led else Status.DEAD
            after = state._replace(status=status, pending=())

        def work(cells: Cells) -> Cells:
            return crashed(self.plan, cells, rank, state)

        who = self.plan.members[rank]
        owned = {at // self.width for at, owner in enumerate(self.plan.owner) if owner == who}
        devices = {self.device_slot[device] for device in owned}
        if acting and isinstance(here, Act):
            devices |= set(self._devices(here))
        return self._went(slot, after, tuple(sorted(devices)), ("crash", rank, state), work)

    def _landed(self, slot: int, rank: int, state: RankState, act: Act) -> Go:
        def work(cells: Cells) -> Cells:
            return landed(self.plan, cells, rank, state)

        after = state._replace(status=Status.DEAD)
        devices = self._devices(act)
        return self._went(slot, after, devices, ("land", rank, state), work, (), devices)

    def _went(
        self,
        slot: int,
        after: RankState,
        devices: tuple[int, ...],
        key: tuple[object, ...],
        work: Callable[[Cells], Cells],
        wants: tuple[tuple[int, Memo], ...] = (),
        checked: tuple[int, ...] = (),
    ) -> Go:
        others = tuple((at, self._op(at, None, work, key)) for at in devices if at != slot)
        own = self._op(slot, after, work if slot in devices else None, key)
        return Go(own, others, wants, checked)

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
                    cells = self._slice(work(self._spread(base, cells)), base)
                    if self.blurred:
                        cells = tuple(map(self._blur, cells, range(self.width)))
                return self.unit(state if number is None else number, cells)

            memo = self._ops[name] = Memo(run)
        return memo

    def _blur(self, value: int, resource: int) -> int:
        """Partial content that nobody `uses` is as good as old: who needs it objects to both."""
        partly = resource in self.blurred and content_of(value) == PARTIAL
        return cell(mapped_of(value), 0) if partly else value

    def _spread(self, base: int, cells: Cells) -> Cells:
        """One device's memory within a plan's that is otherwise empty."""
        empty = len(self.plan.start)
        return (*(4,) * base, *cells, *(4,) * (empty - base - len(cells)))

    def _slice(self, cells: Cells, base: int) -> Cells:
        return cells[base : base + self.width]

    def _judge(self, slot: int, judge: Callable[[Cells], bool], key: tuple[object, ...]) -> Memo:
        name = ("judge", slot, *key)
        memo = self._ops.get(name)
        if memo is None:
            base = self.slots[slot].device * self.width

            def run(unit: int) -> int:
                return judge(self._spread(base, self.unit_of[unit][1]))

            memo = self._ops[name] = Memo(run)
        return memo

    def _part(self, slot: int, act: Act) -> Act:
        device = self.slots[slot].device
        touches = tuple(t for t in act.touches if t.cell // self.width == device)
        return act._replace(touches=touches)

    def _wants(self, slot: int, act: Act, epoch: int) -> Memo:
        part = self._part(slot, act)
        who = self.plan.members[0]

        def judge(cells: Cells) -> bool:
            return next(wanted(self.plan, who, part, cells, epoch), None) is not None

        return self._judge(slot, judge, ("wants", part, epoch))

    def _lost(self, slot: int, act: Act) -> Memo:
        part = self._part(slot, act)
        return self._judge(slot, lambda cells: input_lost(cells, part), ("lost", part))

    def _never_of(self, slot: int) -> Memo:
        """Whether a unit's device holds together what it must not."""
        device = self.slots[slot].device
        who = self.plan.members[0]

        def judge(cells: Cells) -> bool:
            if next(together(self.plan, who, cells, {device}), None) is not None:
                return True
            return next(unmapped(self.plan, who, cells, {device}), None) is not None

        return self._judge(slot, judge, ("never",))

    def races(self, one: int, unit: int, two: int, other: int) -> bool:
        """Whether starting `unit`'s action beside that of `other` breaks the race rule."""
        key = (one, self.unit_of[unit][0], two, self.unit_of[other][0])
        found = self._races.get(key)
        if found is None:
            mine, theirs = self.row(one, unit), self.row(two, other)
            found = False
            if mine.act is not None and theirs.act is not None:
                who = self.plan.members
                ranks = self.slots[one].rank, self.slots[two].rank
                pair = ((who[ranks[1]], theirs.act),)
                found = next(raced(self.plan, who[ranks[0]], mine.act, pair), None) is not None
            self._races[key] = found
        return found

    def poisons(self, one: int, unit: int, two: int, other: int) -> bool:
        """Whether `unit`'s action is served from an engine that `other` left unrecovered."""
        key = (one, self.unit_of[unit][0], two, self.unit_of[other][0])
        found = self._poisons.get(key)
        if found is None:
            mine, theirs = self.row(one, unit), self.row(two, other)
            found = False
            if mine.act is not None:
                there = ((self.slots[two].rank, theirs.state),)
                rank, epoch = self.slots[one].rank, mine.state.epoch
                found = next(poisoned(self.plan, rank, mine.act, epoch, there), None) is not None
            self._poisons[key] = found
        return found
