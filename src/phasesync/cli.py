"""The command line: thin commands over the library, each imported when it is called.

People read stdout, programs ask for --json, errors are one line on stderr that says what to do
next. Exit codes: 0 holds, conforms or ok; 1 violated, violation, hang, failure, false alarm; 2 bad
input or usage; 3 undecided or inconclusive; 130 interrupted.
"""

import os
import sys
from pathlib import Path
from typing import Any

import click

from phasesync import __version__
from phasesync.errors import InputError, PhasesyncError, ProtocolError

__all__ = ("cli", "main")

OK, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        code = cli.main(arguments, prog_name="phasesync", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "phasesync"
        code = _complain(f"{error.format_message()} (see: {command} --help)")
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


def _complain(text: str, prefix: str = "phasesync: ") -> int:
    click.echo(prefix + " ".join(text.split()), err=True)
    return USAGE


def _print_json(value: object) -> None:
    from phasesync.core import wire

    click.echo(wire.encode(value).decode())


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead.")
_runs = click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="PHASESYNC_RUNS",
    default=Path("runs"),
    show_default="$PHASESYNC_RUNS, else ./runs",
    help="Where run folders go.",
)
_protocol = click.argument("protocol")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="phasesync")
def cli() -> None:
    """Weight syncs between RL trainers and rollout engines: declared, fenced, checked, audited."""


# ------------------------------------------------------------------------------ run


@cli.command()
@click.option("--protocol", default="colocated", show_default=True, help="colocated or basic.")
@click.option("--ranks", default=4, show_default=True, help="Trainer ranks, two a replica.")
@click.option("--backend", default="torch", show_default=True, help="torch, ray or inprocess.")
@click.option("--break-fence", is_flag=True, help="Take the fence before KV resumes away.")
@click.option("--slow", metavar="RANK", help="Who is late; RANK is [ROLE/]NUMBER.")
@click.option("--kill", metavar="RANK@PHASE", help="Whom to kill (SIGKILL), and where.")
@click.option("--seed", default=0, show_default=True, help="Chance, made repeatable.")
@click.option("--epochs", default=3, show_default=True, help="Turns of the cycle.")
@_runs
def demo(**given: Any) -> int:
    """A real weight sync on this machine: real processes, tensors, and memory that refuses."""
    from phasesync.demo import DemoSettings, run_demo
    from phasesync.report.audit import audit_run

    return run_demo(DemoSettings(**given), audit_run=audit_run)


# ------------------------------------------------------------------------------ protocols


@cli.command()
@_as_json
def protocols(*, as_json: bool) -> None:
    """What is shipped, a line each."""
    from phasesync.report.protocols import listing
    from phasesync.spec import load, shipped

    found = tuple(map(load, shipped()))
    if as_json:
        _print_json([{"name": each.name, "summary": each.summary} for each in found])
    else:
        click.echo(listing(found), nl=False)


@cli.command()
@_protocol
@_as_json
def show(protocol: str, *, as_json: bool) -> None:
    """What PROTOCOL guarantees, fence by fence, and what it asks of you."""
    from phasesync.report import protocols as report
    from phasesync.spec import load

    found = report.overview(load(protocol))
    if as_json:
        _print_json(report.as_json(found))
    else:
        click.echo(report.as_text(found), nl=False)


@cli.command()
@_protocol
@click.option("--format", "form", default="text", show_default=True, help="mermaid, dot, text, svg")
def graph(protocol: str, form: str) -> None:
    """PROTOCOL as a picture."""
    from phasesync.report.graph import FORMATS, draw
    from phasesync.spec import load

    if form not in FORMATS:
        raise click.BadParameter(f"no format {form!r}; formats are: {', '.join(FORMATS)}")
    click.echo(draw(load(protocol), form), nl=False)


@cli.command()
@click.argument("one")
@click.argument("two")
@_as_json
def diff(one: str, two: str, *, as_json: bool) -> int:
    """What protocol TWO means that protocol ONE does not, and the other way round."""
    from phasesync.report import compare
    from phasesync.spec import load

    changes = compare.compare(load(one), load(two))
    if as_json:
        _print_json(compare.as_json(changes))
    else:
        click.echo(compare.as_text(changes), nl=False)
    return BROKEN if changes else OK


@cli.command()
@click.argument("file")
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@_as_json
def lint(file: str, *, strict: bool, as_json: bool) -> int:
    """Everything that is wrong with a protocol FILE, with its place and what would be right."""
    from phasesync.lint import Severity
    from phasesync.lint import lint as doubt
    from phasesync.spec import check_file

    protocol, errors = check_file(file)
    findings = doubt(protocol) if protocol is not None else ()
    if as_json:
        _print_json(
            [_finding(error, "error") for error in errors]
            + [_finding(found.error(), str(found.severity)) for found in findings]
        )
    else:
        for error in errors:
            click.echo(f"error: {error}")
        for found in findings:
            click.echo(f"{found.severity}: {found}")
        if not errors and not findings and protocol is not None:
            click.echo(f"{protocol.file}: nothing to say against it")
    worst = [found for found in findings if strict or found.severity is Severity.ERROR]
    return USAGE if errors or worst else OK


def _finding(error: ProtocolError, severity: str) -> dict[str, object]:
    return {
        "file": error.file,
        "line": error.line,
        "column": error.column,
        "severity": severity,
        "wrong": error.wrong,
        "right": error.right,
    }


@cli.command()
@click.argument("name")
@click.option("--from", "source", default="basic", show_default=True, help="What to start from.")
def init(name: str, source: str) -> None:
    """Write NAME.yaml, a copy of a shipped protocol to make your own."""
    from phasesync.spec import find, load

    path = Path(name).with_suffix(".yaml")
    if path.exists():
        raise click.UsageError(f"{path} exists; choose another name or move it away")
    if not path.stem.replace("_", "").replace("-", "").isalnum():
        raise click.UsageError(f"{path.stem!r} cannot name a protocol; use letters, digits and _")
    was = load(source).name
    text = find(source).read_text(encoding="utf-8")
    try:
        path.write_text(
            text.replace(f"protocol: {was}", f"protocol: {path.stem}", 1), encoding="utf-8"
        )
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None
    click.echo(f"{path}: written; next: phasesync lint {path} && phasesync check {path}")


@cli.command()
@_as_json
def doctor(*, as_json: bool) -> int:
    """What this machine has for phasesync, and what it lacks."""
    from phasesync.doctor import examine

    found = examine()
    if as_json:
        _print_json([each._asdict() for each in found])
    else:
        for each in found:
            click.echo(f"{each.state:8} {each.what:12} {each.says}")
    return BROKEN if any(each.state == "broken" for each in found) else OK


if __name__ == "__main__":
    main()
