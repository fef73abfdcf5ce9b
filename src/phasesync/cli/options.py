"""What the commands share: exit codes, options, and how a value is printed for programs."""

from pathlib import Path

import click

__all__ = (
    "BROKEN",
    "INTERRUPTED",
    "OK",
    "UNDECIDED",
    "USAGE",
    "as_json_option",
    "print_json",
    "protocol_argument",
    "runs_option",
)

OK, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value instead."
)
runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="PHASESYNC_RUNS",
    default=Path("runs"),
    show_default="$PHASESYNC_RUNS, else ./runs",
    help="Where run folders go.",
)
protocol_argument = click.argument("protocol")


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    from phasesync.core import wire

    click.echo(wire.encode(value).decode())
