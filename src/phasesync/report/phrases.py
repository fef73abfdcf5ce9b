"""A declaration in words, the same wherever it is shown."""

from phasesync.core.condition import write
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    WORLD,
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

__all__ = (
    "asks", "effects", "fence_terms", "group", "never", "option", "resource", "role", "scope",
    "seconds", "step", "when",
)  # fmt: skip

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def when(decl: StepDecl | Invariant) -> str:
    """The condition, or nothing."""
    return "" if decl.when is None else f"when {write(decl.when)}"


def seconds(time: float) -> str:
    return f"{time:g} s"


def effects(phase: PhaseDecl) -> str:
    """What a phase does to memory: `uses staging of the replica; writes rollout_weights ...`."""
    said: dict[tuple[Verb, str], list[str]] = {}
    for effect in phase.effects:
        said.setdefault((effect.verb, _reach(effect)), []).append(effect.resource)
    return "; ".join(f"{verb} {', '.join(names)}{reach}" for (verb, reach), names in said.items())


def _reach(effect: Effect) -> str:
    if effect.verb is Verb.ENSURES:
        return " as at the start"
    if effect.reach == DEVICE:
        return ""
    return " on all devices" if effect.reach == EVERYWHERE else f" of the {effect.reach}"


def scope(protocol: Protocol, fence: FenceDecl) -> str:
    """`world`, a group, or the words that the option in its place can have."""
    for decl in protocol.options:
        if decl.name == fence.scope:
            return " or ".join(decl.choices)
    return fence.scope or WORLD


def fence_terms(protocol: Protocol, fence: FenceDecl) -> str:
    """`replica, 300 s, device_synchronised`."""
    words = [scope(protocol, fence), seconds(fence.deadline_s), *fence.established]
    words += [f"{each.name} {each.op} {_bytes(each.value)}" for each in fence.evidence]
    words += ["joined outside"] if fence.joined else []
    return ", ".join(words)


def _bytes(count: int) -> str:
    for size, unit in _UNITS:
        if count and count % size == 0:
            return f"{count // size} {unit}"
    return str(count)


def step(protocol: Protocol, decl: StepDecl) -> str:
    """All that is declared of a step but its name and its role."""
    match decl:
        case FenceDecl():
            words = [fence_terms(protocol, decl), when(decl)]
        case PhaseDecl():
            words = [
                "by the leader" if decl.by else "",
                effects(decl),
                "enqueued" if decl.enqueued else "",
                when(decl),
                "outside" if decl.outside else "",
                f"within {seconds(decl.deadline_s)}" if decl.deadline_s else "",
                f"retry {decl.retry}" if decl.retry != "never" else "",
            ]
    return "; ".join(word for word in words if word)


def option(decl: OptionDecl) -> str:
    if decl.choices:
        return f"{' or '.join(decl.choices)}, by default {decl.default}"
    default = str(decl.default).lower() if decl.type == "bool" else str(decl.default)
    least = "" if decl.least is None else f", at least {decl.least}"
    most = "" if decl.most is None else f", at most {decl.most}"
    return f"{decl.type}, by default {default}{least}{most}"


def group(decl: GroupDecl) -> str:
    return f"{decl.size} of {decl.of}, led by the {decl.leader}"


def role(decl: RoleDecl) -> str:
    driven = f", driven by its {decl.driven_by}" if decl.driven_by else ""
    return f"one per {decl.per}{driven}"


def resource(decl: ResourceDecl) -> str:
    start = f"; mapped at the start: {write(decl.start)}" if decl.start is not None else ""
    return f"of {decl.owner}{', holds a version' if decl.content else ''}{start}"


def never(decl: Invariant) -> str:
    """`kv_cache with staging`."""
    return " with ".join(decl.resources)


def asks(decl: Invariant) -> str:
    """`weights and kv_cache are mapped during serve`."""
    names = " and ".join(decl.resources)
    are = "is" if len(decl.resources) == 1 else "are"
    match decl.kind:
        case InvariantKind.NEVER:
            return f"{never(decl)} never on a device"
        case InvariantKind.ALWAYS:
            return f"{names} {are} mapped {f'during {decl.on}' if decl.on else 'at all times'}"
        case InvariantKind.AGREE:
            across = "all ranks" if decl.on == "world" else f"each {decl.on}"
            return f"the version of {names} agrees across {across} where it is used"
        case InvariantKind.MONOTONE:
            return f"the version of {names} never falls"
