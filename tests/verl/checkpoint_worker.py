"""A worker of the disaggregated path, as a Ray actor; it imports nothing, to start fast."""

from typing import Any

__all__ = ("CheckpointWorker",)


class CheckpointWorker:
    """A worker of either side; it fails where it is told to."""

    def __init__(self, fails_in: str = "") -> None:
        self._fails_in = fails_in

    def update_weights(self, global_steps: Any = None, mode: str = "auto") -> dict[str, int]:
        self._do("update_weights")
        return {"sent": 1}

    def execute_checkpoint_engine(self, method: str, **_: Any) -> None:
        self._do(method)

    def _do(self, what: str) -> None:
        if what == self._fails_in:
            raise RuntimeError(f"injected in {what}")
