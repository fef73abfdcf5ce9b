"""A counterexample as lanes: one column a rank, one row a step, memory where it changes.

Everything is replayed on the kernel while it is drawn, so that the picture cannot say what the
kernel did not do. What comes before the steps that matter is folded into one line a place.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phasesync.core.kernel import (
    Event,
    Kind,
    Mapped,
    Status,
    System,
    initial,
    mapped_of,
    next_step,
    step,
)
from phasesync.core.model import OptionValue
from phasesync.core.plan import Act, Plan, Wait
from phasesync.core.properties import Violation

__all__ = ("Row", "draw", "folded", "memory", "rows")

SHOWN = 12
SHOWN_LEAST = 3
LANES_MAX = 6
_FAULTS = frozenset((Kind.CRASH, Kind.FAIL, Kind.HANG, Kind.DEADLINE, Kind.ENGINE))
_MAPPED = {Mapped.NO: "free", Mapped.YES: "mapped", Mapped.UNKNOWN: "unknown", Mapped.LOST: "lost"}


class Row(NamedTuple):
    """One step: its number from 1, who does what, and which memory it changes."""

    number: int
    rank: int
    text: str
    memory: tuple[str, ...]
    fault: bool


def rows(plan: Plan, path: Sequence[Event]) -> tuple[tuple[Row, ...], tuple[System, ...]]:
    """Every step of a path, and the system before the first and after each."""
    systems = [initial(plan)]
    found: list[Row] = []
    for number, event in enumerate(path, 1):
        before, after = systems[-1], step(plan, systems[-1], event)
        text = f"{event.kind} {event.name}".strip()
        memory = tuple(_changes(plan, before, after))
        found.append(Row(number, event.rank, text, memory, event.kind in _FAULTS))
        systems.append(after)
    return tuple(found), tuple(systems)


def _changes(plan: Plan, before: System, after: System) -> list[str]:
    """`device/1 kv_cache free -> mapped`, one a cell whose mapping changed."""
    found: list[str] = []
    for number, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if mapped_of(old) is not mapped_of(new):
            device, resource = plan.cell_name(number)
            change = f"{_MAPPED[mapped_of(old)]} -> {_MAPPED[mapped_of(new)]}"
            found.append(f"{device} {resource} {change}")
    return found


def _where(plan: Plan, rank: int, system: System) -> str:
    state = system.ranks[rank]
    status = state.status.name.lower().replace("_", " ")
    match next_step(plan, rank, state):
        case Wait(fence=fence) if state.status is Status.WAITING:
            return f"at fence {fence}"
        case Wait(fence=fence):
            return f"before fence {fence}" if state.status is Status.READY else status
        case Act(phase=phase) if state.status is Status.ACTING:
            return f"in {phase}"
        case Act(phase=phase):
            return f"before {phase}" if state.status is Status.READY else status
        case None:
            return status


def folded(plan: Plan, path: Sequence[Event], shown: int = SHOWN) -> tuple[int, tuple[str, ...]]:
    """How many steps are folded, and where they take the ranks: one line a place.

    At most `shown` steps are left; fewer, if that makes the fold simpler to say and hides no fault.
    """
    least = max(0, len(path) - shown)
    if not least:
        return 0, ()
    _, systems = rows(plan, path)
    most = max(least, len(path) - SHOWN_LEAST)
    fault = next((at for at in range(least, most) if path[at].kind in _FAULTS), most)
    found = {at: _places(plan, systems[at]) for at in range(least, fault + 1)}
    hidden = min(found, key=lambda at: (len(found[at]), -at))
    return hidden, found[hidden]


def _places(plan: Plan, system: System) -> tuple[str, ...]:
    places: dict[tuple[int, str], list[int]] = {}
    for rank in range(len(plan.members)):
        place = (system.ranks[rank].epoch, _where(plan, rank, system))
        places.setdefault(place, []).append(rank)
    return tuple(
        f"{_ranks(plan, who)}: {where}" + (f" of epoch {epoch}" if epoch > 1 else "")
        for (epoch, where), who in places.items()
    )


def _ranks(plan: Plan, who: Sequence[int]) -> str:
    """`trainer/0`, or `trainer/0..63` where they follow each other."""
    names = [str(plan.members[rank]) for rank in who]
    if len(who) > 2 and list(who) == list(range(who[0], who[-1] + 1)):
        return f"{names[0]}..{plan.members[who[-1]].number}"
    return ", ".join(names)


def draw(
    plan: Plan,
    path: Sequence[Event],
    violations: Sequence[Violation] = (),
    *,
    says: str = "",
    shown: int = SHOWN,
    gib: Mapping[str, float] | None = None,
) -> tuple[str, ...]:
    """The run as lines of text; the offending step is marked.

    With `gib`, figures by resource, each step says what the devices that it changes hold then.
    """
    found, systems = rows(plan, path)
    hidden, places = folded(plan, path, shown)
    tail = found[hidden:]
    acting = list(dict.fromkeys(row.rank for row in tail))
    involved = acting if len(plan.members) > LANES_MAX else list(range(len(plan.members)))
    lanes = sorted(involved)[:LANES_MAX]
    width = max([14, *(len(row.text) + 2 for row in tail)])
    lines = [_options(plan.options)]
    if hidden:
        lines.append(f"steps 1 to {hidden}, in any order that the fences allow:")
        lines += [f"  {place}" for place in places]
    lines.append(("step  " + "".join(str(plan.members[at]).ljust(width) for at in lanes)).rstrip())
    for row in tail:
        last = row.number == len(found) and bool(violations)
        mark = ">" if last else "!" if row.fault else " "
        column = lanes.index(row.rank) if row.rank in lanes else 0
        body = " " * (width * column) + row.text
        memory = "; ".join(row.memory)
        if gib and row.memory:
            devices = dict.fromkeys(change.split()[0] for change in row.memory)
            after = systems[row.number]
            sums = (f"{each} {_gib_on(plan, after, each, gib):g} GiB" for each in devices)
            memory += f" ({', '.join(sums)})"
        line = f"{mark}{row.number:>4} {body.ljust(width * len(lanes))} {memory}"
        lines.append(line.rstrip())
    lines += [_broken(each) for each in violations]
    if says and not violations:
        lines.append(f"broken: {says}")
    lines += _held(plan, systems[-1], violations, gib)
    return tuple(lines)


def _gib_on(plan: Plan, system: System, device: str, gib: Mapping[str, float]) -> float:
    """What a device holds; what is in doubt counts."""
    base = [str(each) for each in plan.devices].index(device) * len(plan.protocol.resources)
    return sum(
        gib.get(str(resource.name), 0.0)
        for at, resource in enumerate(plan.protocol.resources)
        if mapped_of(system.cells[base + at]) is not Mapped.NO
    )


def _options(options: Sequence[tuple[str, OptionValue]]) -> str:
    said = (f"{name}={str(value).lower()}" for name, value in options)
    return "options: " + (", ".join(said) or "none")


def _broken(each: Violation) -> str:
    holders = f" (held by {', '.join(map(str, each.holders))})" if each.holders else ""
    return f"broken: {each.property}: {each.rank} on {each.device}: {each.says}{holders}"


def _held(
    plan: Plan,
    system: System,
    violations: Sequence[Violation],
    gib: Mapping[str, float] | None,
) -> list[str]:
    """What is on the devices that the violations name."""
    width = len(plan.protocol.resources)
    lines: list[str] = []
    for device in dict.fromkeys(each.device for each in violations if each.resources):
        base = plan.devices.index(device) * width
        held = [
            f"{resource.name} {_MAPPED[mapped_of(system.cells[base + at])]}"
            for at, resource in enumerate(plan.protocol.resources)
            if mapped_of(system.cells[base + at]) is not Mapped.NO
        ]
        sums = f"; {_gib_on(plan, system, str(device), gib):g} GiB" if gib else ""
        lines.append(f"{device} holds: {', '.join(held) or 'nothing'}{sums}")
    return lines


def memory(plan: Plan, system: System) -> list[list[tuple[str, str]]]:
    """What each device holds: (resource, state), whatever is not free."""
    width = len(plan.protocol.resources)
    return [
        [
            (str(resource.name), _MAPPED[mapped_of(system.cells[device * width + at])])
            for at, resource in enumerate(plan.protocol.resources)
            if mapped_of(system.cells[device * width + at]) is not Mapped.NO
        ]
        for device in range(len(plan.devices))
    ]
