"""Who did it: a log in, one verdict with its evidence out. Pure: logs arrive as parsed lines.

`audit_trace` (`audit_traces` where a file may hold several runs) and `Audit` are the whole of it;
files are `phasesync.logs`, printing is `phasesync.report.audit`.
"""

from collections.abc import Iterable, Iterator, Mapping

from phasesync.audit.answer import Answer, Evidence, Finding
from phasesync.audit.auditor import Audit
from phasesync.audit.events import Event, Header
from phasesync.audit.traces import RawLine, Trace

__all__ = (
    "Answer",
    "Audit",
    "Event",
    "Evidence",
    "Finding",
    "Header",
    "Trace",
    "audit_trace",
    "audit_traces",
)


def audit_trace(
    file: str, lines: Iterable[RawLine], *, vocabulary: Mapping[str, str] | None = None
) -> Answer:
    """The verdict on one trace, or on the first run of several; `vocabulary` maps its phase names
    to known ones.
    """
    return next(audit_traces(file, lines, vocabulary=vocabulary))


def audit_traces(
    file: str, lines: Iterable[RawLine], *, vocabulary: Mapping[str, str] | None = None
) -> Iterator[Answer]:
    """The verdict on each run of a trace file, in its order."""
    left: Iterable[RawLine] | None = lines
    while left is not None:
        trace = Trace(file, left, vocabulary)
        audit = Audit(trace.header)
        for event in trace.events():
            audit.feed(event)
        for problem in trace.problems:
            audit.add(problem)
        yield audit.answer(run=trace.header.name or file)
        left = trace.rest
