"""Processes that talk through a medium, step by step: every order of operations, every death.

A process is a generator of operations. Over a store they are those of `core.fence_keys`, the very
ones that a transport drives; at a coordinator they are requests to `core.fence_hub`, the very hub
that a coordinator asks. Generators cannot be copied, so a process is known by the replies it has
had and is replayed from its start when a new reply comes; each history is replayed once. Hubs are
known by the requests that they have had, in the same way.

Messages may be lost and come twice. Who loses one, or its answer, never hears of the medium again:
a real rank would raise that its store is lost, and acquire nothing.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

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
    "Moment",
    "Note",
    "Process",
    "View",
    "coordinator",
    "explore_messages",
)


class Note(NamedTuple):
    """What a process remarks on its way; it takes no time, and invariants read it."""

    what: tuple[Any, ...]


#: Whether a process may crash (or lose a message): of what it has noted, and what it asks next.
Moment: TypeAlias = Callable[[tuple[tuple[Any, ...], ...], Any], bool]


class Process(NamedTuple):
    """A process by name. It starts at once, or when `when` says so of what is to be seen.

    It may crash between any two operations, or at the moments that `may_crash` chooses.
    """

    name: str
    life: Callable[[], Generator[Any, Any, Any]]
    when: "Callable[[View], bool] | None" = None
    may_crash: bool | Moment = False


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
    value: int
    nodes: tuple[int, ...]
    crashes: int
    repeats: int
    cut: frozenset[int]


_UNBORN = -1
_CRASHED, _CUT, _ENDED, _WAITS, _GOES_ON = range(5)
#: Of each process how it stands (unborn or one of the above), and the number of its notes.
_Look: TypeAlias = tuple[tuple[int, int], ...]


class _Seen(NamedTuple):
    """What is to be said of all states of one look: who may start now, and what is wrong."""

    view: View
    born: frozenset[int]
    wrong: str | None


class _Histories:
    """The nodes of one process, by number."""

    def __init__(self, life: Callable[[], Generator[Any, Any, Any]]) -> None:
        self.life = life
        self.nodes: list[_Node] = []
        self.replies: list[tuple[Any, ...]] = []
        self.noted: list[int] = []  # Of each node the number of its notes,
        self.notes: list[tuple[tuple[Any, ...], ...]] = []  # which are these.
        self._number: dict[tuple[tuple[Any, ...], ...], int] = {}
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
        node = self._replay(replies)
        self.nodes.append(node)
        self.replies.append(replies)
        self.noted.append(self._number.setdefault(node.notes, len(self.notes)))
        if self.noted[-1] == len(self.notes):
            self.notes.append(node.notes)
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


class _Move(NamedTuple):
    """A way out of a state: the process that takes it, and what becomes of it on the way."""

    at: int
    how: str


class _Explorer:
    """One exploration. A state is the medium's value and a node of each process.

    Values are known by number, so that what an operation makes of one is worked out once; and what
    invariants see is known by the notes and the standing of each process, so that they are asked
    once about all states that look alike.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.medium = cast.medium or STORE
        self.histories = tuple(_Histories(each.life) for each in cast.processes)
        self.values: list[Any] = []
        self._number: dict[Any, int] = {}
        self._performed: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._blocked: dict[tuple[int, int, int], bool] = {}
        self._looks: dict[_Look, _Seen] = {}

    def run(self, budget: Budget) -> Explored:
        starts = tuple(
            _UNBORN if process.when else history.first
            for process, history in zip(self.cast.processes, self.histories, strict=True)
        )
        first = _State(self._numbered(self.medium.start), starts, 0, 0, frozenset())
        parents: dict[_State, tuple[_State, _Move] | None] = {first: None}
        level, found = [first], Explored()
        while level:
            following: list[_State] = []
            for state in level:
                look = self._look(state)
                seen = self._looks.get(look) or self._seen(look)
                moves = self._moves(state, look, seen)
                wrong = seen.wrong
                if not moves:
                    found.ends += 1
                    wrong = wrong or self.cast.at_end(seen.view)
                if wrong is not None:
                    found.wrong, found.path = wrong, self._path(parents, state)
                    found.states = len(parents)
                    return found
                found.transitions += len(moves)
                for move, after in moves:
                    if after not in parents:
                        parents[after] = (state, move)
                        following.append(after)
            if (bound := budget.over(len(parents))) is not None:
                found.bound = bound
                break
            level = following
        found.states = len(parents)
        return found

    def _numbered(self, value: Any) -> int:
        number = self._number.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def _look(self, state: _State) -> _Look:
        """How each process stands, and the number of its notes."""
        found: list[tuple[int, int]] = []
        for at, node in enumerate(state.nodes):
            history = self.histories[at]
            if node == _UNBORN:
                found.append((_UNBORN, 0))
            elif node < 0:
                found.append((_CRASHED, history.noted[-node - 3]))
            elif at in state.cut:
                found.append((_CUT, history.noted[node]))
            elif history.nodes[node].operation is None:
                found.append((_ENDED, history.noted[node]))
            else:
                waits = self._waits(state.value, at, node)
                found.append((_WAITS if waits else _GOES_ON, history.noted[node]))
        return tuple(found)

    def _waits(self, value: int, at: int, node: int) -> bool:
        key = (value, at, node)
        found = self._blocked.get(key)
        if found is None:
            operation = self.histories[at].nodes[node].operation
            found = self._blocked[key] = self.medium.blocked(self.values[value], operation)
        return found

    def _seen(self, look: _Look) -> _Seen:
        """What invariants and `when` say about all states that look like this."""
        standing: dict[int, list[str]] = {}
        notes: dict[str, tuple[tuple[Any, ...], ...]] = {}
        for (stands, noted), process, history in zip(
            look, self.cast.processes, self.histories, strict=True
        ):
            standing.setdefault(stands, []).append(process.name)
            if stands != _UNBORN:
                notes[process.name] = history.notes[noted]
        groups = (frozenset(standing.get(each, ())) for each in (_WAITS, _ENDED, _CRASHED, _CUT))
        view = View(notes, *groups)
        born = frozenset(
            at
            for at, (process, (stands, _)) in enumerate(zip(self.cast.processes, look, strict=True))
            if stands == _UNBORN and process.when is not None and process.when(view)
        )
        found = self._looks[look] = _Seen(view, born, self.cast.always(view))
        return found

    def _moves(self, state: _State, look: _Look, seen: _Seen) -> list[tuple[_Move, _State]]:
        cast, found = self.cast, []
        for at, (stands, _) in enumerate(look):
            if stands not in (_UNBORN, _WAITS, _GOES_ON):
                continue
            node, history = state.nodes[at], self.histories[at]
            if stands == _UNBORN:
                if at in seen.born:
                    found.append((_Move(at, "starts"), _with(state, at, history.first)))
                continue
            mortal = self._is_mortal(at, node)
            if mortal and state.crashes < cast.crashes:
                # The node is kept below zero: what the dead one had noted still counts.
                dead = _with(state, at, -history.over(node) - 3, crashes=1)
                found.append((_Move(at, "crashes"), dead))
            if stands == _WAITS:
                continue
            value, next_node = self._perform(state.value, at, node)
            found.append((_Move(at, ""), _with(state, at, next_node, value=value)))
            if mortal and len(state.cut) < cast.losses:
                cut = state.cut | {at}
                lost = _with(state, at, history.over(node), cut=cut)
                found.append((_Move(at, "lost"), lost))
                # What its invariants read is what came of it, which it does not act on.
                over = _with(state, at, history.over(next_node), value=value, cut=cut)
                found.append((_Move(at, "unanswered"), over))
            operation = history.nodes[node].operation
            if state.repeats < cast.repeats and isinstance(operation, self.medium.twice):
                again, next_node = self._perform(value, at, node)
                twice = _with(state, at, next_node, value=again, repeats=1)
                found.append((_Move(at, "twice"), twice))
        return found

    def _is_mortal(self, at: int, node: int) -> bool:
        mortal = self.cast.processes[at].may_crash
        here = self.histories[at].nodes[node]
        return mortal(here.notes, here.operation) if callable(mortal) else mortal

    def _perform(self, value: int, at: int, node: int) -> tuple[int, int]:
        """The value, and the node of the process, after what it asks at its node."""
        key = (value, at, node)
        found = self._performed.get(key)
        if found is None:
            history = self.histories[at]
            operation = history.nodes[node].operation
            after, reply = self.medium.perform(self.values[value], operation)
            next_node = history.after(node, reply)
            if history.nodes[next_node].operation is None:
                next_node = history.ended(next_node)
            found = self._performed[key] = (self._numbered(after), next_node)
        return found

    def _path(
        self, parents: Mapping[_State, tuple[_State, _Move] | None], state: _State
    ) -> tuple[str, ...]:
        said: list[str] = []
        while (came := parents[state]) is not None:
            state, move = came
            said.append(self._said(state, move))
        return tuple(reversed(said))

    def _said(self, state: _State, move: _Move) -> str:
        name = self.cast.processes[move.at].name
        if move.how in ("starts", "crashes"):
            return f"{name} {move.how}"
        operation = self.histories[move.at].nodes[state.nodes[move.at]].operation
        parts = (name, type(operation).__name__, getattr(operation, "key", ""), move.how)
        return " ".join(part for part in parts if part)


def _with(
    state: _State,
    at: int,
    node: int,
    *,
    value: int | None = None,
    crashes: int = 0,
    repeats: int = 0,
    cut: frozenset[int] | None = None,
) -> _State:
    return _State(
        state.value if value is None else value,
        (*state.nodes[:at], node, *state.nodes[at + 1 :]),
        state.crashes + crashes,
        state.repeats + repeats,
        state.cut if cut is None else cut,
    )
