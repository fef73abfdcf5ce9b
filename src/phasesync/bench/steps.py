"""What each step of a store fence costs, alone on this machine."""

import asyncio
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from phasesync.bench.barriers import Place, arrival_of, call_of
from phasesync.core.fence import decode_arrivals, encode_arrival, judge
from phasesync.core.model import Rank, RoleName

__all__ = ("step_costs",)


def step_costs(repeats: int = 300) -> dict[str, float]:
    """Microseconds of each step of a store fence, alone on this machine."""
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(number=0, size=8, port=store.port, run="steps")
    call = call_of(place, 0)
    arrivals = [
        arrival_of(Place(number=n, size=8, port=store.port, run="steps"), call) for n in range(8)
    ]
    log = b"".join(map(encode_arrival, arrivals))
    store.set("there", "x")
    return {
        "store round trip (add)": _time(repeats, lambda: store.add("n", 1)),
        "store get": _time(repeats, lambda: store.get("there")),
        "store append, one way": _time(repeats, lambda: store.append("log", "x")),
        "frame to JSON": _time(repeats, lambda: encode_arrival(arrivals[0])),
        "8 frames from JSON": _time(repeats, lambda: decode_arrivals(log)),
        "judging 8 arrivals": _time(repeats, lambda: judge(call, arrivals)),
        "thread hop, there and back": asyncio.run(_hop(store, repeats)),
    }


def _time(repeats: int, act: Callable[[], object]) -> float:
    taken = []
    for _ in range(repeats):
        since = time.perf_counter_ns()
        act()
        taken.append((time.perf_counter_ns() - since) / 1e3)
    return statistics.median(taken)


async def _hop(store: Any, repeats: int) -> float:
    from phasesync.fences.store import StoreFences  # noqa: PLC0415

    endpoint = StoreFences(store, rank=Rank(RoleName("trainer"), 0), run="hop")
    await endpoint.connect()
    taken = []
    for _ in range(repeats):
        since = time.perf_counter_ns()
        await endpoint.hop()
        taken.append((time.perf_counter_ns() - since) / 1e3)
    await endpoint.close()
    return statistics.median(taken)
