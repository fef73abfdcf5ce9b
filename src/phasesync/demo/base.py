"""What trainers and engines of the demo say to each other, and the way it goes.

A trainer knows its engine by `Link` alone, whichever process that is in.
"""

import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ("KV", "WEIGHTS", "Command", "FreeNow", "Link", "Said")

KV = "kv_cache"
WEIGHTS = "rollout_weights"


class Command(NamedTuple):
    """What a leader or a peer asks for: the engine's method, its arguments, and when that is."""

    name: str
    arguments: Mapping[str, Any]
    phase: str
    epoch: int


class FreeNow(NamedTuple):
    """What is free on each of the engine's devices after it mapped or unmapped."""

    free_bytes: Mapping[str, int]


class Said(NamedTuple):
    """What the engine generated, and with which version of the weights."""

    version: int
    values: list[float]


class Link(typing.Protocol):
    """One trainer's way to its engine."""

    async def ask(self, command: Command) -> Any:
        """What the engine answers; what it raised is raised here.

        Raises:
            EngineLost: it is gone; whether it did the work is unknown.
        """
