"""Whether an epoch of all ranks needs no closer look: its shapes are known, its tickets add up.

An epoch whose lines have a shape that was judged before, in which all tickets of a fence agree with
the judged list and with each rank's own arrival, cannot break a property: that is proved for the
plan once, from the fences alone (`rounds.unordered`), whatever the clocks say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from phasesync.audit.gist import Gist, Key, Shape
from phasesync.audit.rounds import is_separate, unordered
from phasesync.core.plan import Plan

__all__ = ("Healthy", "Tally")

_SHAPES_MAX: Final = 4096

_Program = tuple[str, ...]


class _Shapes:
    """The shapes that were judged, each under the program of who wrote it.

    `sure` knows them by the identity of what is equal to them: a shape is long, and most are the
    very same value.
    """

    def __init__(self) -> None:
        self._judged: set[tuple[_Program, Shape]] = set()
        self.sure: dict[int, tuple[_Program, Shape]] = {}

    def add(self, program: _Program, shape: Shape) -> None:
        if len(self._judged) < _SHAPES_MAX:
            self._judged.add((program, shape))

    def knows(self, program: _Program, shape: Shape) -> bool:
        if (program, shape) not in self._judged:
            return False
        if len(self.sure) >= _SHAPES_MAX:
            self.sure.clear()
        self.sure[id(shape)] = (program, shape)  # Held, so that its id stays its own.
        return True


class Healthy:
    """Knows one plan, the shapes that were judged under it, and who belongs to which scope.

    Ranks with the same program share their shapes, and a part is what can be judged apart from
    the rest: a replica, or a rank of none.
    """

    def __init__(self, plan: Plan) -> None:
        self.is_ordered = is_separate(plan) and not unordered(plan, 1)
        names = [str(member) for member in plan.members]
        programs: dict[_Program, _Program] = {}
        self._program: dict[str, _Program] = {}
        for name, steps in zip(names, plan.programs, strict=True):
            program = tuple(str(step[0]) for step in steps)
            self._program[name] = programs.setdefault(program, program)
        self._part: dict[str, int] = {name: -1 - at for at, name in enumerate(names)}
        parts = (part for _, groups in plan.groups for part in groups)
        for number, part in enumerate(parts):
            self._part.update((names[member], number) for member in part)
        self._scopes: dict[str, frozenset[str]] = {
            scope.name: frozenset(names[member] for member in scope.members)
            for scope in plan.scopes
        }
        self._shapes = _Shapes()

    @property
    def members(self) -> Iterable[str]:
        return self._program

    def sample(self, names: Sequence[str], chosen: Iterable[str]) -> list[int]:
        """The ranks without which those of `chosen` cannot be judged: their parts."""
        parts = {self._part[name] for name in chosen}
        return [at for at, name in enumerate(names) if self._part[name] in parts]

    def absent(self, names: Iterable[str]) -> dict[str, int]:
        """How many members of each scope are not among `names`."""
        here = frozenset(names)
        return {scope: len(members - here) for scope, members in self._scopes.items()}

    def learn(self, name: str, shape: Shape) -> None:
        """This shape was gone through line by line, and nothing was found."""
        self._shapes.add(self._program[name], shape)

    def tally(self) -> "Tally":
        """For one epoch: what its gists amount to."""
        return Tally(self._program, self._scopes, self._shapes)


class Tally:
    """One epoch of all ranks, its gists taken in as they are read.

    A fence is looked at and forgotten as soon as all members of its scope are there.
    """

    def __init__(
        self,
        program: Mapping[str, _Program],
        scopes: Mapping[str, frozenset[str]],
        shapes: _Shapes,
    ) -> None:
        self._program, self._scopes, self._shapes = program, scopes, shapes
        self._fences: dict[Key, _Fence] = {}
        self._joined: dict[Key, int] = {}
        self._is_odd = False
        self.names: dict[str, None] = {}
        self.unknown: dict[tuple[_Program, Shape], str] = {}

    def add(self, name: str, gist: Gist) -> None:
        """Take in what one rank says."""
        try:
            self._add(name, gist)
        except (TypeError, ValueError, KeyError):
            self._is_odd = True

    def is_sound(self) -> bool:
        """Whether all tickets are of what was judged, and that of all who belong."""
        return not self._is_odd and not self._fences and not self._joined

    def _add(self, name: str, gist: Gist) -> None:
        self._is_odd |= name in self.names
        self.names[name] = None
        program = self._program[name]
        sure = self._shapes.sure.get(id(gist.shape))
        if sure is None or sure[0] is not program:
            self._look_up(name, program, gist.shape)
        fences, scopes, incarnation = self._fences, self._scopes, gist.incarnation
        for key, rows, proof in gist.judged:
            fence = fences.get(key)
            if fence is None:
                fence = fences[key] = _Fence(len(scopes[key[0]]))
            self._is_odd |= fence.judged is not None
            fence.judged = (rows, proof)
        if len(gist.arrived) != len(gist.passed):
            self._is_odd = True
        for (key, seq, free), (gone, found, count) in zip(gist.arrived, gist.passed, strict=False):
            fence = fences.get(key)
            if fence is None:
                fence = fences[key] = _Fence(len(scopes[key[0]]))
            fence.came[name] = (incarnation, seq, free)
            ticket = fence.ticket
            if ticket is None:
                fence.ticket = (found, count)
            elif ticket[0] != found or ticket[1] != count:
                self._is_odd = True
            if gone != key:
                self._is_odd = True  # It went from one fence to another.
            if len(fence.came) == fence.members:
                self._is_odd |= not fence.adds_up(scopes[key[0]])
                del fences[key]
        for key, joined in gist.joined:
            members = len(self._scopes[key[0]])
            self._is_odd |= joined != members
            left = self._joined[key] = self._joined.get(key, members) - 1
            if not left:
                del self._joined[key]

    def _look_up(self, name: str, program: _Program, shape: Shape) -> None:
        """Whether a shape was judged before, where it is not the last that was looked up."""
        if not self._shapes.knows(program, shape):
            # Where the caller does the rest, it is told after the epoch's end, line by line.
            self._is_odd |= _done(shape) != program
            self.unknown.setdefault((program, shape), name)


def _done(shape: Shape) -> _Program:
    return tuple(str(row[1]) for row in shape if row[0] in ("phase.end", "fence.pass"))


class _Fence:
    """One fence instance: who came and passed, with which ticket, and what was judged."""

    __slots__ = ("came", "judged", "members", "ticket")

    def __init__(self, members: int) -> None:
        self.members = members
        self.came: dict[str, tuple[int, int, object]] = {}
        self.judged: tuple[list[list[Any]], str] | None = None
        self.ticket: tuple[str, int] | None = None

    def adds_up(self, members: frozenset[str]) -> bool:
        if self.judged is None or self.ticket is None or self.came.keys() != members:
            return False
        rows, proof = self.judged
        if self.ticket != (proof, len(rows)) or len(rows) != len(members):
            return False
        came = self.came
        return all(
            status == "ok" and came.get(who) == (incarnation, seq, free)
            for who, incarnation, status, seq, free in rows
        )
