"""What an epoch costs that comes once every few seconds, and finds nothing of itself in any cache.

python -m tests.bench.epoch_cost --cold [ROUNDS]

In between the process sleeps and 256 MB go through the processor's caches. Actions sleep for longer
than it takes until a rank watches its next fence, and touch some memory, as an engine's do. Turn by
turn in the same process: the calls alone, the calls through a thread and back, and whole epochs of
one rank whose fences go over a TCPStore. What is not spent in the actions is the share of whoever
calls them.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from phasesync.core.plan import Act
from phasesync.core.protocol import PhaseDecl
from phasesync.runtime import RankRunner, at_once
from phasesync.runtime.calls import BlockingCalls
from phasesync.spec import load

__all__ = ("Part", "cold", "told")

PAUSE_S = 3.0
ACTION_S = 0.025
_FLUSHED = 256 << 20
_TOUCHED = 4 << 20


class Part(NamedTuple):
    """Milliseconds of each round that were not spent in the actions, and those spent at fences."""

    whole_ms: list[float]
    fences_ms: list[float]


class _Calls:
    """The actions of all parts, and how long the present one has been in them."""

    def __init__(self) -> None:
        self._source = bytes(_FLUSHED)
        self._sink = bytearray(_FLUSHED)
        self.spent_ns = 0

    def act(self) -> None:
        began = time.perf_counter_ns()
        self._sink[:_TOUCHED] = self._source[:_TOUCHED]
        time.sleep(ACTION_S)
        self.spent_ns += time.perf_counter_ns() - began

    def acting_at_once(self) -> Callable[[], None]:
        @at_once
        def act() -> None:
            self.act()

        return act

    async def awaited(self) -> None:
        """An action whose work is done elsewhere: an RPC."""
        began = time.perf_counter_ns()
        await asyncio.sleep(ACTION_S)
        self.spent_ns += time.perf_counter_ns() - began

    def chill(self) -> None:
        time.sleep(PAUSE_S)
        self._sink[:] = self._source

    async def timed(self, once: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
        """The milliseconds that `once` takes beside the actions, and its answer."""
        self.chill()
        self.spent_ns = 0
        began = time.perf_counter_ns()
        answer = await once()
        return (time.perf_counter_ns() - began - self.spent_ns) / 1e6, answer


async def _measured(protocol: str, rounds: int) -> dict[str, Part]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = _Calls()
    steps = (*load(protocol).steps, *load(protocol).recover)
    names = [step.name for step in steps if isinstance(step, PhaseDecl)]
    kinds = {
        "actions in a thread": calls.act,
        "actions at once": calls.acting_at_once(),
        "awaited actions": calls.awaited,
    }
    hops = BlockingCalls("hops")
    async with AsyncExitStack() as stack:
        runs = stack.enter_context(tempfile.TemporaryDirectory())
        parts: dict[str, Callable[[], Awaitable[Any]]] = {}
        acts = 0
        for number, (kind, act) in enumerate(kinds.items()):
            runner = RankRunner(
                protocol,
                rank=0,
                ranks=1,
                options={"replica_size": 1},
                actions=dict.fromkeys(names, act),
                fences=store,
                runs=runs,
                run=f"cold-{number}",
            )
            await stack.enter_async_context(runner)
            acts = sum(isinstance(step, Act) for step in runner.plan.programs[0])
            parts[kind] = runner.run_epoch

        async def bare() -> None:
            for _ in range(acts):
                calls.act()

        async def hopped() -> None:
            for _ in range(acts):
                await hops.run(calls.act)

        parts = {"bare calls": bare, "bare calls in a thread": hopped, **parts}
        found = {name: Part([], []) for name in parts}
        for once in parts.values():
            await once()
        for _ in range(rounds):
            for name, once in parts.items():
                whole_ms, report = await calls.timed(once)
                found[name].whole_ms.append(whole_ms)
                waits = () if report is None else report.waits_s.values()
                found[name].fences_ms.append(sum(waits) * 1e3)
    hops.close()
    return found


def cold(protocol: str = "colocated", rounds: int = 8) -> dict[str, Part]:
    """What each part costs, in milliseconds, round by round."""
    return asyncio.run(_measured(protocol, rounds))


def told(found: dict[str, Part]) -> list[str]:
    """The medians in words, with the least and the most of what is beside the fences."""
    lines = []
    for name, part in found.items():
        rest = [all_ms - fence_ms for all_ms, fence_ms in zip(*part, strict=True)]
        middle = statistics.median
        lines.append(
            f"{name:24} {middle(part.whole_ms):7.2f} ms an epoch; fences "
            f"{middle(part.fences_ms):6.2f}, the rest {middle(rest):6.2f} "
            f"({min(rest):.2f} to {max(rest):.2f})"
        )
    return lines
