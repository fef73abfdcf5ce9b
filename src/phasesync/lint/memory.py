"""Memory over an epoch: the kernel runs it once, every rank in step, and is asked what it thinks.

No rule about memory is written twice; what is wrong in this one orderly run is wrong in every run.
"""

from collections.abc import Mapping
from math import lcm

from phasesync.core import kernel
from phasesync.core.kernel import (
    Event,
    Kind,
    Mapped,
    RankState,
    Status,
    System,
    content_of,
    mapped_of,
)
from phasesync.core.model import ResourceName
from phasesync.core.plan import Act, Plan, Wait, resolve
from phasesync.core.properties import Violation, violations
from phasesync.core.protocol import InvariantKind, Place, Verb
from phasesync.lint.finding import Finding, Findings
from phasesync.lint.view import View

__all__ = ("memory_rules",)

_MEMBERS_MAX = 64
_STEPS_MAX = 100_000
_STATES = {
    Mapped.NO: "is not mapped",
    Mapped.YES: "is mapped already",
    Mapped.UNKNOWN: "may be mapped: its release is enqueued, and no device was synchronised",
    Mapped.LOST: "is lost",
}


def memory_rules(view: View) -> Findings:
    """What the epoch does to memory that it must not, and whether it ends as it started."""
    protocol = view.protocol
    yield from _start(view)
    counts = _counts(view)
    if sum(counts.values()) > _MEMBERS_MAX:
        return
    plan = resolve(protocol, counts, view.options)
    system = kernel.initial(plan)
    first = system
    for _ in range(_STEPS_MAX):
        event = _next(plan, system)
        if event is None:
            break
        after = kernel.step(plan, system, event)
        found = violations(plan, system, event, after)
        yield from (_broken(view, plan, system, event, each) for each in found)
        if found:
            return
        system = after
    yield from _closed(view, plan, first, system)


def _counts(view: View) -> Mapping[str, int]:
    """As few devices as fill all groups, and one rank of each role on each."""
    devices = lcm(*(view.size(group.name) for group in view.protocol.groups))
    return dict.fromkeys(view.programs, devices)


def _next(plan: Plan, system: System) -> Event | None:
    """The next event of the run in which nobody hurries ahead."""
    events = kernel.enabled(plan, system, epochs=1)
    return min(events, key=lambda event: _turn(plan, system, event), default=None)


def _turn(plan: Plan, system: System, event: Event) -> tuple[int, int, int, int]:
    state = system.ranks[event.rank]
    program = plan.programs[event.rank][: state.at]
    passed = sum(isinstance(step, Wait) for step in program)
    names: list[str] = [step.name for step in plan.protocol.steps]
    return event.kind is not Kind.END, passed, names.index(event.name), event.rank


def _start(view: View) -> Findings:
    right = "change start: of one, or when: of this line"
    for invariant in view.invariants:
        mapped = [name for name in invariant.resources if view.starts_mapped(name)]
        together = len(mapped) == len(invariant.resources)
        if invariant.kind is InvariantKind.NEVER and together:
            names = " and ".join(invariant.resources)
            wrong = f"{names} may never be together, and every epoch starts with them so"
            yield _finding(view, "never-in-start", invariant.place, wrong, right)
        if invariant.kind is InvariantKind.ALWAYS and not invariant.on and not together:
            names = " and ".join(name for name in invariant.resources if name not in mapped)
            wrong = f"{names} must always be mapped, and every epoch starts without"
            yield _finding(view, "always-in-start", invariant.place, wrong, right)


def _broken(view: View, plan: Plan, system: System, event: Event, found: Violation) -> Finding:
    place = next(step.place for step in plan.protocol.steps if step.name == event.name)
    names = " and ".join(found.resources)
    if found.property == "never":
        return _together(view, plan, system, place, event.name, found)
    act = kernel.next_step(plan, event.rank, system.ranks[event.rank])
    assert isinstance(act, Act)
    if found.property == "content":
        wrong = f"phase {event.name!r} needs the new weights in {names}, and it {found.says}"
        return _finding(view, "content", place, wrong, "write or fill it before")
    if found.property in ("always", "agree", "monotone"):
        right = f"mend the order, or `{found.property}:`"
        wrong = f"phase {event.name!r} breaks {found.property} for {names}: {found.says}"
        return _finding(view, found.property, place, wrong, right)
    for touch in act.touches:
        if plan.cell_name(touch.cell) == (found.device, found.resources[0]):
            state = _STATES[mapped_of(system.cells[touch.cell])]
            wrong = f"phase {event.name!r} {touch.verb} {names}, which {state}"
            right = "release it before" if touch.verb is Verb.ACQUIRES else "acquire it before"
            return _finding(view, found.property, place, wrong, right)
    return _finding(view, found.property, place, f"phase {event.name!r}: {found.says}", "")


def _together(
    view: View, plan: Plan, system: System, place: Place, phase: str, found: Violation
) -> Finding:
    for cell, value in enumerate(system.cells):
        device, name = plan.cell_name(cell)
        held = device == found.device and name in found.resources
        if held and mapped_of(value) is Mapped.UNKNOWN:
            wrong = f"phase {phase!r} needs the memory of {name}, whose release is only enqueued"
            right = "before it, come to a fence with `requires: [device_synchronised]`"
            return _finding(view, "unsynchronised", place, wrong, right)
    wrong = f"phase {phase!r} brings {' and '.join(found.resources)} together on one device"
    return _finding(view, "never", place, wrong, "release one of them before")


def _closed(view: View, plan: Plan, first: System, last: System) -> Findings:
    """The epoch's end is its start, one version later."""
    for rank, state in enumerate(last.ranks):
        if state.status is not Status.FINISHED:
            yield _stuck(view, plan, rank, state)
            return
    for number, resource in enumerate(view.protocol.resources):
        cells = range(number, len(first.cells), len(view.protocol.resources))
        for cell in cells:
            before, after = first.cells[cell], last.cells[cell]
            if mapped_of(before) is not mapped_of(after):
                yield _open_end(view, resource.name, resource.place, mapped_of(after))
                break
            if content_of(before) == 0 and content_of(after) != 1:
                wrong = f"{resource.name} starts each epoch with the last one's content, "
                wrong += "and this epoch gives it none"
                right = "write or fill it in some phase"
                yield _finding(view, "closure", resource.place, wrong, right)
                break


def _stuck(view: View, plan: Plan, rank: int, state: RankState) -> Finding:
    who, step = plan.members[rank], kernel.next_step(plan, rank, state)
    if step is None:
        place = next(role.place for role in view.protocol.roles if role.name == who.role)
        wrong = f"role {who.role!r} has nothing to do in an epoch"
        return _finding(view, "hang", place, wrong, "give it a phase or a fence that always stands")
    name = step.phase if isinstance(step, Act) else step.fence
    place = next(each.place for each in view.steps if each.name == name)
    wrong = f"the epoch never ends: {who} waits at {name!r} for ever"
    return _finding(view, "hang", place, wrong, "let every member of its scope come to it")


def _open_end(view: View, name: ResourceName, place: Place, after: Mapped) -> Finding:
    started = "mapped" if view.starts_mapped(name) else "not mapped"
    ends = {
        Mapped.NO: "not mapped",
        Mapped.YES: "mapped",
        Mapped.UNKNOWN: "with its release still enqueued",
    }[after]
    right = {
        Mapped.NO: "acquire it in the epoch, or start with it not mapped",
        Mapped.YES: "release it in the epoch, or start with it mapped",
        Mapped.UNKNOWN: "add `requires: [device_synchronised]` to a fence after the release",
    }[after]
    wrong = f"{name} starts the epoch {started} and ends it {ends}"
    return _finding(view, "closure", place, wrong, right)


def _finding(view: View, rule: str, place: Place, wrong: str, right: str) -> Finding:
    return Finding(
        rule=rule, wrong=wrong, right=right, place=place, under=view.under,
        file=view.protocol.file,
    )  # fmt: skip
