"""What an epoch left behind when it failed, as far as one rank can know.

A rank knows its own steps, and of others what fences prove: a step before a fence that opened is
done, a step behind a fence that is broken never began. Everything between may have happened, and
what it touches is `unknown`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from phasesync.core.kernel import RankState, Stage, program
from phasesync.core.model import Rank, ResourceName, RootCause
from phasesync.core.plan import Act, Plan, Wait
from phasesync.core.protocol import Verb

__all__ = ("INTACT", "LOST", "UNKNOWN", "Aftermath", "aftermath", "put_back", "to_replace")

INTACT = "intact"
UNKNOWN = "unknown"
LOST = "lost"

_CHANGES = frozenset(
    (Verb.ACQUIRES, Verb.RELEASES, Verb.WRITES, Verb.DISCARDS, Verb.FILLS, Verb.ENSURES)
)
_GONE = frozenset(("cancelled", "dead", "deadline", "restarted"))


class Aftermath(NamedTuple):
    """The state of each engine resource in the rank's reach: intact, unknown or lost."""

    resources: tuple[tuple[str, str], ...]

    @property
    def weights(self) -> str:
        """The worst of what is written; `intact` where the protocol writes nothing."""
        return _worst(state for name, state in self.resources if name != "kv_cache")

    @property
    def kv(self) -> str:
        """The state of the KV cache."""
        return _worst(state for name, state in self.resources if name == "kv_cache")


def aftermath(
    plan: Plan, rank: int, state: RankState, passed: frozenset[str], broken: frozenset[str]
) -> Aftermath:
    """What may have become of the engine's memory on this rank's devices.

    `passed` and `broken` are the fences of this epoch that this rank knows to be open and broken.
    """
    passive = {role.name for role in plan.protocol.roles if role.passive}
    reach = _reach(plan, rank)
    states: dict[str, str] = {
        decl.name: INTACT for decl in plan.protocol.resources if decl.owner in passive
    }
    for other in reach:
        for act in _possible(plan, other, rank, state, passed, broken):
            for touch in act.touches:
                name = plan.cell_name(touch.cell)[1]
                if touch.verb in _CHANGES and name in states:
                    states[name] = UNKNOWN
    return Aftermath(tuple(states.items()))


def put_back(plan: Plan, behind: Aftermath) -> Aftermath:
    """After the recovery: what an epoch starts without is known to be gone; what it starts with
    is mapped again, but what it holds stays as doubtful as it was."""
    start = {plan.cell_name(number)[1]: mapped for number, mapped in enumerate(plan.start)}
    return Aftermath(
        tuple((name, state if start[ResourceName(name)] else INTACT) for name, state in behind[0])
    )


def to_replace(cause: RootCause) -> tuple[Rank, ...]:
    """Ranks that must be started again: those that died, hung, left or were superseded."""
    return cause.ranks if cause.kind in _GONE else ()


def _reach(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that can act on this rank's engine: those of its groups."""
    parts = [part for _, group in plan.groups for part in group if rank in part]
    return tuple(sorted({member for part in parts for member in part} or {rank}))


def _possible(
    plan: Plan,
    other: int,
    rank: int,
    state: RankState,
    passed: frozenset[str],
    broken: frozenset[str],
) -> Iterator[Act]:
    """The other's actions that may be under way or half done: neither proved done nor shut off."""
    steps = program(plan, other, Stage.EPOCH)
    if other == rank and state.stage is Stage.EPOCH:
        here = steps[state.at : state.at + 1]
        yield from (step for step in here if isinstance(step, Act))
        return
    first = max(
        (
            at + 1
            for at, step in enumerate(steps)
            if isinstance(step, Wait) and step.fence in passed
        ),
        default=0,
    )
    for step in steps[first:]:
        if isinstance(step, Wait):
            if step.fence in broken:
                return
        else:
            yield step


def _worst(states: Iterator[str]) -> str:
    found = set(states)
    return next((state for state in (LOST, UNKNOWN) if state in found), INTACT)
