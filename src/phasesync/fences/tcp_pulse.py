"""A rank's heartbeat to the coordinator: a daemon thread with a connection of its own.

It beats whatever the rank's event loop does, and hears when the coordinator asks what the rank
does. It is no rank to the coordinator: its end is nobody's death.
"""

import asyncio
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from phasesync.core import wire
from phasesync.core.fence_beats import HEARTBEAT_S, Ask
from phasesync.core.fence_messages import NO_REQUEST, REQUEST_BYTES_MAX, Answer, Framer, frame
from phasesync.core.model import Rank
from phasesync.fences.base import Probe

__all__ = ("TcpPulse",)

CONNECT_S = 30.0
END_S = 1.0


class TcpPulse:
    """Beats for one rank until it is stopped."""

    def __init__(
        self,
        address: tuple[str, int],
        greeting: bytes,
        run: tuple[str, int],
        rank: Rank,
        probe: Probe,
        every_s: float = HEARTBEAT_S,
    ) -> None:
        self._address = address
        self._hello = greeting + _request("hello", NO_REQUEST, None, 0, *run)
        self._rank = list(rank)
        self._probe = probe
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ours, self._theirs = socket.socketpair()
        name = f"phasesync.pulse.{rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def stop(self) -> None:
        """End the thread; it is not joined."""
        self._ours.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._ended.wait()

    def _run(self) -> None:
        with (
            suppress(Exception),
            self._theirs,
            socket.create_connection(self._address, CONNECT_S) as end,
            selectors.DefaultSelector() as ears,
        ):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.sendall(self._hello)
            ears.register(end, selectors.EVENT_READ)
            ears.register(self._theirs, selectors.EVENT_READ)
            self._beat(end, ears)
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._ended.set)

    def _beat(self, end: socket.socket, ears: selectors.BaseSelector) -> None:
        framer = Framer(REQUEST_BYTES_MAX)
        due = time.monotonic()
        while True:
            if (wait_s := due - time.monotonic()) <= 0:
                self._say(end)
                due = time.monotonic() + self._every_s
                continue
            for key, _ in ears.select(wait_s):
                if key.fileobj is self._theirs or not (data := end.recv(1 << 16)):
                    return
                for body in framer.feed(data):
                    self._heard(end, Answer.decode(body).said)

    def _heard(self, end: socket.socket, said: Any) -> None:
        if type(said) is list and said[:1] == ["ask"] and self._probe.asked(Ask(*said[1:])):
            self._say(end)

    def _say(self, end: socket.socket) -> None:
        end.sendall(_request("beat", self._rank, self._probe.beat().encode().decode()))


def _request(*said: Any) -> bytes:
    return frame(wire.encode(said))
