"""Hangs and lost errors: who is absent, why, and whether anybody was told.

All of them read one graph of waits at the end of the log. The absentee is the root, never who
waits.
"""

from collections.abc import Callable
from typing import Final

from phasesync.audit.answer import Finding
from phasesync.audit.facts import Facts
from phasesync.audit.rules.branches import joins, plans, sameplan
from phasesync.audit.rules.control import ctrl, release, terminal
from phasesync.audit.rules.cycles import ctrlplane, nocycle
from phasesync.audit.rules.handshake import handshake
from phasesync.audit.rules.lost import gone, report
from phasesync.audit.rules.seen import Seen
from phasesync.audit.rules.unexplained import left_over
from phasesync.audit.waits import Waits

__all__ = ("Hangs",)

# In this order: the first that explains a wait leaves nothing for the others.
_JUDGES: Final[tuple[Callable[[Waits, Seen, set[int]], list[Finding]], ...]] = (
    terminal,
    ctrl,
    release,
    gone,
    report,
    nocycle,
    ctrlplane,
    handshake,
    sameplan,
    joins,
    plans,
    left_over,
)


class Hangs:
    """The family of R-ALLOK, R-MEMBERS, R-REPORT, R-SAMEPLAN, R-NOCYCLE, R-CTRLPLANE, R-HANDSHAKE,
    R-CTRL, R-RELEASE, R-TERMINAL and R-DUMPSET.

    One pass collects what only the order tells; the rest is read from the graph of waits once the
    log is over. Each judge is one rule, with its own page.
    """

    rule = "R-ALLOK"
    wants = None

    def __init__(self) -> None:
        self._seen = Seen()
        self.see = self._seen.see

    def finish(self, facts: Facts) -> list[Finding]:
        waits = Waits(facts, self._seen.cut)
        explained: set[int] = set()
        return [each for judge in _JUDGES for each in judge(waits, self._seen, explained)]
