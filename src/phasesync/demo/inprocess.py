"""The demo in one process and one event loop. Torch is imported beside a view that goes on."""

import asyncio
import tempfile
import threading
from importlib import import_module
from pathlib import Path

from phasesync.demo.ending import Ending
from phasesync.demo.settings import Script
from phasesync.demo.view import View

__all__ = ("play",)

TASKS = "phasesync.demo.tasks"
TICK_S = 0.1


def play(script: Script, view: View) -> Ending:
    """Run the script; how it ended."""
    view.status("importing torch")
    importer = threading.Thread(target=import_module, args=(TASKS,), daemon=True)
    importer.start()
    while importer.is_alive():
        view.tick()
        importer.join(TICK_S)
    view.status("making the model")
    with tempfile.TemporaryDirectory(prefix="phasesync-demo-") as scratch:
        ending: Ending = asyncio.run(import_module(TASKS).play_all(script, view, Path(scratch)))
    return ending
