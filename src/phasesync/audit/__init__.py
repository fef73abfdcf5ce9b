"""Who did it: a log in, one verdict with its evidence out. Pure: logs arrive as parsed lines.

`audit_trace` and `Audit` are the whole of it; files are `phasesync.logs`, printing is
`phasesync.report.audit`.
"""

from collections.abc import Iterable, Mapping

from phasesync.audit.answer import Answer, Evidence, Finding
from phasesync.audit.auditor import Audit
from phasesync.audit.events import Event, Header
from phasesync.audit.traces import RawLine, Trace

__all__ = ("Answer", "Audit", "Event", "Evidence", "Finding", "Header", "Trace", "audit_trace")


def audit_trace(
    file: str, lines: Iterable[RawLine], *, vocabulary: Mapping[str, str] | None = None
) -> Answer:
    """The verdict on one trace; `vocabulary` maps its phase names to known ones."""
    trace = Trace(file, lines, vocabulary)
    audit = Audit(trace.header)
    for event in trace.events():
        audit.feed(event)
    for problem in trace.problems:
        audit.add(problem)
    return audit.answer(run=trace.header.name or file)
