"""Our own admission gate: who may send requests, and how many are under way.

It exists because the engine's own is not enough: vLLM resumes its scheduler by itself when it is
fully awake, and SGLang has no way to turn a late request away. Shut first, then drain: a request
that came in between would be missed otherwise.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias

from phasesync.errors import EngineRefused

__all__ = ("Gate", "Late")

Late: TypeAlias = Literal["park", "reject"]


class Gate:
    """Counts admissions; while shut, a late one is parked until it opens, or turned away."""

    def __init__(self, *, late: Late = "reject") -> None:
        self._late = late
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def under_way(self) -> int:
        """How many admitted requests have not ended."""
        return self._under_way

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    async def drained(self) -> None:
        """Return once nothing that was admitted is under way; the caller sets the deadline."""
        await self._idle.wait()

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """Hold one admission for as long as the block runs.

        Raises:
            EngineRefused: the gate is shut, and late requests are turned away.
        """
        if not self._open.is_set():
            if self._late == "reject":
                raise EngineRefused("the engine is not serving; send the request again later")
            await self._open.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
