"""What one rank's journals tell of themselves: where it stands, and what it did last."""

from phasesync.audit.answer import Evidence

__all__ = ("Told",)


class Told:
    """What one rank's journals tell of themselves."""

    __slots__ = (
        "boots",
        "cut",
        "epoch",
        "exit",
        "failed",
        "first",
        "incarnation",
        "last",
        "phase",
        "seq",
        "status",
        "stopped",
        "waits",
    )

    def __init__(self) -> None:
        self.seq = -1
        self.incarnation = -1
        self.first: Evidence | None = None
        self.last: Evidence | None = None
        self.exit: str | None = None
        self.epoch: int | None = None
        self.phase: str | None = None
        self.failed: tuple[Evidence, str | None, str] | None = None
        self.stopped = False
        self.cut: str | None = None
        self.waits: tuple[object, ...] | None = None
        self.status = ""
        self.boots: set[object] = set()
