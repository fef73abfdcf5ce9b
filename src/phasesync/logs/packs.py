"""Journals of many hosts in one file, and back.

A pack begins with a manifest that counts what is in it, so that whoever reads it knows what is not.
"""

import contextlib
import gzip
import hashlib
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, cast

from phasesync.core.wire import JsonError, decode, encode
from phasesync.errors import LogError
from phasesync.logs.lines import lines, open_log, zstandard
from phasesync.logs.sources import Shown, Source, sources

__all__ = ("PACKED", "collect", "unpacked")

PACKED: Final = (".pack.tar", ".pack.tar.gz", ".pack.tar.zst")
_PACK: Final = 1
_MANIFEST: Final = "pack.json"
_BOOT_WITHIN: Final = 64  # lines; the first fence tells the boot of the store


def collect(
    run: Path, out: Path, *, nodes: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Pack the journals of the folder `run` into the file `out`; the pack's manifest.

    The manifest counts files and lines per host, with the boots seen and what turns each host's
    monotonic clock into wall time, so that who reads the pack knows what should be in it. `nodes`
    is what is known of the machines that were asked for them.

    Raises:
        LogError: there is no journal, or `out` cannot be written.
    """
    if not out.name.endswith(PACKED):
        raise LogError(f"{out}: name the pack with one of: {', '.join(PACKED)}")
    files = [each for each in sources([run]) if each.kind == "journal"]
    if not files:
        raise LogError(f"{run}: no journal in this folder")
    manifest = _manifest(run, files) | ({"nodes": nodes} if nodes is not None else {})
    beside = [each for each in sorted(run.glob("*.yaml")) if each.is_file()]
    try:
        with _writing(out) as stream, tarfile.open(fileobj=stream, mode="w|") as pack:
            _add(pack, _MANIFEST, encode(manifest))
            for each in (*(file.path for file in files), *beside):
                pack.add(each, arcname=str(each.relative_to(run)), recursive=False)
    except OSError as error:
        raise LogError(f"{out}: cannot be written ({error.strerror})") from error
    return manifest


def _manifest(run: Path, files: Sequence[Source]) -> dict[str, Any]:
    hosts: dict[str, dict[str, Any]] = {}
    listed = []
    names: set[str] = set()
    for each in files:
        count = 0
        first: dict[str, Any] | None = None
        boot: object = None
        for line in lines(each.path):
            count += 1
            first = first or line.data
            if boot is None and count <= _BOOT_WITHIN and line.data is not None:
                boot = line.data.get("boot")
        names.add(each.run)
        host = hosts.setdefault(
            str((first or {}).get("host", "")),
            {"files": 0, "lines": 0, "boots": [], "offset_ns": None},
        )
        host["files"] += 1
        host["lines"] += count
        if boot is not None and str(boot) not in host["boots"]:
            host["boots"].append(str(boot))
        if host["offset_ns"] is None and first is not None:
            host["offset_ns"] = _offset(first)
        listed.append(
            {
                "name": str(each.path.relative_to(run)),
                "lines": count,
                "sha256": _sha256(each.path),
            }
        )
    members = sorted(set().union(*{each.members for each in files}))
    return {
        "pack": _PACK, "runs": sorted(names), "hosts": hosts, "members": members, "files": listed,
    }  # fmt: skip


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
        with cast("IO[bytes]", zstandard(out).open(out, "wb")) as stream:
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
        with open_log(path) as stream, tarfile.open(fileobj=stream, mode="r|") as pack:
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
