"""A plan: a protocol with its options, members and devices settled, immutable for an epoch.

`when:` is resolved here, once. What is left is a program of steps a rank, made of actions that
touch numbered memory cells and fences that name their members, so that no driver looks at an
option again. The digest covers all of it and travels with every arrival and every journal line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from phasesync.core import wire
from phasesync.core.condition import Condition, evaluate
from phasesync.core.model import (
    Device,
    Digest,
    GroupName,
    OptionValue,
    Rank,
    ResourceName,
    RoleName,
)
from phasesync.core.protocol import (
    DEVICE,
    ELSEWHERE,
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
from phasesync.core.steps import (
    FIRST_FROM_S,
    FIRST_TIMES,
    PLAN,
    STOPPED,
    Act,
    Defect,
    Plan,
    Scope,
    Step,
    Together,
    Touch,
    Wait,
)
from phasesync.errors import PlanError

__all__ = (
    "FIRST_FROM_S",
    "PLAN",
    "STOPPED",
    "Act",
    "Defect",
    "Plan",
    "Scope",
    "Step",
    "Together",
    "Touch",
    "Wait",
    "resolve",
    "settle",
    "text_digest",
)


def settle(
    protocol: Protocol, options: Mapping[str, OptionValue] | None = None
) -> dict[str, OptionValue]:
    """All options with their values, defaults filled in.

    Raises:
        PlanError: an option is unknown, of the wrong type or out of range.
    """
    given = dict(options or {})
    known = {decl.name: decl for decl in protocol.options}
    for name in given:
        if name not in known:
            have = ", ".join(known) or "none"
            raise PlanError(
                f"protocol {protocol.name!r} has no option {name!r}; options are: {have}"
            )
    settled: dict[str, OptionValue] = {}
    for decl in protocol.options:
        value = given.get(decl.name, decl.default)
        if decl.type == "int" and isinstance(value, bool):
            value = str(value)
        wanted = {"int": int, "bool": bool, "enum": str}[decl.type]
        if not isinstance(value, wanted):
            raise PlanError(f"option {decl.name!r} is {value!r}; it must be of type {decl.type}")
        if decl.choices and value not in decl.choices:
            choices = ", ".join(decl.choices)
            raise PlanError(f"option {decl.name!r} is {value!r}; it must be one of: {choices}")
        if isinstance(value, int) and not isinstance(value, bool):
            if decl.least is not None and value < decl.least:
                raise PlanError(
                    f"option {decl.name!r} is {value}; it must be at least {decl.least}"
                )
            if decl.most is not None and value > decl.most:
                raise PlanError(f"option {decl.name!r} is {value}; it must be at most {decl.most}")
        settled[decl.name] = value
    return settled


def resolve(
    protocol: Protocol,
    ranks: int | Mapping[str, int],
    options: Mapping[str, OptionValue] | None = None,
    *,
    devices: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Plan:
    """The plan of `protocol` for so many ranks (of the one active role, or per role).

    `devices[i]` is where member `i` lives; left out, each member has a device of its own.
    `groups` places members by number where they are not consecutive.

    Raises:
        PlanError: options, members or placement do not fit the protocol.
    """
    settled = tuple(settle(protocol, options).items())
    counts = ranks if isinstance(ranks, int) else tuple(ranks.items())
    placed = None if devices is None else tuple(devices)
    parts = tuple((name, tuple(map(tuple, each))) for name, each in (groups or {}).items())
    return _resolved(protocol, counts, settled, placed, parts)


@lru_cache(maxsize=64)
def _resolved(
    protocol: Protocol,
    ranks: int | tuple[tuple[str, int], ...],
    options: tuple[tuple[str, OptionValue], ...],
    devices: tuple[str, ...] | None,
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...],
) -> Plan:
    """The ranks of one process share a plan: all the runners of a driver ask for the same one."""
    counts = ranks if isinstance(ranks, int) else dict(ranks)
    return _Resolver(protocol, counts, dict(options), devices, dict(groups)).plan()


class _Resolver:
    """One resolution; the fields are what later steps of it need."""

    def __init__(
        self,
        protocol: Protocol,
        ranks: int | Mapping[str, int],
        options: dict[str, OptionValue],
        devices: Sequence[str] | None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None,
    ) -> None:
        self.protocol = protocol
        self.options = options
        self.members = _members(protocol, ranks)
        names, self.place = _placement(self.members, devices)
        self.devices = names
        self.groups = {
            group.name: self._group(group.name, (groups or {}).get(group.name))
            for group in protocol.groups
        }
        self.resources = {decl.name: at for at, decl in enumerate(protocol.resources)}
        self.scopes: dict[str, Scope] = {}
        self._part_of: dict[str, dict[int, int]] = {}
        self._numbers: dict[str, int] = {}
        self._owner_on: dict[str, dict[int, Rank]] = {}
        self._during = self._held_during()
        self._agreeing = self._agreements()
        rising = self._invariants(InvariantKind.MONOTONE)
        self._rising = {name for each in rising for name in each.resources}
        self._scope(WORLD, tuple(range(len(self.members))))
        for group, parts in self.groups.items():
            for number, part in enumerate(parts):
                self._scope(f"{group}/{number}", part)

    def plan(self) -> Plan:
        protocol = self.protocol
        engines = tuple(
            Rank(role.name, number)
            for role in protocol.roles
            if role.passive
            for number in range(self._count(role.name, role.per))
        )
        never = self._together()
        digest = Digest(
            wire.sha256(
                {
                    "protocol": text_digest(protocol),
                    "options": self.options,
                    "members": [str(rank) for rank in self.members],
                    "groups": self.groups,
                    "devices": self.devices,
                    "place": self.place,
                }
            )
        )
        cells = [
            (device, decl) for device in range(len(self.devices)) for decl in protocol.resources
        ]
        return Plan(
            protocol=protocol,
            options=tuple(sorted(self.options.items())),
            members=self.members,
            engines=engines,
            devices=self.devices,
            place=self.place,
            groups=tuple(self.groups.items()),
            scopes=tuple(self.scopes.values()),
            programs=self._programs(protocol.steps),
            recover=self._recovery(),
            start=tuple(self._true(decl.start, absent=False) for _, decl in cells),
            content=tuple(decl.content for _, decl in cells),
            owner=tuple(self._owner(device, decl.owner) for device, decl in cells),
            never=tuple(pair for pairs in never for pair in pairs),
            never_on=never,
            digest=digest,
            elsewhere=self._elsewhere(),
            freed=tuple(decl.freed for _, decl in cells),
            always_on=self._always(),
            agree=tuple(part for _, parts in self._agreeing for part in parts),
            monotone=tuple(decl.name in self._rising for _, decl in cells),
        )

    def _group(
        self, name: GroupName, given: Sequence[Sequence[int]] | None
    ) -> tuple[tuple[int, ...], ...]:
        decl = next(group for group in self.protocol.groups if group.name == name)
        own = [at for at, rank in enumerate(self.members) if rank.role == decl.of]
        if given is not None:
            parts = tuple(tuple(own[number] for number in part) for part in given)
            if sorted(at for part in parts for at in part) != own or not all(parts):
                raise PlanError(f"group {name!r} must hold every {decl.of} exactly once")
            return parts
        size = self.options[decl.size] if isinstance(decl.size, str) else decl.size
        assert isinstance(size, int)
        if len(own) % size:
            raise PlanError(
                f"{len(own)} {decl.of} ranks do not make whole {name}s of {size}; "
                f"give a multiple of {size}, or say who is where with groups="
            )
        return tuple(tuple(own[at : at + size]) for at in range(0, len(own), size))

    def _scope(self, name: str, members: tuple[int, ...]) -> None:
        self._numbers[name] = len(self.scopes)
        self.scopes[name] = Scope(name, members)

    def _count(self, role: RoleName, per: str) -> int:
        if per == DEVICE:
            return len(self.devices)
        return len(self.groups[GroupName(per)])

    def _owner(self, device: int, role: RoleName) -> Rank:
        """Which member of `role` holds memory on `device`."""
        found = self._owners(role).get(device)
        if found is not None:
            return found
        per = next(decl.per for decl in self.protocol.roles if decl.name == role)
        if per == DEVICE:
            return Rank(role, device)
        raise PlanError(f"no {per} covers device {self.devices[device]}")

    def _owners(self, role: RoleName) -> dict[int, Rank]:
        """The member of `role` on each device; asked once a cell, so worked out once."""
        found = self._owner_on.get(role)
        if found is None:
            decl = next(decl for decl in self.protocol.roles if decl.name == role)
            if decl.per == DEVICE:
                own = [(at, rank) for at, rank in enumerate(self.members) if rank.role == role]
                pairs = [(self.place[at], rank) for at, rank in own]
            else:
                parts = enumerate(self.groups[GroupName(decl.per)])
                pairs = [(self.place[at], Rank(role, n)) for n, part in parts for at in part]
            found = self._owner_on[role] = dict(reversed(pairs))
        return found

    def _true(self, condition: Condition | None, *, absent: bool) -> bool:
        return absent if condition is None else bool(evaluate(condition, self.options))

    def _together(self) -> tuple[tuple[Together, ...], ...]:
        """What `never` forbids, device by device."""
        found = [each for each in self._invariants(InvariantKind.NEVER) if each.on == DEVICE]
        width = len(self.resources)
        return tuple(
            tuple(
                Together(
                    device,
                    tuple(device * width + self.resources[name] for name in each.resources),
                    each.resources,
                )
                for each in found
            )
            for device in range(len(self.devices))
        )

    def _elsewhere(self) -> tuple[tuple[int, int], ...]:
        """Pairs of resources, by number, of which one may not be held while the other is held on
        another device."""
        return tuple(
            (self.resources[one], self.resources[two])
            for each in self._invariants(InvariantKind.NEVER)
            if each.on == ELSEWHERE
            for one, two in (each.resources[:2],)
        )

    def _always(self) -> tuple[tuple[int, ...], ...]:
        """What is mapped at all times, device by device."""
        found = [each for each in self._invariants(InvariantKind.ALWAYS) if not each.on]
        numbers = sorted({self.resources[name] for each in found for name in each.resources})
        width = len(self.resources)
        return tuple(
            tuple(device * width + number for number in numbers)
            for device in range(len(self.devices))
        )

    def _held_during(self) -> dict[str, tuple[int, ...]]:
        """By phase, the resources that are mapped wherever it works."""
        found: dict[str, tuple[int, ...]] = {}
        for each in self._invariants(InvariantKind.ALWAYS):
            if each.on:
                numbers = tuple(self.resources[name] for name in each.resources)
                found[each.on] = (*found.get(each.on, ()), *numbers)
        return found

    def _agreements(self) -> list[tuple[ResourceName, tuple[tuple[int, ...], ...]]]:
        """By resource, the cells that agree: those of the devices of one group, or of the world."""
        width = len(self.resources)
        found: list[tuple[ResourceName, tuple[tuple[int, ...], ...]]] = []
        for each in self._invariants(InvariantKind.AGREE):
            parts: tuple[tuple[int, ...], ...] = (tuple(range(len(self.members))),)
            if each.on != WORLD:
                parts = self.groups[GroupName(each.on)]
            for name in each.resources:
                cells = (
                    sorted({self.place[at] * width + self.resources[name] for at in part})
                    for part in parts
                )
                found.append((name, tuple(map(tuple, cells))))
        return found

    def _implied(self, at: int, step: PhaseDecl) -> Iterator[Touch]:
        """What invariants make an action read."""
        width = len(self.resources)
        reached = {d for e in step.effects for d in self._reach(at, step, e.reach)}
        for number in self._during.get(step.name, ()):
            for device in sorted(reached or self._reach(at, step, DEVICE)):
                yield Touch(Verb.HOLDS, device * width + number)
        for name, parts in self._agreeing:
            used = {
                device * width + self.resources[name]
                for effect in step.effects
                if effect.resource == name and effect.verb in (Verb.NEEDS, Verb.USES)
                for device in self._reach(at, step, effect.reach)
            }
            for cells in parts:
                if used.intersection(cells):
                    yield from (Touch(Verb.AGREES, number) for number in cells)

    def _invariants(self, kind: InvariantKind) -> list[Invariant]:
        return [
            invariant
            for invariant in self.protocol.invariants
            if invariant.kind is kind and self._true(invariant.when, absent=True)
        ]

    def _programs(self, steps: tuple[StepDecl, ...]) -> tuple[tuple[Step, ...], ...]:
        return tuple(self._program(at, steps) for at in range(len(self.members)))

    def _recovery(self) -> tuple[tuple[Step, ...], ...]:
        """The recovery, behind an implicit fence that every live rank has stopped."""
        programs = self._programs(self.protocol.recover)
        patience = max((fence.deadline_s for fence in self.protocol.fences), default=600.0)
        stopped = Wait(STOPPED, 0, patience, ("device_synchronised",), (), False)
        return tuple((stopped, *steps) if self.protocol.recover else () for steps in programs)

    def _program(self, at: int, steps: tuple[StepDecl, ...]) -> tuple[Step, ...]:
        program: list[Step] = []
        for step in steps:
            if step.role != self.members[at].role or not self._true(step.when, absent=True):
                continue
            match step:
                case PhaseDecl():
                    if step.by is None or self._leads(at, step):
                        program.append(self._act(at, step))
                case FenceDecl():
                    program.append(self._wait(at, step))
        return tuple(program)

    def _part(self, at: int, group: str) -> tuple[int, ...]:
        number = self._parts(group).get(at)
        if number is None:
            raise PlanError(f"{self.members[at]} is in no {group}")
        return self.groups[GroupName(group)][number]

    def _parts(self, group: str) -> dict[int, int]:
        """Which part of a group each member is in; asked once a step, so worked out once."""
        found = self._part_of.get(group)
        if found is None:
            parts = enumerate(self.groups[GroupName(group)])
            found = self._part_of[group] = {at: n for n, part in parts for at in part}
        return found

    def _leads(self, at: int, step: PhaseDecl) -> bool:
        """Whether the rank leads: the widest group that the phase reaches, else any of its own."""
        reached = [effect.reach for effect in step.effects if effect.reach in self.groups]
        own = [group.name for group in self.protocol.groups if group.of == step.role]
        groups = reached or own
        return all(self._part(at, group)[0] == at for group in groups)

    def _act(self, at: int, step: PhaseDecl) -> Act:
        touches = dict.fromkeys(
            Touch(effect.verb, device * len(self.resources) + self.resources[effect.resource])
            for effect in step.effects
            for device in self._reach(at, step, effect.reach)
        )
        return Act(
            step.name,
            # What is implied comes first: what the phase itself does to a cell has the last word.
            tuple(dict.fromkeys((*self._implied(at, step), *touches))),
            step.outside,
            step.enqueued,
            step.by is not None,
            step.retry,
            step.deadline_s,
        )

    def _reach(self, at: int, step: PhaseDecl, reach: str) -> list[int]:
        if reach == EVERYWHERE:
            return list(range(len(self.devices)))
        if reach == DEVICE and step.by is None:
            return [self.place[at]]
        if reach == DEVICE:
            own = [group.name for group in self.protocol.groups if group.of == step.role]
            return sorted({self.place[member] for member in self._part(at, own[0])})
        return sorted({self.place[member] for member in self._part(at, reach)})

    def _wait(self, at: int, step: FenceDecl) -> Wait:
        named = step.scope
        if named in self.options:
            named = str(self.options[named])
        scope = WORLD if named == WORLD else f"{named}/{self._parts(named)[at]}"
        return Wait(
            step.name,
            self._numbers[scope],
            step.deadline_s,
            step.established,
            step.evidence,
            step.joined,
            step.first_deadline_s or _first_s(step.deadline_s),
        )


def _first_s(deadline_s: float) -> float:
    """What a fence waits in the first epoch, where the protocol does not say: a deadline of
    minutes is one for epochs that run smoothly, a shorter one somebody's own choice."""
    return FIRST_TIMES * deadline_s if deadline_s >= FIRST_FROM_S else 0.0


def _members(protocol: Protocol, ranks: int | Mapping[str, int]) -> tuple[Rank, ...]:
    active = protocol.active_roles
    if isinstance(ranks, int):
        if len(active) != 1:
            raise PlanError(f"say how many ranks each of these roles has: {', '.join(active)}")
        ranks = {active[0]: ranks}
    for role, count in ranks.items():
        if role not in active:
            raise PlanError(f"{role!r} is no active role; active roles are: {', '.join(active)}")
        if count < 1:
            raise PlanError(f"role {role!r} has {count} ranks; it needs at least 1")
    return tuple(Rank(role, number) for role in active for number in range(ranks.get(role, 0)))


def _placement(
    members: tuple[Rank, ...], devices: Sequence[str] | None
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    if devices is None:
        role = members[0].role
        count = sum(rank.role == role for rank in members)
        return (
            tuple(Device(f"device/{number}") for number in range(count)),
            tuple(rank.number % count for rank in members),
        )
    if len(devices) != len(members):
        raise PlanError(f"{len(devices)} devices for {len(members)} ranks; give one a rank")
    names = tuple(dict.fromkeys(map(Device, devices)))
    for role in {rank.role for rank in members}:
        own = [name for name, rank in zip(devices, members, strict=True) if rank.role == role]
        twice = next((name for name in own if own.count(name) > 1), None)
        if twice is not None:
            raise PlanError(
                f"two {role} ranks claim device {twice}; each needs a device of its own"
            )
    return names, tuple(names.index(Device(name)) for name in devices)


@lru_cache(maxsize=64)
def text_digest(protocol: Protocol) -> str:
    """The sha256 of what a protocol says, wherever its file is."""
    return wire.sha256(_plain(protocol))


def _plain(protocol: Protocol) -> object:
    """The declaration as text without its places in the file, for hashing."""
    blank = replace(protocol, file="", summary="")
    return _stripped(blank)


def _stripped(value: object) -> object:
    if isinstance(value, tuple):
        return [_stripped(item) for item in value]
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None:
        return str(value) if not isinstance(value, int | float | str | None) else value
    body = {
        name: _stripped(getattr(value, name)) for name in fields if name not in ("place", "file")
    }
    return {"": type(value).__name__, **_ONCE.get(type(value).__name__, {}), **body}


#: Fields that declarations had once, empty in every protocol: stored digests cover them.
_ONCE: Mapping[str, Mapping[str, object]] = {"ResourceDecl": {"tag": None}}
