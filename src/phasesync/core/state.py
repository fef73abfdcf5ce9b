"""What the kernel holds, as frozen values: ranks, fences, engines, and the system of them all."""

from enum import IntEnum, StrEnum
from typing import NamedTuple

__all__ = (
    "NO_FAULTS",
    "EngineState",
    "Event",
    "Faults",
    "FenceState",
    "Kind",
    "Late",
    "RankState",
    "Stage",
    "Status",
    "System",
    "Verdict",
)


class Status(IntEnum):
    """Where a rank stands within its step."""

    READY = 0
    ACTING = 1
    WAITING = 2
    STOPPED = 3  # its own action failed
    ABORTED = 4  # it learned that somebody else's did
    DEAD = 5
    DEAD_ACTING = 6  # dead, and the call it had made to the engine is still under way
    FINISHED = 7
    HUNG = 8
    CUT = 9  # it waits at a fence, and its arrival was lost on the way


class Stage(IntEnum):
    """The epoch's own steps, or the recovery after it."""

    EPOCH = 0
    RECOVER = 1


class Kind(StrEnum):
    """What may happen to a rank, or to a fence."""

    START = "start"
    END = "end"
    FAIL = "fail"
    ARRIVE = "arrive"
    REFUSE = "refuse"  # arrive as failed: a precondition of the fence was not met
    PASS = "pass"
    ABORT = "abort"
    RECOVER = "recover"
    BEGIN = "begin"
    CRASH = "crash"
    LAND = "land"  # a dead leader's call reaches its end on the engine
    NOTICE = "notice"  # somebody tells that a rank is dead
    HANG = "hang"
    DEADLINE = "deadline"
    RESTART = "restart"  # the dead are replaced, and all begin the next epoch
    ENGINE = "engine"  # the process of an engine dies; `name` is the engine, `rank` its first rank
    LOSE = "lose"  # it arrives, and the arrival never comes
    AGAIN = "again"  # an arrival that was counted comes once more
    WAKE = "wake"  # a call of an older incarnation reaches the engine after all


class Verdict(IntEnum):
    """What was decided of a fence instance, once."""

    SHUT = 0
    OPEN = 1
    BROKEN = 2


class Event(NamedTuple):
    """Something that happens: `rank` counts in `Plan.members`, `name` is a phase or fence."""

    kind: Kind
    rank: int
    name: str


class RankState(NamedTuple):
    """Where a rank stands. `pending` are cells whose release the device has yet to perform."""

    status: Status = Status.READY
    epoch: int = 1
    stage: Stage = Stage.EPOCH
    at: int = 0
    pending: tuple[int, ...] = ()
    incarnation: int = 0


class FenceState(NamedTuple):
    """One fence instance: arrivals are bits, one a rank, and count only while it is shut; the
    first verdict stays."""

    epoch: int
    stage: Stage
    scope: int
    fence: str
    arrived: int = 0
    verdict: Verdict = Verdict.SHUT


class EngineState(NamedTuple):
    """A passive role's instance: calls below the floor are refused, a dead one's all fail."""

    floor: int = 0
    dead: bool = False


class Late(NamedTuple):
    """A call to an engine whose caller was replaced before it came back."""

    rank: int
    state: RankState


class System(NamedTuple):
    """The state of all ranks, all memory, all fences and all engines, the faults so far, and the
    calls of older incarnations that may still come."""

    ranks: tuple[RankState, ...]
    cells: tuple[int, ...]
    fences: tuple[FenceState, ...] = ()
    engines: tuple[EngineState, ...] = ()
    faults: int = 0
    late: tuple[Late, ...] = ()


class Faults(NamedTuple):
    """Which faults may happen, how many in all, and whether deadlines and notices are on."""

    most: int = 0
    crash: bool = False
    fail: bool = False
    hang: bool = False
    deadlines: bool = False
    notices: bool = True
    aborts: bool = True
    restart: bool = False
    engine: bool = False
    lost: bool = False
    again: bool = False
    mixed: bool = False


NO_FAULTS = Faults()
