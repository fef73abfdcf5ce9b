"""Doors: sockets that listen, and how to shut one so that nobody is left half inside.

What has been accepted becomes a connection a turn of the loop later. If its server is closed by
then, asyncio drops it half made: the socket stays open until it is collected as garbage, and who
connected waits there. So no more is accepted first, and the server closed a turn later; whoever
comes in between is its owner's to cut.
"""

import asyncio
from contextlib import suppress

__all__ = ("shut",)

NO_READERS = (NotImplementedError, RuntimeError, ValueError)  # Some loops listen in their own way.


def shut(server: asyncio.Server) -> None:
    """Accept nobody any more, and close in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    for end in server.sockets:
        with suppress(*NO_READERS):
            loop.remove_reader(end.fileno())
    loop.call_soon(server.close)
