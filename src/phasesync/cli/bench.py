"""`phasesync bench`: measured on your own machine, beside peers in the same run."""

from dataclasses import asdict
from pathlib import Path

import click

from phasesync.cli.options import as_json_option, print_json

__all__ = ("bench",)


@click.group()
def bench() -> None:
    """Measure on this machine, against peers in the same run."""


@bench.command()
@click.option("--sizes", default="2,4,8", show_default=True, help="Numbers of processes.")
@click.option("--only", metavar="A,B", help="Which variants; left out, what is installed.")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--fences", type=click.IntRange(1), default=40, show_default=True, help="A round.")
@click.option("--tight", is_flag=True, help="Arrive back to back, not spread.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the medians.")
@as_json_option
def fence(
    *,
    sizes: str,
    only: str | None,
    rounds: int,
    fences: int,
    tight: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Fences beside the barriers that people use today."""
    from phasesync.bench.fence import bench_fence, draw, table

    try:
        counts = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise click.UsageError(f"{sizes!r} are no sizes; write --sizes 2,4,8") from None
    rows = bench_fence(
        counts,
        variants=only.split(",") if only else None,
        rounds=rounds,
        fences=fences,
        spread=not tight,
        say=lambda line: click.echo(line, err=True),
    )
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        click.echo(table(rows))
    if png is not None:
        draw(rows, png)
        click.echo(f"{png}: written", err=True)
