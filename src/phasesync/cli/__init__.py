"""The command line: thin commands over the library, each imported when it is called.

People read stdout, programs ask for --json, errors are one line on stderr that says what to do
next. Exit codes: 0 holds, conforms or ok; 1 violated, violation, hang, failure, false alarm; 2 bad
input or usage; 3 undecided or inconclusive; 130 interrupted.
"""

import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from phasesync import __version__
from phasesync.cli.options import BROKEN, INTERRUPTED, OK, USAGE
from phasesync.errors import InputError, PhasesyncError, ProtocolError

__all__ = ("cli", "main")

#: Which module has which command, under its own name (`import_` where that is Python's).
_COMMANDS = {
    "audit": "phasesync.cli.audit",
    "bench": "phasesync.cli.bench",
    "check": "phasesync.cli.check",
    "collect": "phasesync.cli.audit",
    "demo": "phasesync.cli.run",
    "diff": "phasesync.cli.protocols",
    "doctor": "phasesync.cli.run",
    "graph": "phasesync.cli.protocols",
    "import": "phasesync.cli.audit",
    "init": "phasesync.cli.protocols",
    "lint": "phasesync.cli.protocols",
    "protocols": "phasesync.cli.protocols",
    "show": "phasesync.cli.protocols",
    "simulate": "phasesync.cli.simulate",
}


class _Commands(click.Group):
    """Commands that are imported when they are called, or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        home = _COMMANDS.get(name)
        if home is None:
            return None
        found = import_module(home)
        command: click.Command = getattr(found, name, None) or getattr(found, f"{name}_")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, _COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(_COMMANDS)}"
            ctx.fail(f"phasesync has no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="phasesync")
def cli() -> None:
    """Weight syncs between RL trainers and rollout engines: declared, fenced, checked, audited."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        code = cli.main(arguments, prog_name="phasesync", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        code = _misused(error)
    except click.ClickException as error:
        code = _complain(error.format_message())
    except ProtocolError as error:
        for each in (error, *error.others):
            code = _complain(str(each), prefix="")
    except InputError as error:
        code = _complain(str(error))
    except PhasesyncError as error:
        code = _complain(str(error)) and BROKEN
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has seen enough; the interpreter must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OK
    raise SystemExit(code or OK)


def _misused(error: click.UsageError) -> int:
    """A command without arguments is answered with its help, as click 8.2 asks for."""
    if type(error).__name__ == "NoArgsIsHelpError":
        click.echo(error.format_message())
        return USAGE
    command = error.ctx.command_path if error.ctx else "phasesync"
    return _complain(f"{error.format_message()} (see: {command} --help)")


def _complain(text: str, prefix: str = "phasesync: ") -> int:
    click.echo(prefix + " ".join(text.split()), err=True)
    return USAGE
