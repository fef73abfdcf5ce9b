"""Every error of phasesync, and who should mend it.

PhasesyncError
├── InputError           the user: a file, an option or an argument is wrong (exit 2)
│   ├── ProtocolError    the author of a protocol file; carries file:line:column
│   ├── PlanError        who starts the run: options, members, placement
│   │   └── PlanChanged  a rank no longer goes by the plan that its peers go by
│   └── LogError         who hands us a log that is not one
├── Refused              the caller: an event that the protocol does not allow now
│   ├── EpochOrderError  re-entered, skipped or unfinished epoch; two runners for one rank
│   └── EngineRefused    a call that the engine must not get now
├── EngineError          who looks after the engine: it failed, or is not installed
│   └── EngineLost       it did not answer; whether it did the work is unknown
├── DeviceOutOfMemory    who plans the memory: a device has no room; says who holds what
├── RankLost             who looks after the cluster: who does a rank's work is out of reach
├── FenceError           who looks after the cluster
│   ├── FenceBroken      a fence broke; carries the root cause
│   ├── StaleArrival     an old verdict must not release this rank
│   └── StoreLost        the transport no longer answers
└── EpochFailed          the training loop: what to do next is in its fields
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from phasesync.core.model import Broken, FenceKey, Rank, RootCause

__all__ = (
    "DeviceOutOfMemory",
    "EngineError",
    "EngineLost",
    "EngineRefused",
    "EpochFailed",
    "EpochOrderError",
    "FenceBroken",
    "FenceError",
    "InputError",
    "LogError",
    "PhasesyncError",
    "PlanChanged",
    "PlanError",
    "ProtocolError",
    "RankLost",
    "Refused",
    "StaleArrival",
    "StoreLost",
    "describe",
)


class PhasesyncError(Exception):
    """The root of all errors that phasesync raises on purpose."""


class InputError(PhasesyncError):
    """Something a user wrote is wrong; the message says what would be right."""


class PlanError(InputError):
    """Options, members or placement do not make a plan."""


class PlanChanged(PlanError):
    """A rank no longer goes by the plan that it has agreed to; between two epochs it left."""


class LogError(InputError):
    """A log is not what it claims to be."""


class ProtocolError(InputError):
    """A protocol file is wrong, at `file:line:column`; `others` is what else is wrong with it."""

    others: tuple[ProtocolError, ...] = ()

    def __init__(
        self, wrong: str, right: str, *, file: str = "<protocol>", line: int = 1, column: int = 1
    ) -> None:
        super().__init__(wrong, right, file, line, column)
        self.wrong = wrong
        self.right = right
        self.file = file
        self.line = line
        self.column = column

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_protocol_error, (self.wrong, self.right, self.file, self.line, self.column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.wrong}; {self.right}"


def _rebuild_protocol_error(
    wrong: str, right: str, file: str, line: int, column: int
) -> ProtocolError:
    return ProtocolError(wrong, right, file=file, line=line, column=column)


class Refused(PhasesyncError):
    """An event that the protocol does not allow where the rank stands."""


class EpochOrderError(Refused):
    """An epoch was re-entered, skipped or left open, or a rank has two runners."""


class EngineRefused(Refused):
    """A call that was stopped before it reached the engine, with the reason."""


class EngineError(PhasesyncError):
    """The engine failed, answered wrongly, or is not installed."""


class EngineLost(EngineError):
    """The engine did not answer; whether it did the work is unknown, so nothing is repeated."""


class DeviceOutOfMemory(PhasesyncError):
    """A device refused memory. `held` is who holds what there: (rank, what, bytes)."""

    def __init__(
        self,
        device: str,
        who: str,
        what: str,
        wanted: int,
        free: int,
        capacity: int,
        held: tuple[tuple[str, str, int], ...],
    ) -> None:
        super().__init__(device, who, what, wanted, free, capacity, held)
        self.device = device
        self.who = who
        self.what = what
        self.wanted = wanted
        self.free = free
        self.capacity = capacity
        self.held = held

    def __str__(self) -> str:
        holders = ", ".join(f"{who} {what} {_mib(size)}" for who, what, size in self.held)
        return (
            f"device {self.device} is out of memory: {self.who} asks for {self.what} "
            f"{_mib(self.wanted)}, {_mib(self.free)} of {_mib(self.capacity)} are free; "
            f"held: {holders or 'nothing'}"
        )


class RankLost(PhasesyncError):
    """What does a rank's work for its driver is gone: the action raises this, not the rank.

    `kind` is `dead`, or `unavailable` where it may come back.
    """

    def __init__(self, message: str, kind: str = "dead") -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class FenceError(PhasesyncError):
    """A fence did not open."""


class FenceBroken(FenceError):
    """The fence broke, for everybody in its scope, for the same reason."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(broken)
        self.broken = broken

    @property
    def cause(self) -> RootCause:
        return self.broken.cause

    def __str__(self) -> str:
        key = self.broken.key
        return (
            f"fence {self.broken.fence!r} ({key.scope}, generation {key.generation}) broke: "
            f"{describe(self.broken.cause)}"
        )


class StaleArrival(FenceError):
    """The verdict was decided without this arrival; it must not release this rank."""


class StoreLost(FenceError):
    """The store or coordinator no longer answers; what it decided cannot be known."""

    def __init__(self, message: str, key: FenceKey | None = None) -> None:
        super().__init__(message, key)
        self.key = key

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class EpochFailed(PhasesyncError):
    """An epoch failed. The same root cause on every rank; the rest says what to do now.

    `weights`, `kv` and `groups` are each `intact`, `unknown` or `lost`. `can_retry` is true where
    the protocol's `recover` put every resource back, so that the epoch may run again. Where the
    caller joins the ranks, that waits for all to be called again: `recovers_next` is true, what is
    said of memory holds from then on, and a recovery that fails is raised there.
    """

    rank: Rank
    epoch: int
    cause: RootCause
    replace: tuple[Rank, ...] = ()
    weights: str = "unknown"
    kv: str = "unknown"
    groups: str = "intact"
    can_retry: bool = False
    poisoned: tuple[str, ...] = ()
    late: tuple[RootCause, ...] = field(default=())
    recovers_next: bool = False

    EXIT_CODE: ClassVar[int] = 75  # EX_TEMPFAIL: a supervisor may start the rank again

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_epoch_failed, (
            self.rank,
            self.epoch,
            self.cause,
            self.replace,
            self.weights,
            self.kv,
            self.groups,
            self.can_retry,
            self.poisoned,
            self.late,
            self.recovers_next,
        )

    def __str__(self) -> str:
        return f"{self.rank}: epoch {self.epoch} failed: {describe(self.cause)} ({self.advice})"

    @property
    def advice(self) -> str:
        """What to do now, in a few words."""
        if self.can_retry and self.recovers_next:
            return "the next call recovers first; the epoch may run again"
        if self.can_retry:
            return "recovered; the epoch may run again"
        if self.cause.kind == "digest":
            return "give every rank the same protocol and options, and start again"
        if self.replace:
            return f"replace {', '.join(map(str, self.replace))}"
        if self.poisoned:
            return f"rebuild the engine of {', '.join(self.poisoned)}"
        return "start the ranks again"

    __hash__ = PhasesyncError.__hash__


def _rebuild_epoch_failed(*fields: Any) -> EpochFailed:
    return EpochFailed(*fields)


def describe(cause: RootCause) -> str:
    """One line that names who, where and what."""
    who = ", ".join(map(str, cause.ranks)) or "nobody"
    whose = f" ({who})" if cause.ranks else ""  # Without a majority nobody is blamed.
    where = f" in phase {cause.phase!r}" if cause.phase else ""
    at = f" at fence {cause.fence!r}" if cause.fence else ""
    what = f": {cause.error_type}: {cause.error}" if cause.error_type else ""
    what = what or (f": {cause.error}" if cause.error else "")
    match cause.kind:
        case "failed":
            return f"{who} failed{where}{what}"
        case "dead":
            return f"{who} died{where}{what}"
        case "deadline":
            missing = ", ".join(map(str, cause.missing or cause.ranks))
            return f"{missing} did not come{at} before the deadline{what}"
        case "evidence":
            return f"{who} could not show what fence {cause.fence!r} requires{what}"
        case "digest":
            return f"ranks hold different plans{whose}{what}"
        case "disagreement":
            return f"ranks disagree{at}{whose}{what}"
        case "cancelled":
            return f"{who} was cancelled{where}{what}"
        case "store_lost":
            return f"the fence transport was lost{at}{what}"
        case kind:
            return f"{who}: {kind}{where}{at}{what}"
