"""`phasesync check`: every interleaving, before a GPU is touched."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phasesync.cli.options import (
    BROKEN,
    OK,
    SECONDS,
    UNDECIDED,
    as_json_option,
    option_values,
    pair_of,
    print_json,
    protocol_argument,
    read_json,
    write_text,
)
from phasesync.core.model import OptionValue
from phasesync.core.protocol import Protocol
from phasesync.core.verdict import Holds, Undecided, Verdict, Violated

if TYPE_CHECKING:
    from phasesync.checker.memory import Peak
    from phasesync.checker.planted import Planted
    from phasesync.checker.report import Report

__all__ = ("check",)

#: Seconds to go on for once a rule is broken and the run that shows it is known.
REST_S = 1.0
#: More than a search of ten seconds sees; time and memory end it first.
STATES_MAX = 20_000_000
_FILE = click.Path(path_type=Path, dir_okay=False)
#: Beyond this a plan alone, before anything is searched, takes longer than its time limit.
RANKS = click.IntRange(1, 4096)
#: What says something of one search, and nothing of a survey of mistakes.
_NOT_WITH_MUTATE = (
    *("ranks", "epochs", "faults", "without_fence", "swap", "scope", "show", "write_test"),
    *("html", "sarif", "junit", "memory", "export", "no_symmetry", "no_por", "atomic", "apart"),
)


@click.command()
@protocol_argument
@click.option("--ranks", type=RANKS, help="Count ranks out, this many a role.")
@click.option("--any-n/--no-any-n", default=True, help="Prove safety for any number of ranks.")
@click.option("--epochs", type=click.IntRange(1), help="Epochs of an explicit search.")
@click.option(
    "--faults",
    help="Of none, crash, fail, hang, restart, engine, lost, again, mixed.",
)
@click.option(
    "--faults-most",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Faults in one run, at most.",
)
@click.option("--option", "options", multiple=True, metavar="K=V", help="Pin an option.")
@click.option("--without-fence", metavar="NAME", help="Take a fence's wait away.")
@click.option("--swap", metavar="A,B", help="Let two steps change places.")
@click.option("--scope", metavar="NAME=SCOPE", help="Give a fence another scope.")
@click.option("--mutate", is_flag=True, help="Plant every known mistake, one at a time.")
@click.option("--no-symmetry", is_flag=True, help="Tell interchangeable ranks apart.")
@click.option("--no-por", is_flag=True, help="Take every order of independent steps.")
@click.option("--atomic", is_flag=True, help="Take a phase as one step; races are not seen then.")
@click.option("--apart", is_flag=True, help="A device for each rank, also of different roles.")
@click.option(
    "--time-limit",
    type=SECONDS,
    default=10.0,
    show_default=True,
    help="Seconds (for each mutation, with --mutate), then undecided.",
)
@click.option("--show", type=click.IntRange(1), metavar="N", help="Show so many different runs.")
@click.option("--write-test", type=_FILE, help="Write the counterexample as a pytest test.")
@click.option("--html", type=_FILE, help="Write a page to step through the counterexample.")
@click.option("--sarif", type=_FILE, help="Write SARIF 2.1.0, for code scanning.")
@click.option("--junit", type=_FILE, help="Write JUnit XML, for CI.")
@click.option("--memory", type=_FILE, help="GiB a resource and a device (JSON): does it fit?")
@click.option("--export", type=click.Choice(["promela"]), help="Print the model for Spin instead.")
@as_json_option
def check(protocol: str, *, as_json: bool, mutate: bool, time_limit: float, **given: Any) -> int:
    """Whether PROTOCOL is safe for any number of ranks, and if not, the shortest run that shows."""
    from phasesync.checker import Settings
    from phasesync.checker import check as ask
    from phasesync.checker.mutants import survey
    from phasesync.checker.search import Budget
    from phasesync.report.check_text import survey_lines
    from phasesync.spec import load

    # A search makes many tuples and no cycles: to look for these costs a tenth of its time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    declared = load(protocol)
    options = option_values(declared, given["options"])
    if given["export"] and not mutate:
        click.echo(_promela(declared, given, options), nl=False)
        return OK
    if mutate:
        _alone(given)
        found = survey(
            declared,
            options=options,
            budget=lambda: Budget(now=time.monotonic, until_s=time.monotonic() + time_limit),
        )
        if as_json:
            print_json(found.to_json())
        for line in () if as_json else survey_lines(found):
            click.echo(line)
        if any(not each.may_survive for each in found.survivors):
            return BROKEN
        return UNDECIDED if found.undecided else OK
    planted = _planted(given)
    change = planted.mutate if planted else None
    peak = _peak(declared, given, options, change, time_limit)
    report = ask(
        declared,
        ranks=given["ranks"],
        options=options,
        faults=given["faults"],
        faults_most=given["faults_most"],
        epochs=given["epochs"],
        mutate=change,
        mutation=str(planted) if planted else None,
        settings=Settings(
            any_n=given["any_n"],
            symmetry=not given["no_symmetry"],
            reduction=not given["no_por"],
            atomic=given["atomic"],
            apart=given["apart"],
            time_limit_s=time_limit,
            rest_s=REST_S,
            states_max=STATES_MAX,
            now=time.monotonic,
            held=_held,
        ),
    )
    _say_report(report, declared, given, peak, as_json)
    _write(report, protocol, declared, given)
    return BROKEN if peak is not None and not peak.fits else _code(report.verdict)


def _alone(given: dict[str, Any]) -> None:
    """`--mutate` has bounds of its own: what it would not heed is refused."""
    if odd := [name for name in _NOT_WITH_MUTATE if given[name]]:
        raise click.UsageError(
            f"--mutate does not heed --{odd[0].replace('_', '-')}; it takes --option, "
            "--time-limit and --json"
        )


def _held() -> int:
    """Bytes that this process has had at most."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _shown(report: "Report", given: dict[str, Any]) -> Iterable[str]:
    """The runs that `--show` asks for beside the shortest."""
    from phasesync.checker import faults_of
    from phasesync.report.check_show import shown

    if given["show"] is None:
        return ()
    faults, _ = faults_of(given["faults"], given["faults_most"])
    return shown(report, given["show"], faults, given["epochs"] or 1)


def _say_report(
    report: "Report",
    declared: Protocol,
    given: dict[str, Any],
    peak: "Peak | None",
    as_json: bool,
) -> None:
    """The report, whether it fits, and what lint doubts: a check answers for the declaration."""
    from phasesync.lint import lint
    from phasesync.report.check_text import lint_lines, report_lines

    doubts = lint(declared)
    if as_json:
        memory = None if peak is None else peak.to_json()
        planted = _planted(given)
        more = {
            "memory": memory,
            "lint": [str(found) for found in doubts],
            "planted": planted and planted.to_json(),
            "apart": given["apart"],
        }
        print_json(report.to_json() | more)
        return
    fit = () if peak is None else (peak.says(),)
    gib = None if peak is None else read_json(given["memory"])["gib"]
    for line in (*report_lines(report, gib), *fit, *lint_lines(doubts), *_shown(report, given)):
        click.echo(line)


def _peak(
    protocol: Protocol,
    given: dict[str, Any],
    options: dict[str, OptionValue],
    change: Callable[..., Any] | None,
    limit_s: float,
) -> "Peak | None":
    """The most that a device holds, where figures are given; they are read before all else."""
    from phasesync.checker.memory import figures_of, peak
    from phasesync.checker.search import Budget
    from phasesync.core.plan import resolve

    if given["memory"] is None:
        return None
    body = read_json(given["memory"])
    counts = {str(role): given["ranks"] or 2 for role in protocol.active_roles}
    plan = resolve(protocol, counts, options)
    figures = figures_of(plan, body)
    budget = Budget(now=time.monotonic, until_s=time.monotonic() + limit_s)
    return peak(change(plan) if change else plan, figures, budget=budget)


def _write(report: "Report", protocol: str, declared: Protocol, given: dict[str, Any]) -> None:
    """The files that were asked for beside the answer."""
    asked = [name for name in ("html", "sarif", "junit", "write_test") if given[name] is not None]
    if not asked:
        return
    from phasesync.core import wire
    from phasesync.lint import lint
    from phasesync.report.check_files import junit, sarif, written_test
    from phasesync.report.check_html import html

    makers: dict[str, Callable[[], str]] = {
        "html": lambda: html(report),
        "sarif": lambda: wire.encode(sarif(report, declared, lint(declared))).decode() + "\n",
        "junit": lambda: junit(report),
    }
    case = report.counterexample
    if case is not None and isinstance(case.verdict, Violated) and case.verdict.path:
        makers["write_test"] = lambda: written_test(
            case,
            _from_its_folder(protocol, given["write_test"]),
            planted=_planted(given),
            apart=given["apart"],
        )
    elif given["write_test"] is not None:
        click.echo("no run that goes wrong, so no test is written", err=True)
    for name, make in makers.items():
        path: Path | None = given[name]
        if path is not None:
            write_text(path, make())
            click.echo(f"{path}: written", err=True)


def _from_its_folder(protocol: str, test: Path) -> str:
    """A protocol's file as seen from the folder of a test; the name of a shipped one is a name."""
    if not Path(protocol).is_file():
        return protocol
    path = os.path.relpath(protocol, test.absolute().parent)
    return path if "." in path or "/" in path else f"./{path}"


def _promela(protocol: Protocol, given: dict[str, Any], options: dict[str, OptionValue]) -> str:
    from phasesync.core.plan import resolve
    from phasesync.report.check_promela import promela

    planted = _planted(given)
    counts = {str(role): given["ranks"] or 2 for role in protocol.active_roles}
    plan = resolve(protocol, counts, options)
    return promela(planted.mutate(plan) if planted else plan, given["epochs"] or 2)


def _code(verdict: Verdict) -> int:
    match verdict:
        case Holds():
            return OK
        case Violated():
            return BROKEN
        case Undecided():
            return UNDECIDED


def _planted(given: dict[str, Any]) -> "Planted | None":
    """The one mistake that was asked for."""
    from phasesync.checker.planted import Planted

    asked = [name for name in ("without_fence", "swap", "scope") if given[name]]
    if len(asked) > 1:
        raise click.UsageError("plant one mutation at a time: --without-fence, --swap or --scope")
    if not asked:
        return None
    text = given[asked[0]]
    match asked[0]:
        case "without_fence":
            return Planted("without_fence", (text,))
        case "swap":
            return Planted("swapped", pair_of(text, ",", "--swap A,B"))
        case _:
            return Planted("rescoped", pair_of(text, "=", "--scope NAME=SCOPE"))
