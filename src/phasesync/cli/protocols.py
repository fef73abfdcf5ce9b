"""Commands on protocol files: what is shipped, what one means, what is wrong with one."""

from pathlib import Path

import click

from phasesync.cli.options import BROKEN, OK, USAGE, as_json_option, print_json, protocol_argument
from phasesync.errors import ProtocolError

__all__ = ("diff", "graph", "init", "lint", "protocols", "show")


@click.command()
@as_json_option
def protocols(*, as_json: bool) -> None:
    """What is shipped, a line each."""
    from phasesync.report.protocols import listing
    from phasesync.spec import load, shipped

    found = tuple(map(load, shipped()))
    if as_json:
        print_json([{"name": each.name, "summary": each.summary} for each in found])
    else:
        click.echo(listing(found), nl=False)


@click.command()
@protocol_argument
@as_json_option
def show(protocol: str, *, as_json: bool) -> None:
    """What PROTOCOL guarantees, fence by fence, and what it asks of you."""
    from phasesync.report import protocols as report
    from phasesync.spec import load

    found = report.overview(load(protocol))
    if as_json:
        print_json(report.as_json(found))
    else:
        click.echo(report.as_text(found), nl=False)


@click.command()
@protocol_argument
@click.option("--format", "form", default="text", show_default=True, help="mermaid, dot, text, svg")
def graph(protocol: str, form: str) -> None:
    """PROTOCOL as a picture."""
    from phasesync.report.graph import FORMATS, draw
    from phasesync.spec import load

    if form not in FORMATS:
        raise click.BadParameter(f"no format {form!r}; formats are: {', '.join(FORMATS)}")
    click.echo(draw(load(protocol), form), nl=False)


@click.command()
@click.argument("one")
@click.argument("two")
@as_json_option
def diff(one: str, two: str, *, as_json: bool) -> int:
    """What protocol TWO means that protocol ONE does not, and the other way round."""
    from phasesync.report import compare
    from phasesync.spec import load

    changes = compare.compare(load(one), load(two))
    if as_json:
        print_json(compare.as_json(changes))
    else:
        click.echo(compare.as_text(changes), nl=False)
    return BROKEN if changes else OK


@click.command()
@click.argument("file")
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@as_json_option
def lint(file: str, *, strict: bool, as_json: bool) -> int:
    """Everything that is wrong with a protocol FILE, with its place and what would be right."""
    from phasesync.lint import Severity
    from phasesync.lint import lint as doubt
    from phasesync.spec import check_file

    protocol, errors = check_file(file)
    findings = doubt(protocol) if protocol is not None else ()
    if as_json:
        print_json(
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


@click.command()
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
