"""The audit of a run's journals, as `phasesync audit` makes it."""

from pathlib import Path

from phasesync.audit import Answer
from phasesync.audit.journals import audit_journals
from phasesync.audit.merge import Stream
from phasesync.logs import lines, sources
from phasesync.spec import load

__all__ = ("verdict",)


def verdict(runs: Path, *, ranks: int = 4) -> Answer:
    """The one verdict on the run in `runs`."""
    streams = [Stream(source.name, lines(source.path)) for source in sources([runs])]
    members = [f"trainer/{rank}" for rank in range(ranks)]
    return audit_journals("job", streams, members, load)
