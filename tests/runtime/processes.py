"""Real ranks: one process each, over a real TCPStore. The forkserver imports torch once for all."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from phasesync.core.model import Rank, RoleName, RootCause
from phasesync.core.protocol import FenceDecl, PhaseDecl
from phasesync.errors import EpochFailed
from phasesync.fences.store import StoreFences
from phasesync.runtime import RankRunner, Turn
from phasesync.spec import load

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.runtime.processes"])
PROTOCOL = load("colocated")
IMPATIENT = replace(
    PROTOCOL,
    steps=tuple(
        replace(step, deadline_s=1.5) if isinstance(step, FenceDecl) else step
        for step in PROTOCOL.steps
    ),
)
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong: `kind` is ok, failed, cancelled, killed, frozen, or store (is killed)."""

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
    number: int,
    ranks: int,
    port: int,
    host: int,
    run: str,
    runs: Path,
    trouble: Trouble,
    pipe: Connection,
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
            if trouble.kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[trouble.kind])
            if trouble.kind == "store":
                os.kill(host, signal.SIGKILL)

        return act

    async def main() -> None:
        runner = RankRunner(
            PROTOCOL if trouble.kind in ("ok", "failed", "cancelled", "killed") else IMPATIENT,
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


def host_main(pipe: Connection) -> None:
    """Host the store until told to stop."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


def play(ranks: int, run: str, runs: Path, trouble: Trouble, *, within_s: float = 30) -> Outcome:
    """One run with real processes; a dead one is told to the others, as a launcher does."""
    line, theirs = CONTEXT.Pipe()
    host = CONTEXT.Process(target=host_main, args=(theirs,))
    host.start()
    theirs.close()
    port = line.recv()
    pipes, children = [], []
    for number in range(ranks):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(
            target=rank_main, args=(number, ranks, port, host.pid, run, runs, trouble, theirs)
        )
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    said: list[list[EpochFailed | str] | None] = [None] * ranks
    died = time.monotonic()
    end = died + within_s
    open_pipes = dict(enumerate(pipes))
    try:
        while open_pipes:
            if trouble.kind == "frozen" and set(open_pipes) == {trouble.number}:
                break
            ready = wait(list(open_pipes.values()), timeout=end - time.monotonic())
            if not ready:
                raise TimeoutError(f"{run}: ranks {sorted(open_pipes)} are still there: {trouble}")
            for number in [at for at, pipe in open_pipes.items() if pipe in ready]:
                try:
                    said[number] = open_pipes.pop(number).recv()
                except EOFError:
                    died = time.monotonic()
                    asyncio.run(_tell(port, run, number))
        for number, child in enumerate(children):
            if number not in open_pipes:
                child.join()
        return Outcome(said, time.monotonic() - died)
    finally:
        for child in (*children, host):
            child.kill()
            child.join()


async def _tell(port: int, run: str, number: int) -> None:
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    observer = StoreFences.observer(store, run=run)
    await observer.connect()
    dead = Rank(RoleName("trainer"), number)
    await observer.report_lost(
        RootCause(kind="dead", ranks=(dead,), error="the process was killed"), incarnation=0
    )
    await observer.close()
