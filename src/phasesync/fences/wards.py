"""Word of a death on another host: each rank holds a connection to some processes there.

Silence proves nothing, but the kernel closes the connections of a process that ends, whatever it
was doing. Nothing is said on them but, once, who listens: who took over the port of a process that
is gone must not pass for it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable

from phasesync.core.model import Rank
from phasesync.fences.doors import keep_alive, shut

__all__ = ("Wards", "address_of")

CONNECT_S = 5.0
WATCHERS_MAX = 256  # Connections that one rank holds open for those who watch it.
GREETING_BYTES = 32
DEAD = ("dead", "its process is gone: it closed its connection to another host")
SILENT = ("unavailable", "its host no longer answers")

log = logging.getLogger(__name__)


def address_of(said: str) -> tuple[str, int]:
    """Host and port from how they are announced."""
    host, _, port = said.rpartition(":")
    return host, int(port)


class Wards:
    """Whom this rank watches on other hosts, and where it lets itself be watched."""

    def __init__(self, run: str, gone: Callable[[Rank, int, str, str], None]) -> None:
        self._run = run
        self._gone = gone
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._watchers: set[asyncio.StreamWriter] = set()
        self._watching: dict[tuple[Rank, int], asyncio.Task[None]] = {}

    async def listen(self, host: str, rank: Rank, incarnation: int) -> str:
        """Let others hold connections to this process; where."""
        greeting = self._greeting(rank, incarnation)

        def watched(_: asyncio.StreamReader, watcher: asyncio.StreamWriter) -> None:
            if self._is_closed or len(self._watchers) >= WATCHERS_MAX:
                watcher.transport.abort()
                return
            self._watchers = {each for each in self._watchers if not each.is_closing()}
            self._watchers.add(watcher)
            watcher.write(greeting)

        self._server = await asyncio.start_server(watched, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def watch(self, rank: Rank, incarnation: int, address: str) -> None:
        """Tell when that process is gone, once."""
        who = (rank, incarnation)
        if who not in self._watching and not self._is_closed:
            hold = self._hold(rank, incarnation, *address_of(address))
            name = f"watches {rank}"
            self._watching[who] = asyncio.get_running_loop().create_task(hold, name=name)

    async def close(self) -> None:
        """Watch nobody any more, and let nobody watch."""
        self._is_closed = True
        for task in self._watching.values():
            task.cancel()
        if self._watching:
            await asyncio.wait(self._watching.values(), timeout=1.0)
        if self._server is not None:
            shut(self._server)
        for watcher in self._watchers:
            watcher.transport.abort()

    def _greeting(self, rank: Rank, incarnation: int) -> bytes:
        return hashlib.sha256(f"{self._run} {rank} {incarnation}".encode()).digest()

    async def _hold(self, rank: Rank, incarnation: int, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            self._gone(rank, incarnation, *DEAD)
            return
        except (OSError, TimeoutError) as error:
            log.warning("%s at %s:%s cannot be watched from here: %s", rank, host, port, error)
            return
        try:
            keep_alive(writer.get_extra_info("socket"))
            kind, why = DEAD
            try:
                if await reader.readexactly(GREETING_BYTES) != self._greeting(rank, incarnation):
                    return
                await reader.read()
            except asyncio.IncompleteReadError:
                return  # It has as many watchers as it takes, or never was that rank.
            except TimeoutError:
                kind, why = SILENT
            except OSError:
                pass
            self._gone(rank, incarnation, kind, why)
        finally:
            writer.transport.abort()
