"""What is asked of a line to a store: steps to perform, and who waits for what comes of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from phasesync.core.fence_keys import Steps

__all__ = ("Ear", "Job", "Waiting", "settle")


class Ear:
    """Waits for a result as a future does, but hears it at once, not a turn of the loop later."""

    __slots__ = ("_hear",)

    def __init__(self, hear: Callable[[Any, Exception | None], None]) -> None:
        self._hear: Callable[[Any, Exception | None], None] | None = hear

    def done(self) -> bool:
        return self._hear is None

    def set_result(self, result: Any) -> None:
        self._say(result, None)

    def set_exception(self, error: Exception) -> None:
        self._say(None, error)

    def _say(self, result: Any, error: Exception | None) -> None:
        hear, self._hear = self._hear, None
        if hear is not None:
            hear(result, error)


Waiting: TypeAlias = "asyncio.Future[Any] | Ear"


@dataclass(eq=False, slots=True)
class Job:
    """Steps to perform, and who waits for what comes of them."""

    steps: Steps
    future: Waiting


def settle(future: Waiting, result: Any, error: Exception | None) -> None:
    """Give a result or error to who waits, unless it has one or nobody waits any more."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
