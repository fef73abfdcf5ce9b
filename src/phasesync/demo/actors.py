"""What the actors of the demo do under Ray: be a trainer, be an engine. They import torch."""

import os
import signal
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from phasesync.core.model import Rank
from phasesync.demo.base import Command
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import RankEnd
from phasesync.demo.engine import Engine
from phasesync.demo.model import use_one_thread
from phasesync.demo.rank import live
from phasesync.demo.settings import Script
from phasesync.errors import EngineLost
from phasesync.fences.ray import RayFences, answer
from phasesync.runtime.calls import GRACE_S

__all__ = ("EnginePart", "be_trainer")


class EnginePart:
    """An engine over the devices of its replica."""

    def __init__(self, rank: Rank, script: Script, scratch: Path) -> None:
        use_one_thread()
        self._script = script
        part = script.replicas[rank.number]
        devices = [DeviceBudget(device_path(scratch, number)) for number in part]
        self._engine = Engine(rank, devices, script)

    def perform(self, command: Command) -> Any:
        """What the engine answers; the script may want it killed instead."""
        if self._script.kill == (self._engine.rank, command.phase, command.epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._engine.perform(command)


class ActorEngine:
    """An engine that is an actor, as a trainer asks it."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    async def ask(self, command: Command) -> Any:
        try:
            return await answer(self._actor.perform.remote(command), grace_s=GRACE_S)
        except RayActorError as error:
            raise EngineLost(f"{self._name} is gone: it did not answer {command.name!r}") from error


async def be_trainer(rank: Rank, script: Script, scratch: Path, engine: Any) -> RankEnd:
    """Live one rank's life; how it ended."""
    use_one_thread()
    link = ActorEngine(f"engine/{script.replica_of(rank)}", engine)
    return await live(rank, script, RayFences(rank=rank, run=script.run), link, scratch)
