"""pytest: simulated ranks as a fixture, faults by name, protocol files as tests.

Loaded in every session of whoever installs phasesync, so the top imports the standard library and
pytest alone; the rest comes when a fixture or `--phasesync` asks for it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from phasesync.simulator.faults import Fault
    from phasesync.world import SimWorld

__all__ = ("fault", "sim_world")

_MARKER = "phasesync(seed=0, faults=[]): seed and faults of the sim_world fixture in this test"
_SETTINGS = frozenset(("blocking_s", "faults", "role", "seed", "spread"))
_HEAD = b"phasesync:"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phasesync", "weight-sync protocols")
    group.addoption(
        "--phasesync", action="store_true", help="collect protocol files (*.yaml) as tests"
    )
    group.addoption(
        "--phasesync-seed", type=int, default=None, help="seed of every simulated world"
    )
    group.addoption(
        "--phasesync-time-limit",
        type=float,
        default=10.0,
        help="seconds a protocol check may take, and each mutation of it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def sim_world(request: pytest.FixtureRequest, tmp_path: Path) -> "Callable[..., SimWorld]":
    """Makes a world: `sim_world(4)` has four ranks, under this test's seed and faults."""
    from phasesync.world import SimWorld

    marker = request.node.get_closest_marker("phasesync")
    given: dict[str, Any] = dict(marker.kwargs) if marker else {}
    if odd := [*given.keys() - _SETTINGS, *(marker.args if marker else ())]:
        pytest.fail(f"marker phasesync has no {odd[0]!r}; it has: {', '.join(sorted(_SETTINGS))}")
    if (seed := request.config.getoption("--phasesync-seed")) is not None:
        given["seed"] = seed

    def make(ranks: int = 2, **settings: Any) -> "SimWorld":
        return SimWorld(ranks, **{"runs": tmp_path, **given, **settings})

    return make


@pytest.fixture
def fault() -> "Callable[[str], Fault]":
    """Reads a fault: `fault("crash:1@offload")`."""
    from phasesync.simulator.faults import parse_fault

    return parse_fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A world that went wrong says under the failure how to see it again."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    outcome = getattr(error, "outcome", None)
    if outcome is not None and hasattr(outcome, "schedule"):
        how = (
            f"pytest {item.nodeid!r} --phasesync-seed={outcome.seed}\n"
            f"schedule: {outcome.schedule or 'in turn'}"
        )
        report.sections.append(("phasesync: replay", how))
    return report


# ------------------------------------------------------------------------------ protocol files


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "ProtocolFile | None":
    """A protocol file is collected only when asked to, and only if it looks like one."""
    if not parent.config.getoption("--phasesync") or file_path.suffix not in {".yaml", ".yml"}:
        return None
    with file_path.open("rb") as file:
        lines = file.read(4096).splitlines()
    if not any(line.startswith(_HEAD) for line in lines):
        return None
    found: ProtocolFile = ProtocolFile.from_parent(parent, path=file_path)
    return found


class ProtocolFile(pytest.File):
    """One protocol file: one test for each thing that `check` proves of it."""

    def collect(self) -> "Iterator[ProtocolItem]":
        for name in ("holds", "no mutant survives"):
            yield ProtocolItem.from_parent(self, name=name)


class ProtocolFailed(Exception):
    """The lines that say what is wrong."""


class ProtocolItem(pytest.Item):
    """A check of a protocol file; undecided is a failure, never a pass."""

    def runtest(self) -> None:
        import time

        from phasesync.checker import Settings, check
        from phasesync.checker.mutants import survey
        from phasesync.checker.search import Budget
        from phasesync.core.verdict import Holds
        from phasesync.report.check_text import report_lines, survey_lines
        from phasesync.spec import load

        protocol = load(self.path)
        limit = self.config.getoption("--phasesync-time-limit")
        if self.name == "holds":
            report = check(protocol, settings=Settings(time_limit_s=limit, now=time.monotonic))
            if not isinstance(report.verdict, Holds):
                raise ProtocolFailed("\n".join(report_lines(report)))
            return
        found = survey(
            protocol,
            budget=lambda: Budget(now=time.monotonic, until_s=time.monotonic() + limit),
        )
        if found.undecided or any(not mutant.may_survive for mutant in found.survivors):
            raise ProtocolFailed("\n".join(survey_lines(found)))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        from phasesync.errors import ProtocolError

        match excinfo.value:
            case ProtocolFailed() as failed:
                return str(failed)
            case ProtocolError() as error:
                return "\n".join(map(str, (error, *error.others)))
            case _:
                return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name}: {self.name}"
