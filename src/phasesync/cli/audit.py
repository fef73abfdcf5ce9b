"""`phasesync audit`: what happened, to whom, and whose fault it is."""

from pathlib import Path

import click

from phasesync.cli.options import as_json_option, print_json

__all__ = ("audit",)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--protocol", metavar="FILE", help="What the journals are held against.")
@click.option(
    "--map", "vocabulary", metavar="FILE", help="JSON: a trace's phase names to known ones."
)
@click.option("--strict", is_flag=True, help="Findings beside an ok verdict make it exit 3.")
@as_json_option
def audit(
    paths: tuple[str, ...],
    *,
    protocol: str | None,
    vocabulary: str | None,
    strict: bool,
    as_json: bool,
) -> int:
    """Audit journals and traces: run folders, files, or folders of them."""
    from phasesync.report import audit as report

    answers = report.audit_paths(
        [Path(path) for path in paths],
        protocol=protocol,
        vocabulary=None if vocabulary is None else _mapping(Path(vocabulary)),
    )
    if as_json:
        print_json(report.as_json(answers))
    else:
        for line in report.as_text(answers):
            click.echo(line)
    return report.exit_code(answers, strict=strict)


def _mapping(path: Path) -> dict[str, str]:
    from phasesync.core import wire

    try:
        found = wire.decode(path.read_bytes())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None
    except wire.JsonError as error:
        raise click.UsageError(f"{path} is not JSON: {error}") from None
    pairs = found.items() if isinstance(found, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(means, str) for name, means in pairs):
        raise click.UsageError(f'{path} must be an object of names: {{"swap_in": "resume_kv"}}')
    return dict(pairs)
