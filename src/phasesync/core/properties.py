"""What must never happen: the built-in properties and the declared ones, as questions to ask.

`wanted` judges an action at its start, `raced` two actions in progress, `together` the memory of
a device. A driver asks with what it has: the checker with the whole system, the auditor with the
cells that a log shows. The answers are values; nobody raises.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phasesync.core.kernel import (
    INPUTS,
    NONE,
    PARTIAL,
    SHARED,
    Event,
    Kind,
    Mapped,
    RankState,
    Stage,
    Status,
    System,
    Verdict,
    abort_touches,
    content_of,
    mapped_of,
    next_step,
    woken,
)
from phasesync.core.model import Device, Phase, Rank, ResourceName
from phasesync.core.plan import Act, Plan, Touch
from phasesync.core.protocol import Retry, Verb

__all__ = (
    "Violation",
    "agreements",
    "elsewhere",
    "poisoned",
    "raced",
    "together",
    "unmapped",
    "violations",
    "wanted",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One false conjunct: the property, where, who did it and who stood in the way."""

    property: str
    device: Device
    resources: tuple[ResourceName, ...]
    rank: Rank
    holders: tuple[Rank, ...] = ()
    says: str = ""


_WANTS: dict[Verb, tuple[Mapped, str]] = {
    Verb.ACQUIRES: (Mapped.NO, "once"),
    Verb.RELEASES: (Mapped.YES, "once"),
    Verb.NEEDS: (Mapped.YES, "mapped"),
    Verb.USES: (Mapped.YES, "mapped"),
    Verb.WRITES: (Mapped.YES, "mapped"),
    Verb.FILLS: (Mapped.YES, "mapped"),
    Verb.DISCARDS: (Mapped.YES, "mapped"),
    Verb.HOLDS: (Mapped.YES, "always"),
}


def wanted(
    plan: Plan, who: Rank, act: Act, cells: Sequence[int] | Mapping[int, int], version: int
) -> Iterator[Violation]:
    """What the action wants of memory at its start and does not find."""
    fills = {touch.cell for touch in act.touches if touch.verb is Verb.FILLS}
    yield from _disagreeing(plan, who, act, cells)
    for touch in act.touches:
        want = _WANTS.get(touch.verb)
        value = cells[touch.cell]
        if value & 3 == Mapped.LOST and touch.verb in INPUTS:
            continue  # The action will fail: its input died with whoever owned it.
        if _falls(plan, touch, value, version):
            says = f"{touch.verb} version {version} over version {content_of(value)}"
            yield _violation(plan, "monotone", touch, who, says)
        if want is not None and mapped_of(value) is not want[0]:
            state = mapped_of(value).name.lower()
            says = f"{touch.verb} what is mapped: {state}"
            if touch.verb is Verb.HOLDS:
                says = f"{act.phase} runs where it is mapped: {state}"
            yield _violation(plan, want[1], touch, who, says)
        elif touch.verb is Verb.NEEDS and plan.content[touch.cell]:
            content = content_of(value)
            if content != version and not (touch.cell in fills and content == NONE):
                yield _violation(plan, "content", touch, who, _content(content, version))
        elif touch.verb is Verb.USES and content_of(value) == PARTIAL:
            yield _violation(plan, "content", touch, who, _content(PARTIAL, version))


def _falls(plan: Plan, touch: Touch, value: int, version: int) -> bool:
    rises = touch.verb in (Verb.WRITES, Verb.FILLS) and plan.monotone[touch.cell]
    return rises and content_of(value) > version


def _disagreeing(
    plan: Plan, who: Rank, act: Act, cells: Sequence[int] | Mapping[int, int]
) -> Iterator[Violation]:
    """Devices of one group that hold different versions of what the action uses."""
    for part in agreements(plan, act):
        held = [number for number in part if cells[number] & 3 != Mapped.LOST]
        other = next((n for n in held if content_of(cells[n]) != content_of(cells[held[0]])), None)
        if other is not None:
            device, resource = plan.cell_name(held[0])
            one, two = (_held(content_of(cells[number])) for number in (held[0], other))
            yield Violation(
                property="agree",
                device=device,
                resources=(resource,),
                rank=who,
                says=f"{act.phase} uses {one}, and {plan.cell_name(other)[0]} holds {two}",
            )


def agreements(plan: Plan, act: Act) -> Iterator[tuple[int, ...]]:
    """The sets of cells whose content must agree when the action starts."""
    if plan.agree:
        touched = {touch.cell for touch in act.touches if touch.verb is Verb.AGREES}
        for part in plan.agree:
            if len(found := tuple(number for number in part if number in touched)) > 1:
                yield found


def raced(
    plan: Plan, who: Rank, act: Act, others: Iterable[tuple[Rank, Act]]
) -> Iterator[Violation]:
    """Cells that another action in progress touches too, unless both only read."""
    own = {touch.cell: touch for touch in act.touches}
    for other, other_act in others:
        for touch in other_act.touches:
            mine = own.get(touch.cell)
            if mine is None or (mine.verb in SHARED and touch.verb in SHARED):
                continue
            verbs = {mine.verb, touch.verb}
            if Verb.HOLDS in verbs and verbs & _STAYS_MAPPED:
                continue
            says = f"{act.phase} {mine.verb} while {other} is in {other_act.phase}"
            name = next((_IMPLIES[verb] for verb in _IMPLIES if verb in verbs), "race")
            yield _violation(plan, name, mine, who, says, (other,))
            break


#: The property that an implied verb stands for, and what leaves memory mapped beside `holds`.
_IMPLIES = {Verb.HOLDS: "always", Verb.AGREES: "agree"}
_STAYS_MAPPED = frozenset((Verb.WRITES, Verb.DISCARDS))
_LEFT = frozenset((Status.STOPPED, Status.ABORTED))


def poisoned(
    plan: Plan,
    rank: int,
    act: Act,
    epoch: int,
    others: Iterable[tuple[int, RankState]],
) -> Iterator[Violation]:
    """Engines that the action is served from though a member's recovery failed, or there is none.

    The kernel keeps no such engine from being used: fences and the content that `needs` asks for
    do, in a sound protocol, and here it is asked whether they did. Another failure in the same
    epoch is none of it: whoever is whole goes on serving.
    """
    for other, state in others:
        if state.epoch < epoch and never_recovers(plan, other, state):
            for touch in act.touches:
                if touch.verb is Verb.NEEDS and other in _sharers(plan, touch.cell):
                    who = plan.members[rank]
                    says = f"{act.phase} is served from an engine that was never recovered"
                    yield _violation(plan, "poisoned", touch, who, says, (plan.members[other],))
                    break


def never_recovers(plan: Plan, rank: int, state: RankState) -> bool:
    """Whether the rank stopped for good, its recovery undone."""
    return state.status in _LEFT and (state.stage is Stage.RECOVER or not plan.recover[rank])


@lru_cache(maxsize=4096)
def _sharers_of(
    owner: tuple[Rank, ...], place: tuple[int, ...], members: tuple[Rank, ...], cell: int
) -> frozenset[int]:
    width = len(owner) // (max(place) + 1)
    engine = owner[cell]
    if engine in members:
        return frozenset()
    devices = {number // width for number, each in enumerate(owner) if each == engine}
    return frozenset(rank for rank, device in enumerate(place) if device in devices)


def _sharers(plan: Plan, cell: int) -> frozenset[int]:
    """The ranks on the devices of the engine that owns a cell of weights; none for other cells."""
    if not plan.content[cell]:
        return frozenset()
    return _sharers_of(plan.owner, plan.place, plan.members, cell)


def together(
    plan: Plan, who: Rank, cells: Sequence[int] | Mapping[int, int], devices: set[int] | None = None
) -> Iterator[Violation]:
    """Resources that are mapped together on a device though `never` forbids it."""
    where = range(len(plan.devices)) if devices is None else sorted(devices)
    for pair in (pair for device in where for pair in plan.never_on[device]):
        if all(cells[number] & 3 != Mapped.NO for number in pair.cells):
            holders = tuple(dict.fromkeys(plan.owner[number] for number in pair.cells))
            yield Violation(
                property="never",
                device=plan.devices[pair.device],
                resources=pair.resources,
                rank=who,
                holders=holders,
                says=" and ".join(pair.resources) + " together",
            )


def unmapped(
    plan: Plan, who: Rank, cells: Sequence[int] | Mapping[int, int], devices: Iterable[int]
) -> Iterator[Violation]:
    """Resources that are not mapped though `always` wants them at all times; what died with its
    owner broke no rule."""
    for device in devices:
        for number in plan.always_on[device] if plan.always_on else ():
            if cells[number] & 3 not in (Mapped.YES, Mapped.LOST):
                state = mapped_of(cells[number]).name.lower()
                says = f"always mapped, and now it is mapped: {state}"
                yield _violation(plan, "always", Touch(Verb.HOLDS, number), who, says)


def elsewhere(plan: Plan, who: Rank, cells: Sequence[int]) -> Iterator[Violation]:
    """What is held on one device while that which excludes it is held on another."""
    width = len(plan.protocol.resources)
    for one, two in plan.elsewhere:
        first = {at // width for at in range(one, len(cells), width) if cells[at] & 3}
        second = {at // width for at in range(two, len(cells), width) if cells[at] & 3}
        if first and second and len(first | second) > 1:
            device = min(first)
            names = [plan.protocol.resources[each].name for each in (one, two)]
            other = plan.devices[min(second - {device} or second)]
            yield Violation(
                property="never",
                device=plan.devices[device],
                resources=tuple(names),
                rank=who,
                says=f"{names[0]} while {other} holds {names[1]}",
            )


def violations(plan: Plan, before: System, event: Event, after: System) -> tuple[Violation, ...]:
    """Everything that `event` breaks; the checker asks after each step."""
    who = plan.members[event.rank]
    state = before.ranks[event.rank]
    if event.kind in (Kind.FAIL, Kind.ABORT, Kind.NOTICE, Kind.DEADLINE):
        withdrawn = tuple(_withdrawn(plan, who, before, after))
        if withdrawn or event.kind is not Kind.FAIL:
            return withdrawn + tuple(_aborting(plan, event.rank, before, after, event.kind))
    if event.kind is Kind.WAKE:
        return tuple(_waking(plan, event.rank, before, after))
    if event.kind not in _ON_MEMORY:
        return ()
    act = next_step(plan, event.rank, state)
    assert isinstance(act, Act)
    found: list[Violation] = []
    if event.kind is Kind.START:
        found += wanted(plan, who, act, before.cells, state.epoch)
        found += raced(plan, who, act, in_progress(plan, before, event.rank))
        found += poisoned(plan, event.rank, act, state.epoch, enumerate(before.ranks))
    width = len(plan.protocol.resources)
    devices = {touch.cell // width for touch in act.touches}
    if devices:
        found += together(plan, who, after.cells, devices)
        found += unmapped(plan, who, after.cells, devices)
        found += elsewhere(plan, who, after.cells)
    return tuple(found)


_ON_MEMORY = frozenset((Kind.START, Kind.END, Kind.FAIL, Kind.LAND))


def _withdrawn(plan: Plan, who: Rank, before: System, after: System) -> Iterator[Violation]:
    """Fences that were open and are broken now: what is decided stays."""
    opened = {entry[:4] for entry in before.fences if entry.verdict is Verdict.OPEN}
    for entry in after.fences:
        if entry.verdict is Verdict.BROKEN and entry[:4] in opened:
            yield Violation(
                property="fence",
                device=plan.devices[0],
                resources=(),
                rank=who,
                says=f"fence {entry.fence} was open and is broken",
            )


def _waking(plan: Plan, rank: int, before: System, after: System) -> Iterator[Violation]:
    """A late call that the engine did not refuse, while somebody works or too much is held."""
    act = woken(plan, before, rank)
    if act is not None:
        who, width = plan.members[rank], len(plan.protocol.resources)
        yield from raced(plan, who, act, in_progress(plan, before, -1))
        devices = {touch.cell // width for touch in act.touches}
        yield from together(plan, who, after.cells, devices)
        yield from unmapped(plan, who, after.cells, devices)
        yield from _fallen(plan, who, act, before.cells, after.cells)


def _aborting(
    plan: Plan, rank: int, before: System, after: System, kind: Kind
) -> Iterator[Violation]:
    """Memory that an abort touched though somebody uses it, or that is too much with it."""
    if kind is not Kind.ABORT:
        return
    who = plan.members[rank]
    touches = abort_touches(plan, rank, before.ranks[rank])
    if touches:
        act = Act(Phase("abort"), touches, False, False, False, Retry.NEVER, None)
        yield from raced(plan, who, act, in_progress(plan, before, rank))
        width = len(plan.protocol.resources)
        devices = {touch.cell // width for touch in touches}
        yield from together(plan, who, after.cells, devices)
        yield from unmapped(plan, who, after.cells, devices)
        yield from elsewhere(plan, who, after.cells)


def _fallen(
    plan: Plan, who: Rank, act: Act, before: Sequence[int], after: Sequence[int]
) -> Iterator[Violation]:
    """Versions that a late call put back."""
    for touch in act.touches:
        old, new = content_of(before[touch.cell]), content_of(after[touch.cell])
        if plan.monotone[touch.cell] and NONE < new < old:
            says = f"{act.phase} comes late and puts version {new} over version {old}"
            yield _violation(plan, "monotone", touch, who, says)


_BUSY = frozenset((Status.ACTING, Status.DEAD_ACTING, Status.HUNG))


def in_progress(plan: Plan, system: System, but: int) -> Iterator[tuple[Rank, Act]]:
    """All other actions under way, those of dead and hung ranks too."""
    for rank, state in enumerate(system.ranks):
        if rank != but and state.status in _BUSY:
            act = next_step(plan, rank, state)
            if isinstance(act, Act):
                yield plan.members[rank], act


def _violation(
    plan: Plan, name: str, touch: Touch, who: Rank, says: str, holders: tuple[Rank, ...] = ()
) -> Violation:
    device, resource = plan.cell_name(touch.cell)
    return Violation(
        property=name, device=device, resources=(resource,), rank=who, holders=holders, says=says
    )


def _content(content: int, version: int) -> str:
    return f"holds {_held(content)} where version {version} is needed"


def _held(content: int) -> str:
    return {NONE: "nothing", PARTIAL: "partial weights"}.get(content, f"version {content}")
