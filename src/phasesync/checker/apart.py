"""Whether a rank may go first, alone: nobody else touches the same memory before it moves.

Two accesses conflict when they reach one cell and not both only read it, or reach two cells that a
`never` joins. Who starts to serve waits for those whose recovery may yet fail. Others can come only
as far as the first fence that still waits for the rank; so far their programs are read, and no
further. The footprint decides, not the rank.
"""

from phasesync.checker.rows import Row
from phasesync.checker.tables import BlockState, Tables
from phasesync.core.kernel import RankState, Stage, Status
from phasesync.core.plan import Act, Plan, Step, Touch
from phasesync.core.protocol import Verb

__all__ = ("Apart",)

_READS = frozenset((Verb.NEEDS, Verb.USES, Verb.HOLDS, Verb.AGREES))
_AT_ACT = frozenset((Status.READY, Status.ACTING, Status.DEAD_ACTING, Status.HUNG))
_GONE = frozenset((Status.DEAD, Status.DEAD_ACTING))


class Apart:
    """Answers for one block's tables, each worked out once."""

    def __init__(self, tables: Tables, epochs: int) -> None:
        self.tables = tables
        self.plan: Plan = tables.plan
        self.epochs = epochs
        self.joined: dict[int, frozenset[int]] = {}
        for pair in self.plan.never:
            for at in pair.cells:
                others = frozenset(pair.cells) - {at}
                self.joined[at] = self.joined.get(at, frozenset()) | others
        self._memo: dict[tuple[int, int, int, int], bool] = {}
        self._owned: dict[int, tuple[Touch, ...]] = {}

    def ask(self, slot: int, unit: int, other: int, other_unit: int) -> bool:
        """Whether the rank in `slot` may move before the other one does anything."""
        state_of = self.tables.unit_of
        key = (slot, state_of[unit][0], other, state_of[other_unit][0])
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._ask(slot, unit, other, other_unit)
        return found

    def elsewhere(self, block: BlockState, theirs: "Apart", other: BlockState) -> bool:
        """Whether a block of one rank may move before another, for what `elsewhere` excludes."""
        if len(block) != 3 or len(other) != 3:
            return False
        mine, row = self.tables.row(0, block[2]), theirs.tables.row(0, other[2])
        acts = theirs.reach(mine, theirs.tables.slots[0].rank, row, apart=True)
        if acts is None:
            return False
        width = len(self.plan.protocol.resources)
        own = {touch.cell % width for touch in self._now(mine) if touch.verb not in _READS}
        far = {t.cell % width for act in acts for t in act.touches if t.verb not in _READS}
        return not any(
            (one in own and two in far) or (two in own and one in far)
            for one, two in self.plan.elsewhere
        )

    def _ask(self, slot: int, unit: int, other: int, other_unit: int) -> bool:
        mine, theirs = self.tables.row(slot, unit), self.tables.row(other, other_unit)
        rank = self.tables.slots[other].rank
        if rank < 0:
            return True
        acts = self.reach(mine, rank, theirs)
        if acts is None or (self._serves(mine) and self._behind(mine, theirs)):
            return False
        own = [*self._now(mine), *self._own(self.tables.slots[slot].rank, mine)]
        far = [touch for act in acts for touch in act.touches]
        far += self._own(rank, theirs)
        return not any(self._conflict(one, two) for one in own for two in far)

    def _serves(self, row: Row) -> bool:
        return row.status is Status.READY and any(
            touch.verb is Verb.NEEDS and self.plan.content[touch.cell] for touch in self._now(row)
        )

    @staticmethod
    def _behind(mine: Row, theirs: Row) -> bool:
        """Whether the other is in an earlier epoch, in which it may stop for good."""
        return theirs.state.epoch < mine.state.epoch and theirs.status is not Status.FINISHED

    @staticmethod
    def _now(row: Row) -> tuple[Touch, ...]:
        return row.act.touches if row.act is not None and row.status in _AT_ACT else ()

    def _own(self, rank: int, row: Row) -> tuple[Touch, ...]:
        """What the death of a rank's process would lose."""
        if row.status in _GONE:
            return ()
        found = self._owned.get(rank)
        if found is None:
            who = self.plan.members[rank]
            found = self._owned[rank] = tuple(
                Touch(Verb.RELEASES, at) for at, owner in enumerate(self.plan.owner) if owner == who
            )
        return found

    def _conflict(self, one: Touch, two: Touch) -> bool:
        if one.cell == two.cell:
            return not (one.verb in _READS and two.verb in _READS)
        if one.verb in _READS or two.verb in _READS:
            return False
        return two.cell in self.joined.get(one.cell, ())

    def reach(self, mine: Row, rank: int, theirs: Row, *, apart: bool = False) -> list[Act] | None:
        """The actions that the other rank can come to; None where nothing holds it up.

        `apart` says that it is of another block, whose own fences never wait for `mine`.
        """
        state = theirs.state
        match theirs.status:
            case Status.DEAD:
                return []
            case Status.DEAD_ACTING | Status.HUNG:
                return [theirs.act] if theirs.act else []
            case Status.FINISHED:
                if state.epoch >= self.epochs:
                    return []
                state = RankState(Status.READY, state.epoch + 1)
            case _:
                pass
        acts, ended = self._acts(mine, rank, state, state.at, apart)
        if state.stage is Stage.EPOCH and self.plan.recover[rank]:
            after = state._replace(stage=Stage.RECOVER)
            more, over = self._acts(mine, rank, after, 0, apart)
            acts, ended = acts + more, ended or over
        if ended:
            more, over = self._acts(mine, rank, RankState(Status.READY, state.epoch + 1), 0, apart)
            return None if over else acts + more
        return acts

    def _acts(
        self, mine: Row, rank: int, state: RankState, start: int, apart: bool
    ) -> tuple[list[Act], bool]:
        """Actions up to the first fence that waits for `mine`, and whether there is none."""
        acts: list[Act] = []
        for item in self._program(rank, state.stage)[start:]:
            if isinstance(item, Act):
                acts.append(item)
                continue
            own, world = self.tables.bit(state, item)
            if apart and own:
                continue
            facts = mine.facts
            arrived = facts.arrived & own or facts.arrived_world & world
            if not arrived or facts.leads & own or facts.leads_world & world:
                return acts, False
        return acts, True

    def _program(self, rank: int, stage: Stage) -> tuple[Step, ...]:
        return self.plan.programs[rank] if stage is Stage.EPOCH else self.plan.recover[rank]
