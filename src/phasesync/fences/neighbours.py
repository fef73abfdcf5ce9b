"""Word of a death on this host: the kernel tells when a process is gone.

No heartbeat tells slow from dead; a process descriptor does, at once and without a poll. It reaches
as far as one process namespace: `host_id` says which processes can see each other.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

__all__ = ("Neighbours", "host_id", "started_at", "state_of")

log = logging.getLogger(__name__)


def host_id() -> str:
    """This start of this machine, and the process namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def started_at(pid: int) -> int | None:
    """When a process started, in the kernel's own count: tells it from a later one of its number.
    None if it is gone, or dead and not yet buried."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else int(stat[19])


# The kernel's letter for what a process does, in the words of a report.
STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "D": "alive, in the kernel"}


def state_of(pid: int) -> str:
    """`alive`, `stopped` (by a signal or a debugger) or `dead`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        return "not seen from here"
    return STATES.get(stat.rsplit(")", 1)[1].split()[0], "alive")


class Neighbours:
    """Watches processes of this host, in the event loop."""

    def __init__(self, gone: Callable[[Any, int], None]) -> None:
        self._gone = gone
        self._watched: dict[Hashable, int] = {}
        self._is_closed = False

    def watch(self, who: Hashable, pid: int, started: int) -> None:
        """Call `gone(who, pid)` once when the process ends, or now if it has ended."""
        if self._is_closed or who in self._watched or not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._watched[who] = -1
            self._gone(who, pid)
            return
        except OSError as error:
            # A sandbox may forbid it, or there are no files left: that says nothing of the process.
            self._watched[who] = -1
            log.warning("process %d of %s cannot be watched from here: %s", pid, who, error)
            return
        self._watched[who] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, who, pid)
        if started_at(pid) != started:  # Looked at after opening: the number cannot change now.
            self._ended(who, pid)

    def close(self) -> None:
        """Watch nobody any more."""
        self._is_closed = True
        for who in list(self._watched):
            self._forget(who)

    def _ended(self, who: Hashable, pid: int) -> None:
        self._forget(who)
        self._gone(who, pid)

    def _forget(self, who: Hashable) -> None:
        fd, self._watched[who] = self._watched[who], -1
        if fd >= 0:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
