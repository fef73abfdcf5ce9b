"""What the demo's processes do: host the store, be an engine, be a trainer.

All are forked from a server that has imported torch already. None outlives the launcher: each
watches it, and the store's host removes what the launcher then could not.
"""

import asyncio
import os
import shutil
import signal
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from phasesync.core.model import Rank
from phasesync.demo.base import Command
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import Lost, RankEnd
from phasesync.demo.engine import Engine
from phasesync.demo.model import use_one_thread
from phasesync.demo.rank import live
from phasesync.demo.settings import Script
from phasesync.errors import EngineLost
from phasesync.fences.store import StoreFences
from phasesync.runtime.calls import in_thread

__all__ = ("be_engine", "be_trainer", "host_store")

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=60)


# ------------------------------------------------------------------------------- the store


def host_store(script: Script, scratch: Path, launcher: Connection) -> None:
    """Host the run's store on loopback, and break fences for ranks that the launcher lost."""
    _start(scratch)
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    launcher.send(port)
    asyncio.run(_report_losses(store, script, launcher))


async def _report_losses(store: Store, script: Script, launcher: Connection) -> None:
    observer = StoreFences.observer(store, run=script.run)
    await observer.connect()
    try:
        while (lost := await in_thread(lambda: _received(launcher), name="launcher")) is not None:
            await observer.report_lost(lost.cause, incarnation=lost.incarnation)
    finally:
        await observer.close()


def _received(launcher: Connection) -> Lost | None:
    """The next loss; None once the launcher has no more to say."""
    try:
        lost: Lost | None = launcher.recv()
    except (EOFError, ConnectionResetError):
        return None
    return lost


# ------------------------------------------------------------------------------ the engine


def be_engine(rank: Rank, script: Script, scratch: Path, trainers: Sequence[Connection]) -> None:
    """Serve the trainers of a replica until the last of them is gone."""
    _start(None)
    part = script.replicas[rank.number]
    engine = Engine(rank, [DeviceBudget(device_path(scratch, at)) for at in part], script)
    left = list(trainers)
    while left:
        for trainer in wait(left):
            assert isinstance(trainer, Connection)
            if not _answer(trainer, engine, script):
                left.remove(trainer)


def _answer(trainer: Connection, engine: Engine, script: Script) -> bool:
    """Do one thing for a trainer; whether it is still there."""
    try:
        command: Command = trainer.recv()
        if script.kill == (engine.rank, command.phase, command.epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            answer: Any = engine.perform(command)
        except Exception as error:
            answer = error
        trainer.send(answer)
    except (EOFError, OSError):
        return False
    return True


class RemoteEngine:
    """An engine in another process, over a socket of this machine."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection

    async def ask(self, command: Command) -> Any:
        answer = await in_thread(lambda: self._ask(command), name=f"{self._name} {command.name}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, command: Command) -> Any:
        try:
            self._connection.send(command)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineLost(f"{self._name} is gone: it did not answer {command.name!r}") from error


# ----------------------------------------------------------------------------- the trainer


def be_trainer(
    rank: Rank, script: Script, scratch: Path, port: int, engine: Connection, launcher: Connection
) -> None:
    """Live one rank's life and tell the launcher how it ended."""
    _start(None)
    try:
        store = TCPStore(
            LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
        fences = StoreFences(store, rank=rank, run=script.run)
        link = RemoteEngine(f"engine/{script.replica_of(rank)}", engine)
        end = asyncio.run(live(rank, script, fences, link, scratch))
    except Exception as error:
        end = RankEnd(rank, "error", f"{type(error).__name__}: {error}")
    launcher.send(end)
    launcher.close()


# -------------------------------------------------------------------------------- all of them


def _start(scratch: Path | None) -> None:
    """Leave Ctrl-C to the launcher, take one core, and do not outlive the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_thread()
    threading.Thread(target=_end_with_launcher, args=(scratch,), daemon=True).start()


def _end_with_launcher(scratch: Path | None) -> None:
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
