"""The ranks of the in-process demo: tasks of one event loop, and engines that are objects."""

import asyncio
from pathlib import Path

from phasesync.core.model import Rank
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import Ending, RankEnd
from phasesync.demo.engine import Engine, LocalEngine
from phasesync.demo.model import use_one_thread
from phasesync.demo.rank import live
from phasesync.demo.settings import Script
from phasesync.demo.view import View
from phasesync.fences.inprocess import InProcessFences

__all__ = ("play_all",)

TICK_S = 0.1


async def play_all(script: Script, view: View, scratch: Path) -> Ending:
    """All ranks of the script; how they ended."""
    use_one_thread()
    fences = InProcessFences()
    budgets = [
        DeviceBudget.create(device_path(scratch, number), name=name, capacity=script.sizes.capacity)
        for number, name in enumerate(script.devices)
    ]
    engines = [
        LocalEngine(Engine(rank, [budgets[number] for number in part], script))
        for rank, part in zip(script.plan.engines, script.replicas, strict=True)
    ]

    async def one(rank: Rank) -> RankEnd:
        engine = engines[script.replica_of(rank)]
        try:
            return await live(rank, script, fences.endpoint(rank), engine, scratch)
        except Exception as error:
            return RankEnd(rank, "error", f"{type(error).__name__}: {error}")

    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(view), name="view")
            ranks = [group.create_task(one(rank), name=str(rank)) for rank in script.plan.members]
            await asyncio.wait(ranks)
            watcher.cancel()
    finally:
        for budget in budgets:
            budget.close()
    return Ending(ranks=tuple(rank.result() for rank in ranks))


async def _watch(view: View) -> None:
    while True:
        view.tick()
        await asyncio.sleep(TICK_S)
