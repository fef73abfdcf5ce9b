"""Reading of logs: trace files and journals, from files, folders and packed files.

A log is what is left after a crash, so nothing in it is trusted: a torn, foreign or absurd line
becomes a problem that is reported, never an exception.
"""

from phasesync.logs.lines import LINE_MAX, Line, lines
from phasesync.logs.packs import PACKED, collect, unpacked
from phasesync.logs.pool import reading
from phasesync.logs.sources import Shown, Source, by_run, sources

__all__ = (
    "LINE_MAX",
    "PACKED",
    "Line",
    "Shown",
    "Source",
    "by_run",
    "collect",
    "lines",
    "reading",
    "sources",
    "unpacked",
)
