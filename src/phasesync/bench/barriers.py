"""The fences and barriers that `bench fence` measures, as one process of the run makes them.

Each is a coroutine that returns once everybody has come. What a user would await is awaited, what
blocks blocks: the cost of the bridge belongs to whoever needs one.
"""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from phasesync.core.model import (
    Arrival,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Rank,
    RoleName,
    Version,
)

__all__ = ("VARIANTS", "Cluster", "Place", "Variant", "arrival_of", "call_of", "gpus", "member")

DEADLINE_S = 60.0

Fence: TypeAlias = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process stands in the run, and with whom it meets: all, or its replica."""

    number: int
    size: int
    port: int
    run: str
    replica_size: int | None = None
    coordinator: tuple[str, int] | None = None
    cluster: "Cluster | None" = None

    @property
    def scope(self) -> str:
        return "world" if self.replica_size is None else f"replica/{self.first}"

    @property
    def first(self) -> int:
        """The lowest process of the scope."""
        return self.number - self.number % (self.replica_size or self.size)

    @property
    def members(self) -> range:
        return range(self.first, min(self.first + (self.replica_size or self.size), self.size))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster, and what a process needs around it to be let in (Ray 2.60: a token)."""

    address: str
    environment: tuple[tuple[str, str], ...]

    def join(self) -> Any:
        """Connect this process, and give its `ray`."""
        os.environ.update(self.environment)
        ray: Any = import_module("ray")
        ray.init(address=self.address, log_to_driver=False, ignore_reinit_error=True)
        return ray


def gpus() -> int:
    """How many GPUs this process can use with NCCL."""
    if find_spec("torch") is None:
        return 0
    torch: Any = import_module("torch")
    return int(torch.cuda.device_count()) if torch.distributed.is_nccl_available() else 0


# --- One process -----------------------------------------------------------------------------


def member(place: Place, variants: Sequence[str], pipe: Connection) -> None:
    """Take part in whatever the pipe asks for, until it closes."""
    os.dup2(2, 1)  # NCCL, gloo and Ray write to stdout, which belongs to the result.
    asyncio.run(_member_loop(place, variants, pipe))


async def _member_loop(place: Place, variants: Sequence[str], pipe: Connection) -> None:
    try:
        made = {name: await VARIANTS[name].make(place) for name in variants}
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    counts = dict.fromkeys(variants, 0)
    chance = random.Random(place.number)
    pipe.send("ready")
    while True:
        try:
            name, fences, jitter_s = pipe.recv()
        except EOFError:
            break
        stamps = []
        cpu_s = 0.0
        for _ in range(fences):
            await asyncio.sleep(chance.uniform(0, jitter_s))
            used_s = time.process_time()
            entered = time.monotonic_ns()
            await made[name](counts[name])
            stamps.append((entered, time.monotonic_ns()))
            cpu_s += time.process_time() - used_s
            counts[name] += 1
        pipe.send((stamps, cpu_s))
    os._exit(0)  # Neither gloo's threads nor a store that is gone may keep the process.


# --- Ours ------------------------------------------------------------------------------------


def call_of(place: Place, generation: int) -> FenceCall:
    return FenceCall(
        key=FenceKey(place.run, 0, place.scope, generation),
        fence=FenceName("memory_released"),
        epoch=Epoch(generation),
        version=Version(generation),
        digest=Digest("d" * 64),
        members=_members(place),
        deadline_s=DEADLINE_S,
    )


@lru_cache
def _members(place: Place) -> tuple[Rank, ...]:
    """Listed once, as the runtime does for a plan."""
    return tuple(Rank(RoleName("trainer"), n) for n in place.members)


def arrival_of(place: Place, call: FenceCall) -> Arrival:
    nonce, seq = secrets.token_hex(8), call.key.generation
    return call.arrival(_rank(place), nonce=nonce, seq=seq, free_bytes=1 << 34)


async def _over(place: Place, endpoint: Any) -> Fence:
    await endpoint.connect()

    async def fence(generation: int) -> None:
        call = call_of(place, generation)
        await endpoint.arrive(call, arrival_of(place, call))

    return fence


def _client(place: Place) -> Any:
    dist: Any = import_module("torch.distributed")
    return dist.TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False)


def _rank(place: Place) -> Rank:
    return Rank(RoleName("trainer"), place.number)


async def _make_store(place: Place) -> Fence:
    from phasesync.fences.store import StoreFences  # noqa: PLC0415

    return await _over(place, StoreFences(_client(place), rank=_rank(place), run=place.run))


async def _make_tcp(place: Place) -> Fence:
    from phasesync.fences.tcp import TcpFences  # noqa: PLC0415

    assert place.coordinator is not None
    endpoint = TcpFences(place.coordinator, rank=_rank(place), run=place.run, token="bench")
    return await _over(place, endpoint)


async def _make_ray(place: Place) -> Fence:
    assert place.cluster is not None
    place.cluster.join()
    from phasesync.fences.ray import RayFences  # noqa: PLC0415

    return await _over(place, RayFences(rank=_rank(place), run=place.run))


# --- Those that people use today ---------------------------------------------------------------


class _BarrierActor:
    """The barrier that people write: count to N, then let all go."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[asyncio.Future[None]] = []

    async def arrive(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.set_result(None)
        await waiter


async def _make_ray_barrier(place: Place) -> Fence:
    assert place.cluster is not None
    ray = place.cluster.join()
    name = f"barrier.{place.run}.{place.scope}"
    options = {"name": name, "namespace": "bench", "get_if_exists": True}
    made = ray.remote(_BarrierActor).options(num_cpus=0, lifetime="detached", **options)
    actor = made.remote(len(place.members))

    async def fence(_: int) -> None:
        await actor.arrive.remote()

    return fence


def _gloo(place: Place) -> Any:
    """The default process group, over gloo."""
    dist: Any = import_module("torch.distributed")
    if not dist.is_initialized():
        store = dist.PrefixStore("gloo", _client(place))
        dist.init_process_group("gloo", store=store, rank=place.number, world_size=place.size)
    return dist


def _group(place: Place, backend: str) -> Any:
    """The group of this place's scope; all processes make all groups, as they must."""
    dist = _gloo(place)
    if place.replica_size is None and backend == "gloo":
        return dist.group.WORLD
    step = place.replica_size or place.size
    parts = [list(range(at, min(at + step, place.size))) for at in range(0, place.size, step)]
    groups = [dist.new_group(ranks, backend=backend) for ranks in parts]
    return groups[place.first // step]


def _barrier(place: Place) -> Callable[[], None]:
    dist, group = _gloo(place), _group(place, "gloo")
    return lambda: dist.barrier(group=group)


def _nccl_barrier(place: Place) -> Callable[[], None]:
    torch: Any = import_module("torch")
    torch.cuda.set_device(place.number)
    dist, group = _gloo(place), _group(place, "nccl")
    # The first one makes the communicator, which is no part of a barrier.
    dist.barrier(group=group, device_ids=[place.number])
    return lambda: dist.barrier(group=group, device_ids=[place.number])


def _blocking(make: Callable[[Place], Callable[[], None]]) -> Callable[[Place], Awaitable[Fence]]:
    async def made(place: Place) -> Fence:
        barrier = make(place)

        async def fence(_: int) -> None:
            barrier()

        return fence

    return made


def _in_thread(make: Callable[[Place], Callable[[], None]]) -> Callable[[Place], Awaitable[Fence]]:
    async def made(place: Place) -> Fence:
        barrier = make(place)

        async def fence(_: int) -> None:
            await asyncio.to_thread(barrier)

        return fence

    return made


def _monitored(place: Place) -> Callable[[], None]:
    dist, group = _gloo(place), _group(place, "gloo")
    return lambda: dist.monitored_barrier(group=group, timeout=timedelta(seconds=DEADLINE_S))


@dataclass(frozen=True, slots=True)
class Variant:
    """A fence or barrier to measure; `needs` names what it cannot be measured without."""

    make: Callable[[Place], Awaitable[Fence]]
    needs: str = ""


VARIANTS: dict[str, Variant] = {
    "store": Variant(_make_store),
    "tcp": Variant(_make_tcp, needs="coordinator"),
    "to_thread(dist.barrier)": Variant(_in_thread(_barrier)),
    "dist.barrier": Variant(_blocking(_barrier)),
    "monitored_barrier": Variant(_blocking(_monitored)),
    "nccl barrier": Variant(_blocking(_nccl_barrier), needs="gpu"),
    "to_thread(nccl barrier)": Variant(_in_thread(_nccl_barrier), needs="gpu"),
    "ray": Variant(_make_ray, needs="ray"),
    "ray actor barrier": Variant(_make_ray_barrier, needs="ray"),
}
