"""The audit of a run's journals, as `phasesync audit` makes it."""

from pathlib import Path

from phasesync.audit import Answer
from phasesync.report.audit import audit_paths

__all__ = ("verdict",)


def verdict(runs: Path) -> Answer:
    """The one verdict on the one run in `runs`."""
    (answer,) = audit_paths([runs])
    return answer
