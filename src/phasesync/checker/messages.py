"""Processes that talk through a store, step by step: every order of their operations, every death.

A process is a generator of operations (`core.fence_keys`), the very one that a transport drives on
a real store. Generators cannot be copied, so a process is known by the replies it has had and is
replayed from its start when a new reply comes; each history is replayed once.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from phasesync.checker.search import NO_BUDGET, Budget
from phasesync.core.fence_keys import (
    Add,
    Append,
    CompareSet,
    Delete,
    Get,
    Operation,
    Put,
    Read,
    Tell,
    Wait,
)

__all__ = ("Cast", "Explored", "Note", "Process", "View", "explore_messages")

Values: TypeAlias = tuple[tuple[str, bytes], ...]


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
    """What invariants and `when` see: the notes of each process, who waits, ended or crashed."""

    notes: Mapping[str, tuple[tuple[Any, ...], ...]]
    waits: frozenset[str]
    ended: frozenset[str]
    crashed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who takes part, how many may die, whether a message may come twice, and what must hold.

    `always` and `at_end` answer with what is wrong, or None.
    """

    processes: tuple[Process, ...]
    crashes: int = 0
    repeats: int = 0
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
    values: Values
    nodes: tuple[int, ...]
    crashes: int
    repeats: int


_UNBORN = -1


class _Histories:
    """The nodes of one process, by number."""

    def __init__(self, life: Callable[[], Generator[Any, Any, Any]]) -> None:
        self.life = life
        self.nodes: list[_Node] = []
        self.replies: list[tuple[Any, ...]] = []
        self._after: dict[tuple[int, Any], int] = {}
        self.first = self._add(())

    def after(self, node: int, reply: Any) -> int:
        """The node that the process comes to when it gets this reply."""
        found = self._after.get((node, reply))
        if found is None:
            found = self._after[node, reply] = self._add((*self.replies[node], reply))
        return found

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


def _put(values: dict[str, bytes], op: Put) -> None:
    values[op.key] = op.value


def _compare_set(values: dict[str, bytes], op: CompareSet) -> bytes:
    return values.setdefault(op.key, op.value)


def _delete(values: dict[str, bytes], op: Delete) -> None:
    values.pop(op.key, None)


_PERFORM: dict[type, Callable[[dict[str, bytes], Any], Any]] = {
    Append: _append,
    Add: _add,
    Put: _put,
    Get: lambda values, op: values[op.key],
    Wait: lambda values, op: values[op.key],
    Read: lambda values, op: values.get(op.key),
    CompareSet: _compare_set,
    Delete: _delete,
}


def explore_messages(cast: Cast, budget: Budget = NO_BUDGET) -> Explored:
    """Every order of operations, with a crash between any two as often as the cast allows."""
    return _Explorer(cast).run(budget)


class _Explorer:
    """One exploration; a state is the store's values and a node of each process."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.histories = tuple(_Histories(each.life) for each in cast.processes)

    def run(self, budget: Budget) -> Explored:
        starts = tuple(
            _UNBORN if process.when else history.first
            for process, history in zip(self.cast.processes, self.histories, strict=True)
        )
        first = _State((), starts, 0, 0)
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
        keys = dict(state.values)
        notes, waits, ended, crashed = {}, [], [], []
        for process, history, node in zip(
            self.cast.processes, self.histories, state.nodes, strict=True
        ):
            if node == _UNBORN:
                continue
            if node < 0:
                crashed.append(process.name)
            here = history.nodes[node if node >= 0 else -node - 3]
            notes[process.name] = here.notes
            if here.operation is None:
                ended.append(process.name)
            elif isinstance(here.operation, Wait) and here.operation.key not in keys:
                waits.append(process.name)
        return View(notes, frozenset(waits), frozenset(ended), frozenset(crashed))

    def moves(self, state: _State, view: View) -> Iterator[tuple[str, _State]]:
        for at, (process, history) in enumerate(
            zip(self.cast.processes, self.histories, strict=True)
        ):
            node = state.nodes[at]
            if node == _UNBORN:
                if process.when is not None and process.when(view):
                    yield f"{process.name} starts", _with(state, at, history.first)
                continue
            if node < 0 or (operation := history.nodes[node].operation) is None:
                continue
            if process.may_crash and state.crashes < self.cast.crashes:
                # The node is kept below zero: what the dead one had noted still counts.
                dead = _with(state, at, -node - 3)
                yield f"{process.name} crashes", dead._replace(crashes=state.crashes + 1)
            if process.name in view.waits:
                continue
            label = f"{process.name} {type(operation).__name__} {getattr(operation, 'key', '')}"
            yield label, self._performed(state, at, operation, times=1)
            if isinstance(operation, Append) and state.repeats < self.cast.repeats:
                twice = self._performed(state, at, operation, times=2)
                yield f"{label} twice", twice._replace(repeats=state.repeats + 1)

    def _performed(self, state: _State, at: int, operation: Operation, *, times: int) -> _State:
        values = dict(state.values)
        reply: Any = None
        for _ in range(times):
            reply = _PERFORM[type(operation)](values, operation)
        node = self.histories[at].after(state.nodes[at], reply)
        return _with(state._replace(values=tuple(sorted(values.items()))), at, node)


def _with(state: _State, at: int, node: int) -> _State:
    return state._replace(nodes=(*state.nodes[:at], node, *state.nodes[at + 1 :]))


def _path(parents: Mapping[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    labels: list[str] = []
    while (came := parents[state]) is not None:
        state, label = came
        labels.append(label)
    return tuple(reversed(labels))
