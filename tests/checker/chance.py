"""Protocols by chance: from nothing, or a shipped one with a few of its steps moved or gone."""

import random
from dataclasses import replace

from phasesync.core.model import FenceName, GroupName, OptionName, Phase, ResourceName, RoleName
from phasesync.core.protocol import (
    ELSEWHERE,
    Effect,
    FenceDecl,
    GroupDecl,
    Invariant,
    InvariantKind,
    OptionDecl,
    PhaseDecl,
    Protocol,
    ResourceDecl,
    RoleDecl,
    StepDecl,
    Verb,
)
from phasesync.spec import load

TRAINER = RoleName("trainer")
OWN = ("params", "cache")
ENGINE = ("weights", "kv")


def protocol(chance: random.Random) -> Protocol:
    """One more protocol."""
    if chance.random() < 0.6:
        return _moved(load(chance.choice(["basic", "colocated", "colocated_each"])), chance)
    return _fresh(chance)


def _moved(found: Protocol, chance: random.Random) -> Protocol:
    steps = list(found.steps)
    for _ in range(chance.choice([1, 1, 2])):
        at = chance.randrange(len(steps) - 1)
        match chance.choice(["swap", "drop", "scope", "never", "unsynced"]):
            case "swap":
                steps[at], steps[at + 1] = steps[at + 1], steps[at]
            case "drop":
                del steps[at]
            case "scope":
                steps = [_rescoped(step, chance) for step in steps]
            case "unsynced":
                steps = [_unsynced(step, chance) for step in steps]
            case _:
                found = replace(found, invariants=found.invariants[1:])
    recover = found.recover if chance.random() < 0.7 else ()
    return replace(found, steps=tuple(steps), recover=recover)


def _rescoped(step: StepDecl, chance: random.Random) -> StepDecl:
    if isinstance(step, FenceDecl) and chance.random() < 0.3:
        return replace(step, scope=chance.choice(["world", "replica"]))
    return step


def _unsynced(step: StepDecl, chance: random.Random) -> StepDecl:
    if isinstance(step, FenceDecl) and chance.random() < 0.5:
        return replace(step, established=())
    return step


def _fresh(chance: random.Random) -> Protocol:
    steps: list[StepDecl] = []
    for number in range(chance.randint(3, 7)):
        steps.append(_fence(number, chance) if chance.random() < 0.4 else _phase(number, chance))
    never = [
        Invariant(
            kind=InvariantKind.NEVER,
            resources=(ResourceName(chance.choice(OWN)), ResourceName(chance.choice(ENGINE))),
        )
        for _ in range(chance.randint(0, 2))
    ]
    if chance.random() < 0.2:
        never = [replace(each, on=ELSEWHERE) for each in never]
    return Protocol(
        name="chance",
        options=(OptionDecl(name=OptionName("replica_size"), type="int", default=2, least=1),),
        groups=(GroupDecl(name=GroupName("replica"), of=TRAINER, size=OptionName("replica_size")),),
        roles=(
            RoleDecl(name=TRAINER),
            RoleDecl(name=RoleName("engine"), per="replica", driven_by="leader"),
        ),
        resources=(
            *(ResourceDecl(name=ResourceName(name), owner=TRAINER) for name in OWN),
            *(
                ResourceDecl(name=ResourceName(name), owner=RoleName("engine"), content=True)
                for name in ENGINE
            ),
        ),
        invariants=tuple(never),
        steps=tuple(steps),
    )


def _fence(number: int, chance: random.Random) -> FenceDecl:
    return FenceDecl(
        name=FenceName(f"fence{number}"),
        role=TRAINER,
        scope=chance.choice(["world", "replica", "replica"]),
        established=("device_synchronised",) if chance.random() < 0.5 else (),
    )


def _phase(number: int, chance: random.Random) -> PhaseDecl:
    led = chance.random() < 0.4
    names = ENGINE if led else OWN
    verbs = [Verb.ACQUIRES, Verb.ACQUIRES, Verb.RELEASES, Verb.USES, Verb.WRITES, Verb.FILLS]
    reach = chance.choice(["device", "replica"]) if led else "device"
    effect = Effect(chance.choice(verbs), ResourceName(chance.choice(names)), reach)
    more: tuple[Effect, ...] = ()
    if not led and chance.random() < 0.25:
        shared = chance.choice([Verb.USES, Verb.USES, Verb.FILLS, Verb.WRITES])
        effect = Effect(shared, ResourceName(chance.choice(ENGINE + OWN)), "replica")
    if led and chance.random() < 0.3:
        more = (Effect(Verb.USES, ResourceName(chance.choice(OWN)), "replica"),)
    return PhaseDecl(
        name=Phase(f"phase{number}"),
        role=TRAINER,
        by="leader" if led else None,
        effects=(effect, *more),
        outside=chance.random() < 0.2,
        enqueued=effect.verb is Verb.RELEASES and chance.random() < 0.5,
    )
