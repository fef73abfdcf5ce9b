"""A protocol under one assignment of its options, and who may meet whom in it.

Two phases *meet* where different ranks may be in them with a hand on one device at the same time,
if no fence keeps them apart. Which fence would is the scope that this file computes.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from phasesync.core.condition import Condition, evaluate
from phasesync.core.kernel import SHARED
from phasesync.core.model import OptionValue, ResourceName, RoleName
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    WORLD,
    FenceDecl,
    Invariant,
    InvariantKind,
    PhaseDecl,
    Protocol,
    StepDecl,
    Verb,
)

__all__ = ("MAPPING", "Access", "View")

MAPPING = frozenset((Verb.ACQUIRES, Verb.RELEASES, Verb.ENSURES))


class Access(NamedTuple):
    """A phase's hand on a resource; `at` is the phase's place in its role's program."""

    phase: PhaseDecl
    verb: Verb
    resource: ResourceName
    reach: str
    actor: str  # the group whose leader acts, or `device` where each rank does
    at: int
    order: tuple[int, int, int]

    @property
    def shared(self) -> bool:
        return self.verb in SHARED


class View:
    """The steps that are left under these options, and their order."""

    def __init__(
        self,
        protocol: Protocol,
        options: Mapping[str, OptionValue],
        steps: tuple[StepDecl, ...],
        *,
        cyclic: bool = True,
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.cyclic = cyclic
        self.steps = tuple(step for step in steps if self.true(step.when, absent=True))
        self.programs: dict[RoleName, tuple[StepDecl, ...]] = {
            role: tuple(step for step in self.steps if step.role == role)
            for role in protocol.active_roles
        }

    @property
    def under(self) -> str:
        """The options that differ from their defaults."""
        return ", ".join(
            f"{option.name}={_word(self.options[option.name])}"
            for option in self.protocol.options
            if self.options[option.name] != option.default
        )

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All that the options decide; views of one shape have the same findings."""
        return (
            tuple(step.name for step in self.steps),
            tuple((group.name, self.size(group.name)) for group in self.protocol.groups),
            tuple(self.starts_mapped(each.name) for each in self.protocol.resources),
            tuple(self.scope(step) for step in self.steps if isinstance(step, FenceDecl)),
            self.never,
            tuple(each for each in self.invariants if each.kind is not InvariantKind.NEVER),
        )

    def true(self, condition: Condition | None, *, absent: bool) -> bool:
        return absent if condition is None else bool(evaluate(condition, self.options))

    def size(self, group: str) -> int:
        decl = next(group_ for group_ in self.protocol.groups if group_.name == group)
        size = self.options[decl.size] if isinstance(decl.size, str) else decl.size
        assert isinstance(size, int)
        return size

    def scope(self, fence: FenceDecl) -> str:
        """The fence's scope; an option that holds one is looked up."""
        return str(self.options.get(fence.scope, fence.scope))

    def starts_mapped(self, resource: ResourceName) -> bool:
        decl = next(decl for decl in self.protocol.resources if decl.name == resource)
        return self.true(decl.start, absent=False)

    @cached_property
    def never(self) -> tuple[tuple[ResourceName, ...], ...]:
        return tuple(each.resources for each in self.invariants if each.kind is InvariantKind.NEVER)

    @cached_property
    def invariants(self) -> tuple[Invariant, ...]:
        """The invariants that these options leave."""
        return tuple(each for each in self.protocol.invariants if self.true(each.when, absent=True))

    # ------------------------------------------------------------------ who touches what

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """All hands on memory in the order of the program."""
        found = (
            access
            for number, (_, program) in enumerate(self.programs.items())
            for access in self._of(number, program)
        )
        return tuple(sorted(found, key=lambda access: access.order))

    def _of(self, number: int, program: tuple[StepDecl, ...]) -> Iterator[Access]:
        passed = 0
        for at, step in enumerate(program):
            if isinstance(step, FenceDecl):
                passed += self.scope(step) == WORLD
                continue
            actor = self._actor(step)
            for effect in step.effects:
                reach = self._small(effect.reach)
                if reach == DEVICE:
                    reach = actor  # a leader's hand is on all devices of its group
                order = (passed, number, at)
                yield Access(step, effect.verb, effect.resource, reach, actor, at, order)

    def _actor(self, phase: PhaseDecl) -> str:
        if phase.by is None:
            return DEVICE
        groups = [group.name for group in self.protocol.groups if group.of == phase.role]
        reached = [effect.reach for effect in phase.effects if effect.reach in groups]
        return self._small((reached or groups)[0])

    def _small(self, reach: str) -> str:
        """A group of one is its device."""
        if reach in (DEVICE, EVERYWHERE):
            return reach
        return reach if self.size(reach) > 1 else DEVICE

    # --------------------------------------------------------------- who meets whom, where

    def meets(self, one: Access, two: Access) -> str | None:
        """The scope of a fence that would keep them apart; None where they are one rank's."""
        if one.phase.role == two.phase.role:
            spans = {one.reach, two.reach, one.actor, two.actor}
            if len(spans) == 1 and spans != {EVERYWHERE}:
                return None
            groups = spans - {DEVICE}
            if len(groups) == 1 and groups != {EVERYWHERE}:
                return groups.pop()
        return WORLD

    def between(self, first: Access, then: Access, scope: str) -> FenceDecl | None:
        """The first fence of this scope or wider that stands between two accesses."""
        return next(self._between(first, then, scope), None)

    def synced(self, first: Access, then: Access, scope: str) -> bool:
        """Whether a fence between finds the device synchronised since `first`."""
        program = self.programs[first.phase.role]
        for fence in self._between(first, then, scope):
            at = program.index(fence)
            later = program[first.at + 1 :] if at < first.at else program[first.at + 1 : at + 1]
            wrapped = program[: at + 1] if at < first.at else ()
            if any(
                isinstance(step, FenceDecl) and "device_synchronised" in step.established
                for step in (*later, *wrapped)
            ):
                return True
        return False

    def _between(self, first: Access, then: Access, scope: str) -> Iterator[FenceDecl]:
        mine, other = self.programs[first.phase.role], self.programs[then.phase.role]
        names = {step.name: at for at, step in enumerate(other) if isinstance(step, FenceDecl)}
        fences = [
            (at, names[step.name], step)
            for at, step in enumerate(mine)
            if isinstance(step, FenceDecl)
            and step.name in names
            and self.scope(step) in (scope, WORLD)
        ]
        after = [each for each in fences if each[0] > first.at]
        before = [each for each in fences if each[1] < then.at]
        if self.goes_on(first, then):
            yield from (fence for at, _, fence in after if (at, _, fence) in before)
        elif self.cyclic:
            yield from (fence for _, _, fence in (*after, *before))

    def goes_on(self, first: Access, then: Access) -> bool:
        """Whether `then` comes after `first` within the epoch, not in the next one."""
        return first.order < then.order

    def last(self, resource: ResourceName, before: Access) -> Access | None:
        """What last mapped or unmapped a resource before an access, the epoch before included."""
        found = [
            access
            for access in self.accesses
            if access.resource == resource and access.verb in MAPPING
        ]
        earlier = [access for access in found if access.order < before.order]
        if earlier:
            return earlier[-1]
        return found[-1] if found and self.cyclic else None


def _word(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
