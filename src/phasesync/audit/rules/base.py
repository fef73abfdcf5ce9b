"""What every rule is: it sees each event once, and says at the end what it found.

A rule concludes from what lines say. Evidence that is absent is no evidence; then it keeps silent,
or says `inconclusive` and what to record.
"""

import typing

from phasesync.audit.answer import Finding
from phasesync.audit.events import Event
from phasesync.audit.facts import Facts, Open

__all__ = ("Rule",)


class Rule(typing.Protocol):
    """`wants` lists the actions whose events it is fed (none: all of them)."""

    @property
    def rule(self) -> str: ...

    @property
    def wants(self) -> frozenset[str] | None: ...

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        """Note `event`; `start` is the phase that it ends, `facts` what was known before it."""

    def finish(self, facts: Facts) -> list[Finding]:
        """What the rule found, once the log is over."""
