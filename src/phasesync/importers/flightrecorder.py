"""PyTorch Flight Recorder dumps: who is in which collective, and who is not there.

Dumps are pickles. They are read by an unpickler that knows containers and scalars only: whatever
else one names is refused, because a dump comes from a machine that has just failed.
"""

import ast
import io
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from phasesync.errors import InputError
from phasesync.importers.base import Course, Imported, LogLine

__all__ = ("is_dump", "read")

_KEPT: Final = 64  # collectives per rank; a ring buffer has thousands that all completed
_SIZE_MAX: Final = 1 << 30
_LOOK_MAX: Final = 1 << 26
_PLAIN: Final = frozenset(
    {
        "dict",
        "list",
        "tuple",
        "set",
        "frozenset",
        "bytes",
        "bytearray",
        "str",
        "int",
        "float",
        "bool",
    }
)
_RANK: Final = re.compile(r"(\d+)(?=\D*$)")


class _Plain(pickle.Unpickler):
    """Unpickles builtin containers and scalars, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _PLAIN:
            return {"dict": dict, "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
                    "bytes": bytes, "bytearray": bytearray, "str": str, "int": int,
                    "float": float, "bool": bool}[name]  # fmt: skip
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump needs")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside itself")


def read(paths: Sequence[Path]) -> Imported:
    """The trace of a set of dumps, one a rank.

    Raises:
        InputError: a file is no dump.
    """
    course = Course("flight recorder")
    found: list[tuple[int, int, dict[str, Any], str, dict[str, Any]]] = []
    everybody: set[int] = set()
    for path in paths:
        dump = _load(path)
        rank = _rank_of(path, dump)
        course.rank(str(rank), rank)
        groups = _groups(dump)
        for members in groups.values():
            everybody |= set(members)
        entries = [entry for entry in dump["entries"] if isinstance(entry, dict)]
        for entry in entries[-_KEPT:]:
            only = next(iter(groups.values())) if len(groups) == 1 else []
            members = groups.get(_group_of(entry), only)
            attrs = _attrs(entry, members)
            found.append((_time(entry), rank, entry, str(path), attrs))
    found.sort(key=lambda each: (each[0], each[1]))
    for _, rank, entry, file, attrs in found:
        line = LogLine(file, int(entry.get("record_id", 0) or 0), "", "", "", "", rank, 1)
        phase = str(entry.get("profiling_name", "collective"))[:80]
        course.put(rank, phase, "start", line, **attrs)
        if entry.get("state") == "completed" or entry.get("retired") is True:
            course.put(rank, phase, "end", line, **attrs)
    return course.done(sorted(everybody))


def is_dump(path: Path) -> bool:
    """Whether a file is a dump: a pickle or JSON with entries, and small enough for a look."""
    try:
        if path.stat().st_size > _LOOK_MAX or path.read_bytes()[:1] not in (b"\x80", b"{"):
            return False
        _load(path)
    except (InputError, OSError):
        return False
    return True


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _SIZE_MAX:
            raise InputError(f"{path}: larger than {_SIZE_MAX >> 30} GiB; no dump is")
        raw = path.read_bytes()
        dump = json.loads(raw) if raw[:1] in (b"{", b"[") else _Plain(io.BytesIO(raw)).load()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: not a Flight Recorder dump ({text or type(error).__name__})"
        ) from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise InputError(f"{path}: not a Flight Recorder dump (it has no entries)")
    return dump


def _rank_of(path: Path, dump: dict[str, Any]) -> int:
    if isinstance(dump.get("rank"), int):
        return int(dump["rank"])
    found = _RANK.search(path.name)
    if found is None:
        raise InputError(f"{path}: no rank in the dump or in its name; name it like ..._rank_3")
    return int(found[1])


def _groups(dump: dict[str, Any]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    config = dump.get("pg_config")
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str) and len(ranks) < 1 << 20:
            try:
                ranks = ast.literal_eval(ranks)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                ranks = None
        if isinstance(ranks, list | tuple):
            groups[str(name)] = [rank for rank in ranks if type(rank) is int]
    return groups


def _group_of(entry: dict[str, Any]) -> str:
    group = entry.get("process_group")
    if isinstance(group, list | tuple) and group:
        return str(group[0])
    return str(entry.get("pg_id", "0"))


def _attrs(entry: dict[str, Any], members: list[int]) -> dict[str, Any]:
    p2p = entry.get("is_p2p") is True
    number = entry.get("p2p_seq_id" if p2p else "collective_seq_id")
    timeout = entry.get("timeout_ms")
    return {
        "group": _group_of(entry),
        "members": members or None,
        "call": number if type(number) is int else None,
        "state": str(entry.get("state", ""))[:20] or None,
        "timeout_s": timeout / 1000 if isinstance(timeout, int) and timeout > 0 else None,
    }


def _time(entry: dict[str, Any]) -> int:
    created = entry.get("time_created_ns")
    return created if type(created) is int else 0
