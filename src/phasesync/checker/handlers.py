"""What a rank may do where it stands: one handler a status, each reading the row that it is in.

What depends on the other ranks of the block is asked of the draft. Both drafts, of one block and of
many at once, are given the same questions here, and no other rule says what may happen.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from phasesync.checker.rows import Around, Go, Row
from phasesync.core.kernel import Faults, Kind, Stage, Status
from phasesync.core.plan import PLAN

__all__ = ("HANDLERS", "Draft", "stopped")


class Draft(ABC):
    """The moves of a rank as they are found, and what there is to know of the rest of its block."""

    def __init__(
        self,
        opened: int,
        broken: int,
        around: Around,
        faults: Faults,
        epochs: int,
        *,
        endless: bool,
    ) -> None:
        self.opened = opened
        self.broken = broken
        self.around = around
        self.faults = faults
        self.epochs = epochs
        self.endless = endless

    @abstractmethod
    def move(
        self,
        kind: Kind,
        slot: int,
        name: str,
        go: Go | None,
        *,
        arrives: int = 0,
        opens: int = 0,
        breaks: int = 0,
        breaks_world: int = 0,
        faults: int = 0,
        bad: bool = False,
    ) -> None:
        """Adds the move whose effect on units is `go`."""

    @abstractmethod
    def starts_wrongly(self, slot: int, row: Row) -> bool:
        """Whether the start of the row's action breaks a rule before it does anything."""

    @abstractmethod
    def lost(self, go: Go) -> bool:
        """Whether what an action works on is gone."""

    @abstractmethod
    def arrival(self, slot: int, row: Row, go: Go) -> tuple[int, int]:
        """What an arrival decides of the block's own fence: (opens, breaks)."""

    @abstractmethod
    def awaited(self) -> int:
        """The fences of the block that somebody has yet to pass."""

    @abstractmethod
    def orphan(self, row: Row) -> tuple[int, int, int]:
        """The fence of a recovery that a notice of the rank's death decides: (opens, breaks, the
        bit of a world fence)."""

    @abstractmethod
    def aborts_wrongly(self, slot: int) -> bool:
        """Whether an abort touches memory that somebody is at work on."""

    def opens_now(self, row: Row) -> bool:
        return bool(row.bit & self.opened or row.bit_world & self.around.open)

    def rank(self, slot: int, row: Row) -> None:
        """Everything that the rank of a slot may do next, faults last."""
        if (handler := HANDLERS.get(row.status)) is not None:
            handler(self, slot, row)
        if self.around.may_fault and self.faults.again and row.again:
            self.move(Kind.AGAIN, slot, row.again, None, faults=1)
        if self.around.may_fault and self.faults.crash and (go := row.go.get(Kind.CRASH)):
            self.move(Kind.CRASH, slot, "", go, faults=1)


def _ready(draft: Draft, slot: int, row: Row) -> None:
    if (go := row.go.get(Kind.START)) is not None and row.act is not None:
        bad = draft.starts_wrongly(slot, row)
        draft.move(Kind.START, slot, row.act.phase, go, bad=bad)
    elif (go := row.go.get(Kind.ARRIVE)) is not None and row.wait is not None:
        opens, breaks = draft.arrival(slot, row, go)
        name = row.wait.fence
        draft.move(Kind.ARRIVE, slot, name, go, arrives=row.bit_world, opens=opens, breaks=breaks)
        _not_arriving(draft, slot, row)
    _abort(draft, slot, row)


def _not_arriving(draft: Draft, slot: int, row: Row) -> None:
    """An arrival that is lost on the way, or one under another plan."""
    assert row.wait is not None
    faults, name = draft.faults, row.wait.fence
    if not draft.around.may_fault:
        return
    if faults.lost:
        draft.move(Kind.LOSE, slot, name, row.go[Kind.LOSE], faults=1)
    if faults.mixed and name == PLAN:
        breaks, world = row.breaks, row.breaks_world
        go = row.go[Kind.REFUSE]
        draft.move(Kind.REFUSE, slot, name, go, breaks=breaks, breaks_world=world, faults=1)


def _abort(draft: Draft, slot: int, row: Row) -> None:
    """Who learns of a break leaves, and arrives as failed wherever it has not passed."""
    heard = row.first & draft.broken or row.first_world & draft.around.broken
    if not (draft.faults.aborts and row.hears and heard):
        return
    draft.move(
        Kind.ABORT,
        slot,
        row.first_name,
        row.go[Kind.ABORT],
        breaks=row.breaks,
        breaks_world=row.breaks_world,
        bad=draft.aborts_wrongly(slot),
    )


def _acting(draft: Draft, slot: int, row: Row) -> None:
    assert row.act is not None
    name, faults = row.act.phase, draft.faults
    end, fail = row.go[Kind.END], row.go[Kind.FAIL]
    lost = draft.lost(end)
    if not lost:
        draft.move(Kind.END, slot, name, end)
    may_fail = not row.act.outside or draft.endless
    if lost or (draft.around.may_fault and faults.fail and may_fail):
        draft.move(
            Kind.FAIL,
            slot,
            name,
            fail,
            breaks=row.breaks,
            breaks_world=row.breaks_world,
            faults=0 if lost else 1,
        )
    if draft.around.may_fault and faults.hang:
        draft.move(Kind.HANG, slot, name, row.go[Kind.HANG], faults=1)


def _waiting(draft: Draft, slot: int, row: Row) -> None:
    assert row.wait is not None
    name = row.wait.fence
    if draft.opens_now(row):
        draft.move(Kind.PASS, slot, name, row.go[Kind.PASS])
    else:
        _deadline(draft, slot, row)
    _abort(draft, slot, row)


def _deadline(draft: Draft, slot: int, row: Row) -> None:
    """The patience of a rank at a fence that is still shut."""
    assert row.wait is not None
    if not draft.faults.deadlines:
        return
    if row.bit & ~draft.broken or row.bit_world & ~draft.around.broken:
        bits, world, name = row.bit, row.bit_world, row.wait.fence
        draft.move(Kind.DEADLINE, slot, name, None, breaks=bits, breaks_world=world)


def _cut(draft: Draft, slot: int, row: Row) -> None:
    """It waits like the others, at a fence that cannot open."""
    _deadline(draft, slot, row)
    _abort(draft, slot, row)


def stopped(draft: Draft, slot: int, row: Row) -> None:
    if (go := row.go.get(Kind.RECOVER)) is not None:
        draft.move(Kind.RECOVER, slot, "", go)


def _finished(draft: Draft, slot: int, row: Row) -> None:
    state = row.state
    follows = state.stage is Stage.EPOCH or draft.around.missing > state.epoch
    if state.epoch < draft.epochs and follows:
        draft.move(Kind.BEGIN, slot, "", row.go[Kind.BEGIN])


def _dead(draft: Draft, slot: int, row: Row) -> None:
    if row.act is not None and (go := row.go.get(Kind.LAND)) is not None:
        draft.move(Kind.LAND, slot, row.act.phase, go)
    if not draft.faults.notices:
        return
    around = draft.around
    unnoticed = row.misses & ~(draft.opened | draft.broken) & draft.awaited()
    far = row.misses_world & ~(around.open | around.broken) & around.awaited
    opens, breaks, waits = draft.orphan(row)
    if unnoticed or far or opens or breaks or waits:
        # What is judged is not failed beside: it was shut, whatever the order.
        draft.move(
            Kind.NOTICE,
            slot,
            "",
            None,
            opens=opens,
            breaks=(row.breaks & ~opens) | breaks,
            arrives=waits,
            breaks_world=row.breaks_world & ~waits,
        )


HANDLERS: dict[Status, Callable[[Draft, int, Row], None]] = {
    Status.READY: _ready,
    Status.ACTING: _acting,
    Status.WAITING: _waiting,
    Status.CUT: _cut,
    Status.STOPPED: stopped,
    Status.ABORTED: stopped,
    Status.FINISHED: _finished,
    Status.DEAD: _dead,
    Status.DEAD_ACTING: _dead,
}
