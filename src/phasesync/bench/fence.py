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

from phasesync.bench.barriers import VARIANTS, Cluster, Place, gpus, member
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
def _ray() -> Iterator[Cluster]:
    """A Ray cluster on this machine."""
    ray: Any = import_module("ray")
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        ours = tuple(each for each in os.environ.items() if each[0].startswith("RAY_"))
        yield Cluster(ray.get_runtime_context().gcs_address, ours)
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


def table(rows: Sequence[Row], wide: int | None = None) -> str:
    """Medians and 99th percentiles in milliseconds, a variant a line, a size a column.

    Where that is wider than `wide`, medians only; and where these are, too, a block for each few
    sizes.
    """
    sizes = sorted({row.size for row in rows})
    by_place = {(row.variant, row.size): row for row in rows}
    names = list(dict.fromkeys(row.variant for row in rows))
    lead = max(map(len, names), default=0)
    is_narrow = wide is not None and lead + FULL * len(sizes) > wide
    cell = SHORT if is_narrow else FULL
    at_once = max((wide - lead) // cell, 1) if wide is not None else len(sizes)
    lines: list[str] = []
    for at in range(0, len(sizes), at_once):
        lines += _block(by_place, names, sizes[at : at + at_once], lead, cell)
    worst = max((row.foreign for row in rows), default=0.0)
    said = "p50" if is_narrow else "p50 / p99"
    lines += [f"{said} in ms, last arrival to last release;", f"others used up to {worst:.0%}"]
    if not is_narrow:
        lines[-2:] = [" ".join(lines[-2:])]
    return "\n".join(lines)


FULL, SHORT = 16, 8


def _block(
    by_place: dict[tuple[str, int], Row],
    names: Sequence[str],
    sizes: Sequence[int],
    lead: int,
    cell: int,
) -> Iterator[str]:
    """The figures of some sizes."""

    def line(title: str, cells: Iterable[str]) -> str:
        return f"{title:<{lead}}" + "".join(f"{each:>{cell}}" for each in cells)

    def cost(row: Row | None) -> str:
        if row is None:
            return "-"
        return f"{row.p50_ms:.2f}" + (f" / {row.p99_ms:.2f}" if cell == FULL else "")

    def ratio(ours: Row | None, theirs: Row | None) -> str:
        return f"{ours.p50_ms / theirs.p50_ms:.2f}" if ours and theirs else "-"

    found = {name: [by_place.get((name, size)) for size in sizes] for name in names}
    yield line("", (f"N={size}" for size in sizes))
    for name, rows in found.items():
        yield line(name, map(cost, rows))
    if any(row.cpu_us for row in by_place.values()):
        yield "processor us of a rank for one fence"
        for name, rows in found.items():
            yield line(name, (f"{row.cpu_us:.0f}" if row else "-" for row in rows))
    for ours, theirs in COMPARED:
        if ours in found and theirs in found:
            title = f"{ours} : {theirs}"
            title = title if len(title) <= lead else f"{ours} : barrier"
            yield line(title, map(ratio, found[ours], found[theirs]))


COMPARED = (("store", "to_thread(dist.barrier)"), ("ray", "ray actor barrier"))


STEPS_MS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]


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
    sizes = sorted({row.size for row in rows})
    axes.set_xticks(sizes, labels=sizes)
    axes.minorticks_off()  # Those of a logarithmic axis are named over the sizes.
    least, most = (bound(row.p50_ms for row in rows) for bound in (min, max))
    steps = [each for each in STEPS_MS if least / 2 < each < most * 2]
    axes.set_yticks(steps, labels=[f"{each:g}" for each in steps])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
