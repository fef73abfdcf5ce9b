"""How fast journals are audited here, beside tools that only count their lines.

The journals are made first, of a healthy run of the size asked for; every reader is a process of
its own, so that its memory is its own, and all read the same files in the same run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phasesync.bench.journals import write
from phasesync.errors import InputError

__all__ = ("Row", "bench_audit", "table")

_DUCKDB: Final = """
import duckdb, sys
duckdb.execute("SET threads = 1")
found = duckdb.execute("SELECT count(*) FROM read_json(?, format='newline_delimited', "
    "maximum_object_size=1 << 26, union_by_name=true)", [sys.argv[1] + "/*.jsonl"])
print(found.fetchone()[0])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One reader of the journals; `memory_mb` is the most that one of its processes held.

    On a busy machine `cpu_s`, of all its processes, says more than `seconds`.
    """

    name: str
    lines: int
    seconds: float
    cpu_s: float
    memory_mb: float

    @property
    def lines_a_second(self) -> float:
        return self.lines / self.seconds


def bench_audit(
    ranks: int = 64,
    epochs: int = 100,
    *,
    jobs: int | None = None,
    folder: Path | None = None,
    duckdb: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Row]:
    """Make the journals of a run and audit them with one and with `jobs` processes.

    `folder` keeps the journals, and has them where an earlier run made them. jq and DuckDB count
    the same lines where they are installed; `duckdb` is a Python that has it, else this one.

    Raises:
        InputError: the audit of the journals did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="phasesync-bench-") as scratch:
        place = folder or Path(scratch) / "journals"
        if not place.is_dir():
            say(f"making the journals of {ranks} ranks x {epochs} epochs in {place}")
            write(place, ranks, epochs)
        files = sorted(place.glob("*.jsonl"))
        size = sum(path.stat().st_size for path in files)
        lines = sum(_count(path) for path in files)
        say(f"{lines:,} lines, {size / 1e9:.2f} GB, {len(files)} files")
        rows = []
        jobs = jobs or len(os.sched_getaffinity(0))
        for name, command in _readers(place, files, jobs, duckdb or sys.executable):
            rows.append(_measured(name, command, lines))
            say(_shown(rows[-1]))
    return rows


def _count(path: Path) -> int:
    count = 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            count += piece.count(b"\n")
    return count


def _readers(
    place: Path, files: Sequence[Path], jobs: int, duckdb: str
) -> Iterator[tuple[str, list[str]]]:
    audit = [sys.executable, "-m", "phasesync", "audit", "--json", "--jobs"]
    yield "phasesync audit, 1 process", [*audit, "1", str(place)]
    if jobs > 1:
        yield f"phasesync audit, {jobs} processes", [*audit, str(jobs), str(place)]
    if (jq := shutil.which("jq")) is not None:
        yield "jq -c .event", [jq, "-c", ".event", *map(str, files)]
    asked = subprocess.run([duckdb, "-c", "import duckdb"], check=False, capture_output=True)
    if asked.returncode == 0:
        yield "duckdb read_json, 1 thread", [duckdb, "-c", _DUCKDB, str(place)]


def _measured(name: str, command: Sequence[str], lines: int) -> Row:
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if process.returncode != 0:
        raise InputError(f"{name}: ended with {process.returncode}: {said[-300:]}")
    cpu_s = used.ru_utime + used.ru_stime
    return Row(name=name, lines=lines, seconds=took, cpu_s=cpu_s, memory_mb=used.ru_maxrss / 1024)


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    head = f"{'reader':32} {'lines/s':>12} {'seconds':>9} {'CPU':>9} {'memory':>9}"
    return "\n".join([head, *map(_shown, rows)])


def _shown(row: Row) -> str:
    return (
        f"{row.name:32} {row.lines_a_second:12,.0f} {row.seconds:9.1f} {row.cpu_s:9.1f} "
        f"{row.memory_mb:6.0f} MB"
    )
