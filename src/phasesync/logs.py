"""Reading of logs: trace files and journals, line by line, from files, folders and packed files.

A log is what is left after a crash, so nothing in it is trusted: a torn, foreign or absurd line
becomes a problem that is reported, never an exception.
"""

import contextlib
import gzip
import hashlib
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from phasesync.core.wire import JsonError, decode, encode
from phasesync.errors import LogError

__all__ = (
    "LINE_MAX",
    "PACKED",
    "Line",
    "Shown",
    "Source",
    "by_run",
    "collect",
    "epochs",
    "lines",
    "sources",
    "unpacked",
)

LINE_MAX: Final = 1 << 20
PACKED: Final = (".pack.tar", ".pack.tar.gz", ".pack.tar.zst")
_CHUNK: Final = 1 << 16
_PIECE: Final = 1 << 15
_PACK: Final = 1
_MANIFEST: Final = "pack.json"
_FILES_MAX: Final = 1_000_000
_RANKS_MAX: Final = 1 << 20
FORMAT: Final = 1


class Line(NamedTuple):
    """One line of a log: its object, or why there is none."""

    number: int
    data: dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file that holds lines; `kind` is `trace` or `journal`, `run` the folder or run that it
    is of.
    """

    path: Path
    name: str
    kind: str
    run: str = ""
    attempt: int = 0
    protocol: str = ""
    members: tuple[str, ...] = ()


class Shown(NamedTuple):
    """A path, and what answers call it: what came out of a pack is called by the pack."""

    path: Path
    name: str


def sources(paths: Iterable[str | Path | Shown]) -> list[Source]:
    """The log files that `paths` (files, or folders searched in full) name.

    Raises:
        LogError: a path does not exist, or a folder has no log.
    """
    found: list[Source] = []
    for each in paths:
        path, name = each if isinstance(each, Shown) else (Path(each), str(each))
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*.jsonl*") if file.is_file() and _is_log(file)
            )
            if not inside:
                raise LogError(
                    f"{name}: no log in this folder; logs are *.jsonl files, plain, .gz or .zst"
                )
            found += [
                _source(file, f"{name.rstrip('/')}/{file.relative_to(path)}")
                for file in inside[:_FILES_MAX]
            ]
        elif path.is_file():
            found.append(_source(path, name))
        else:
            raise LogError(
                f"{name}: no such file or folder; give a trace, a journal or a run folder"
            )
    return found


def _is_log(path: Path) -> bool:
    name = path.name
    return name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst"))


def _source(path: Path, name: str) -> Source:
    for line in lines(path):
        if line.data is None:
            if line.number > 64:
                break
            continue
        if "trace" in line.data and "event" not in line.data:
            return Source(path=path, name=name, kind="trace", run=name)
        if "journal" in line.data or ("role" in line.data and "seq" in line.data):
            return _journal(path, name, line.data)
        if "phase" in line.data and "event" in line.data:
            return Source(path=path, name=name, kind="trace", run=name)
        break
    kind = "trace" if ".trace." in path.name else "journal"
    return Source(path=path, name=name, kind=kind, run=name if kind == "trace" else "")


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
    role, ranks = line.get("role"), line.get("ranks")
    count = ranks if isinstance(ranks, int) and 0 < ranks <= _RANKS_MAX else 0
    own = line.get("rank")
    members = {f"{role}/{number}" for number in range(count)}
    if isinstance(role, str) and isinstance(own, int):
        members.add(f"{role}/{own}")
    attempt = line.get("attempt")
    return Source(
        path=path,
        name=name,
        kind="journal",
        run=str(line.get("run", "")),
        attempt=attempt if isinstance(attempt, int) else 0,
        protocol=str(line.get("protocol", "")),
        members=tuple(sorted(members)),
    )


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


def lines(path: Path) -> Iterator[Line]:
    """The lines of one file, in order; problems in place of what cannot be read.

    Raises:
        LogError: the file cannot be opened, or needs a package that is not installed.
    """
    try:
        with _open(path) as stream:
            yield from _lines(stream)
    except PermissionError as error:
        raise LogError(
            f"{path}: may not be read ({error.strerror}); check its permissions"
        ) from error
    except IsADirectoryError as error:
        raise LogError(f"{path}: is a folder") from error


def epochs(path: Path) -> Iterator[tuple[list[tuple[int, dict[str, Any]]], list[Line]]]:
    """A journal an epoch at a time: the lines up to `epoch.end`, and those that are none.

    The same lines as `lines` gives, with less made of each.

    Raises:
        LogError: the file cannot be opened, or needs a package that is not installed.
    """
    block: list[tuple[int, dict[str, Any]]] = []
    bad: list[Line] = []
    number = 0
    for raw in _pieces(path, bad):
        number += 1
        if raw is None:
            bad.append(Line(number, None, f"longer than {LINE_MAX >> 20} MiB; skipped"))
            continue
        try:
            data = decode(raw)
        except (JsonError, RecursionError):
            if raw and not raw.isspace():
                bad.append(Line(number, None, _why_bad(raw)))
            continue
        if type(data) is not dict:
            bad.append(Line(number, None, "not a JSON object"))
            continue
        block.append((number, data))
        if data.get("event") == "epoch.end":
            yield block, bad
            block, bad = [], []
    if block or bad:
        yield block, bad


def _pieces(path: Path, bad: list[Line]) -> Iterator[bytes | None]:
    """The lines of a file without their ends, in large pieces; None for one that is too long."""
    with _open(path) as stream:
        rest = b""
        while True:
            try:
                piece = stream.read(_PIECE)
            except (EOFError, OSError, zlib.error) as error:
                bad.append(Line(0, None, f"the file ends early: {error}"))
                piece = b""
            if not piece:
                if rest:
                    yield rest if len(rest) <= LINE_MAX else None
                return
            if b"\n" not in piece:
                # A line longer than any: what was read of it is enough to know that.
                rest = (rest + piece)[: LINE_MAX + 1]
                continue
            found = (rest + piece).split(b"\n")
            rest = found.pop()
            for raw in found:
                yield raw if len(raw) <= LINE_MAX else None


def _open(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.name.endswith(".zst"):
        return cast("IO[bytes]", _zstandard(path).open(path, "rb"))
    return path.open("rb")


def _zstandard(path: Path) -> Any:
    try:
        import zstandard  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LogError(f"{path}: .zst needs: pip install 'phasesync[zstd]'") from error
    return zstandard


def _lines(stream: IO[bytes]) -> Iterator[Line]:
    number = 0
    try:
        while True:
            raw = stream.readline(LINE_MAX + 1)
            if not raw:
                return
            number += 1
            if len(raw) > LINE_MAX and not raw.endswith(b"\n"):
                _skip(stream)
                yield Line(number, None, f"longer than {LINE_MAX >> 20} MiB; skipped")
                continue
            if raw.isspace():
                continue
            try:
                data = decode(raw)
            except (JsonError, RecursionError):
                torn = not raw.endswith(b"\n")
                yield Line(number, None, "torn off" if torn else _why_bad(raw))
                continue
            if isinstance(data, dict):
                yield Line(number, data)
            else:
                yield Line(number, None, "not a JSON object")
    except (EOFError, OSError, zlib.error, ValueError) as error:
        yield Line(number + 1, None, f"the file ends here: {error}")
    except Exception as error:  # zstandard raises its own type, known only where it is installed.
        if type(error).__name__ != "ZstdError":
            raise
        yield Line(number + 1, None, f"the file ends here: {error}")


def _why_bad(raw: bytes) -> str:
    if not raw.endswith((b"}", b"\n", b"\r")) and b"\0" not in raw:
        return "torn off"
    if b"\0" in raw:
        return "holds NUL bytes; a file system or a crash left them"
    return "not JSON"


def _skip(stream: IO[bytes]) -> None:
    """Read to the end of a line that is too long to keep."""
    while True:
        raw = stream.readline(_CHUNK)
        if not raw or raw.endswith(b"\n"):
            return


# ------------------------------------------------------------------------------ packs


def collect(run: Path, out: Path) -> dict[str, Any]:
    """Pack the journals of the folder `run` into the file `out`; the pack's manifest.

    The manifest counts files and lines per host, with the boots seen and what turns each host's
    monotonic clock into wall time, so that who reads the pack knows what should be in it.

    Raises:
        LogError: there is no journal, or `out` cannot be written.
    """
    if not out.name.endswith(PACKED):
        raise LogError(f"{out}: name the pack with one of: {', '.join(PACKED)}")
    files = [each for each in sources([run]) if each.kind == "journal"]
    if not files:
        raise LogError(f"{run}: no journal in this folder")
    manifest = _manifest(run, files)
    beside = [each for each in sorted(run.glob("*.yaml")) if each.is_file()]
    try:
        with _writing(out) as stream, tarfile.open(fileobj=stream, mode="w|") as pack:
            _add(pack, _MANIFEST, encode(manifest))
            for each in (*(file.path for file in files), *beside):
                pack.add(each, arcname=str(each.relative_to(run)), recursive=False)
    except OSError as error:
        raise LogError(f"{out}: cannot be written ({error.strerror})") from error
    return manifest


def _manifest(run: Path, files: Iterable[Source]) -> dict[str, Any]:
    hosts: dict[str, dict[str, Any]] = {}
    listed = []
    names: set[str] = set()
    for each in files:
        count = 0
        first: dict[str, Any] | None = None
        for line in lines(each.path):
            count += 1
            first = first or line.data
        names.add(each.run)
        host = hosts.setdefault(
            str((first or {}).get("host", "")),
            {"files": 0, "lines": 0, "boots": [], "offset_ns": None},
        )
        host["files"] += 1
        host["lines"] += count
        boot = (first or {}).get("boot")
        if boot is not None and str(boot) not in host["boots"]:
            host["boots"].append(str(boot))
        if host["offset_ns"] is None and first is not None:
            host["offset_ns"] = _offset(first)
        listed.append(
            {
                "name": str(each.path.relative_to(run)),
                "lines": count,
                "sha256": _sha256(each.path),
                "members": list(each.members),
            }
        )
    return {"pack": _PACK, "runs": sorted(names), "hosts": hosts, "files": listed}


def _offset(line: dict[str, Any]) -> int | None:
    """What turns the monotonic clock of the line's host into wall time."""
    mono, stamp = line.get("mono_ns"), line.get("timestamp")
    if not isinstance(mono, int) or not isinstance(stamp, str):
        return None
    try:
        return int(datetime.fromisoformat(stamp).timestamp() * 1e9) - mono
    except (ValueError, OverflowError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _add(pack: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    pack.addfile(entry, io.BytesIO(data))


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[IO[bytes]]:
    if out.name.endswith(".zst"):
        with cast("IO[bytes]", _zstandard(out).open(out, "wb")) as stream:
            yield stream
    elif out.name.endswith(".gz"):
        with cast("IO[bytes]", gzip.open(out, "wb")) as stream:
            yield stream
    else:
        with out.open("wb") as stream:
            yield stream


@contextlib.contextmanager
def unpacked(paths: Iterable[str | Path]) -> Iterator[list[Shown]]:
    """`paths` with every pack among them replaced by a folder of what is in it.

    Raises:
        LogError: a pack is none, or lacks what its manifest lists.
    """
    given = [Path(each) for each in paths]
    with tempfile.TemporaryDirectory(prefix="phasesync-") as folder:
        found: list[Shown] = []
        for number, path in enumerate(given):
            if path.name.endswith(PACKED) and path.is_file():
                inside = Path(folder) / str(number)
                _unpack(path, inside)
                found.append(Shown(inside, f"{path}!"))
            else:
                found.append(Shown(path, str(path)))
        yield found


def _unpack(path: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        with _open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as pack:
            for member in pack:
                if member.isreg():
                    pack.extract(member, folder, filter="data")
        manifest = decode((folder / _MANIFEST).read_bytes())
        listed = [str(each["name"]) for each in manifest["files"]]
    except (
        OSError,
        tarfile.TarError,
        EOFError,
        zlib.error,
        JsonError,
        KeyError,
        TypeError,
    ) as error:
        raise LogError(f"{path}: not a whole pack ({error})") from error
    lacking = [name for name in listed if not (folder / name).is_file()]
    if lacking:
        raise LogError(f"{path}: lacks {', '.join(lacking[:4])}, which its manifest lists")
