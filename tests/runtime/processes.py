"""Real ranks: one process each, over a real TCPStore. The forkserver imports torch once for all."""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from phasesync.core.model import Rank, RoleName, RootCause
from phasesync.core.protocol import PhaseDecl
from phasesync.errors import EpochFailed
from phasesync.fences.store import StoreFences
from phasesync.runtime import RankRunner, Turn
from phasesync.spec import load

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.runtime.processes"])
PROTOCOL = load("colocated")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong: `kind` is ok, failed, cancelled or killed."""

    kind: str
    number: int
    phase: str
    epoch: int
    seed: int


@dataclass
class Outcome:
    """What the ranks said (None for one that was killed), and seconds from the trouble on."""

    said: list[list[EpochFailed | str] | None]
    late_s: float


def rank_main(
    number: int, ranks: int, port: int, run: str, runs: Path, trouble: Trouble, pipe: Connection
) -> None:
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    chance = random.Random(trouble.seed * 31 + number)
    said: list[EpochFailed | str] = []
    tasks: list[asyncio.Task[None]] = []

    def action(phase: str) -> Callable[[Turn], Any]:
        async def act(turn: Turn) -> None:
            await asyncio.sleep(chance.random() * 0.01)
            if (number, phase, turn.epoch) != (trouble.number, trouble.phase, trouble.epoch):
                return
            if trouble.kind == "failed":
                raise RuntimeError("injected")
            if trouble.kind == "cancelled":
                tasks[0].cancel()
                await asyncio.sleep(1)
            if trouble.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

        return act

    async def main() -> None:
        runner = RankRunner(
            PROTOCOL,
            rank=number,
            ranks=ranks,
            fences=store,
            runs=runs,
            run=run,
            actions={
                step.name: action(step.name)
                for step in (*PROTOCOL.steps, *PROTOCOL.recover)
                if isinstance(step, PhaseDecl)
            },
        )
        async with runner:
            for _ in range(2):
                try:
                    await runner.run_epoch()
                    said.append("ok")
                except EpochFailed as failed:
                    said.append(failed)
                    if not failed.can_retry:
                        return

    async def whole() -> None:
        tasks.append(asyncio.create_task(main()))
        try:
            await tasks[0]
        except asyncio.CancelledError:
            said.append("cancelled")

    asyncio.run(whole())
    pipe.send(said)


def play(ranks: int, run: str, runs: Path, trouble: Trouble, *, within_s: float = 30) -> Outcome:
    """One run with real processes; a dead one is told to the others, as a launcher does."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipes, children = [], []
    for number in range(ranks):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(
            target=rank_main, args=(number, ranks, store.port, run, runs, trouble, theirs)
        )
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    said: list[list[EpochFailed | str] | None] = [None] * ranks
    died = time.monotonic()
    end = died + within_s
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), timeout=end - time.monotonic())
        if not ready:
            for child in children:
                child.kill()
            raise TimeoutError(f"{run}: ranks {sorted(open_pipes)} are still there: {trouble}")
        for number in [at for at, pipe in open_pipes.items() if pipe in ready]:
            try:
                said[number] = open_pipes.pop(number).recv()
            except EOFError:
                died = time.monotonic()
                asyncio.run(_tell(store, run, number))
    for child in children:
        child.join()
    return Outcome(said, time.monotonic() - died)


async def _tell(store: TCPStore, run: str, number: int) -> None:
    observer = StoreFences.observer(store, run=run)
    await observer.connect()
    dead = Rank(RoleName("trainer"), number)
    await observer.report_lost(
        RootCause(kind="dead", ranks=(dead,), error="the process was killed"), incarnation=0
    )
    await observer.close()
