"""Journals of a run whose caller does the rest of each epoch, and joins its ranks itself."""

import asyncio
from pathlib import Path

from phasesync.core.model import Rank, RoleName
from phasesync.core.protocol import PhaseDecl
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import RankRunner
from phasesync.spec import load

__all__ = ("run_joined",)


def nothing() -> None:
    """An action that has nothing to do."""


async def _rank(number: int, hub: InProcessFences, join: asyncio.Barrier, epochs: int,
                runs: Path) -> None:  # fmt: skip
    protocol = load("colocated")
    own = [step.name for step in protocol.steps if isinstance(step, PhaseDecl) and not step.outside]
    own += [step.name for step in protocol.recover if isinstance(step, PhaseDecl)]
    async with RankRunner(
        protocol,
        rank=number,
        ranks=join.parties,
        actions=dict.fromkeys(own, nothing),
        fences=hub.endpoint(Rank(RoleName("trainer"), number)),
        caller_joins=True,
        device=f"host/cpu{number}",
        runs=runs,
        run="joined",
    ) as runner:
        for _ in range(epochs):
            await runner.run_epoch()
            await join.wait()


def run_joined(runs: Path, ranks: int, epochs: int) -> Path:
    """The folder of the run's journals."""

    async def main() -> None:
        hub, join = InProcessFences(), asyncio.Barrier(ranks)
        await asyncio.gather(*(_rank(each, hub, join, epochs, runs) for each in range(ranks)))

    asyncio.run(main())
    return runs / "joined"
