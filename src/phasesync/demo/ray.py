"""The demo under Ray: trainers and engines are actors of a cluster on this machine.

This process imports no torch. It watches all actors' answers at once: what Ray says of one that
is gone gives its memory back, and its peers have heard of it by then from the coordinator.
"""

import asyncio
import shutil
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from phasesync.core.model import Rank, RootCause
from phasesync.demo.base import Command
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import Ending, RankEnd
from phasesync.demo.settings import Script
from phasesync.demo.view import View
from phasesync.fences.ray import RayFences, start_coordinator

__all__ = ("play",)

PARTS = "phasesync.demo.actors"
CPUS = 2
TICK_S = 0.1
OBJECTS_BYTES = 80 * 2**20  # The least that Ray takes: no tensor goes through its store.


class TrainerActor:
    """A trainer; torch is imported here."""

    async def live(self, rank: Rank, script: Script, scratch: Path, engine: Any) -> RankEnd:
        """One rank's life, from its first epoch to its last."""
        end: RankEnd = await import_module(PARTS).be_trainer(rank, script, scratch, engine)
        return end


class EngineActor:
    """An engine; torch is imported here. What it is asked for waits its turn."""

    def __init__(self, rank: Rank, script: Script, scratch: Path) -> None:
        self._engine = import_module(PARTS).EnginePart(rank, script, scratch)

    def perform(self, command: Command) -> Any:
        return self._engine.perform(command)


def play(script: Script, view: View) -> Ending:
    """Run the script; how it ended. A Ray that this process has started already is used."""
    view.status("starting Ray")
    mine = not ray.is_initialized()
    if mine:
        _start_ray(view)
    scratch = Path(tempfile.mkdtemp(prefix="phasesync-demo-"))
    try:
        return _Launcher(script, view, scratch).run()
    finally:
        if mine:
            ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def _start_ray(view: View) -> None:
    """Start Ray, and a view that goes on beside it.

    The view gets the thread: on Linux what Ray starts dies with the thread that started it.
    """
    started = threading.Event()
    ticking = threading.Thread(target=_tick_until, args=(started, view), daemon=True)
    ticking.start()
    try:
        _init_ray()
    finally:
        started.set()
        ticking.join()


def _tick_until(over: threading.Event, view: View) -> None:
    while not over.wait(TICK_S):
        view.tick()


def _init_ray() -> None:
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=OBJECTS_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )


class _Launcher:
    """The actors of one demo."""

    def __init__(self, script: Script, view: View, scratch: Path) -> None:
        self._script = script
        self._view = view
        self._scratch = scratch
        self._dead: list[Rank] = []
        self._budgets = [
            DeviceBudget.create(
                device_path(scratch, number), name=name, capacity=script.sizes.capacity
            )
            for number, name in enumerate(script.devices)
        ]

    def run(self) -> Ending:
        """Start everybody, and watch until every rank has ended."""
        self._view.status("starting actors; each imports torch")
        members = self._script.plan.members
        coordinator = start_coordinator(self._script.run)
        engines = [self._engine(rank) for rank in self._script.plan.engines]
        trainers = [ray.remote(num_cpus=0)(TrainerActor).remote() for _ in members]
        try:
            answers = {
                trainer.live.remote(
                    rank, self._script, self._scratch, engines[self._script.replica_of(rank)]
                ): rank
                for rank, trainer in zip(members, trainers, strict=True)
            }
            ends = self._watch(answers)
        finally:
            for actor in (*trainers, *engines, coordinator):
                ray.kill(actor)
            for budget in self._budgets:
                budget.close()
        self._view.tick()
        return Ending(ranks=tuple(ends[rank] for rank in members), survived_s=self._survived_s())

    def _engine(self, rank: Rank) -> Any:
        actor = ray.remote(num_cpus=0)(EngineActor)
        return actor.remote(rank, self._script, self._scratch)

    def _watch(self, answers: dict[Any, Rank]) -> dict[Rank, RankEnd]:
        ends: dict[Rank, RankEnd] = {}
        while answers:
            ready, _ = ray.wait(list(answers), num_returns=1, timeout=TICK_S)
            for answer in ready:
                rank = answers.pop(answer)
                ends[rank] = self._end_of(rank, answer)
            self._view.tick()
        return ends

    def _end_of(self, rank: Rank, answer: Any) -> RankEnd:
        try:
            end: RankEnd = ray.get(answer)
        except RayTaskError as error:
            said = error.cause if isinstance(error.cause, BaseException) else error
            end = RankEnd(rank, "error", f"{type(said).__name__}: {said}")
        except RayActorError:
            end = RankEnd(rank, "died", "gone: its actor is dead")
        if end.how in ("died", "error"):
            self._bury(end)
        return end

    def _survived_s(self) -> float | None:
        """From the last word of who died first to the last word of all, by their journals."""
        words = [(int(line["mono_ns"]), line) for line in self._view.tail.lines]
        last = {f"{line['role']}/{line['rank']}": at for at, line in words}
        died = [last[str(rank)] for rank in self._dead if str(rank) in last]
        return (max(last.values()) - min(died)) / 1e9 if died else None

    def _bury(self, end: RankEnd) -> None:
        """Give back the memory of a rank that is gone without a word."""
        self._dead.append(end.rank)
        self._view.tick()
        asyncio.run(self._tell(end))
        phase = self._view.phase_of(str(end.rank))
        self._budgets[end.rank.number].give(str(end.rank))
        where = f" in {phase}" if phase else ""
        self._view.news(f"{end.rank} is {end.cause}{where}")

    async def _tell(self, end: RankEnd) -> None:
        """Its peers know, unless it was gone before it came to any fence."""
        observer = RayFences.observer(run=self._script.run)
        await observer.connect()
        cause = RootCause(kind="dead", ranks=(end.rank,), error=end.cause)
        await observer.report_lost(cause, incarnation=0)
        await observer.close()
