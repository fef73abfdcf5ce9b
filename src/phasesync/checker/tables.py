"""A block of a plan, compiled: local states and memory by number, moves by table.

The kernel stays the one source of truth: every table here is filled by asking it, on the first
use of an entry. What the tables add is that nothing is asked twice. A *unit* is one number for a
rank's state and its device's memory; a block is a tuple of two masks (its own fences that are
open, and broken) and its units. Whether a rank has arrived at a shut fence is read off its state.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

from phasesync.checker.blocks import NOBODY, Block
from phasesync.checker.rows import NEVER, Bits, Facts, Go, Memo, Row, Rows
from phasesync.checker.units import Cells, Units
from phasesync.core.kernel import (
    Faults,
    Kind,
    Moment,
    RankState,
    Stage,
    Status,
    abort_touches,
    aborted,
    advance,
    crashed,
    fence_epoch,
    fences_failed,
    fences_left,
    heard,
    landed,
    last_counted,
    lost_leaders,
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
)
from phasesync.core.protocol import Retry

__all__ = ("BlockState", "Engine", "Tables")

BlockState: TypeAlias = tuple[int, ...]
_GONE = frozenset((Status.DEAD, Status.DEAD_ACTING))
_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))


class Engine(NamedTuple):
    """An engine that may die: its name, the first slot that has memory of it and which, and what
    its death does to the units."""

    name: str
    slot: int
    bits: int
    go: Go


class Tables(Units):
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
        super().__init__(plan, block.slots, blur=blur, dying=faults.engine)
        self.faults = faults
        self.epochs = epochs
        self.world = world
        self.reused = Defect.KEY_REUSED in plan.defects
        self.late = Defect.LATE_ABORT in plan.defects
        self.own = Bits()
        self.slot_of = {slot.rank: at for at, slot in enumerate(block.slots) if slot.rank >= 0}
        self._rows: list[dict[int, Row]] = [{} for _ in block.slots]
        self.rows = tuple(Rows(partial(self._row_of, slot)) for slot in range(len(block.slots)))
        self._facts: dict[int, Facts] = {}
        self._fences: dict[tuple[int, int], list[tuple[int, Stage, int, int, int, bool]]] = {}
        self._bits: dict[tuple[int, Stage, int, str], tuple[int, int]] = {}
        self._races: dict[tuple[object, ...], bool] = {}
        self._poisons: dict[tuple[object, ...], bool] = {}
        self.engines = tuple(self._engines()) if faults.engine else ()

    def _engines(self) -> Iterator[Engine]:
        """The engines whose memory is in this block."""
        for name in self.plan.engines:
            died = {slot: self._died(slot, name) for slot in range(len(self.slots))}
            own = [slot for slot, (bits, _) in died.items() if bits]
            if own:
                first, *rest = own
                go = Go(died[first][1], tuple((slot, died[slot][1]) for slot in rest))
                yield Engine(str(name), first, died[first][0], go)

    def row(self, slot: int, unit: int) -> Row:
        """Where the rank of a unit stands."""
        return self.rows[slot][unit]

    def _row_of(self, slot: int, unit: int) -> Row:
        state = self.unit_of[unit][0]
        found = self._rows[slot].get(state)
        if found is None:
            found = self._rows[slot][state] = self._row(slot, state)
        return found

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
        key = (state.epoch, state.stage, wait.scope, wait.fence)
        found = self._bits.get(key)
        if found is None:
            found = self._bits[key] = self._bit(state, wait)
        return found

    def _bit(self, state: RankState, wait: Wait) -> tuple[int, int]:
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
        if not wants:
            return went
        checked = tuple((at, self._starts_with(at, act)) for at in devices)
        return went._replace(agrees=self._agrees(act), checked=checked)

    def _agrees(self, act: Act) -> tuple[tuple[tuple[int, Memo], ...], ...]:
        """For each set of cells that must agree: where they are, and what they hold."""
        return tuple(
            tuple((self.device_slot[at // self.width], self._holds(at)) for at in part)
            for part in agreements(self.plan, act)
        )

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
        return Go(own, others, wants, tuple((at, self.never[at]) for at in checked))

    def races(
        self, one: int, unit: int, two: int, other: int, dead: frozenset[int] = frozenset()
    ) -> bool:
        """Whether starting `unit`'s action beside that of `other` breaks the race rule."""
        key = (one, self.unit_of[unit][0], two, self.unit_of[other][0], dead)
        found = self._races.get(key)
        if found is None:
            mine, theirs = self.row(one, unit), self.row(two, other)
            found = False
            if mine.act is not None and theirs.act is not None:
                who = self.plan.members
                ranks = self.slots[one].rank, self.slots[two].rank
                pair = ((who[ranks[1]], theirs.act),)
                act = _but(mine.act, dead)
                found = next(raced(self.plan, who[ranks[0]], act, pair), None) is not None
            self._races[key] = found
        return found

    def poisons(
        self, one: int, unit: int, two: int, other: int, dead: frozenset[int] = frozenset()
    ) -> bool:
        """Whether `unit`'s action is served from an engine that `other` left unrecovered."""
        key = (one, self.unit_of[unit][0], two, self.unit_of[other][0], dead)
        found = self._poisons.get(key)
        if found is None:
            mine, theirs = self.row(one, unit), self.row(two, other)
            found = False
            if mine.act is not None:
                there = ((self.slots[two].rank, theirs.state),)
                rank, epoch = self.slots[one].rank, mine.state.epoch
                act = _but(mine.act, dead)
                found = next(poisoned(self.plan, rank, act, epoch, there), None) is not None
            self._poisons[key] = found
        return found


def _but(act: Act, dead: frozenset[int]) -> Act:
    """The action without what it would do to dead engines."""
    if not dead:
        return act
    return act._replace(touches=tuple(touch for touch in act.touches if touch.cell not in dead))
