"""`phasesync audit`: what happened, to whom, and whose fault it is."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from phasesync.cli.options import as_json_option, print_json, read_json, write_text

__all__ = ("audit", "collect", "import_")

_KINDS = "verl, ray, vllm, sglang, torchrun, flight-recorder, py-spy, text"
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--protocol", metavar="FILE", help="What the journals are held against.")
@click.option(
    "--map", "vocabulary", metavar="FILE", help="JSON: a trace's phase names to known ones."
)
@click.option("--stats", is_flag=True, help="Durations, stragglers and waits over all epochs.")
@click.option("--html", type=_FILE, help="Write one page that opens offline.")
@click.option("--perfetto", type=_FILE, help="Write a trace for ui.perfetto.dev.")
@click.option("--strict", is_flag=True, help="Findings beside an ok verdict make it exit 3.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; left out, as many as pay.")
@as_json_option
def audit(
    paths: tuple[str, ...],
    *,
    protocol: str | None,
    vocabulary: str | None,
    stats: bool,
    html: Path | None,
    perfetto: Path | None,
    strict: bool,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Audit journals and traces: run folders, files, or folders of them."""
    from phasesync.report import audit as report

    renames = None if vocabulary is None else _mapping(Path(vocabulary))
    with _readable(paths) as logs:
        with _progress(quiet=as_json) as tell:
            answers = report.audit_paths(
                [Path(path) for path in logs],
                protocol=protocol,
                vocabulary=renames,
                progress=tell,
                jobs=jobs,
            )
        found = _stats(logs) if stats else None
        if as_json:
            print_json({**report.as_json(answers), **({"stats": found[0]} if found else {})})
        else:
            for line in (*report.as_text(answers, paths=logs), *(found[1] if found else ())):
                click.echo(line)
        if html is not None:
            from phasesync.report.audit_html import write_html

            write_html(logs, answers, html)
            click.echo(f"{html}: written", err=True)
        if perfetto is not None:
            from phasesync.report.perfetto import write_perfetto

            count = write_perfetto(logs, perfetto)
            click.echo(f"{perfetto}: {count:,} events; open it in ui.perfetto.dev", err=True)
    return report.exit_code(answers, strict=strict)


@contextmanager
def _readable(paths: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """`paths`, or in their place a trace made of them, where they are logs of another system whose
    lines leave no doubt which.
    """
    from phasesync import logs
    from phasesync.errors import InputError, LogError

    try:
        with logs.unpacked([Path(path) for path in paths]) as shown:
            logs.sources(shown)
    except LogError as error:
        try:
            foreign = _foreign([Path(path) for path in paths])
        except InputError as other:
            # Of a folder the first word stands; one file is best known by why it cannot be read.
            raise (error if any(Path(path).is_dir() for path in paths) else other) from None
        if foreign is None:
            raise LogError(f"{error}; kinds: {_KINDS}") from None
    else:
        yield paths
        return
    kind, text = foreign
    with tempfile.TemporaryDirectory(prefix="phasesync-") as folder:
        trace = Path(folder) / f"{kind}.trace.jsonl"
        trace.write_bytes(text)
        named = ", ".join(paths[:3])
        click.echo(f"{named}: read as logs of {kind}, as phasesync import {kind} does", err=True)
        yield (str(trace),)


def _foreign(paths: list[Path]) -> tuple[str, bytes] | None:
    from phasesync.core import wire
    from phasesync.importers import as_lines, guess, import_logs

    if not all(path.exists() for path in paths) or (kind := guess(paths)) is None:
        return None
    lines = as_lines(import_logs(kind, paths))
    return kind, b"".join(wire.encode(line) + b"\n" for line in lines)


def _stats(paths: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    from phasesync.report import stats

    found = stats.stats_of(paths)
    return stats.as_json(found), ["", *stats.as_text(found)]


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of the bytes that are read, on stderr, for people whose logs are long."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("audit", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _mapping(path: Path) -> dict[str, str]:
    found = read_json(path)
    pairs = found.items() if isinstance(found, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(means, str) for name, means in pairs):
        raise click.UsageError(f'{path} must be an object of names: {{"swap_in": "resume_kv"}}')
    return dict(pairs)


@click.command("import")
@click.argument("kind")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "--map", "mapping", type=click.Path(path_type=Path), help="For text: what lines mean."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Not stdout.")
def import_(
    kind: str, files: tuple[Path, ...], *, mapping: Path | None, output: Path | None
) -> None:
    """Make a trace from logs of systems that do not run phasesync.

    KIND is verl, ray, vllm, sglang, torchrun, flight-recorder, py-spy or text. Files without any
    line of that kind are bad input: exit 2, and nothing is written.
    """
    from phasesync.core import wire
    from phasesync.importers import as_lines, import_logs

    lines = as_lines(import_logs(kind, files, mapping=mapping))
    if len(lines) == 1 and not lines[0].get("errors"):
        raise _empty(kind, files, lines[0])
    text = b"".join(wire.encode(line) + b"\n" for line in lines).decode()
    if output is None:
        click.echo(text, nl=False)
        return
    write_text(output, text)
    click.echo(f"{output}: {len(lines) - 1} events; next: phasesync audit {output}")


def _empty(kind: str, files: tuple[Path, ...], header: dict[str, Any]) -> Exception:
    """Nothing of these files is of that system; what would have to be logged is in the header."""
    from phasesync.errors import LogError

    named = ", ".join(map(str, files[:3]))
    wanted = header.get("record_next") or ["another kind: the file may be of another system"]
    return LogError(f"{named}: no line of {kind} here, so that there is no trace; try {wanted[0]}")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="RUN.pack.tar.zst, .gz or plain .pack.tar; left out, RUN.pack.tar.gz.",
)
@click.option(
    "--ray", "over_ray", is_flag=True, help="Ask every node of a Ray cluster for its part."
)
@click.option("--address", help="The Ray cluster's; left out, the one this machine is in.")
@as_json_option
def collect(
    run: Path, *, output: Path | None, over_ray: bool, address: str | None, as_json: bool
) -> None:
    """Pack the journals of the folder RUN into one file, with what should be in it.

    On a shared folder once; with --ray on all nodes of a cluster; else once a machine, and
    `phasesync audit` is given all packs.
    """
    from phasesync import logs

    if address and not over_ray:
        raise click.UsageError("--address is that of a Ray cluster: it goes with --ray")
    out = output or run.with_name(f"{run.name}.pack.tar.gz")
    manifest = _over_ray(run, out, address) if over_ray else logs.collect(run, out)
    if as_json:
        print_json(manifest)
        return
    hosts, files = manifest["hosts"], manifest["files"]
    lines = sum(each["lines"] for each in files)
    click.echo(f"{out}: {len(files)} journals of {len(hosts)} hosts, {lines:,} lines")
    for name, node in manifest.get("nodes", {}).items():
        if not node["files"]:
            click.echo(f"nothing from {name}: {node['why']}", err=True)
    click.echo(f"next: phasesync audit {out}")


def _over_ray(run: Path, out: Path, address: str | None) -> dict[str, Any]:
    try:
        from phasesync.integrations.ray_collect import collect_over_ray
    except ModuleNotFoundError as error:
        raise click.UsageError("--ray needs: pip install 'phasesync[ray]'") from error
    return collect_over_ray(run, out, address=address)
