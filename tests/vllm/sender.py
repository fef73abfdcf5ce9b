"""The trainer's side of the tests' weight transfer: one group with all workers."""

import asyncio
import datetime
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .sleepy_worker import broadcast, gloo

__all__ = ("Sender", "children", "end", "free_port")


class Sender:
    """Rank 0 of the group; the workers are the ranks from 1 on."""

    def __init__(self, *, receivers: int) -> None:
        self._size = receivers + 1
        self._pool = ThreadPoolExecutor(1)
        self._group: Any = None
        self._store: Any = None

    def __enter__(self) -> "Sender":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._group = None
        self._pool.shutdown(wait=False)

    async def join(self, init: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Open the store, let the workers in through `init`, and form the group with them."""
        port = free_port()
        opened = asyncio.get_running_loop().run_in_executor(self._pool, self._open, port)
        await init({"port": port, "world_size": self._size})
        await opened

    async def push(self, model: Any, load: Callable[[object], Awaitable[None]]) -> None:
        """Send every parameter of `model` while the workers take them in through `load`."""
        named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
        bucket = {
            "names": [name for name, _ in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
        }
        sent = asyncio.get_running_loop().run_in_executor(self._pool, self._send, named)
        await load(bucket)
        await sent

    def _open(self, port: int) -> None:
        limit = datetime.timedelta(seconds=60)
        self._store = TCPStore("127.0.0.1", port, self._size, True, limit, wait_for_workers=False)
        self._group = gloo(self._store, 0, self._size)

    def _send(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            broadcast(self._group, tensor.contiguous())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children() -> set[Any]:
    """The processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def end(processes: set[Any], within_s: float = 5.0) -> None:
    """Leave none of them behind: an engine that lost a worker does not end by itself."""
    _, left = psutil.wait_procs(processes, timeout=within_s)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=within_s)
