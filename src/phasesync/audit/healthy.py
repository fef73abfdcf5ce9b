"""Whether an epoch of all ranks needs no closer look: its shapes are known, its tickets add up.

An epoch whose lines have a shape that was judged before, in which all tickets of a fence agree with
the judged list and with each rank's own arrival, cannot break a property: that is proved for the
plan once, from the fences alone (`rounds.unordered`), whatever the clocks say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from phasesync.audit.gist import Gist, Key, Shape
from phasesync.audit.rounds import is_separate, unordered
from phasesync.core.plan import Plan

__all__ = ("Healthy",)

_SHAPES_MAX: Final = 4096

_Program = tuple[str, ...]


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
        self._shapes: set[tuple[_Program, Shape]] = set()

    @property
    def members(self) -> Iterable[str]:
        return self._program

    def unknown(self, names: Sequence[str], gists: Sequence[Gist]) -> list[int]:
        """Who has a shape that was never judged: the first of each."""
        found: dict[tuple[_Program, Shape], int] = {}
        for at, (name, gist) in enumerate(zip(names, gists, strict=True)):
            key = (self._program[name], gist.shape)
            if key not in self._shapes:
                found.setdefault(key, at)
        return list(found.values())

    def sample(self, names: Sequence[str], chosen: Iterable[int]) -> list[int]:
        """The ranks without which those of `chosen` cannot be judged: their parts."""
        parts = {self._part[names[at]] for at in chosen}
        return [at for at, name in enumerate(names) if self._part[name] in parts]

    def absent(self, names: Iterable[str]) -> dict[str, int]:
        """How many members of each scope are not among `names`."""
        here = frozenset(names)
        return {scope: len(members - here) for scope, members in self._scopes.items()}

    def learn(self, name: str, shape: Shape) -> None:
        """This shape was gone through line by line, and nothing was found."""
        if len(self._shapes) < _SHAPES_MAX:
            self._shapes.add((self._program[name], shape))

    def adds_up(self, names: Sequence[str], gists: Sequence[Gist]) -> bool:
        """Whether all tickets of a round are of what was judged, and that of all who belong."""
        tickets: dict[Key, tuple[str, int]] = {}
        arrived: dict[Key, dict[str, tuple[int, int, object]]] = {}
        joined: dict[Key, list[int]] = {}
        for name, gist in zip(names, gists, strict=True):
            incarnation = gist.incarnation
            for key, seq, free in gist.arrived:
                known = arrived.get(key)
                if known is None:
                    known = arrived[key] = {}
                known[name] = (incarnation, seq, free)
            for key, found, count in gist.passed:
                ticket = (found, count)
                if tickets.setdefault(key, ticket) != ticket:
                    return False
            for key, count in gist.joined:
                joined.setdefault(key, []).append(count)
        judged = {key: (rows, found) for gist in gists for key, rows, found in gist.judged}
        return self._all_came(tickets, arrived, judged) and all(
            self._scopes.get(scope) is not None
            and counts == [len(self._scopes[scope])] * len(counts)
            and len(counts) == len(self._scopes[scope])
            for (scope, _), counts in joined.items()
        )

    def _all_came(
        self,
        tickets: Mapping[Key, tuple[str, int]],
        arrived: Mapping[Key, Mapping[str, tuple[int, int, object]]],
        judged: Mapping[Key, tuple[list[list[object]], str]],
    ) -> bool:
        if tickets.keys() != judged.keys() or tickets.keys() != arrived.keys():
            return False
        for key, (found, count) in tickets.items():
            rows, proof = judged[key]
            here = arrived[key]
            members = self._scopes.get(key[0])
            if members is None or proof != found or count != len(rows) or here.keys() != members:
                return False
            if len(rows) != len(members):
                return False
            for who, incarnation, status, seq, free in rows:
                if status != "ok" or here.get(str(who)) != (incarnation, seq, free):
                    return False
        return True
