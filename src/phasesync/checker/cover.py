"""Which assignments of the options follow from others, so that one search answers for all of them.

A plan covers another one of the same ranks that lacks some of its actions, and nothing else that
counts: each run of the narrow plan is then a run of the wide one, in which a rank does what only
the wide one has just before its next step. It may do that at any time, because such an action
waits for nobody, cannot be made to fail by memory that was lost, and touches only resources that
nothing else asks about. So where the wide plan breaks no rule and never stops, nor does the narrow.
"""

from collections.abc import Mapping, Sequence

from phasesync.core.condition import evaluate
from phasesync.core.kernel import INPUTS
from phasesync.core.model import OptionValue
from phasesync.core.options import conditions
from phasesync.core.plan import Act, Plan, Step, Touch, Wait
from phasesync.core.protocol import FenceDecl, Protocol, Retry, Verb

__all__ = ("covers", "decided", "families")


def decided(protocol: Protocol, options: Mapping[str, OptionValue]) -> tuple[object, ...]:
    """All that the options decide of a plan; two assignments that agree here have equal plans."""
    steps = protocol.steps + protocol.recover
    scopes = [step.scope for step in steps if isinstance(step, FenceDecl)]
    return (
        tuple(bool(evaluate(condition, options)) for condition in conditions(protocol)),
        tuple(options[g.size] for g in protocol.groups if isinstance(g.size, str)),
        tuple(options[name] for name in scopes if name in options),
    )


def families(plans: Sequence[Plan]) -> tuple[int, ...]:
    """For each plan the number of one that covers it; its own where none does."""
    heads: list[int] = []
    of: dict[int, int] = {}
    for at in sorted(range(len(plans)), key=lambda at: (-_length(plans[at]), at)):
        head = next((head for head in heads if covers(plans[head], plans[at])), at)
        of[at] = head
        if head == at:
            heads.append(at)
    return tuple(of[at] for at in range(len(plans)))


def _length(plan: Plan) -> int:
    return sum(map(len, plan.programs)) + sum(map(len, plan.recover))


def covers(wide: Plan, narrow: Plan) -> bool:
    """Whether whatever holds of the wide plan holds of the narrow one too."""
    if _frame(wide) != _frame(narrow):
        return False
    epoch = _extra(wide.programs, narrow.programs)
    recover = _extra(wide.recover, narrow.recover)
    if epoch is None or recover is None or any(act.led for act in recover):
        return False  # Whether a recovery can do without a dead leader is read off what it led.
    extra = epoch + recover
    width = len(wide.protocol.resources)
    hidden = {touch.cell % width for act in extra for touch in act.touches}
    return (
        all(touch.verb not in INPUTS for act in extra for touch in act.touches)
        and _alike_elsewhere(wide, narrow, hidden)
        and not any(
            touch.cell % width in hidden and touch.verb is not Verb.ENSURES
            for touch in _touches(narrow)
        )
    )


def _frame(plan: Plan) -> tuple[object, ...]:
    """What must be equal in both."""
    return (
        plan.members,
        plan.engines,
        plan.place,
        plan.groups,
        plan.scopes,
        plan.owner,
        plan.content,
        plan.freed,
        plan.defects,
    )


def _extra(
    programs: tuple[tuple[Step, ...], ...], others: tuple[tuple[Step, ...], ...]
) -> list[Act] | None:
    """The actions that only the first programs have; None if that is not all they differ in."""
    extra: list[Act] = []
    for program, other in zip(programs, others, strict=True):
        left_out = _left_out(program, other)
        if left_out is None:
            return None
        extra += left_out
    return extra


def _left_out(program: tuple[Step, ...], other: tuple[Step, ...]) -> list[Act] | None:
    extra: list[Act] = []
    at = 0
    for step in program:
        if at < len(other) and _plain(step) == _plain(other[at]):
            at += 1
        elif isinstance(step, Act):
            extra.append(step)
        else:
            return None
    return extra if at == len(other) else None


def _plain(step: Step) -> Step:
    """A step without what no search asks for."""
    match step:
        case Act():
            return step._replace(retry=Retry.NEVER, deadline_s=None)
        case Wait():
            return step._replace(deadline_s=0.0, first_deadline_s=0.0)


def _alike_elsewhere(wide: Plan, narrow: Plan, hidden: set[int]) -> bool:
    """Whether memory starts alike but for what is hidden, and nothing more is forbidden."""
    width = len(wide.protocol.resources)
    starts = zip(wide.start, narrow.start, strict=True)
    if any(one != two for at, (one, two) in enumerate(starts) if at % width not in hidden):
        return False
    if not _follows(wide, narrow, hidden):
        return False
    pairs = {(pair.device, pair.cells) for pair in wide.never}
    if any(
        (pair.device, pair.cells) not in pairs or any(at % width in hidden for at in pair.cells)
        for pair in narrow.never
    ):
        return False
    return all(
        pair in wide.elsewhere and not hidden.intersection(pair) for pair in narrow.elsewhere
    )


def _follows(wide: Plan, narrow: Plan, hidden: set[int]) -> bool:
    """Whether all that other invariants ask of the narrow plan is asked of the wide one."""
    width = len(wide.protocol.resources)
    mapped = {at for cells in narrow.always_on for at in cells}
    rising = {at for at, rises in enumerate(narrow.monotone) if rises}
    agreed = set(narrow.agree)
    return (
        mapped <= {at for cells in wide.always_on for at in cells}
        and rising <= {at for at, rises in enumerate(wide.monotone) if rises}
        and agreed <= set(wide.agree)
        and not any(at % width in hidden for at in mapped | rising)
        and not any(at % width in hidden for part in agreed for at in part)
    )


def _touches(plan: Plan) -> list[Touch]:
    return [
        touch
        for program in plan.programs + plan.recover
        for act in program
        if isinstance(act, Act)
        for touch in act.touches
    ]
