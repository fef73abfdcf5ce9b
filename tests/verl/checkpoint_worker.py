"""A worker of the disaggregated path, as a Ray actor; it imports nothing, to start fast."""

import os
from typing import Any

__all__ = ("CheckpointWorker",)


class CheckpointWorker:
    """A worker of either side; it fails where it is told to, as often as it is told."""

    def __init__(self, fails_in: str = "") -> None:
        self._fails: dict[str, int] = {fails_in: 1 << 30}
        self._dies_in = ""

    def fail(self, fails: dict[str, int]) -> None:
        """Where to fail from now on, and how often."""
        self._fails = dict(fails)

    def die_in(self, what: str) -> None:
        """Where to die, as a process does that runs out of memory."""
        self._dies_in = what

    def update_weights(self, global_steps: Any = None, mode: str = "auto") -> dict[str, int]:
        self._do("update_weights")
        return {"sent": 1}

    def execute_checkpoint_engine(self, method: str, **_: Any) -> None:
        self._do(method)

    def _do(self, what: str) -> None:
        if what == self._dies_in:
            os._exit(1)
        if self._fails.get(what):
            self._fails[what] -= 1
            raise RuntimeError(f"injected in {what}")
