"""The one pass: every event goes to the shared facts and to the rules that want it.

Rules see an event before the ledgers take it over, so that what a phase starts on is what was there
before it.
"""

from collections.abc import Callable, Iterable
from typing import Final

from phasesync.audit.answer import Answer, Finding
from phasesync.audit.events import Event, Header
from phasesync.audit.facts import Facts, Open
from phasesync.audit.policy import judge
from phasesync.audit.rules.base import Rule
from phasesync.audit.rules.commands import AllRanks, FanOut
from phasesync.audit.rules.epochs import FenceEpoch
from phasesync.audit.rules.fences import Covers, FencePost
from phasesync.audit.rules.memory import Fence
from phasesync.audit.rules.payload import Exclusive, Lifetime
from phasesync.audit.rules.residue import Drift, Freed, Rollback
from phasesync.audit.rules.service import Quiet, Timeouts, Windows
from phasesync.audit.rules.tags import Contents, Mapped, Once, TagSets
from phasesync.audit.rules.versions import Evidenced, Monotone, Prerequisites, Scope, Versions
from phasesync.audit.rules.waiting import Hangs
from phasesync.audit.vocabulary import ACTIONS

__all__ = ("FAMILIES", "Audit")

FAMILIES: Final[tuple[Callable[[], Rule], ...]] = (
    Fence,
    FencePost,
    Prerequisites,
    Mapped,
    Contents,
    Once,
    TagSets,
    Hangs,
    FenceEpoch,
    Covers,
    Lifetime,
    Exclusive,
    Versions,
    Monotone,
    Quiet,
    FanOut,
    AllRanks,
    Freed,
    Rollback,
    Drift,
    Evidenced,
    Windows,
    Timeouts,
    Scope,
)

_See = Callable[[Event, Open | None, Facts], None]


class Audit:
    """One run under audit: feed it events in order, then ask for the answer."""

    def __init__(self, header: Header, families: Iterable[Callable[[], Rule]] = FAMILIES) -> None:
        self.facts = Facts(header)
        self.rules: tuple[Rule, ...] = tuple(family() for family in families)
        self.events = 0
        self.findings: list[Finding] = []
        self._for: dict[str, tuple[_See, ...]] = {
            action: tuple(
                rule.see for rule in self.rules if rule.wants is None or action in rule.wants
            )
            for action in ACTIONS
        }

    def feed(self, event: Event) -> None:
        """Take in the next event."""
        self.events += 1
        facts = self.facts
        start = facts.match(event)
        for see in self._for[event.means.action]:
            see(event, start, facts)
        facts.settle(event, start)

    def add(self, finding: Finding) -> None:
        """Take in what somebody else found in the same log: its reader, or the kernel's replay."""
        self.findings.append(finding)

    def answer(self, *, run: str = "") -> Answer:
        """The verdict on what was fed."""
        found = list(self.findings)
        for rule in self.rules:
            found += rule.finish(self.facts)
        return judge(found, self.facts, run=run, events=self.events)
