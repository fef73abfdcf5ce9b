"""Hosts of a network, as network namespaces of this machine: two of them, and a cable between.

It takes the right to make them (root) and the tools of iproute2.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

__all__ = ("Cable", "cable")

NEAR, FAR = "10.213.7.1", "10.213.7.2"


def _sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def _why_not() -> str | None:
    """Why this machine has no namespaces for us; None if it has."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed: apt-get install iproute2"
    name = f"ps{secrets.token_hex(3)}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    _sh("ip", "netns", "del", name)
    return None


@dataclass(frozen=True)
class Cable:
    """The link between two hosts; `near` and `far` are their namespaces."""

    near: str
    far: str

    @property
    def address(self) -> str:
        """The address of the near host."""
        return NEAR

    def cut(self) -> None:
        """A partition: no packet arrives, and nobody is told."""
        _sh("ip", "netns", "exec", self.near, "ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        _sh("ip", "netns", "exec", self.near, "ip", "link", "set", "cable", "up")

    def slow(self, rate: str, latency: str) -> None:
        """Let both directions carry no more than `rate` (`64kbit`)."""
        for host in (self.near, self.far):
            _sh(
                *("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "cable", "root"),
                *("tbf", "rate", rate, "burst", "1540", "latency", latency),
            )


@contextmanager
def cable() -> Iterator[Cable]:
    """Two hosts that see each other; the test is skipped where the machine has none to give.

    In CI, which runs as root in a machine of its own, it is not skipped but fails.
    """
    if (why := _why_not()) is not None:
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    mark = secrets.token_hex(3)
    made = Cable(near=f"ps{mark}a", far=f"ps{mark}b")
    try:
        for host in (made.near, made.far):
            _sh("ip", "netns", "add", host)
            _sh("ip", "netns", "exec", host, "ip", "link", "set", "lo", "up")
        _sh(
            *("ip", "link", "add", "cable", "netns", made.near, "type", "veth"),
            *("peer", "name", "cable", "netns", made.far),
        )
        for host, address in ((made.near, NEAR), (made.far, FAR)):
            _sh("ip", "netns", "exec", host, "ip", "addr", "add", f"{address}/24", "dev", "cable")
            _sh("ip", "netns", "exec", host, "ip", "link", "set", "cable", "up")
        yield made
    finally:
        for host in (made.near, made.far):
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)
