"""What is asked of a line to a store: steps to perform, and a future for what comes of them."""

import asyncio
from dataclasses import dataclass
from typing import Any

from phasesync.core.fence_keys import Steps

__all__ = ("Job", "settle")


@dataclass(eq=False, slots=True)
class Job:
    """Steps to perform, and the future that waits for what comes of them."""

    steps: Steps
    future: "asyncio.Future[Any]"


def settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    """Give a future its result or error, unless it has one or nobody waits any more."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
