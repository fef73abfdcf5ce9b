"""A rank's heartbeat over a store: a daemon thread with a connection of its own.

It beats whatever the rank's event loop does, and hears when somebody asks what the rank does. Its
errors are nobody's: a store that is lost is found lost by whoever waits for a verdict.
"""

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from phasesync.core.fence_beats import HEARTBEAT_S, Ask
from phasesync.core.fence_keys import Delete, Put, Read, Space
from phasesync.core.model import Rank
from phasesync.fences.base import Probe
from phasesync.fences.lines import Client

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("Pulse",)

END_S = 1.0


class Pulse:
    """Beats for one rank until it is stopped."""

    def __init__(
        self, store: "Store", space: Space, rank: Rank, probe: Probe, every_s: float = HEARTBEAT_S
    ) -> None:
        self._store = store
        self._space = space
        self._key = space.beat(rank)
        self._probe = probe
        self._every_s = every_s
        self._over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._client: Client | None = None
        name = f"phasesync.pulse.{rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def stop(self) -> None:
        """End the thread; what it has written is there by then, so that it can be removed."""
        self._over.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._ended.wait()
        self.cut()

    def cut(self) -> None:
        """End the thread whatever it is blocked in."""
        self._over.set()
        if self._client is not None:
            self._client.cut()

    def _run(self) -> None:
        with suppress(Exception):
            self._client = Client(self._store)
            try:
                self._beat(self._client)
            finally:
                self._client.close()
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._ended.set)

    def _beat(self, client: Client) -> None:
        if self._over.is_set():
            return  # It took so long to connect that the rank has left, and what it wrote is swept.
        client.perform(Put(self._space.beating, b"1"))
        heard: set[Ask] = set()
        while True:
            client.perform(Put(self._key, self._probe.beat().encode()))
            # The reply also proves that the beat has come.
            for ask in Ask.lines(client.perform(Read(self._space.asks))):
                if ask not in heard:
                    heard.add(ask)
                    if self._probe.asked(ask):
                        client.perform(Put(self._key, self._probe.beat().encode()))
            if self._over.wait(self._every_s):
                client.perform(Delete(self._key))
                return
