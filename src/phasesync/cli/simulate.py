"""`phasesync simulate`: what a sync would cost, and what a fault would do to it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phasesync.cli.options import (
    BROKEN,
    OK,
    as_json_option,
    option_values,
    print_json,
    protocol_argument,
    read_json,
)

if TYPE_CHECKING:
    from phasesync.core.plan import Plan
    from phasesync.simulator.profile import Profile

__all__ = ("simulate",)

_FILE = click.Path(path_type=Path)


@click.command()
@protocol_argument
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The same seed is the same run.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Pin an option.")
@click.option("--fault", "faults", multiple=True, help="crash:3@offload, slow:2@load*8 and such.")
@click.option("--without-fence", metavar="NAME", help="Take a fence's wait away.")
@click.option("--profile", type=_FILE, help="A run folder to fit, or JSON of seconds and GiB.")
@click.option("--replay", type=_FILE, help="A report of check --json, whose run is taken again.")
@as_json_option
def simulate(protocol: str, *, as_json: bool, **given: Any) -> int:
    """A run of PROTOCOL in virtual time, thousands of ranks if you like."""
    from phasesync.checker.mutants import without_fence
    from phasesync.core.plan import resolve
    from phasesync.simulator import Profile, parse_fault
    from phasesync.simulator import simulate as run
    from phasesync.spec import load

    declared = load(protocol)
    change = without_fence(given["without_fence"]) if given["without_fence"] else _as_it_is
    if given["replay"] is not None:
        return _replayed(protocol, given["replay"], change)
    counts = {str(role): given["ranks"] for role in declared.active_roles}
    plan = change(resolve(declared, counts, option_values(declared, given["options"])))
    found = run(
        plan,
        profile=_profile(given["profile"]) if given["profile"] else Profile(),
        faults=[parse_fault(text) for text in given["faults"]],
        seed=given["seed"],
        epochs=given["epochs"],
    )
    if as_json:
        print_json(found.to_json())
    else:
        _say(found)
    return BROKEN if found.broken or found.waiting else OK


def _say(found: Any) -> None:
    click.echo(
        f"{found.ranks} ranks, seed {found.seed}: {found.epochs_done} epochs in "
        f"{found.total_s:.2f} s, {found.waited_s:.2f} s waited by all ranks together"
    )
    for name, seconds in found.waits_s.items():
        longest = found.longest_wait_s.get(name, 0.0)
        click.echo(f"  fence {name:20} {seconds:10.2f} s waited, longest {longest:.2f} s")
    for name, seconds in found.phases_s.items():
        click.echo(f"  phase {name:20} {seconds:10.2f} s in all")
    if found.peak_gib:
        click.echo(f"  peak {found.peak_gib:.1f} GiB on a device, in {found.peak_phase}")
    for line in found.broken:
        click.echo(f"broken: {line}")
    for line in found.waiting:
        click.echo(f"waits for ever: {line}")


def _profile(path: Path) -> "Profile":
    from phasesync import logs
    from phasesync.simulator.profile import fit, profile_of

    if not path.is_dir():
        body = read_json(path)
        if not isinstance(body, dict):
            raise click.UsageError(f'{path} must be an object: {{"phases": {{"load": 3.5}}}}')
        return profile_of(body)
    return fit(
        line.data
        for source in logs.sources([path])
        for line in logs.lines(source.path)
        if line.data is not None
    )


def _as_it_is(plan: "Plan") -> "Plan":
    return plan


def _replayed(protocol: str, path: Path, change: "Callable[[Plan], Plan]") -> int:
    """Take the run of a report again, step by step, on the kernel."""
    from phasesync.report import lanes
    from phasesync.simulator.replay import events_of, replay

    plan, steps = _run_of(protocol, read_json(path), path)
    plan = change(plan)
    events = events_of(plan, steps)
    _, broken = replay(plan, events)
    for line in lanes.draw(plan, events, broken):
        click.echo(line)
    if not broken:
        click.echo("the run is taken again, and breaks nothing")
    return BROKEN if broken else OK


def _run_of(protocol: str, report: Any, path: Path) -> "tuple[Plan, Sequence[Any]]":
    from phasesync.core.plan import resolve
    from phasesync.spec import load

    cases = report.get("cases", ()) if isinstance(report, dict) else ()
    broken = [case for case in cases if case.get("path")]
    if not broken:
        raise click.UsageError(f"{path} has no run; write one with: phasesync check ... --json")
    case = min(broken, key=lambda each: len(each["path"]))
    declared = load(protocol)
    counts = {str(role): int(case["ranks"]) for role in declared.active_roles}
    plan = resolve(declared, counts, dict(case["options"]))
    return plan, case["path"]
