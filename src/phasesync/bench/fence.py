"""What a fence costs on this machine, beside the barriers that people use today.

All variants run in the same processes, in turns, so that a busy moment of the machine falls on
all of them. The cost of a fence is the time from the last arrival to the last release, on the one
monotonic clock of the machine; whoever was released before the last arrival is counted.
"""

import asyncio
import multiprocessing
import os
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from phasesync.core.fence import decode_arrivals, encode_arrival, judge
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
from phasesync.errors import InputError

__all__ = ("SIZES", "VARIANTS", "Row", "bench_fence", "draw", "step_costs", "table")

SIZES = (2, 4, 8, 16, 32)
DEADLINE_S = 60.0
START_S = 120.0

Fence: TypeAlias = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one size; costs in milliseconds."""

    variant: str
    size: int
    fences: int
    p50_ms: float
    p99_ms: float
    least_ms: float
    most_ms: float
    early: int
    foreign: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process stands in the run."""

    number: int
    size: int
    port: int
    run: str
    coordinator: tuple[str, int] | None = None
    cluster: str | None = None


def bench_fence(
    sizes: Sequence[int] = SIZES,
    *,
    variants: Sequence[str] | None = None,
    rounds: int = 6,
    fences: int = 40,
    spread: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure every variant at every size: `rounds` turns of `fences` fences each.

    Raises:
        InputError: a variant is unknown.
    """
    chosen = tuple(variants or (name for name, offered in VARIANTS.items() if offered.default))
    for name in chosen:
        if name not in VARIANTS:
            raise InputError(f"no fence {name!r} to measure; there are: {', '.join(VARIANTS)}")
    rows: list[Row] = []
    for size in sizes:
        say(f"{size} processes: {', '.join(chosen)}")
        rows += _bench_size(size, chosen, rounds=rounds, fences=fences, spread=spread)
    return rows


def _bench_size(
    size: int, variants: Sequence[str], *, rounds: int, fences: int, spread: bool
) -> list[Row]:
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "phasesync.fences.store", __name__])
    place = Place(number=0, size=size, port=store.port, run=secrets.token_hex(4))
    with ExitStack() as ended:
        if any(VARIANTS[name].needs == "coordinator" for name in variants):
            (_, pipe), *_ = ended.enter_context(_processes(context, _coordinate, [()]))
            place = replace(place, coordinator=pipe.recv())
        if any(VARIANTS[name].needs == "ray" for name in variants):
            place = replace(place, cluster=ended.enter_context(_ray()))
        parts = [(replace(place, number=number), variants) for number in range(size)]
        started = ended.enter_context(_processes(context, _member, parts))
        pipes = [pipe for _, pipe in started]
        _all_say(pipes, "ready")
        pids = [process.pid for process, _ in started]
        return _take_turns(pipes, pids, size, variants, rounds, fences, spread)


@contextmanager
def _processes(
    context: Any, target: Callable[..., None], parts: Sequence[tuple[Any, ...]]
) -> Iterator[list[tuple[Any, Connection]]]:
    """A process for each of `parts`, with a pipe to it; they end when their pipe closes."""
    started: list[tuple[Any, Connection]] = []
    for part in parts:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*part, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        yield started
    finally:
        for _, pipe in started:
            pipe.close()
        for process, _ in started:
            process.join(5)
            process.kill()


@contextmanager
def _ray() -> Iterator[str]:
    """A Ray cluster on this machine; its address."""
    ray: Any = import_module("ray")
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def _coordinate(pipe: Connection) -> None:
    """A process that does nothing but coordinate, as one would have it."""
    from phasesync.fences.tcp import TcpCoordinator  # noqa: PLC0415

    async def serve() -> None:
        coordinator = TcpCoordinator(token="bench")
        await coordinator.start()
        pipe.send(coordinator.address)
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
        await over.wait()
        await coordinator.close()

    asyncio.run(serve())


def _all_say(pipes: Iterable[Connection], word: str) -> None:
    for pipe in pipes:
        if not pipe.poll(START_S) or pipe.recv() != word:
            raise InputError("a process of the benchmark did not start; see its output above")


def _take_turns(
    pipes: Sequence[Connection],
    pids: Sequence[int | None],
    size: int,
    variants: Sequence[str],
    rounds: int,
    fences: int,
    spread: bool,
) -> list[Row]:
    costs: dict[str, list[float]] = {name: [] for name in variants}
    early = dict.fromkeys(variants, 0)
    foreign: dict[str, list[float]] = {name: [] for name in variants}
    jitter_s = (4e-3 + 0.3e-3 * size) if spread else 0.0
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(variants), len(variants)):
            busy = _cpu_seconds(pids)
            for pipe in pipes:
                pipe.send((name, fences, jitter_s))
            stamps = [pipe.recv() for pipe in pipes]
            if turn == 0:
                continue  # Warm-up.
            foreign[name].append(_foreign(busy, _cpu_seconds(pids)))
            for each in zip(*stamps, strict=True):
                last_in, last_out = max(e for e, _ in each), max(o for _, o in each)
                costs[name].append((last_out - last_in) / 1e6)
                early[name] += min(o for _, o in each) < last_in
    return [
        Row(
            variant=name,
            size=size,
            fences=len(costs[name]),
            p50_ms=statistics.median(costs[name]),
            p99_ms=sorted(costs[name])[int(0.99 * (len(costs[name]) - 1))],
            least_ms=min(costs[name]),
            most_ms=max(costs[name]),
            early=early[name],
            foreign=statistics.median(foreign[name]),
        )
        for name in variants
    ]


def _cpu_seconds(pids: Sequence[int | None]) -> tuple[float, float, float]:
    """Now, CPU time of the whole machine, and of our processes; in seconds."""
    tick = os.sysconf("SC_CLK_TCK")
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    busy = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
    own = 0
    for pid in (os.getpid(), *pids):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        own += int(stat[11]) + int(stat[12])
    return time.monotonic(), busy / tick, own / tick


def _foreign(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of the machine that others used meanwhile."""
    wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


# --- One process -----------------------------------------------------------------------------


def _member(place: Place, variants: Sequence[str], pipe: Connection) -> None:
    asyncio.run(_member_loop(place, variants, pipe))


async def _member_loop(place: Place, variants: Sequence[str], pipe: Connection) -> None:
    made = {name: await VARIANTS[name].make(place) for name in variants}
    counts = dict.fromkeys(variants, 0)
    chance = random.Random(place.number)
    pipe.send("ready")
    while True:
        try:
            name, fences, jitter_s = pipe.recv()
        except EOFError:
            break
        stamps = []
        for _ in range(fences):
            await asyncio.sleep(chance.uniform(0, jitter_s))
            entered = time.monotonic_ns()
            await made[name](counts[name])
            stamps.append((entered, time.monotonic_ns()))
            counts[name] += 1
        pipe.send(stamps)
    os._exit(0)  # Neither gloo's threads nor a store that is gone may keep the process.


def _call(place: Place, generation: int) -> FenceCall:
    return FenceCall(
        key=FenceKey(place.run, 0, "world", generation),
        fence=FenceName("memory_released"),
        epoch=Epoch(generation),
        version=Version(generation),
        digest=Digest("d" * 64),
        members=tuple(Rank(RoleName("trainer"), n) for n in range(place.size)),
        deadline_s=DEADLINE_S,
    )


def _arrival(place: Place, call: FenceCall) -> Arrival:
    return Arrival(
        rank=Rank(RoleName("trainer"), place.number),
        incarnation=0,
        nonce=secrets.token_hex(8),
        fence=call.fence,
        epoch=call.epoch,
        version=call.version,
        digest=call.digest,
        seq=call.key.generation,
        free_bytes=1 << 34,
    )


def _client(place: Place) -> Any:
    dist: Any = import_module("torch.distributed")
    return dist.TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False)


async def _make_store(place: Place) -> Fence:
    from phasesync.fences.store import StoreFences  # noqa: PLC0415

    rank = Rank(RoleName("trainer"), place.number)
    endpoint = StoreFences(_client(place), rank=rank, run=place.run)
    await endpoint.connect()

    async def fence(generation: int) -> None:
        call = _call(place, generation)
        await endpoint.arrive(call, _arrival(place, call))

    return fence


async def _make_tcp(place: Place) -> Fence:
    from phasesync.fences.tcp import TcpFences  # noqa: PLC0415

    assert place.coordinator is not None
    rank = Rank(RoleName("trainer"), place.number)
    endpoint = TcpFences(place.coordinator, rank=rank, run=place.run, token="bench")
    await endpoint.connect()

    async def fence(generation: int) -> None:
        call = _call(place, generation)
        await endpoint.arrive(call, _arrival(place, call))

    return fence


async def _make_ray(place: Place) -> Fence:
    ray: Any = import_module("ray")
    ray.init(address=place.cluster, log_to_driver=False, ignore_reinit_error=True)
    from phasesync.fences.ray import RayFences  # noqa: PLC0415

    endpoint = RayFences(rank=Rank(RoleName("trainer"), place.number), run=place.run)
    await endpoint.connect()

    async def fence(generation: int) -> None:
        call = _call(place, generation)
        await endpoint.arrive(call, _arrival(place, call))

    return fence


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
    ray: Any = import_module("ray")
    ray.init(address=place.cluster, log_to_driver=False, ignore_reinit_error=True)
    options = {"name": f"barrier.{place.run}", "namespace": "bench", "get_if_exists": True}
    made = ray.remote(_BarrierActor).options(num_cpus=0, lifetime="detached", **options)
    actor = made.remote(place.size)

    async def fence(_: int) -> None:
        await actor.arrive.remote()

    return fence


def _gloo(place: Place) -> Any:
    dist: Any = import_module("torch.distributed")
    if not dist.is_initialized():
        store = dist.PrefixStore("gloo", _client(place))
        dist.init_process_group("gloo", store=store, rank=place.number, world_size=place.size)
    return dist


async def _make_gloo_barrier(place: Place) -> Fence:
    dist = _gloo(place)

    async def fence(_: int) -> None:
        dist.barrier()

    return fence


async def _make_to_thread_barrier(place: Place) -> Fence:
    dist = _gloo(place)

    async def fence(_: int) -> None:
        await asyncio.to_thread(dist.barrier)

    return fence


async def _make_monitored_barrier(place: Place) -> Fence:
    dist = _gloo(place)

    async def fence(_: int) -> None:
        dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S))

    return fence


async def _make_nccl_barrier(place: Place) -> Fence:
    dist = _gloo(place)
    torch: Any = import_module("torch")
    torch.cuda.set_device(place.number)
    group = dist.new_group(backend="nccl")

    async def fence(_: int) -> None:
        dist.barrier(group=group, device_ids=[place.number])

    return fence


@dataclass(frozen=True, slots=True)
class Variant:
    """A fence or barrier to measure; `default` ones are measured unless others are named."""

    make: Callable[[Place], Awaitable[Fence]]
    default: bool = True
    needs: str = ""


VARIANTS: dict[str, Variant] = {
    "store": Variant(_make_store),
    "tcp": Variant(_make_tcp, needs="coordinator"),
    "to_thread(dist.barrier)": Variant(_make_to_thread_barrier),
    "dist.barrier": Variant(_make_gloo_barrier),
    "monitored_barrier": Variant(_make_monitored_barrier),
    "nccl barrier": Variant(_make_nccl_barrier, default=False),
    "ray": Variant(_make_ray, default=False, needs="ray"),
    "ray actor barrier": Variant(_make_ray_barrier, default=False, needs="ray"),
}


# --- What a fence is made of -----------------------------------------------------------------


def step_costs(repeats: int = 300) -> dict[str, float]:
    """Microseconds of each step of a store fence, alone on this machine."""
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(number=0, size=8, port=store.port, run="steps")
    call = _call(place, 0)
    arrivals = [
        _arrival(Place(number=n, size=8, port=store.port, run="steps"), call) for n in range(8)
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


# --- Showing it ------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Medians and 99th percentiles in milliseconds, a variant a line, a size a column."""
    sizes = sorted({row.size for row in rows})
    by_place = {(row.variant, row.size): row for row in rows}
    names = list(dict.fromkeys(row.variant for row in rows))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{f'N={size}':>16}" for size in sizes)]
    for name in names:
        cells = [by_place.get((name, size)) for size in sizes]
        shown = "".join(f"{f'{c.p50_ms:.2f} / {c.p99_ms:.2f}' if c else '-':>16}" for c in cells)
        lines.append(f"{name:<{width}}{shown}")
    worst = max((row.foreign for row in rows), default=0.0)
    lines.append(f"p50 / p99 in ms, last arrival to last release; others used up to {worst:.0%}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], file: Path) -> None:
    """The medians over the number of processes, as a PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise InputError("a picture needs: pip install matplotlib") from error
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row.variant for row in rows):
        mine = sorted((row for row in rows if row.variant == name), key=lambda row: row.size)
        axes.plot([r.size for r in mine], [r.p50_ms for r in mine], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="fence cost, median, ms")
    axes.set_xticks(sorted({row.size for row in rows}), labels=sorted({row.size for row in rows}))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
