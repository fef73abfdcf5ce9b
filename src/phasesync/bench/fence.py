"""What a fence costs on this machine, beside the barriers that people use today.

All variants run in the same processes, in turns, so that a busy moment of the machine falls on
all of them. The cost of a fence is the time from the last arrival to the last release, on the one
monotonic clock of the machine; whoever was released before the last arrival is counted.
"""

import asyncio
import multiprocessing
import os
import platform
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phasesync.bench.barriers import VARIANTS, Place, gpus, member
from phasesync.errors import InputError

__all__ = (
    "SIZES",
    "Row",
    "all_say",
    "bench_fence",
    "can_measure",
    "coordinate",
    "draw",
    "forked",
    "machine",
    "processes",
    "table",
)

SIZES = (2, 4, 8, 16, 32)
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one size; costs in milliseconds. `cpu_us` is what a rank's process used of the
    processor for one fence, its threads included; `foreign` what others used meanwhile."""

    variant: str
    size: int
    scope: str = "world"
    fences: int
    p50_ms: float
    p99_ms: float
    least_ms: float
    most_ms: float
    early: int
    foreign: float
    cpu_us: float = 0.0


def can_measure(size: int) -> tuple[str, ...]:
    """The variants that this machine has the means for, with so many processes."""
    have = {"": True, "coordinator": True, "gpu": gpus() >= size, "ray": find_spec("ray")}
    return tuple(name for name, variant in VARIANTS.items() if have[variant.needs])


def machine() -> dict[str, Any]:
    """What was measured on."""
    torch: Any = import_module("torch")
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(n) for n in range(gpus())],
        "kernel": platform.release(),
    }


def bench_fence(
    sizes: Sequence[int] = SIZES,
    *,
    variants: Sequence[str] | None = None,
    replica_size: int | None = None,
    rounds: int = 6,
    fences: int = 40,
    spread: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure every variant at every size: `rounds` turns of `fences` fences each.

    Without `variants`, all that need no Ray and that this machine has the means for. With
    `replica_size` each fence is one of a replica, and the replicas go through theirs side by side.

    Raises:
        InputError: a variant is unknown, or cannot be measured here.
    """
    for name in variants or ():
        if name not in VARIANTS:
            raise InputError(f"no fence {name!r} to measure; there are: {', '.join(VARIANTS)}")
    rows: list[Row] = []
    for size in sizes:
        able = can_measure(size)
        chosen = tuple(variants or (n for n in able if VARIANTS[n].needs != "ray"))
        for name in chosen:
            if name not in able:
                raise InputError(
                    f"{name!r} cannot be measured with {size} processes here: it needs "
                    f"{NEEDED[VARIANTS[name].needs]}; there are: {', '.join(able)}"
                )
        say(f"{size} processes: {', '.join(chosen)}")
        turns = Turns(size, chosen, replica_size, rounds=rounds, fences=fences, spread=spread)
        rows += _bench_size(turns)
    return rows


NEEDED = {"gpu": "a GPU and NCCL for each process", "ray": "pip install 'phasesync[ray]'"}


@dataclass(frozen=True, slots=True)
class Turns:
    """What is measured with one number of processes, and how often."""

    size: int
    variants: tuple[str, ...]
    replica_size: int | None
    rounds: int
    fences: int
    spread: bool


def _bench_size(turns: Turns) -> list[Row]:
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked()
    place = Place(
        number=0,
        size=turns.size,
        port=store.port,
        run=secrets.token_hex(4),
        replica_size=turns.replica_size,
    )
    needs = {VARIANTS[name].needs for name in turns.variants}
    with ExitStack() as ended:
        if "coordinator" in needs:
            (_, pipe), *_ = ended.enter_context(processes(context, coordinate, [()]))
            place = replace(place, coordinator=pipe.recv())
        if "ray" in needs:
            place = replace(place, cluster=ended.enter_context(_ray()))
        places = [replace(place, number=number) for number in range(turns.size)]
        parts = [(each, turns.variants) for each in places]
        started = ended.enter_context(processes(context, member, parts))
        pipes = [pipe for _, pipe in started]
        all_say(pipes, "ready")
        pids = [process.pid for process, _ in started]
        scopes: dict[str, list[int]] = {}
        for each in places:
            scopes.setdefault(each.scope, []).append(each.number)
        return _take_turns(turns, pipes, pids, list(scopes.values()))


def forked() -> Any:
    """Where processes come from: a server that has imported once what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed", "phasesync.fences.store", "phasesync.bench.barriers"]
    )
    return context


@contextmanager
def processes(
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


def coordinate(pipe: Connection) -> None:
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


def all_say(pipes: Iterable[Connection], word: str, within_s: float = START_S) -> None:
    """Until each has said the word.

    Raises:
        InputError: one has said something else, or nothing in time.
    """
    until = time.monotonic() + within_s
    for pipe in pipes:
        said = "nothing" if not pipe.poll(max(0.0, until - time.monotonic())) else _said(pipe)
        if said != word:
            raise InputError(f"a process of the benchmark did not start; it said: {said}")


def _said(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        return "nothing, and ended"


def _take_turns(
    turns: Turns, pipes: Sequence[Connection], pids: Sequence[int], scopes: list[list[int]]
) -> list[Row]:
    costs: dict[str, list[float]] = {name: [] for name in turns.variants}
    early = dict.fromkeys(turns.variants, 0)
    foreign: dict[str, list[float]] = {name: [] for name in turns.variants}
    cpu_s: dict[str, list[float]] = {name: [] for name in turns.variants}
    jitter_s = (4e-3 + 0.3e-3 * turns.size) if turns.spread else 0.0
    for turn in range(turns.rounds + 1):
        for name in random.Random(turn).sample(turns.variants, len(turns.variants)):
            busy = _cpu_seconds(pids)
            for pipe in pipes:
                pipe.send((name, turns.fences, jitter_s))
            said = [pipe.recv() for pipe in pipes]
            if turn == 0:
                continue  # Warm-up.
            stamps = [each for each, _ in said]
            cpu_s[name].append(sum(used_s for _, used_s in said) / len(said) / turns.fences)
            foreign[name].append(_foreign(busy, _cpu_seconds(pids)))
            for numbers in scopes:
                for each in zip(*(stamps[number] for number in numbers), strict=True):
                    last_in, last_out = max(e for e, _ in each), max(o for _, o in each)
                    costs[name].append((last_out - last_in) / 1e6)
                    early[name] += min(o for _, o in each) < last_in
    return [
        Row(
            variant=name,
            size=turns.size,
            scope=f"replica of {turns.replica_size}" if turns.replica_size else "world",
            fences=len(costs[name]),
            p50_ms=statistics.median(costs[name]),
            p99_ms=sorted(costs[name])[int(0.99 * (len(costs[name]) - 1))],
            least_ms=min(costs[name]),
            most_ms=max(costs[name]),
            early=early[name],
            foreign=statistics.median(foreign[name]),
            cpu_us=1e6 * statistics.median(cpu_s[name]),
        )
        for name in turns.variants
    ]


def _cpu_seconds(pids: Sequence[int]) -> tuple[float, float, float]:
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
    if any(row.cpu_us for row in rows):
        lines.append("processor time of a rank for one fence, us")
        for name in names:
            cells = [by_place.get((name, size)) for size in sizes]
            lines.append(
                f"{name:<{width}}"
                + "".join(f"{f'{c.cpu_us:.0f}' if c else '-':>16}" for c in cells)
            )
    lines += _ratios(by_place, sizes, width)
    worst = max((row.foreign for row in rows), default=0.0)
    lines.append(f"p50 / p99 in ms, last arrival to last release; others used up to {worst:.0%}")
    return "\n".join(lines)


COMPARED = (("store", "to_thread(dist.barrier)"), ("ray", "ray actor barrier"))


def _ratios(
    by_place: dict[tuple[str, int], Row], sizes: Sequence[int], width: int
) -> Iterator[str]:
    """How ours compares with what it stands in for, median over median."""
    for ours, theirs in COMPARED:
        pairs = [(by_place.get((ours, size)), by_place.get((theirs, size))) for size in sizes]
        if any(a and b for a, b in pairs):
            cells = [f"{a.p50_ms / b.p50_ms:.2f}" if a and b else "-" for a, b in pairs]
            title = f"{ours} : {theirs}"
            lead = title if len(title) <= width else f"{ours} : barrier"
            yield f"{lead:<{width}}" + "".join(f"{cell:>16}" for cell in cells)


def draw(rows: Sequence[Row], file: Path) -> None:
    """The medians over the number of processes, as a PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise InputError(
            "a picture needs: pip install matplotlib (figures that were kept with --json can be "
            "drawn elsewhere: phasesync bench fence --from FILE --png FILE)"
        ) from error
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row.variant for row in rows):
        mine = sorted((row for row in rows if row.variant == name), key=lambda row: row.size)
        axes.plot([r.size for r in mine], [r.p50_ms for r in mine], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="fence cost, median, ms")
    axes.set_xticks(sorted({row.size for row in rows}), labels=sorted({row.size for row in rows}))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
