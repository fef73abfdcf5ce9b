"""Which files are logs, of which run and rank they are, and who else should have one."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from phasesync.errors import LogError
from phasesync.logs.lines import lines

__all__ = ("Shown", "Source", "by_run", "chains", "sources")

FORMAT: Final = 1
_FILES_MAX: Final = 1_000_000
_RANKS_MAX: Final = 1 << 20
_LOOKED_AT: Final = 64
_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# What a journal writer calls its files: trainer-3.0.jsonl, and trainer-3.0.part7.jsonl behind it.
_NAME: Final = re.compile(
    r"(?P<role>[^./]+)-(?P<rank>\d{1,9})\.(?P<inc>\d{1,9})(\.part\d+)?\.jsonl"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file that holds lines; `kind` is `trace` or `journal`, `run` the folder or run that it
    is of. `rank`, `incarnation` and `seq` are those of a journal's first line.
    """

    path: Path
    name: str
    kind: str
    run: str = ""
    attempt: int = 0
    protocol: str = ""
    members: tuple[str, ...] = ()
    rank: str = ""
    incarnation: int = 0
    seq: int = 0


class Shown(NamedTuple):
    """A path, and what answers call it: what came out of a pack is called by the pack."""

    path: Path
    name: str


def sources(paths: Iterable[str | Path | Shown]) -> list[Source]:
    """The log files that `paths` (files, or folders searched in full) name.

    Raises:
        LogError: a path does not exist, is no log, or a folder has none.
    """
    found: list[Source] = []
    for each in paths:
        path, name = each if isinstance(each, Shown) else (Path(each), str(each))
        if path.is_dir():
            found += _inside(path, name)
        elif path.is_file():
            source = _source(path, name)
            if source is None:
                raise LogError(
                    f"{name}: not a log: none of its first lines is of a journal or a trace; "
                    "logs of other systems are read by: phasesync import"
                )
            found.append(source)
        elif path.exists():
            raise LogError(f"{name}: a pipe or a device; copy what it gives to a file first")
        else:
            raise LogError(
                f"{name}: no such file or folder; give a trace, a journal or a run folder"
            )
    return found


def _inside(folder: Path, name: str) -> list[Source]:
    files = sorted(
        file
        for file in folder.rglob("*.jsonl*")
        if file.name.endswith(_SUFFIXES) and file.is_file()
    )
    found, nameless = [], []
    for file in files[:_FILES_MAX]:
        shown = f"{name.rstrip('/')}/{file.relative_to(folder)}"
        source = _source(file, shown)
        if source is not None:
            found.append(source)
        elif (said := _NAME.match(file.name)) is not None:
            nameless.append((file, shown, said))
    runs = {(each.run, each.attempt): each for each in found if each.kind == "journal"}
    for file, shown, said in nameless:
        # Not a line of it can be read. Its name says whose it is, and so that something is missing.
        near = next(iter(runs.values())) if len(runs) == 1 else None
        rank = f"{said['role']}/{int(said['rank'])}"
        empty = Source(path=file, name=shown, kind="journal", rank=rank, members=(rank,))
        if near is not None:
            empty = replace(empty, run=near.run, attempt=near.attempt, protocol=near.protocol)
        found.append(replace(empty, incarnation=int(said["inc"])))
    if not found:
        raise LogError(f"{name}: no log in this folder; logs are *.jsonl files, plain, .gz or .zst")
    return found


def _source(path: Path, name: str) -> Source | None:
    """What a file's first lines say that it is; None where they are of no log."""
    for line in lines(path):
        data = line.data
        if data is not None:
            if "trace" in data and "event" not in data:
                return Source(path=path, name=name, kind="trace", run=name)
            if "journal" in data or ("role" in data and "seq" in data):
                return _journal(path, name, data)
            if "phase" in data and "event" in data:
                return Source(path=path, name=name, kind="trace", run=name)
        if line.number >= _LOOKED_AT:
            break
    return None


def _journal(path: Path, name: str, line: dict[str, Any]) -> Source:
    """What the first line of a journal says of its run, and of who else should have one.

    Raises:
        LogError: it was written by a newer phasesync.
    """
    version = line.get("journal", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise LogError(
            f"{path}: journal format {str(version)[:20]}; this phasesync reads up to {FORMAT}: "
            "upgrade it"
        )
    role, ranks = str(line.get("role")), line.get("ranks")
    count = ranks if type(ranks) is int and 0 < ranks <= _RANKS_MAX else 0
    own = line.get("rank")
    members = _members(role, count)
    rank = ""
    if isinstance(line.get("role"), str) and type(own) is int:
        rank = f"{role}/{own}"
        if not 0 <= own < count:
            members = (*members, rank)
    return Source(
        path=path,
        name=name,
        kind="journal",
        run=str(line.get("run", "")),
        attempt=_number(line.get("attempt")),
        protocol=str(line.get("protocol", "")),
        members=members,
        rank=rank,
        incarnation=_number(line.get("incarnation")),
        seq=_number(line.get("seq")),
    )


@lru_cache(maxsize=64)
def _members(role: str, count: int) -> tuple[str, ...]:
    """The ranks of a role: one tuple for all of their journals."""
    return tuple(f"{role}/{number}" for number in range(count))


def _number(value: object) -> int:
    return value if type(value) is int else 0


def by_run(found: Iterable[Source]) -> dict[str, list[Source]]:
    """Journals by the run and attempt that they are of, in their order."""
    runs: dict[tuple[str, int], list[Source]] = {}
    for each in found:
        runs.setdefault((each.run, each.attempt), []).append(each)
    attempts = [run for run, _ in runs]
    return {
        run if attempts.count(run) == 1 else f"{run} attempt {attempt}": files
        for (run, attempt), files in sorted(runs.items())
    }


def chains(files: Iterable[Source]) -> Iterator[tuple[str, list[Source]]]:
    """The files of each rank in the order they were written: its incarnations, and their parts.

    Two files that begin with the same line are copies, and each is a chain of its own.
    """
    ranks: dict[str, list[Source]] = {}
    for each in files:
        ranks.setdefault(each.rank or each.name, []).append(each)
    for rank, own in ranks.items():
        known: list[list[Source]] = [[]]
        for each in sorted(own, key=lambda one: (one.incarnation, one.seq, one.name)):
            begin = (each.incarnation, each.seq)
            chain = next(
                (c for c in known if not c or (c[-1].incarnation, c[-1].seq) != begin), None
            )
            if chain is None:
                known.append(chain := [])
            chain.append(each)
        for chain in known:
            yield rank, chain
