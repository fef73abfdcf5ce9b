"""`phasesync bench`: measured on your own machine, beside peers in the same run."""

import sys
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size

import click

from phasesync.cli.options import as_json_option, print_json, read_json

__all__ = ("bench",)


@click.group()
def bench() -> None:
    """Measure on this machine, against peers in the same run."""


@bench.command()
@click.option("--sizes", help="Numbers of processes.  [default: 2,4,8]")
@click.option("--only", metavar="A,B", help="Which variants; left out, all but those under Ray.")
@click.option("--all", "everything", is_flag=True, help="With Ray, where it is installed.")
@click.option("--gpus", is_flag=True, help="One process a GPU, NCCL beside the others.")
@click.option("--replica", type=click.IntRange(1), help="Fences of replicas of so many processes.")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--fences", type=click.IntRange(1), default=40, show_default=True, help="A round.")
@click.option("--tight", is_flag=True, help="Arrive back to back, not spread.")
@click.option("--clients", metavar="N,M", help="So many ranks in a few processes, and no barriers.")
@click.option("--steps", is_flag=True, help="Also what each step of a store fence costs.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the medians.")
@click.option(
    "--from",
    "kept",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Measure nothing: show what an earlier run printed with --json.",
)
@as_json_option
def fence(
    *,
    sizes: str | None,
    only: str | None,
    everything: bool,
    gpus: bool,
    replica: int | None,
    rounds: int,
    fences: int,
    tight: bool,
    clients: str | None,
    steps: bool,
    png: Path | None,
    kept: Path | None,
    as_json: bool,
) -> None:
    """Fences beside the barriers that people use today."""
    from phasesync.bench.fence import Row, bench_fence, can_measure, draw, machine, table
    from phasesync.bench.steps import step_costs

    if clients is not None:
        _clients(_numbers(clients, "--clients", CLIENTS_MAX), only, fences, as_json=as_json)
        return
    if kept is not None:
        found = read_json(kept)
        rows = [Row(**row) for row in found["rows"]]
    else:
        counts = _counts(sizes, gpus=gpus)
        rows = bench_fence(
            counts,
            variants=only.split(",") if only else can_measure(max(counts)) if everything else None,
            replica_size=replica,
            rounds=rounds,
            fences=fences,
            spread=not tight,
            say=lambda line: click.echo(line, err=True),
        )
        found = {"bench": "fence", "machine": machine(), "rows": [asdict(row) for row in rows]}
        if steps:
            found["steps_us"] = step_costs()
    if as_json:
        print_json(found)
    else:
        wide = get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(table(rows, wide))
        for name, cost in found.get("steps_us", {}).items():
            click.echo(f"{name:<30}{cost:>8.1f} µs")
    if png is not None:
        draw(rows, png)
        click.echo(f"{png}: written", err=True)


@bench.command()
@click.argument("questions", nargs=-1)
@click.option("--only", metavar="A,B", help="Which tools; left out, all that are installed.")
@click.option(
    "--ranks", type=click.IntRange(2), help="Ranks of `product` and `crash`, asked of all tools."
)
@click.option("--limit", default=120.0, show_default=True, help="Seconds an answer may take.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the seconds.")
@as_json_option
def check(
    *,
    questions: tuple[str, ...],
    only: str | None,
    ranks: int | None,
    limit: float,
    png: Path | None,
    as_json: bool,
) -> None:
    """The checker beside Spin, TLC and minicheck. QUESTIONS: product crash uniform groups any."""
    from phasesync.bench.check import ALL_TOOLS, bench_check, draw, ratios, table

    rows = bench_check(
        questions or None,
        tools=only.split(",") if only else ALL_TOOLS,
        ranks=ranks,
        limit_s=limit,
        say=lambda line: click.echo(line, err=True),
    )
    if as_json:
        times = ratios(rows)
        print_json(
            {
                "bench": "check",
                "rows": [
                    asdict(row) | {"times_ours": times.get((row.question, row.tool))}
                    for row in rows
                ],
            }
        )
    else:
        click.echo(table(rows))
    if png is not None:
        draw(rows, png)
        click.echo(f"{png}: written", err=True)


def _clients(counts: list[int], only: str | None, fences: int, *, as_json: bool) -> None:
    """What one store or coordinator does with many clients."""
    from phasesync.bench.clients import OVER, bench_clients, clients_table
    from phasesync.bench.fence import machine

    rows = bench_clients(
        counts,
        over=only.split(",") if only else OVER,
        fences=fences,
        say=lambda line: click.echo(line, err=True),
    )
    if as_json:
        listed = [asdict(row) for row in rows]
        print_json({"bench": "fence clients", "machine": machine(), "rows": listed})
    else:
        click.echo(clients_table(rows))


CLIENTS_MAX = 100_000
SIZE_MAX = 1024  # Processes on one machine.


def _numbers(said: str, option: str, most: int) -> list[int]:
    try:
        numbers = [int(number) for number in said.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.UsageError(f"{option} takes numbers from 1 on, such as 2,4,8, not {said!r}")
    if max(numbers) > most:
        raise click.UsageError(f"{option} takes numbers up to {most:,}, not {max(numbers):,}")
    return numbers


def _counts(sizes: str | None, *, gpus: bool) -> list[int]:
    """The numbers of processes that were asked for."""
    counts = _numbers(sizes or "2,4,8", "--sizes", SIZE_MAX)
    if not gpus:
        return counts
    from phasesync.bench import barriers

    have = barriers.gpus()
    may = [size for size in counts if size <= have]
    if not may or (sizes is not None and may != counts):
        raise click.UsageError(f"--gpus: one process a GPU, and there are {have} GPUs with NCCL")
    return may


@bench.command()
@click.option("--ranks", type=click.IntRange(1), default=64, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=100, show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Processes; left out, one a core.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the journals there, or audit those that are there.",
)
@click.option("--duckdb", metavar="PYTHON", help="A Python that has DuckDB, where this has none.")
@as_json_option
def audit(
    *,
    ranks: int,
    epochs: int,
    jobs: int | None,
    folder: Path | None,
    duckdb: str | None,
    as_json: bool,
) -> None:
    """Audits of journals, beside jq and DuckDB counting their lines."""
    from phasesync.bench import audit as measured

    rows = measured.bench_audit(
        ranks,
        epochs,
        jobs=jobs,
        folder=folder,
        duckdb=duckdb,
        say=lambda line: click.echo(line, err=True),
    )
    if as_json:
        print_json([{**asdict(row), "lines_a_second": row.lines_a_second} for row in rows])
    else:
        click.echo(measured.table(rows))
