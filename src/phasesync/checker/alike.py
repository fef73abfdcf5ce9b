"""What no later step can tell apart: of such values one stands for all.

Only the argument for any number of ranks asks here, where lengths do not matter and no state is
counted. Each rule says what still reads a value, and forgets the rest; nothing may be forgotten
because it seems unlikely to matter.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from phasesync.checker.apart import Apart
from phasesync.checker.tables import Tables
from phasesync.core.kernel import (
    NONE,
    Mapped,
    RankState,
    Stage,
    Status,
    cell,
    mapped_of,
    missing_from,
    next_step,
)
from phasesync.core.plan import Act, Step, Wait
from phasesync.core.protocol import Verb

__all__ = ("Alike",)

States: TypeAlias = tuple[int, ...]
Found: TypeAlias = list[RankState | None]

_LEFT = frozenset((Status.STOPPED, Status.ABORTED))
_LIVE = frozenset((Status.READY, Status.ACTING, Status.WAITING))
_HELD = cell(Mapped.UNKNOWN, NONE)
_FREE = cell(Mapped.NO, NONE)


class _Reach(NamedTuple):
    """Cells to which an action may do more than ensure them, and cells that it may map, as bits."""

    touched: int
    mapped: int


class _Forgets(NamedTuple):
    """Cells of which it counts only whether they are held, and those of which nothing counts."""

    value: tuple[int, ...]
    all: tuple[int, ...]


class _Settled(NamedTuple):
    """What stands for the states of a block, and what the memory of each slot may forget."""

    states: States
    forgets: tuple[_Forgets | None, ...]


class Alike:
    """The forgetting for one block's tables."""

    def __init__(self, tables: Tables, apart: Apart) -> None:
        self.tables = tables
        self.apart = apart
        self.plan = tables.plan
        self.width = tables.width
        self._of: dict[States, _Settled] = {}
        self._units: dict[tuple[int, int, _Forgets | None], int] = {}
        self._reached: dict[tuple[int, RankState, int, RankState, bool], _Reach | None] = {}
        self._later: dict[tuple[int, int], list[tuple[int, int, _Reach]]] = {}
        self._on: dict[tuple[int, int, int], _Forgets | None] = {}
        self._free = _bits(at for at, start in enumerate(self.plan.start) if not start)
        self._joined = {at: _bits(others) for at, others in apart.joined.items()}

    def settle(self, units: list[int]) -> None:
        """Replaces each unit by the one that stands for it here."""
        unit_of = self.tables.unit_of
        states = tuple([unit_of[unit][0] for unit in units])
        found = self._of.get(states)
        if found is None:
            found = self._of[states] = self._settled(states)
        for slot, unit in enumerate(units):
            state, forgets = found.states[slot], found.forgets[slot]
            if forgets is not None or state != states[slot]:
                key = (unit, state, forgets)
                after = self._units.get(key)
                if after is None:
                    cells = self._forgotten(unit_of[unit][1], forgets)
                    after = self._units[key] = self.tables.unit(state, cells)
                units[slot] = after

    def _forgotten(self, cells: States, forgets: _Forgets | None) -> States:
        if forgets is None:
            return cells
        after = list(cells)
        for at in forgets.value:
            if mapped_of(cells[at]) is not Mapped.NO:
                after[at] = _HELD
        for at in forgets.all:
            after[at] = _FREE
        return tuple(after)

    # ---------------------------------------------------------------------- positions

    def _settled(self, states: States) -> _Settled:
        slots = self.tables.slots
        found: Found = [
            self.tables.rank_state(at, number) if slots[at].rank >= 0 else None
            for at, number in enumerate(states)
        ]
        if all(s is None or (s.status in _LIVE and s.stage is Stage.EPOCH) for s in found):
            return _Settled(states, (None,) * len(slots))
        for slot, state in enumerate(found):
            if state is not None and state.status in _LEFT:
                found[slot] = self._left(slots[slot].rank, state)
        alive = [s for s in found if s is not None and s.status is not Status.DEAD]
        for slot, state in enumerate(found):
            if state is not None and state.status is Status.DEAD:
                found[slot] = self._dead(slots[slot].rank, state, alive)
        value, every = self._forgets(found)
        after = tuple(
            number if state is None else self.tables.state(slot, _but_pending(state, every))
            for slot, (number, state) in enumerate(zip(states, found, strict=True))
        )
        here = (self._here(slot.device, value, every) for slot in slots)
        return _Settled(after, tuple(here) if value else (None,) * len(slots))

    def _here(self, device: int, value: int, every: int) -> _Forgets | None:
        if device < 0:
            return None
        key = (device, value, every)
        if key not in self._on:
            self._on[key] = self._forgotten_on(device, value, every)
        return self._on[key]

    def _forgotten_on(self, device: int, value: int, every: int) -> _Forgets | None:
        base, own = device * self.width, range(self.width)
        found = _Forgets(
            tuple(at for at in own if value >> base + at & 1),
            tuple(at for at in own if every >> base + at & 1),
        )
        return found if found.value else None

    def _left(self, rank: int, state: RankState) -> RankState:
        """Who left the epoch has broken every fence that it had not passed: it recovers at once,
        and where it stood is of no account."""
        recover = self.plan.recover[rank]
        if state.stage is Stage.EPOCH and recover:
            return state._replace(status=Status.READY, stage=Stage.RECOVER, at=0)
        steps = recover if state.stage is Stage.RECOVER else self.plan.programs[rank]
        return state._replace(status=Status.ABORTED, at=len(steps))

    def _dead(self, rank: int, state: RankState, alive: list[RankState]) -> RankState:
        """Of the dead it counts which fences they have arrived at, while anybody is before one."""
        here = (state.epoch, Stage.EPOCH)
        later = missing_from(self.plan, rank, state) > state.epoch
        if all((each.epoch, each.stage) > here for each in alive) or state.stage is Stage.RECOVER:
            at = len(self.plan.recover[rank]) if later else 0
            return state._replace(stage=Stage.RECOVER, at=at)
        steps = self.plan.programs[rank]
        at = state.at
        while at < len(steps) and not isinstance(steps[at], Wait):
            at += 1
        return state._replace(at=at)

    # -------------------------------------------------------------------------- memory

    def _forgets(self, found: Found) -> tuple[int, int]:
        """Cells whose value no later action asks for; and those that nothing will meet either."""
        value = every = 0
        for slot, state in enumerate(found):
            if state is None or state.status is Status.FINISHED:
                continue
            reaches: list[tuple[int, _Reach | None]] = []
            if state.status not in _LIVE:
                reaches.append((self._free, self._after(slot, state, found)))
            elif state.stage is Stage.RECOVER:
                for at, cells, own in self._puts_back(slot, state):
                    before = RankState(Status.READY, state.epoch, Stage.RECOVER, at)
                    reaches.append((cells, self._before(slot, own, before, found)))
            for cells, reach in reaches:
                if reach is not None:
                    forgotten = cells & ~reach.touched
                    value |= forgotten
                    every |= self._unmet(forgotten, reach.mapped)
        return value, every

    def _unmet(self, cells: int, mapped: int) -> int:
        """Those of the cells that no `never` joins to what may be mapped."""
        for at, others in self._joined.items():
            if others & mapped:
                cells &= ~(1 << at)
        return cells

    def _puts_back(self, slot: int, state: RankState) -> list[tuple[int, int, _Reach]]:
        """What the rank's own steps ensure from here on: the place of each such step, the cells
        (but for those that are as they start: they stay, with their content), and all its steps."""
        found = self._later.get((slot, state.at))
        if found is None:
            found = self._later[slot, state.at] = []
            steps = self.plan.recover[self.tables.slots[slot].rank]
            own, touched = self._does(_acts(steps[state.at :])), 0
            for at in range(state.at, len(steps)):
                step = steps[at]
                if isinstance(step, Act):
                    ensured = _bits(t.cell for t in step.touches if t.verb is Verb.ENSURES)
                    touched |= _bits(t.cell for t in step.touches if t.verb is not Verb.ENSURES)
                    if cells := ensured & ~touched & self._free:
                        found.append((at, cells, own))
        return found

    def _before(self, slot: int, own: _Reach, before: RankState, found: Found) -> _Reach | None:
        """What may be done until the rank has done its step at `before`, or ever if it never does.

        A release that is pending asks nothing: it takes away whatever is there.
        """
        return _all_of(
            own if other == slot else self._held_up(slot, before, other, theirs, ends=False)
            for other, theirs in enumerate(found)
            if theirs is not None
        )

    def _after(self, slot: int, gone: RankState, found: Found) -> _Reach | None:
        """What may be done to memory now that one of the block is gone."""
        return _all_of(
            self._held_up(slot, gone, other, theirs, ends=gone.status not in _LEFT)
            for other, theirs in enumerate(found)
            if theirs is not None
        )

    def _held_up(
        self, slot: int, mine: RankState, other: int, theirs: RankState, *, ends: bool
    ) -> _Reach | None:
        """What another rank may do before `mine` moves on; its recovery is the last thing, if
        `ends`, for none goes on beside one dead whom it did without. None where nothing holds it
        up."""
        key = (slot, mine, other, theirs, ends)
        if key not in self._reached:
            acts = self._comes_to(slot, mine, other, theirs, ends=ends)
            self._reached[key] = None if acts is None else self._does(acts)
        return self._reached[key]

    def _comes_to(
        self, slot: int, mine: RankState, other: int, theirs: RankState, *, ends: bool
    ) -> list[Act] | None:
        tables, rank = self.tables, self.tables.slots[other].rank
        if theirs.status is Status.DEAD or theirs.status in _LEFT:
            return []
        if theirs.status is Status.DEAD_ACTING:
            step = next_step(self.plan, rank, theirs)
            return [step] if isinstance(step, Act) else []
        if ends and theirs.stage is Stage.RECOVER:
            if missing_from(self.plan, tables.slots[slot].rank, mine) > theirs.epoch:
                return None
            return _acts(self.plan.recover[rank][theirs.at :])
        row = tables.row(slot, tables.unit(tables.state(slot, mine), ()))
        their = tables.row(other, tables.unit(tables.state(other, theirs), ()))
        acts = self.apart.reach(row, rank, their)
        return None if acts is None else [*acts, *_acts(self.plan.recover[rank])]

    def _does(self, acts: Iterable[Act]) -> _Reach:
        touched = mapped = 0
        for act in acts:
            for verb, at in act.touches:
                if verb is not Verb.ENSURES:
                    touched |= 1 << at
                if verb is Verb.ACQUIRES or (verb is Verb.ENSURES and self.plan.start[at]):
                    mapped |= 1 << at
        return _Reach(touched, mapped)


def _bits(cells: Iterable[int]) -> int:
    found = 0
    for at in cells:
        found |= 1 << at
    return found


def _but_pending(state: RankState, every: int) -> RankState:
    """A release that is still to come is nothing where nothing is asked of the cell."""
    if not state.pending or not _bits(state.pending) & every:
        return state
    return state._replace(pending=tuple(at for at in state.pending if not every >> at & 1))


def _acts(steps: Iterable[Step]) -> list[Act]:
    return [step for step in steps if isinstance(step, Act)]


def _all_of(reaches: Iterable[_Reach | None]) -> _Reach | None:
    touched = mapped = 0
    for each in reaches:
        if each is None:
            return None
        touched |= each.touched
        mapped |= each.mapped
    return _Reach(touched, mapped)
