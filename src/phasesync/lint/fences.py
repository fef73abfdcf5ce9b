"""Fences: whether somebody comes to each, what lies unprotected between two, and their deadlines.

The rule that must survive edits: whatever is refuted by removing a fence is an error here first,
because two accesses that *meet* (lint.view) need a fence between them that covers both.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, permutations

from phasesync.core.model import ResourceName
from phasesync.core.protocol import DEVICE, EVERYWHERE, WORLD, FenceDecl, PhaseDecl, StepDecl, Verb
from phasesync.lint.finding import Finding, Findings
from phasesync.lint.view import MAPPING, Access, View

__all__ = ("WAITS", "fence_rules", "order_rules")

#: Rules whose breach makes somebody wait for ever, so that no run of the epoch has an end.
WAITS = frozenset(("fence-members", "fence-scope"))

_SAYS = {
    Verb.ACQUIRES: "acquires", Verb.RELEASES: "releases", Verb.NEEDS: "needs", Verb.USES: "uses",
    Verb.WRITES: "writes", Verb.FILLS: "fills", Verb.DISCARDS: "discards", Verb.ENSURES: "ensures",
}  # fmt: skip


def fence_rules(view: View) -> Findings:
    """What is wrong with the fences of an epoch by themselves."""
    yield from _members(view)
    yield from _last(view)
    yield from _deadlines(view)


def order_rules(view: View) -> Findings:
    """What no fence keeps apart; one finding for two phases, whatever they share."""
    seen: set[tuple[str, ...]] = set()
    for found in chain(_acquires(view), _races(view)):
        if found.phases not in seen:
            seen.add(found.phases)
            yield found


# ------------------------------------------------------------------------- fences themselves


def _members(view: View) -> Findings:
    """Every member of a fence's scope comes to it, and all in the same order."""
    of: dict[str, str] = {group.name: group.of for group in view.protocol.groups}
    worlds = {role: tuple(_fences(view, program)) for role, program in view.programs.items()}
    for role, program in view.programs.items():
        for fence in (step for step in program if isinstance(step, FenceDecl)):
            scope = view.scope(fence)
            if scope != WORLD and of.get(scope) != role:
                wrong = f"fence {fence.name!r} is of {role}, and its scope {scope!r} is not"
                right = f"{scope} is a group of {of.get(scope)}; use a scope that {role} is in"
                yield _finding(view, "fence-scope", fence, wrong, right)
    for one, two in permutations(view.programs, 2):
        theirs = {fence.name: at for at, fence in enumerate(worlds[two])}
        met = [theirs[fence.name] for fence in worlds[one] if fence.name in theirs]
        for fence in worlds[one]:
            if fence.name not in theirs:
                wrong = f"fence {fence.name!r} waits for {two}, which never comes to it"
                yield _finding(view, "fence-members", fence, wrong, f"add it to {two}'s phases")
        if met != sorted(met):
            wrong = f"{one} and {two} come to their common fences in different orders"
            yield _finding(view, "fence-members", worlds[one][0], wrong, "put them in one order")


def _fences(view: View, program: tuple[StepDecl, ...]) -> Iterator[FenceDecl]:
    """The fences of a program at which all ranks meet."""
    for step in program:
        if isinstance(step, FenceDecl) and view.scope(step) == WORLD:
            yield step


def _last(view: View) -> Findings:
    """A failure reaches everybody at the last fence, so it is of the world and nothing follows."""
    for role, program in view.programs.items():
        fences = [step for step in program if isinstance(step, FenceDecl)]
        if not fences:
            if program:
                wrong = f"the epoch of {role} has no fence"
                right = "end it with a fence of scope world, where a failure reaches everybody"
                yield _finding(view, "last-fence", program[-1], wrong, right)
            continue
        last = fences[-1]
        if view.scope(last) != WORLD:
            wrong = f"the last fence {last.name!r} is of scope {view.scope(last)!r}"
            right = "a failure reaches all ranks at the last fence: give it scope world"
            yield _finding(view, "last-fence", last, wrong, right)
        for step in program[program.index(last) + 1 :]:
            if isinstance(step, PhaseDecl) and not step.outside:
                wrong = f"phase {step.name!r} can fail after the last fence {last.name!r}"
                right = "nobody would learn of it; put it before that fence"
                yield _finding(view, "last-fence", step, wrong, right)


def _deadlines(view: View) -> Findings:
    """A fence gives its slowest member the time that its phases have."""
    for program in view.programs.values():
        phases = _after_last_fence(program) if view.cyclic else []
        for step in program:
            if isinstance(step, PhaseDecl):
                phases.append(step)
                continue
            times = [(phase.name, phase.deadline_s) for phase in phases if phase.deadline_s]
            total = sum(time for _, time in times)
            if total > step.deadline_s:
                each = ", ".join(f"{name} {_s(time)}" for name, time in times)
                wrong = f"fence {step.name!r} waits {_s(step.deadline_s)}, less than the phases "
                wrong += f"before it may take ({each})"
                right = f"give it at least {_s(total)}"
                yield _finding(view, "deadline", step, wrong, right)
            first = step.first_deadline_s
            if first is not None and first < step.deadline_s:
                wrong = f"fence {step.name!r} waits {_s(first)} in the first epoch, less than the "
                wrong += f"{_s(step.deadline_s)} later, when everything is warm"
                right = f"give it first_deadline_s: {step.deadline_s:g} or more, or drop it"
                yield _finding(view, "deadline", step, wrong, right)
            phases = []


def _after_last_fence(program: tuple[StepDecl, ...]) -> list[PhaseDecl]:
    phases: list[PhaseDecl] = []
    for step in program:
        phases = [*phases, step] if isinstance(step, PhaseDecl) else []
    return phases


def _s(seconds: float) -> str:
    return f"{seconds:g} s"


# ------------------------------------------------------------------------------- what meets


def _races(view: View) -> Findings:
    """Two hands on one resource, not both only reading, with a fence between them either way."""
    for one, two in combinations(view.accesses, 2):
        if one.resource != two.resource or one.phase == two.phase or (one.shared and two.shared):
            continue
        scope = view.meets(one, two)
        if scope is None:
            continue
        if view.between(one, two, scope) is None:
            yield _unfenced(view, one, two, scope)
        elif view.cyclic and view.between(two, one, scope) is None:
            yield _unfenced(view, two, one, scope)


def _acquires(view: View) -> Findings:
    """What is acquired is fenced off from the release of what may not be there with it."""
    for access in view.accesses:
        if not _takes(view, access):
            continue
        for resources in view.never:
            others = [other for other in resources if other != access.resource]
            if len(others) == len(resources):
                continue
            doubts = [
                _at_once(view, access, other) or _let_go(view, access, view.last(other, access))
                for other in others
            ]
            found = [doubt for doubt in doubts if doubt is not None]
            if len(found) == len(others):
                yield found[0]


def _at_once(view: View, access: Access, other: ResourceName) -> Finding | None:
    """Another role that moves `other` between the same two fences, sooner or later by chance."""
    for moves in view.accesses:
        if moves.resource == other and moves.verb in MAPPING:
            apart = moves.phase.role == access.phase.role or moves.order[0] != access.order[0]
            scope = None if apart else view.meets(moves, access)
            if scope is not None:
                return _unfenced(view, moves, access, scope)
    return None


def _takes(view: View, access: Access) -> bool:
    if access.verb is Verb.ENSURES:
        return view.starts_mapped(access.resource)
    return access.verb is Verb.ACQUIRES


def _let_go(view: View, access: Access, release: Access | None) -> Finding | None:
    """What is wrong between a release and the acquire that relies on it."""
    if release is None or release.verb is Verb.ACQUIRES or release.phase == access.phase:
        return None  # What is still mapped then is found by running the epoch.
    scope = view.meets(release, access)
    if scope is None:
        return None
    fence = view.between(release, access, scope)
    if fence is None:
        return _unfenced(view, release, access, scope)
    if release.phase.enqueued and not view.synced(release, access, scope):
        wrong = f"fence {fence.name!r} opens before the device has done what "
        wrong += f"{release.phase.name!r} only enqueued (it releases {release.resource})"
        right = "add `requires: [device_synchronised]`"
        phases = release.phase.name, access.phase.name
        return replace(_finding(view, "unsynchronised", fence, wrong, right), phases=phases)
    return None


_REACH = {DEVICE: "its device", EVERYWHERE: "all devices", WORLD: "all devices"}


def _unfenced(view: View, first: Access, then: Access, scope: str) -> Finding:
    rule = "unprotected-acquire" if then.verb is Verb.ACQUIRES else "unprotected"
    reach = _REACH.get(then.reach, f"every device of its {then.reach}")
    who = "every rank" if first.actor == DEVICE else "the leader"
    wrong = (
        f"phase {then.phase.name!r} {_SAYS[then.verb]} {then.resource} on {reach}, and no fence "
    )
    wrong += f"shows that {who} has ended {first.phase.name!r}, "
    wrong += f"which {_SAYS[first.verb]} {first.resource}"
    right = f"put a fence of scope {' or '.join(dict.fromkeys((scope, WORLD)))} between them"
    phases = first.phase.name, then.phase.name
    return replace(_finding(view, rule, then.phase, wrong, right), phases=phases)


def _finding(view: View, rule: str, step: PhaseDecl | FenceDecl, wrong: str, right: str) -> Finding:
    return Finding(
        rule=rule, wrong=wrong, right=right, place=step.place, under=view.under,
        file=view.protocol.file,
    )  # fmt: skip
