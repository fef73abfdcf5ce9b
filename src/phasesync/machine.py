"""One rank's state machine: `transitions` executes what the kernel's table says.

The kernel decides, the machine never does: each row comes from `kernel.rows`. It is built queued
by model, because unqueued a second event silently cancels a weight load that is under way, and
without auto-transitions, because `to_X()` would be a way around a fence. A queued trigger returns
True whether it was refused or not, so the state is read, never the return value.

No trigger ever waits, so none can be cancelled in its middle, which would leave the machine and the
kernel's state apart: `fire` is no coroutine.
"""

from typing import Any, NamedTuple

from transitions.extensions.asyncio import AsyncEvent, AsyncMachine

from phasesync.core.kernel import Kind, RankState, Stage, Status, advance, program, rows
from phasesync.core.model import Ticket
from phasesync.core.plan import Plan
from phasesync.core.protocol import Row
from phasesync.errors import Refused

__all__ = ("RankMachine",)

_EVENTS = {Kind.FAIL: "stop", Kind.REFUSE: "stop", Kind.ABORT: "abort"}
_ENDS = ("stopped", "aborted")


class _Event(AsyncEvent):
    """A trigger whose rows have conditions and a target, and no callbacks to go through.

    What `transitions` keeps for callbacks that wait is most of what a trigger costs: gatherings of
    no callbacks, and a book of running triggers for a later one to cancel. None is needed.
    """

    def take(self, model: "_Model") -> None:
        """Go where the first row leads whose conditions hold; stay where none does."""
        rows: list[Any] = self.transitions.get(model.state, [])
        for row in rows:
            if all(check.func() is check.target for check in row.conditions):
                model.state = row.dest
                return


class _Machine(AsyncMachine):
    event_cls = _Event


class _Move(NamedTuple):
    """What the kernel answered once, whatever the epoch: the trigger, and where it leads."""

    event: _Event
    after: RankState
    epochs: int
    place: "dict[tuple[Kind, str], _Move]"


class _Model:
    """What `transitions` hangs its state and triggers on."""

    state: str
    trigger: Any


class RankMachine:
    """Where one rank stands, in the kernel's words and in those of `transitions`."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.state = RankState()
        # By where the rank stands but for the epoch, what the kernel said of each event so far.
        self._places: dict[tuple[object, ...], dict[tuple[Kind, str], _Move]] = {}
        self._place = self._places.setdefault(_but_epoch(self.state), {})
        self._ticket: Ticket | None = None
        self._model = _Model()
        tables = {
            stage: rows(program(plan, rank, stage), plan.members[rank].role) for stage in Stage
        }
        self._last = {
            stage: _in(stage, table[-1].target) if table else _in(stage, "ready")
            for stage, table in tables.items()
        }
        transitions: list[dict[str, Any]] = []
        for stage, table in tables.items():
            transitions += [self._row(stage, row) for row in table]
            states = list(_states(stage, table))
            transitions += [_plain("stop", states, "stopped"), _plain("abort", states, "aborted")]
        transitions.append(_plain("recover", list(_ENDS), _in(Stage.RECOVER, "ready")))
        transitions.append(_plain("begin", list(set(self._last.values())), "ready"))
        self._machine = _Machine(
            model=self._model,
            states=sorted({state for stage in Stage for state in _states(stage, tables[stage])})
            + list(_ENDS),
            transitions=transitions,
            initial="ready",
            queued="model",
            auto_transitions=False,
        )

    @property
    def name(self) -> str:
        """The state in words: `in offload`, `at memory_released`."""
        return self._model.state

    def fire(self, kind: Kind, name: str = "", ticket: Ticket | None = None) -> None:
        """Let the rank do this.

        Raises:
            Refused: the kernel does not allow it, or the fence's ticket is not in hand.
        """
        move = self._place.get((kind, name)) or self._asked(kind, name)
        before = self._model.state
        self._ticket = ticket
        move.event.take(self._model)
        if self._model.state == before:
            who = self.plan.members[self.rank]
            raise Refused(f"{who} cannot {kind} {name!r} without a ticket of that fence")
        status, _, stage, at, pending, incarnation = move.after
        epoch = self.state.epoch + move.epochs
        self.state = RankState(status, epoch, stage, at, pending, incarnation)
        self._place = move.place

    def _asked(self, kind: Kind, name: str) -> _Move:
        """What the kernel says of this event here; it is asked once, a move has no other sequel."""
        after = advance(self.plan, self.rank, self.state, kind, name)
        event = _EVENTS.get(kind) or f"{kind} {name}".rstrip()
        if kind not in _EVENTS and kind not in (Kind.RECOVER, Kind.BEGIN):
            event = _in(self.state.stage, event)
        place = self._places.setdefault(_but_epoch(after), {})
        trigger = self._machine.events[event]
        assert isinstance(trigger, _Event)
        move = _Move(trigger, after, after.epoch - self.state.epoch, place)
        self._place[kind, name] = move
        return move

    def _row(self, stage: Stage, row: Row) -> dict[str, Any]:
        entry = _plain(_in(stage, row.event), [_in(stage, row.source)], _in(stage, row.target))
        if row.fence is not None:
            fence = row.fence
            entry["conditions"] = [lambda: self._holds(fence)]
        return entry

    def _holds(self, fence: str) -> bool:
        return self._ticket is not None and self._ticket.fence == fence

    @property
    def done(self) -> bool:
        return self.state.status is Status.FINISHED


def _but_epoch(state: RankState) -> tuple[object, ...]:
    status, _, stage, at, pending, incarnation = state
    return status, stage, at, pending, incarnation


def _in(stage: Stage, name: str) -> str:
    return name if stage is Stage.EPOCH else f"recover: {name}"


def _states(stage: Stage, table: tuple[Row, ...]) -> dict[str, None]:
    names = ["ready", *(row.target for row in table)]
    return dict.fromkeys(_in(stage, name) for name in names)


def _plain(trigger: str, source: list[str], dest: str) -> dict[str, Any]:
    return {"trigger": trigger, "source": source, "dest": dest}
