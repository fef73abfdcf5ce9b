"""What the commands share: exit codes, options, and how a value is printed for programs."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from phasesync.core.model import OptionValue
from phasesync.core.protocol import OptionDecl, Protocol

__all__ = (
    "BROKEN",
    "INTERRUPTED",
    "OK",
    "SECONDS",
    "UNDECIDED",
    "USAGE",
    "as_json_option",
    "option_values",
    "pair_of",
    "print_json",
    "protocol_argument",
    "read_json",
    "runs_option",
    "write_text",
)

OK, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130


class _Seconds(click.FloatRange):
    """More than none; `inf` is without end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


SECONDS = _Seconds(0, min_open=True)

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


def write_text(path: Path, text: str) -> None:
    """Write a file that was asked for.

    Raises:
        click.UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
        click.UsageError: it cannot be read, or is no JSON.
    """
    from phasesync.core import wire

    try:
        return wire.decode(path.read_bytes())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None
    except wire.JsonError as error:
        raise click.UsageError(f"{path} is not JSON: {error}") from None


def pair_of(text: str, sign: str, usage: str) -> tuple[str, str]:
    """The two sides of `sign` in `text`.

    Raises:
        click.UsageError: it has no two sides.
    """
    one, found, two = (part.strip() for part in text.partition(sign))
    if not (one and found and two):
        raise click.UsageError(f"{text!r} is not of the form {usage}")
    return one, two


def option_values(protocol: Protocol, given: Iterable[str]) -> dict[str, OptionValue]:
    """What `--option K=V` pins, each value as its declaration types it."""
    known = {str(decl.name): decl for decl in protocol.options}
    options: dict[str, OptionValue] = {}
    for each in given:
        name, text = pair_of(each, "=", "--option K=V")
        decl = known.get(name)
        options[name] = text if decl is None else _value(decl, text)
    return options


def _value(decl: OptionDecl, text: str) -> OptionValue:
    if decl.type == "bool" and text in ("true", "false"):
        return text == "true"
    if decl.type == "int" and text.lstrip("-").isdigit():
        return int(text)
    return text
