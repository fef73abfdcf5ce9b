"""Processes that talk through a medium, step by step: every order of operations, every death.

A process is a generator of operations. Over a store they are those of `core.fence_keys`, the very
ones that a transport drives; at a coordinator they are requests to `core.fence_hub`, the very hub
that a coordinator asks. Generators cannot be copied, so a process is known by the replies it has
had and is replayed from its start when a new reply comes; each history is replayed once. Hubs are
known by the requests that they have had, in the same way.

Messages may be lost and come twice. Who loses one, or its answer, never hears of the medium again:
a real rank would raise that its store is lost, and acquire nothing.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from phasesync.checker.search import NO_BUDGET, Budget
from phasesync.core import wire
from phasesync.core.fence import Lost
from phasesync.core.fence_hub import Hub
from phasesync.core.fence_keys import (
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Operation,
    Put,
    Read,
    Tell,
    Wait,
)
from phasesync.core.fence_messages import (
    Answer,
    call_from_json,
    call_to_json,
    members_hash,
    verdict_bytes,
)
from phasesync.core.model import Arrival, FenceCall, FenceVerdict, Rank

__all__ = (
    "STORE",
    "Arrives",
    "Cast",
    "ComesBack",
    "Expires",
    "Explored",
    "Hears",
    "Loses",
    "Medium",
    "Note",
    "Process",
    "View",
    "coordinator",
    "explore_messages",
)


class Note(NamedTuple):
    """What a process remarks on its way; it takes no time, and invariants read it."""

    what: tuple[Any, ...]


class Process(NamedTuple):
    """A process by name. It starts at once, or when `when` says so of what is to be seen."""

    name: str
    life: Callable[[], Generator[Any, Any, Any]]
    when: "Callable[[View], bool] | None" = None
    may_crash: bool = False


class View(NamedTuple):
    """What invariants and `when` see: the notes of each process, who waits, ended or crashed, and
    who lost a message and is cut off since."""

    notes: Mapping[str, tuple[tuple[Any, ...], ...]]
    waits: frozenset[str]
    ended: frozenset[str]
    crashed: frozenset[str]
    cut: frozenset[str]


class Medium(NamedTuple):
    """What processes talk through: its first value, and what an operation makes of a value.

    `blocked` says whether an operation has to wait; `twice` are those that may come twice.
    """

    start: Any
    perform: Callable[[Any, Any], tuple[Any, Any]]
    blocked: Callable[[Any, Any], bool]
    twice: tuple[type, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who takes part, how many may die, how many messages come twice or get lost, what must hold.

    They talk through a store, unless another `medium` is given. `always` and `at_end` answer with
    what is wrong, or None.
    """

    processes: tuple[Process, ...]
    crashes: int = 0
    repeats: int = 0
    losses: int = 0
    medium: Medium | None = None
    always: Callable[[View], str | None]
    at_end: Callable[[View], str | None]


@dataclass(slots=True, kw_only=True)
class Explored:
    """How much was seen, and the first thing that was wrong with the way to it."""

    states: int = 0
    transitions: int = 0
    wrong: str | None = None
    path: tuple[str, ...] = ()
    bound: str | None = None
    ends: int = field(default=0)


class _Node(NamedTuple):
    """A process after some replies: what it asks next (None: it ended), and its notes."""

    operation: Operation | None
    notes: tuple[tuple[Any, ...], ...]


class _State(NamedTuple):
    values: Any
    nodes: tuple[int, ...]
    crashes: int
    repeats: int
    cut: frozenset[int] = frozenset()


_UNBORN = -1


class _Histories:
    """The nodes of one process, by number."""

    def __init__(self, life: Callable[[], Generator[Any, Any, Any]]) -> None:
        self.life = life
        self.nodes: list[_Node] = []
        self.replies: list[tuple[Any, ...]] = []
        self._after: dict[tuple[int, Any], int] = {}
        self._ended: dict[tuple[tuple[Any, ...], ...], int] = {}
        self._over: dict[tuple[tuple[Any, ...], ...], int] = {}
        self.first = self._add(())

    def after(self, node: int, reply: Any) -> int:
        """The node that the process comes to when it gets this reply."""
        found = self._after.get((node, reply))
        if found is None:
            found = self._after[node, reply] = self._add((*self.replies[node], reply))
        return found

    def ended(self, node: int) -> int:
        """The same for one that came to its end."""
        return self._ended.setdefault(self.nodes[node].notes, node)

    def over(self, node: int) -> int:
        """The node that stands for one at which the process does nothing more: of such a process
        only the notes count."""
        return self._over.setdefault(self.nodes[node].notes, node)

    def _add(self, replies: tuple[Any, ...]) -> int:
        self.nodes.append(self._replay(replies))
        self.replies.append(replies)
        return len(self.nodes) - 1

    def _replay(self, replies: tuple[Any, ...]) -> _Node:
        notes: list[tuple[Any, ...]] = []
        steps = self.life()
        reply: Any = None
        waiting = iter(replies)
        try:
            while True:
                asked = steps.send(reply)
                while isinstance(asked, Note | Tell):
                    if isinstance(asked, Note):
                        notes.append(asked.what)
                    asked = steps.send(None)
                try:
                    reply = next(waiting)
                except StopIteration:
                    return _Node(asked, tuple(notes))
        except StopIteration:
            return _Node(None, tuple(notes))


def _append(values: dict[str, bytes], op: Append) -> None:
    values[op.key] = values.get(op.key, b"") + op.value


def _add(values: dict[str, bytes], op: Add) -> int:
    count = int(values.get(op.key, b"0")) + op.amount
    values[op.key] = str(count).encode()
    return count


def _count(values: dict[str, bytes], op: Count) -> None:
    values[op.key] = str(int(values.get(op.key, b"0")) + op.amount).encode()


def _put(values: dict[str, bytes], op: Put) -> None:
    values[op.key] = op.value


def _compare_set(values: dict[str, bytes], op: CompareSet) -> bytes:
    return values.setdefault(op.key, op.value)


def _delete(values: dict[str, bytes], op: Delete) -> None:
    values.pop(op.key, None)


_PERFORM: dict[type, Callable[[dict[str, bytes], Any], Any]] = {
    Append: _append,
    Add: _add,
    Count: _count,
    Put: _put,
    Get: lambda values, op: values.get(op.key, b""),
    Wait: lambda values, op: values[op.key],
    Read: lambda values, op: values.get(op.key),
    CompareSet: _compare_set,
    Delete: _delete,
}


def _stored(values: tuple[tuple[str, bytes], ...], op: Operation) -> tuple[Any, Any]:
    after = dict(values)
    reply = _PERFORM[type(op)](after, op)
    return tuple(sorted(after.items())), reply


#: A key-value store; only what changes it twice when it comes twice is worth repeating.
STORE = Medium(
    start=(),
    perform=_stored,
    blocked=lambda values, op: isinstance(op, Wait) and op.key not in dict(values),
    twice=(Append, Add, Count),
)


# --- A coordinator -----------------------------------------------------------------------------


class Arrives(NamedTuple):
    """A rank's arrival comes to the coordinator."""

    call: FenceCall
    arrival: Arrival


class Hears(NamedTuple):
    """The answer to that arrival, once there is one: the verdict, and whether it was judged."""

    call: FenceCall
    arrival: Arrival


class Expires(NamedTuple):
    """The deadline of a rank that waits has passed."""

    call: FenceCall
    by: Rank


class Loses(NamedTuple):
    """A rank is found gone."""

    lost: Lost


class ComesBack(NamedTuple):
    """A later incarnation of a rank connects."""

    rank: Rank
    incarnation: int


def _asked(hub: Hub, request: Any) -> None:
    match request:
        case Arrives(call, arrival):
            hub.arrive(_sent(call), arrival)
        case Expires(call, by):
            hub.expire(hub.instance(call), by)
        case Loses(lost):
            hub.lose(lost)
        case ComesBack(rank, incarnation):
            hub.come_back(rank, incarnation)
        case _:
            raise AssertionError(f"a hub is not asked {request!r}")


def _sent(call: FenceCall) -> FenceCall:
    """The call as it comes out at the other end of a connection."""
    members = members_hash(call.members)
    said = wire.decode(wire.encode(call_to_json(call, members)))
    return call_from_json(said, call.key.run, call.key.attempt, {members: call.members})


def _hub(history: tuple[Any, ...]) -> Hub:
    hub = Hub()
    for request in history:
        _asked(hub, request)
    return hub


def _answer(history: tuple[Any, ...], hears: Hears) -> tuple[FenceVerdict, bool] | None:
    """What the rank reads on its connection, once there is anything to read."""
    instance = _hub(history).instance(hears.call)
    verdict = instance.answer_for(hears.arrival.rank)
    if verdict is None:
        return None
    judged = instance.judged(hears.arrival)
    head = Answer(1, None, judged, False, None).head()
    answer = Answer.decode(head + b"\n" + verdict_bytes(verdict, with_arrivals=not judged))
    return answer.verdict(hears.call), answer.judged


def coordinator() -> Medium:
    """A coordinator: its value is every request that it has had."""
    answer = lru_cache(maxsize=100_000)(_answer)

    def perform(history: tuple[Any, ...], op: Any) -> tuple[Any, Any]:
        return (history, answer(history, op)) if isinstance(op, Hears) else ((*history, op), None)

    def blocked(history: tuple[Any, ...], op: Any) -> bool:
        return isinstance(op, Hears) and answer(history, op) is None

    return Medium(start=(), perform=perform, blocked=blocked, twice=(Arrives,))


# --- The exploration ---------------------------------------------------------------------------


def explore_messages(cast: Cast, budget: Budget = NO_BUDGET) -> Explored:
    """Every order of operations, with a crash between any two as often as the cast allows."""
    return _Explorer(cast).run(budget)


class _Explorer:
    """One exploration; a state is the store's values and a node of each process."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.medium = cast.medium or STORE
        self.histories = tuple(_Histories(each.life) for each in cast.processes)

    def run(self, budget: Budget) -> Explored:
        starts = tuple(
            _UNBORN if process.when else history.first
            for process, history in zip(self.cast.processes, self.histories, strict=True)
        )
        first = _State(self.medium.start, starts, 0, 0)
        parents: dict[_State, tuple[_State, str] | None] = {first: None}
        level, found = [first], Explored()
        while level:
            following: list[_State] = []
            for state in level:
                view = self.view(state)
                moves = list(self.moves(state, view))
                wrong = self.cast.always(view)
                if not moves:
                    found.ends += 1
                    wrong = wrong or self.cast.at_end(view)
                if wrong is not None:
                    found.wrong, found.path = wrong, _path(parents, state)
                    found.states = len(parents)
                    return found
                found.transitions += len(moves)
                for label, after in moves:
                    if after not in parents:
                        parents[after] = (state, label)
                        following.append(after)
            if (bound := budget.over(len(parents))) is not None:
                found.bound = bound
                break
            level = following
        found.states = len(parents)
        return found

    def view(self, state: _State) -> View:
        notes, waits, ended, crashed, cut = {}, [], [], [], []
        for at, (process, history, node) in enumerate(
            zip(self.cast.processes, self.histories, state.nodes, strict=True)
        ):
            if node == _UNBORN:
                continue
            here = history.nodes[node if node >= 0 else -node - 3]
            notes[process.name] = here.notes
            if node < 0:
                crashed.append(process.name)
            elif at in state.cut:
                cut.append(process.name)
            elif here.operation is None:
                ended.append(process.name)
            elif self.medium.blocked(state.values, here.operation):
                waits.append(process.name)
        return View(notes, *map(frozenset, (waits, ended, crashed, cut)))

    def moves(self, state: _State, view: View) -> Iterator[tuple[str, _State]]:
        for at, (process, history) in enumerate(
            zip(self.cast.processes, self.histories, strict=True)
        ):
            node = state.nodes[at]
            if node == _UNBORN:
                if process.when is not None and process.when(view):
                    yield f"{process.name} starts", _with(state, at, history.first)
                continue
            if node < 0 or at in state.cut or (operation := history.nodes[node].operation) is None:
                continue
            if process.may_crash and state.crashes < self.cast.crashes:
                # The node is kept below zero: what the dead one had noted still counts.
                dead = _with(state, at, -history.over(node) - 3)
                yield f"{process.name} crashes", dead._replace(crashes=state.crashes + 1)
            if process.name in view.waits:
                continue
            label = f"{process.name} {type(operation).__name__} {getattr(operation, 'key', '')}"
            label = label.rstrip()
            after = self._performed(state, at, operation, times=1)
            yield label, after
            if process.may_crash and len(state.cut) < self.cast.losses:
                cut = state.cut | {at}
                lost = _with(state, at, history.over(node))
                yield f"{label} lost", lost._replace(cut=cut)
                # What its invariants read is what came of it, which it does not act on.
                over = _with(after, at, history.over(after.nodes[at]))
                yield f"{label} unanswered", over._replace(cut=cut)
            if isinstance(operation, self.medium.twice) and state.repeats < self.cast.repeats:
                twice = self._performed(state, at, operation, times=2)
                yield f"{label} twice", twice._replace(repeats=state.repeats + 1)

    def _performed(self, state: _State, at: int, operation: Any, *, times: int) -> _State:
        values, reply = state.values, None
        for _ in range(times):
            values, reply = self.medium.perform(values, operation)
        history = self.histories[at]
        node = history.after(state.nodes[at], reply)
        if history.nodes[node].operation is None:
            node = history.ended(node)
        return _with(state._replace(values=values), at, node)


def _with(state: _State, at: int, node: int) -> _State:
    return state._replace(nodes=(*state.nodes[:at], node, *state.nodes[at + 1 :]))


def _path(parents: Mapping[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    labels: list[str] = []
    while (came := parents[state]) is not None:
        state, label = came
        labels.append(label)
    return tuple(reversed(labels))
