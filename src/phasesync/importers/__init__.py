"""Logs of systems that do not run phasesync, made into traces that the audit reads.

An importer only translates lines that the system's own source prints; what it does not know it
skips and counts. It never guesses who is guilty: that is the audit's.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from phasesync.errors import InputError
from phasesync.importers import enginelogs, flightrecorder, pyspy, text, torchrun, verl
from phasesync.importers.base import Imported
from phasesync.importers.guess import guess

__all__ = ("IMPORTERS", "Imported", "as_lines", "guess", "import_logs")

IMPORTERS: Final[Mapping[str, Callable[[Sequence[Path]], Imported]]] = {
    "flight-recorder": flightrecorder.read,
    "py-spy": pyspy.read,
    "ray": verl.read,
    "sglang": enginelogs.read_sglang,
    "torchrun": torchrun.read,
    "verl": verl.read,
    "vllm": enginelogs.read_vllm,
}


def import_logs(
    kind: str, paths: Sequence[str | Path], *, mapping: str | Path | None = None
) -> Imported:
    """The trace that the logs of a system amount to; `kind` is one of IMPORTERS, or `text`.

    Raises:
        InputError: an unknown kind, a missing file, a mapping that is none, or a file that is not
            what it should be.
    """
    files = [each for path in paths for each in _files(Path(path))]
    if kind == "text":
        if mapping is None:
            raise InputError("text needs --map FILE: a TOML file of [[line]] tables with 'match'")
        return text.read(files, Path(mapping))
    if kind not in IMPORTERS:
        known = ", ".join(sorted((*IMPORTERS, "text")))
        raise InputError(f"no importer {kind!r}; importers are: {known}")
    return IMPORTERS[kind](files)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    if not path.is_file():
        if path.exists():
            raise InputError(f"{path}: a pipe or a device; copy what it gives to a file first")
        raise InputError(f"{path}: no such file or folder")
    return [path]


def as_lines(imported: Imported) -> list[dict[str, Any]]:
    """The trace as it is written, header first."""
    return [imported.header, *imported.events]
