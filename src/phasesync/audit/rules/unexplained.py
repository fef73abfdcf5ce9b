"""Waits that no rule explains, and logs that lack the rank that matters: R-DUMPSET."""

from phasesync.audit.answer import SUSPECTED, Finding
from phasesync.audit.events import of_epoch
from phasesync.audit.rules.seen import Seen
from phasesync.audit.waits import Waits, named, waiters

__all__ = ("left_over",)


def left_over(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-DUMPSET, or a wait that nothing in the log explains: both are `inconclusive`.

    Sees: waits at the end of the log that no other rule explains, and whom the log has no line of.
    Cannot see: slow from stuck, which is why it is never an accusation. Sources: PyTorch issue
    196968, PyTorch PR 150652.
    """
    found = []
    for meet in waits.meets:
        if any(wait.event.at in explained for wait in meet.waits) or meet.action == "drain":
            continue
        if meet.action in ("publish", "teardown") and not meet.absent:
            continue
        rule: str | None
        silent = [rank for rank, state in meet.absent.items() if state == "silent"]
        rest = [rank for rank, state in meet.absent.items() if state in ("working", "idle")]
        where = f"{waiters(meet.ranks)} in {meet.phase}{of_epoch(meet.epoch)}"
        if silent:
            because = f"{where} for {named(silent)}, of which there is no line at all"
            rule, more = "R-DUMPSET", f"the log or dump of {named(silent)}"
        elif rest:
            because = (
                f"{where}; {named(rest)} did not come, and no line says whether slow, stuck or gone"
            )
            idle = all(meet.absent[rank] == "idle" for rank in rest)
            rule = "R-DUMPSET" if idle else None  # Then its last lines are what is missing.
            more = f"progress marks or a stack of {named(rest)}"
        elif lost := waits.without_lines(meet):
            because = f"{where}, and of {named(lost)} there is no line at all"
            rule, more = "R-DUMPSET", f"the log or dump of {named(lost)}"
        else:
            because = f"{where}, and everybody known to belong there is there"
            rule, more = None, "the members of each group, and who is inside it"
        found.append(
            Finding.on(
                rule,
                meet.first,
                because,
                *(wait.event for wait in meet.waits[1:4]),
                strength=SUSPECTED,
                guilty=(),
                waiting=meet.ranks,
                record_next=(more,),
            )
        )
    return found
