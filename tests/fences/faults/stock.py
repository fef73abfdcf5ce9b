"""The barriers that people use today, put through the same faults as the fences.

Each is called as its users call it, with the deadline where it takes one. A rank says of each
barrier whether it passed or what it raised; one that hangs has said nothing.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from tests.fences.faults.ranks import SKIPS_S, Life, Record, enter, signal_self
from tests.fences.processes import store_client

__all__ = ("STOCK", "process")

Barrier = Callable[[int], None]
FOREVER = timedelta(minutes=30)


def _group(life: Life, timeout: timedelta) -> Any:
    dist: Any = import_module("torch.distributed")
    store = dist.PrefixStore(life.run, store_client(("tcp", life.address)))
    dist.init_process_group(
        "gloo", store=store, rank=life.number, world_size=life.size, timeout=timeout
    )
    return dist


def _gloo(life: Life) -> Barrier:
    dist = _group(life, timedelta(seconds=life.deadline_s))
    return lambda _: dist.barrier()


def _monitored(life: Life) -> Barrier:
    dist = _group(life, FOREVER)
    return lambda _: dist.monitored_barrier(timeout=timedelta(seconds=life.deadline_s))


def _to_thread(life: Life) -> Barrier:
    """The deadline is asyncio's; who calls `asyncio.run` gets control back when the thread ends."""
    dist = _group(life, FOREVER)

    async def wait() -> None:
        await asyncio.wait_for(asyncio.to_thread(dist.barrier), life.deadline_s)

    return lambda _: asyncio.run(wait())


def _elastic(life: Life) -> Barrier:
    elastic: Any = import_module("torch.distributed.elastic.utils.store")
    store = store_client(("tcp", life.address))

    def barrier(generation: int) -> None:
        elastic.barrier(
            store,
            life.size,
            f"{life.run}/{generation}",
            barrier_timeout=life.deadline_s,
            rank=life.number,
            rank_tracing_decoder=lambda rank: f"rank {rank}",
            trace_timeout=0.5,
        )

    return barrier


def _store(life: Life) -> Barrier:
    store = store_client(("tcp", life.address))
    timeout = timedelta(seconds=life.deadline_s)
    return lambda generation: store.barrier(f"{life.run}/{generation}", life.size, timeout)


STOCK: Mapping[str, Callable[[Life], Barrier]] = {
    "dist.barrier (gloo)": _gloo,
    "monitored_barrier": _monitored,
    "wait_for(to_thread(barrier))": _to_thread,
    "elastic store barrier": _elastic,
    "Store.barrier()": _store,
}


def process(life: Life, pipe: Connection) -> None:
    """A rank with a stock barrier, in its own process."""
    with suppress(BrokenPipeError):
        _live(life, STOCK[life.transport](life), pipe)
    os._exit(0)


def _live(life: Life, barrier: Barrier, pipe: Connection) -> None:
    for generation in range(life.generations):
        if generation == life.at and not BEFORE[life.act](life):
            continue
        enter(life, generation)
        since = time.monotonic()
        kind, said = "open", ""
        try:
            barrier(generation)
        except Exception as error:
            kind, said = "broken", f"{type(error).__name__}: {error}"
        now = time.monotonic()
        pipe.send(Record(generation, kind, said, now - since, now))
    pipe.send(None)


def _goes(_: Life) -> bool:
    return True


def _skips(_: Life) -> bool:
    time.sleep(SKIPS_S)
    return False


def _late(life: Life) -> bool:
    time.sleep(life.late_s)
    return True


def _signalled(number: int) -> Callable[[Life], bool]:
    def act(_: Life) -> bool:
        signal_self(number)
        return True

    return act


def _exits(_: Life) -> bool:
    os._exit(1)


BEFORE: Mapping[str, Callable[[Life], bool]] = {
    "well": _goes,
    "late": _late,
    "skips": _skips,
    "killed": _signalled(9),
    "frozen": _signalled(19),
    # An exception before a barrier ends the process: a stock barrier has no word for it.
    "fails": _exits,
    "exits": _exits,
    # A stock barrier carries no payload: whatever the ranks disagree about, it opens.
    "options": _goes,
}
