"""Real coroutines on simulated ranks. `SimWorld` is the way in."""

from phasesync.world.schedule import InTurn, Pct, Replay, Scheduler, Seeded
from phasesync.world.sim import BlockingCall, Injected, Outcome, SimFailed, SimRank, SimWorld

__all__ = (
    "BlockingCall",
    "InTurn",
    "Injected",
    "Outcome",
    "Pct",
    "Replay",
    "Scheduler",
    "Seeded",
    "SimFailed",
    "SimRank",
    "SimWorld",
)
