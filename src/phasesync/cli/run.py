"""Commands that run something on this machine."""

from typing import Any

import click

from phasesync.cli.options import BROKEN, OK, as_json_option, print_json, runs_option

__all__ = ("demo", "doctor")


@click.command()
@click.option("--protocol", default="colocated", show_default=True, help="colocated or basic.")
@click.option("--ranks", default=4, show_default=True, help="Trainer ranks, two a replica.")
@click.option("--backend", default="torch", show_default=True, help="torch, ray or inprocess.")
@click.option("--break-fence", is_flag=True, help="Take the fence before KV resumes away.")
@click.option("--accident", help="all_reduce or slow: what orders ranks in place of the fence.")
@click.option("--slow", metavar="RANK", help="Who is late; RANK is [ROLE/]NUMBER.")
@click.option("--kill", metavar="RANK@PHASE", help="Whom to kill (SIGKILL), and where.")
@click.option("--seed", default=0, show_default=True, help="Chance, made repeatable.")
@click.option("--epochs", default=3, show_default=True, help="Turns of the cycle.")
@runs_option
def demo(**given: Any) -> int:
    """A real weight sync on this machine: real processes, tensors, and memory that refuses."""
    from phasesync.demo import DemoSettings, run_demo
    from phasesync.report.audit import audit_run

    return run_demo(DemoSettings(**given), audit_run=audit_run)


@click.command()
@as_json_option
def doctor(*, as_json: bool) -> int:
    """What this machine has for phasesync, and what it lacks."""
    from phasesync.doctor import examine

    found = examine()
    if as_json:
        print_json([each._asdict() for each in found])
    else:
        for each in found:
            click.echo(f"{each.state:8} {each.what:12} {each.says}")
    return BROKEN if any(each.state == "broken" for each in found) else OK
