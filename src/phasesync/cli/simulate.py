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
    from phasesync.core.protocol import Protocol
    from phasesync.simulator import Profile, Simulated

__all__ = ("simulate",)

_FILE = click.Path(path_type=Path)
#: Each takes some kilobytes and, of `colocated`, a millisecond an epoch.
RANKS = click.IntRange(1, 65_536)


@click.command()
@protocol_argument
@click.option("--ranks", type=RANKS, default=4, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", default=0, show_default=True, help="The same seed is the same run.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Pin an option.")
@click.option("--fault", "faults", multiple=True, help="crash:3@offload, slow:2@load*8 and such.")
@click.option(
    "--what-if",
    "others",
    multiple=True,
    metavar="K=V|FAULT",
    help="Run again with an option or a fault changed, side by side.",
)
@click.option("--without-fence", metavar="NAME", help="Take a fence's wait away.")
@click.option("--profile", type=_FILE, help="A run folder to fit, or JSON of seconds and GiB.")
@click.option("--replay", type=_FILE, help="A report of check --json, whose run is taken again.")
@as_json_option
def simulate(protocol: str, *, as_json: bool, **given: Any) -> int:
    """A run of PROTOCOL in virtual time, thousands of ranks if you like.

    Faults: crash:3@offload, fail:1@stage, hang:2, slow:2@load*8, slow:8-15*2 (each rank of a
    node), drop:arrive@staged:1, mixed:param_offload=false@2.
    """
    from phasesync.checker.mutants import without_fence
    from phasesync.spec import load

    declared = load(protocol)
    change = without_fence(given["without_fence"]) if given["without_fence"] else _as_it_is
    if given["replay"] is not None:
        return _replayed(protocol, given["replay"], change)
    asked = _Asked(declared, change, given)
    found = asked.run(given["options"], given["faults"])
    others = {other: asked.other(other) for other in given["others"]}
    if as_json:
        body = found.to_json()
        if others:
            body["what_if"] = {name: each.to_json() for name, each in others.items()}
        print_json(body)
    else:
        _say(found)
        _compare(found, others)
    return BROKEN if found.broken or found.waiting else OK


class _Asked:
    """The run that was asked for, and others that differ from it in one thing."""

    def __init__(
        self, declared: "Protocol", change: "Callable[[Plan], Plan]", given: dict[str, Any]
    ) -> None:
        self.declared = declared
        self.change = change
        self.given = given

    def run(self, options: Sequence[str], faults: Sequence[str]) -> "Simulated":
        from phasesync.core.plan import resolve
        from phasesync.simulator import Profile, parse_faults, simulate

        given, declared = self.given, self.declared
        counts = {str(role): given["ranks"] for role in declared.active_roles}
        plan = self.change(resolve(declared, counts, option_values(declared, options)))
        return simulate(
            plan,
            profile=_profile(given["profile"], plan) if given["profile"] else Profile(),
            faults=[fault for text in faults for fault in parse_faults(text)],
            seed=given["seed"],
            epochs=given["epochs"],
        )

    def other(self, text: str) -> "Simulated":
        """With an option changed, or one more fault."""
        name = text.partition("=")[0]
        if name in {str(decl.name) for decl in self.declared.options}:
            return self.run([*self.given["options"], text], self.given["faults"])
        if "=" in text and ":" not in name:
            have = ", ".join(str(decl.name) for decl in self.declared.options) or "none"
            raise click.UsageError(
                f"--what-if {text}: no option {name!r}; options are: {have}; or name a fault, "
                "as slow:3@load*8"
            )
        return self.run(self.given["options"], [*self.given["faults"], text])


def _compare(found: "Simulated", others: "dict[str, Simulated]") -> None:
    from phasesync.simulator import compare

    if others:
        click.echo("what if:")
        for line in compare({"as asked": found, **others}):
            click.echo(f"  {line}")


def _say(found: Any) -> None:
    click.echo(
        f"{found.ranks} ranks, seed {found.seed}: {found.epochs_done} "
        f"{'epoch' if found.epochs_done == 1 else 'epochs'} in "
        f"{found.total_s:.2f} s, {found.waited_s:.2f} s waited by all ranks together"
    )
    for name, seconds in found.waits_s.items():
        longest = found.longest_wait_s.get(name, 0.0)
        click.echo(f"  fence {name:20} {seconds:10.2f} s waited, longest {longest:.2f} s")
    for name, seconds in found.phases_s.items():
        click.echo(f"  phase {name:20} {seconds:10.2f} s in all")
    if found.peak_gib:
        click.echo(f"  peak {found.peak_gib:.1f} GiB on a device, in {found.peak_phase}")
    for line in found.missed:
        click.echo(f"note: {line}", err=True)
    for line in found.broken:
        click.echo(f"broken: {line}")
    for line in found.waiting:
        click.echo(f"waits for ever: {line}")
    for line in found.notes:
        click.echo(line)


def _profile(path: Path, plan: "Plan") -> "Profile":
    from phasesync import logs
    from phasesync.simulator.profile import fit, profile_of

    if not path.is_dir():
        body = read_json(path)
        if not isinstance(body, dict):
            raise click.UsageError(f'{path} must be an object: {{"phases": {{"load": 3.5}}}}')
        return profile_of(body, plan)
    journals = (
        line.data
        for source in logs.sources([path])
        for line in logs.lines(source.path)
        if line.data is not None
    )
    return fit(journals, plan=plan)


def _as_it_is(plan: "Plan") -> "Plan":
    return plan


def _replayed(protocol: str, path: Path, change: "Callable[[Plan], Plan]") -> int:
    """Take the run of a report again, step by step, on the kernel."""
    from phasesync.report import lanes
    from phasesync.simulator.replay import events_of, replay, stuck

    plan, case = _run_of(protocol, read_json(path), path)
    plan = change(plan)
    events = events_of(plan, case["path"])
    systems, broken = replay(plan, events)
    waiting = () if broken else stuck(plan, systems[-1], int(case["epochs"]))
    says = f"waits for ever: {', '.join(map(str, waiting))}" if waiting else ""
    for line in lanes.draw(plan, events, broken, says=says):
        click.echo(line)
    if not broken and not says:
        click.echo("the run is taken again, and breaks nothing")
    return BROKEN if broken or says else OK


def _run_of(protocol: str, report: Any, path: Path) -> "tuple[Plan, dict[str, Any]]":
    """The shortest run of a report, and the plan that it is of: what was planted is so again."""
    from phasesync.checker.planted import plan_of, planted_from_json
    from phasesync.spec import load

    cases = report.get("cases", ()) if isinstance(report, dict) else ()
    broken = [case for case in cases if isinstance(case, dict) and case.get("path")]
    if not broken:
        raise click.UsageError(f"{path} has no run; write one with: phasesync check ... --json")
    case = min(broken, key=lambda each: len(each["path"]))
    declared = load(protocol)
    try:
        plan = plan_of(
            declared,
            {str(role): int(case["ranks"]) for role in declared.active_roles},
            dict(case["options"]),
            planted=planted_from_json(report.get("planted")),
            apart=bool(report.get("apart")),
            mixed="mixed" in case["faults"],
        )
        return plan, {"path": case["path"], "epochs": int(case["epochs"])}
    except (KeyError, TypeError, ValueError) as error:
        raise click.UsageError(f"{path} is no report of check --json: {error!r}") from None
