"""One rank's whole life in the demo, whichever backend it runs on."""

from pathlib import Path

from phasesync.core.model import Rank
from phasesync.demo.base import Link
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import RankEnd
from phasesync.demo.settings import Script
from phasesync.demo.trainer import Trainer, TrainerDevice
from phasesync.errors import EpochFailed, describe
from phasesync.fences.base import FenceTransport
from phasesync.runtime import RankRunner
from phasesync.runtime.calls import in_thread

__all__ = ("live",)

PLAN_DEADLINE_S = 120.0


async def live(
    rank: Rank, script: Script, fences: FenceTransport, engine: Link, scratch: Path
) -> RankEnd:
    """All epochs of one rank; how it ended."""
    device = TrainerDevice(DeviceBudget(device_path(scratch, rank.number)))
    try:
        trainer = await in_thread(
            lambda: Trainer(rank, script, device, engine, scratch), name=f"{rank} begins"
        )
        async with RankRunner(
            script.protocol,
            rank=rank,
            ranks=len(script.plan.members),
            actions=trainer.actions(),
            fences=fences,
            device=device,
            run=script.run,
            attempt=0,
            runs=script.runs,
            plan_deadline_s=PLAN_DEADLINE_S,
            unchecked=script.broken,
        ) as runner:
            for _ in range(script.epochs):
                await runner.run_epoch()
    except EpochFailed as error:
        return RankEnd(rank, "failed", describe(error.cause))
    finally:
        device.budget.close()
    return RankEnd(rank, "done")
