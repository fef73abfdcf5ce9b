"""Whose logs a user has handed over, where their lines leave no doubt.

A kind is named only if lines are there that nothing else prints. Of two kinds the one whose
importer reads the other's lines too wins: verl's and Ray's read the engines'.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from phasesync.importers.base import read_lines
from phasesync.importers.enginelogs import is_engine
from phasesync.importers.flightrecorder import is_dump

__all__ = ("guess",)

_FILES_MAX: Final = 64
_LINES_MAX: Final = 20000
# In this order: the first that is there wins.
_MARKS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("py-spy", re.compile(r'^Thread \S+ \([a-z+]+\): "|^Process \d+: ')),
    (
        "verl",
        re.compile(
            r"device memory used/total \(GB\): |Memory cleanup attempt \d+: Freed |verl/workers/"
        ),
    ),
    (
        "ray",
        re.compile(
            r"^ray\.exceptions\.\w+|^\S*ray::\w+\.\w+\(\)|A worker died or was killed while"
        ),
    ),
    (
        "vllm",
        re.compile(r"Sleep mode freed [\d.]+ GiB memory|seconds to (?:fall asleep|wake up)"),
    ),
    ("sglang", re.compile(r'"POST /(?:release|resume)_memory_occupation|sglang/srt/')),
    (
        "torchrun",
        re.compile(
            r"Watchdog caught collective operation timeout|"
            r"^Root Cause \(first observed failure\):|torch/distributed/(?:run|launcher)"
        ),
    ),
)


def guess(paths: Sequence[Path]) -> str | None:
    """The importer that `paths` are for; None where no line tells."""
    files = list(islice(_files(paths), _FILES_MAX))
    if files and all(is_dump(file) for file in files):
        return "flight-recorder"
    seen: set[str] = set()
    actors = False
    for file in files:
        for line in islice(read_lines(file), _LINES_MAX):
            seen.update(kind for kind, mark in _MARKS if mark.search(line.text))
            actors = actors or (bool(line.pid) and not is_engine(line))
    if actors and "torchrun" in seen:
        seen.add("ray")  # Ranks are actors there, of several worlds.
    return next((kind for kind, _ in _MARKS if kind in seen), None)


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if each.is_file())
        elif path.is_file():
            yield path
