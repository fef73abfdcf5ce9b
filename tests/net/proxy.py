"""A TCP proxy that can hold back, cut or half-open the connections that pass through it.

It has a thread and an event loop of its own, so that what it carries may block.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ("Proxy",)

T = TypeVar("T")
CHUNK = 65536
RESET = struct.pack("ii", 1, 0)  # To linger for no time: close with a reset.


class Proxy:
    """Listens on a free port of the loopback interface and passes all on to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._ends: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._flowing: asyncio.Event
        self._tasks: set[asyncio.Task[None]] = set()
        self.port: int = self._call(self._start())

    def stall(self) -> None:
        """Pass nothing on; what comes is kept, and new connections are accepted."""
        self._soon(self._flowing.clear)

    def flow(self) -> None:
        """Pass on again, what was kept first."""
        self._soon(self._flowing.set)

    def reset(self) -> None:
        """Reset all connections, on both sides; new ones are accepted."""

        def reset() -> None:
            for pair in self._ends:
                for writer in pair:
                    _reset(writer)

        self._soon(reset)

    def half_open(self, number: int) -> None:
        """Forget one connection: its server side is reset, and its client is told nothing."""
        self._soon(lambda: _reset(self._ends[number][1]))

    @property
    def connections(self) -> int:
        """How many connections there have been."""
        return len(self._ends)

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Awaitable[T]) -> T:
        async def done() -> T:
            return await work

        future: Future[T] = asyncio.run_coroutine_threadsafe(done(), self._loop)
        return future.result(10)

    def _soon(self, work: Callable[[], Any]) -> None:
        async def done() -> None:
            work()

        self._call(done())

    async def _start(self) -> int:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pair in self._ends:
            for writer in pair:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._ends.append((writer, back))
        for source, sink in ((reader, back), (there, writer)):
            task = self._loop.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
            await self._flowing.wait()
            sink.write_eof()
        except OSError:
            return  # One side is gone; whoever took it away tells the other or does not.


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
