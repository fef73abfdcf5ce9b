"""The demo with real processes: who starts them, watches them and ends them.

This process imports no torch and waits for nobody without looking at its children: the moment
one is gone, its fences break, so that nobody waits for a deadline.
"""

import shutil
import signal
import tempfile
import threading
import time
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple, Self

from phasesync.core.model import Rank, RootCause
from phasesync.demo.budget import DeviceBudget, device_path
from phasesync.demo.ending import Ending, Lost, RankEnd
from phasesync.demo.entry import PRELOADED, enter
from phasesync.demo.settings import Script
from phasesync.demo.view import View
from phasesync.errors import PhasesyncError

__all__ = ("play",)

TICK_S = 0.1
PATIENCE_S = 5.0  # For a process that has nothing left to do.
SHARED = Path("/dev/shm")  # Where there is one and it has room, no disk is touched.
SHARED_LEAST = 2**30


class _Child(NamedTuple):
    """A process and our end of the pipe to it."""

    process: ForkServerProcess
    pipe: Connection | None


def play(script: Script, view: View) -> Ending:
    """Run the script; how it ended."""
    scratch = Path(tempfile.mkdtemp(prefix="phasesync-demo-", dir=_shared()))
    try:
        with _Launcher(script, view, scratch) as launcher:
            return launcher.run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _shared() -> Path | None:
    try:
        return SHARED if shutil.disk_usage(SHARED).free >= SHARED_LEAST else None
    except OSError:
        return None


class _Launcher:
    """The processes of one demo."""

    def __init__(self, script: Script, view: View, scratch: Path) -> None:
        self._script = script
        self._view = view
        self._scratch = scratch
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._host: _Child | None = None
        self._engines: dict[Rank, _Child] = {}
        self._trainers: dict[Rank, _Child] = {}
        self._ends: dict[Rank, RankEnd] = {}
        self._stopping = False
        self._starter = threading.Thread(target=self._start_all, name="starter", daemon=True)
        self._failed: PhasesyncError | None = None
        self._died_s: float | None = None
        self._budgets = [
            DeviceBudget.create(
                device_path(scratch, number), name=name, capacity=script.sizes.capacity
            )
            for number, name in enumerate(script.devices)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        if self._starter.is_alive():
            self._starter.join()
        self._end_all()
        for budget in self._budgets:
            budget.close()

    def run(self) -> Ending:
        """Start everybody, and watch until every rank has ended."""
        self._view.status("starting processes; the first one imports torch")
        self._starter.start()
        while self._starter.is_alive():
            self._view.tick()
            self._starter.join(TICK_S)
        if self._failed is not None:
            raise self._failed
        running = dict(self._trainers)
        engines = dict(self._engines)
        while running:
            self._look_at_engines(engines)
            for rank in self._changed(running):
                if not running[rank].process.is_alive():
                    self._bury(rank, running.pop(rank))
            self._view.tick()
        survived = None if self._died_s is None else time.monotonic() - self._died_s
        ends = tuple(self._ends[rank] for rank in self._script.plan.members)
        return Ending(ranks=ends, survived_s=survived)

    # --------------------------------------------------------------------------- starting

    def _start_all(self) -> None:
        # What is started here, the fork server included, must leave Ctrl-C to us. The resource
        # tracker lets SIGINT in again when it starts, so it is first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._start_children()
        except (OSError, EOFError) as error:
            self._failed = PhasesyncError(
                f"a process of the demo could not start: {error or type(error).__name__}; what it "
                "wrote above says why"
            )

    def _start_children(self) -> None:
        script, scratch = self._script, self._scratch
        ours, theirs = self._context.Pipe()
        self._host = _Child(self._start("host_store", script, scratch, theirs), ours)
        theirs.close()
        port = ours.recv()
        for engine, part in zip(script.plan.engines, script.replicas, strict=True):
            if self._stopping:
                return
            pipes = [self._context.Pipe() for _ in part]
            process = self._start("be_engine", engine, script, scratch, [end for _, end in pipes])
            self._engines[engine] = _Child(process, None)
            for number, (link, end) in zip(part, pipes, strict=True):
                end.close()
                self._start_trainer(script.plan.members[number], port, link)
                link.close()

    def _start_trainer(self, rank: Rank, port: int, link: Connection) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._start("be_trainer", rank, self._script, self._scratch, port, link, theirs)
        theirs.close()
        self._trainers[rank] = _Child(process, ours)

    def _start(self, part: str, *arguments: object) -> ForkServerProcess:
        process = self._context.Process(target=enter, args=(part, *arguments), daemon=True)
        process.start()
        return process

    # --------------------------------------------------------------------------- watching

    def _changed(self, running: dict[Rank, _Child]) -> list[Rank]:
        """The ranks that have something to say or are gone, by now or within a moment."""
        known = {child.process.sentinel: rank for rank, child in running.items()}
        ready = wait(list(known), timeout=TICK_S)
        return [known[sentinel] for sentinel in ready if isinstance(sentinel, int)]

    def _bury(self, rank: Rank, child: _Child) -> None:
        """Note how a rank ended. If it did not say so itself, its fences break now."""
        assert child.pipe is not None
        child.process.join()
        try:
            end: RankEnd = child.pipe.recv()
        except (EOFError, OSError):
            self._view.tick()
            end = self._death(rank, child.process.exitcode)
        self._ends[rank] = end
        if end.how in ("done", "failed"):
            return
        self._died_s = self._died_s or time.monotonic()
        phase = self._view.phase_of(str(rank))
        cause = RootCause(kind="dead", ranks=(rank,), phase=phase, error=end.cause)
        if self._host is not None and self._host.pipe is not None:
            self._host.pipe.send(Lost(cause, 0))
        self._budgets[rank.number].give(str(rank))
        where = f" in {phase}" if phase else ""
        self._view.news(f"{rank} was {end.cause}{where}")

    def _death(self, rank: Rank, code: int | None) -> RankEnd:
        return RankEnd(rank, "died", _how(code))

    def _look_at_engines(self, engines: dict[Rank, _Child]) -> None:
        """An engine that died: its leader hears of it when it asks; its memory is free."""
        for rank, child in list(engines.items()):
            if child.process.is_alive() or child.process.exitcode == 0:
                continue
            del engines[rank]
            self._view.news(f"{rank} was {_how(child.process.exitcode)}")
            for number in self._script.replicas[rank.number]:
                self._budgets[number].give(str(rank))

    # ----------------------------------------------------------------------------- ending

    def _end_all(self) -> None:
        """End what is left: trainers at once, then engines and host, which end by themselves."""
        for child in self._trainers.values():
            if child.process.is_alive():
                child.process.terminate()
        for child in self._trainers.values():
            _end(child)
        if self._host is not None and self._host.pipe is not None:
            self._host.pipe.close()
        for child in (*self._engines.values(), *((self._host,) if self._host else ())):
            _end(child)


def _end(child: _Child) -> None:
    process = child.process
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
    if child.pipe is not None:
        child.pipe.close()


def _how(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"gone with exit code {code} and no word"
