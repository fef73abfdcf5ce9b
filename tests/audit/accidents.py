"""A colocated world without its KV fence, in which some call happens to keep the ranks apart.

The protocol says nothing of that call: `empty_cache` synchronises its device and then meets its
peers in an all-reduce, or the leader's is so slow that every peer is done before it.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from phasesync.core.protocol import FenceDecl, Protocol
from phasesync.runtime import Turn
from phasesync.spec import load
from tests.runtime.world import World

__all__ = ("FENCE", "Accident", "fenced", "unfenced")

FENCE = "memory_released"
ALL_REDUCE = "dist.all_reduce"


def fenced() -> Protocol:
    return load("colocated")


def unfenced() -> Protocol:
    """The shipped protocol without the fence before KV; its releases are still only enqueued."""
    whole = fenced()
    steps = (each for each in whole.steps if not isinstance(each, FenceDecl) or each.name != FENCE)
    return replace(whole, steps=tuple(steps))


@dataclass
class Accident(World):
    """`kind` is what orders the ranks: `all_reduce`, or `slow`: a slow leader's `empty_cache`."""

    kind: str = "all_reduce"
    met: dict[int, asyncio.Barrier] = field(default_factory=dict)

    def _action(self, name: str) -> Any:
        act = super()._action(name)

        async def cleared(turn: Turn) -> None:
            leads = turn.rank.number == self.replica(turn.rank)[0]
            await act(turn)
            turn.synchronised()
            if self.kind == "all_reduce":
                turn.progress(call=ALL_REDUCE)
                first = self.replica(turn.rank)[0]
                await self.met.setdefault(first, asyncio.Barrier(self.size)).wait()
            elif leads:
                await asyncio.sleep(0.02)

        return cleared if name == "empty_cache" else act
