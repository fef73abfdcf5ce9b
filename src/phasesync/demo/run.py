"""`phasesync demo`: settings in, exit code out."""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from phasesync.demo.screen import screen_of
from phasesync.demo.settings import DemoSettings, Script, backend_of, script_of
from phasesync.demo.view import View
from phasesync.errors import InputError, PhasesyncError, PlanError
from phasesync.report.timeline import ASCII

__all__ = ("AuditRun", "run_demo")

AuditRun: TypeAlias = Callable[[Path], tuple[int, Sequence[str]]]
"""Audits the journals in a folder: an exit code, and lines for people."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def run_demo(settings: DemoSettings, *, audit_run: AuditRun, console: Console | None = None) -> int:
    """Run a demo and show it; the exit code of the process."""
    console = console or Console()
    try:
        script = _script(settings)
        play = backend_of(settings.backend)
        _make_folder(script)
    except InputError as error:
        print(f"phasesync demo: {error}", file=sys.stderr)
        return USAGE
    console.print(_opening(script), highlight=False, soft_wrap=True)
    try:
        with View(script, console) as view:
            ending = play(script, view)
        view.tail.poll()
        code, verdict = audit_run(script.shown)
    except KeyboardInterrupt:
        console.print(f"interrupted; journals so far: {script.shown}", soft_wrap=True)
        return INTERRUPTED
    except PhasesyncError as error:
        print(f"phasesync demo: {error}", file=sys.stderr)
        return FAILED
    for row in screen_of(script, ending, view.tail.lines, verdict):
        console.print(_shown(row, console), soft_wrap=True, highlight=False)
    return code if ending.whole else FAILED


def _script(settings: DemoSettings) -> Script:
    """The script, with a run folder of a name that no run has."""
    runs = Path(settings.runs or os.environ.get("PHASESYNC_RUNS") or "runs").absolute()
    stem = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (stem if again == 0 else f"{stem}-{again}" for again in count())
    run = next(name for name in names if not (runs / name).exists())
    return script_of(settings, run=run, runs=runs, host=socket.gethostname())


def _make_folder(script: Script) -> None:
    """The run folder, with the protocol in it.

    Raises:
        PlanError: it cannot be made.
    """
    try:
        script.folder.mkdir(parents=True)
        script.protocol_file.write_text(script.text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"cannot write to {script.runs}: {error.strerror}; give another folder with --runs"
        ) from error


def _opening(script: Script) -> Text:
    trainers, engines = len(script.plan.members), len(script.plan.engines)
    return Text(
        f"phasesync demo: {script.protocol.name}, {trainers} trainers, {engines} engines, "
        f"{script.backend}; journals in {script.shown}",
        style="bold",
    )


def _shown(row: Text, console: Console) -> Text:
    """The row as the console's encoding allows."""
    if "utf" in (console.encoding or "").lower():
        return row
    row.plain = row.plain.translate(ASCII).encode("ascii", "replace").decode()
    return row
