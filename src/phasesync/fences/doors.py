"""Doors: sockets that listen, how to shut one so that nobody is left half inside, and connections:
how to hear of a host that is gone, and to let go of one in a fork.

What has been accepted becomes a connection a turn of the loop later. If its server is closed by
then, asyncio drops it half made: the socket stays open until it is collected as garbage, and who
connected waits there. So no more is accepted first, and the server closed a turn later; whoever
comes in between is its owner's to cut.
"""

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

__all__ = ("keep_alive", "let_go", "shut")

NO_READERS = (NotImplementedError, RuntimeError, ValueError)  # Some loops listen in their own way.


def shut(server: asyncio.Server) -> None:
    """Accept nobody any more, and close in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    for end in server.sockets:
        with suppress(*NO_READERS):
            loop.remove_reader(end.fileno())
    loop.call_soon(server.close)


# A host that has been silent for 5 s is given up, also where it owes an answer to what was sent:
# then the kernel asks for no sign of life, and would send it again for a quarter of an hour.
KEEPALIVE = (
    ("TCP_KEEPIDLE", 2),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 5000),
)


def keep_alive(end: Any) -> None:
    """Let the kernel find out that the other host is gone: its silence closes nothing."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE:
        with suppress(AttributeError, OSError):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def let_go(end: Any) -> None:
    """Close a socket in a fork: it would outlive the rank here. Its number stays taken, so that
    whoever closes it closes nothing else."""
    if end is not None and end.fileno() >= 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, end.fileno())
        os.close(nothing)
