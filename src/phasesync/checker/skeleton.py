"""A plan without its memory, for the one question that memory hardly bears on: who waits for ever.

It stands for a plan that is known to be safe. Then memory decides one thing only: an action that
reads what a dead process owned fails. (It finds that lost, or never mapped; the latter would break
a rule.) Such actions stay, with such memory as always mapped until its owner dies. All others are
one action between two of these or two fences: a rank may go on there, fail, die, or hear of a
failure, whatever it does. Every run of the plan is one of its skeleton; what is found to wait for
ever here has to be found in the plan too before it counts.
"""

from dataclasses import replace

from phasesync.core.kernel import INPUTS
from phasesync.core.plan import Act, Plan, Step, Touch, Wait
from phasesync.core.protocol import Verb

__all__ = ("bare",)


def bare(plan: Plan) -> Plan | None:
    """The skeleton of a safe plan; None where somebody may map what another process owns."""
    numbers = {rank: at for at, rank in enumerate(plan.members)}
    owner = [numbers.get(rank) for rank in plan.owner]
    read: set[int] = set()
    programs: list[tuple[Step, ...]] = []
    for stage in (plan.programs, plan.recover):
        for rank, program in enumerate(stage):
            for step in program:
                if isinstance(step, Act) and _maps_anothers(step, rank, owner):
                    return None
            steps = _bare(program, rank, owner)
            read |= {t.cell for step in steps if isinstance(step, Act) for t in step.touches}
            programs.append(steps)
    many = len(plan.programs)
    return replace(
        plan,
        programs=tuple(programs[:many]),
        recover=tuple(programs[many:]),
        start=tuple(at in read for at in range(len(plan.start))),
        content=(False,) * len(plan.content),
        freed=(False,) * len(plan.freed),
        never=(),
        never_on=((),) * len(plan.devices),
        elsewhere=(),
        always_on=(),
        agree=(),
        monotone=(False,) * len(plan.monotone),
    )


def _maps_anothers(act: Act, rank: int, owner: list[int | None]) -> bool:
    return any(
        touch.verb in (Verb.ACQUIRES, Verb.ENSURES) and owner[touch.cell] not in (None, rank)
        for touch in act.touches
    )


def _bare(program: tuple[Step, ...], rank: int, owner: list[int | None]) -> tuple[Step, ...]:
    steps: list[Step] = []
    acts: list[Act] = []
    for step in program:
        reads = () if isinstance(step, Wait) else _reads(step, rank, owner)
        if isinstance(step, Act) and not reads:
            acts.append(step)
            continue
        steps += _one(acts)
        acts = []
        steps.append(
            step._replace(touches=reads, enqueued=False) if isinstance(step, Act) else step
        )
    return (*steps, *_one(acts))


def _reads(act: Act, rank: int, owner: list[int | None]) -> tuple[Touch, ...]:
    """What the action reads of other processes."""
    cells = (t.cell for t in act.touches if t.verb in INPUTS)
    return tuple(
        Touch(Verb.USES, cell) for cell in dict.fromkeys(cells) if owner[cell] not in (None, rank)
    )


def _one(acts: list[Act]) -> list[Act]:
    if not acts:
        return []
    outside, led = all(act.outside for act in acts), any(act.led for act in acts)
    return [acts[0]._replace(touches=(), outside=outside, enqueued=False, led=led)]
