"""Where it shows that others go on under a plan that this rank has left between two epochs.

Who shares a fence with this rank meets a broken one there, and stops. Who shares none before the
last finishes its epoch, and will not come to the fence of a new plan before that: whoever waits
there would wait in vain. Nothing of this is asked while all go by one plan.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from phasesync.core.model import Arrival, Rank
from phasesync.core.plan import Plan, Wait

__all__ = ("Elsewhere", "elsewhere")

#: Scopes count their fences apart, a recovery's too: another one may be so many behind or ahead.
#: Who has not found them there looks twice as far the next time; a scope that is further away than
#: the last look has failed alone some hundred times.
APART, APART_MAX = 24, 1536


class Elsewhere(NamedTuple):
    """Fences at which ranks of another scope arrive if they begin `epoch`: about those that this
    rank's own scope comes to then."""

    attempt: int
    epoch: int
    scope: str
    own: range

    def generations(self, looks: int = 0) -> range:
        """Where to look, after so many looks that found nobody."""
        apart = min(APART << min(looks, 16), APART_MAX)
        return range(max(self.own.start - apart, 0), self.own.stop + apart)

    def begun_by(self, arrivals: Iterable[Arrival]) -> Rank | None:
        """The first of the ranks that have begun the epoch, if any has: a failed arrival only
        says that a rank has left as well."""
        ranks = [come.rank for come in arrivals if come.epoch >= self.epoch and come.cause is None]
        return min(ranks, default=None)


def elsewhere(
    plan: Plan, rank: int, *, attempt: int, epoch: int, generations: Mapping[int, int]
) -> Elsewhere | None:
    """The scope that this rank looks at: the next one of its kind, so that of all that have left
    somebody looks at one that has not. None where the first of its scope looks for it, or where a
    fence of all is before everybody.
    """
    waits = [step for step in plan.programs[rank] if isinstance(step, Wait) and not step.joined]
    if not waits or any(wait.scope == plan.world for wait in waits):
        return None
    mine = waits[0].scope
    kind = plan.scopes[mine].name.partition("/")[0]
    alike = [at for at, scope in enumerate(plan.scopes) if scope.name.partition("/")[0] == kind]
    if len(alike) == 1 or plan.scopes[mine].members[0] != rank:
        return None
    scope = alike[(alike.index(mine) + 1) % len(alike)]
    come = generations.get(mine, 0)
    coming = sum(wait.scope == mine for wait in waits)
    return Elsewhere(attempt, epoch, plan.scopes[scope].name, range(come, come + coming))
