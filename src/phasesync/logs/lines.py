"""Lines of one file, in order; a problem in place of what cannot be read.

A line longer than LINE_MAX is never held in memory, and a compressed file may end anywhere.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from phasesync.core.wire import JsonError, decode
from phasesync.errors import LogError

__all__ = (
    "LINE_MAX",
    "Line",
    "Packed",
    "decoded",
    "lines",
    "on_disk",
    "open_log",
    "pieces",
    "zstandard",
)

LINE_MAX: Final = 1 << 20
_PIECE: Final = 1 << 15
_TOO_LONG: Final = f"longer than {LINE_MAX >> 20} MiB; skipped"


class Line(NamedTuple):
    """One line of a log: its object, or why there is none. `file` where a stream has several."""

    number: int
    data: dict[str, Any] | None
    problem: str | None = None
    file: str = ""


class TooLong(NamedTuple):
    """A line that was not kept, with its length in bytes."""

    length: int


class Ends(NamedTuple):
    """Where a file ends before its end."""

    why: str


Raw = bytes | TooLong | Ends


class Packed:
    """What is in a compressed file, and how far into the file that is."""

    def __init__(self, inside: IO[bytes], file: IO[bytes]) -> None:
        self._inside, self._file = inside, file

    def read(self, size: int = -1, /) -> bytes:
        return self._inside.read(size)

    def on_disk(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._inside.close()
        self._file.close()

    def __enter__(self) -> "Packed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_disk(stream: IO[bytes]) -> int:
    """How many bytes of its file a log has been read from, packed as they are there."""
    return stream.on_disk() if isinstance(stream, Packed) else stream.tell()


def lines(path: Path, told: Callable[[int], None] | None = None) -> Iterator[Line]:
    """The lines of one file, in order; problems in place of what cannot be read.

    `told` is told of each piece of the file how many bytes it has there.

    Raises:
        LogError: the file cannot be opened, or needs a package that is not installed.
    """
    number = at = 0
    with open_log(path) as stream:
        for found in pieces(stream):
            for raw in found:
                number += 1
                line = decoded(number, raw)
                if line is not None:
                    yield line
            if told is not None:
                before, at = at, on_disk(stream)
                told(at - before)


def decoded(number: int, raw: Raw, file: str = "") -> Line | None:
    """What one line says; None where it is blank."""
    if not isinstance(raw, bytes):
        why = _TOO_LONG if isinstance(raw, TooLong) else f"the file ends here: {raw.why}"
        return Line(number, None, why, file)
    try:
        data = decode(raw)
    except (JsonError, RecursionError):
        if not raw or raw.isspace():
            return None
        return Line(number, None, _why_bad(raw), file)
    if type(data) is not dict:
        return Line(number, None, "not a JSON object", file)
    return Line(number, data, None, file)


def pieces(stream: IO[bytes]) -> Iterator[list[Raw]]:
    """The lines of a file without their ends, some at a time."""
    rest = b""
    dropped = 0
    while True:
        ended: Ends | None = None
        try:
            piece = stream.read(_PIECE)
        except Exception as error:  # zstandard raises its own type, known only where installed.
            known = isinstance(error, EOFError | OSError | zlib.error | ValueError)
            if not known and type(error).__name__ != "ZstdError":
                raise
            piece, ended = b"", Ends(str(error))
        if not piece:
            last: list[Raw] = [_whole(rest, dropped)] if rest else []
            yield [*last, ended] if ended is not None else last
            return
        if b"\n" not in piece:
            # A line longer than any: what was read of it is enough to know that.
            whole = rest + piece
            rest = whole[: LINE_MAX + 1]
            dropped += len(whole) - len(rest)
            continue
        found: list[Raw] = [*(rest + piece).split(b"\n")]
        rest = cast("bytes", found.pop())
        if dropped or len(found[0]) > LINE_MAX:
            found[0] = _whole(cast("bytes", found[0]), dropped)
            dropped = 0
        yield found


def _whole(raw: bytes, dropped: int) -> Raw:
    return raw if len(raw) <= LINE_MAX else TooLong(len(raw) + dropped)


def open_log(path: Path, offset: int = 0) -> IO[bytes]:
    """The file's content from `offset` on, unpacked.

    Raises:
        LogError: the file cannot be opened, or needs a package that is not installed.
    """
    try:
        if path.name.endswith(".gz"):
            file = path.open("rb")
            stream = _packed(gzip.GzipFile(fileobj=file, mode="rb"), file)
        elif path.name.endswith(".zst"):
            packer = zstandard(path).ZstdDecompressor()
            file = path.open("rb")
            stream = _packed(packer.stream_reader(file, read_across_frames=True), file)
        else:
            stream = path.open("rb")
            stream.seek(offset)
            return stream
    except PermissionError as error:
        raise LogError(
            f"{path}: may not be read ({error.strerror}); check its permissions"
        ) from error
    except IsADirectoryError as error:
        raise LogError(f"{path}: is a folder") from error
    except OSError as error:
        raise LogError(f"{path}: cannot be opened ({error.strerror})") from error
    while offset > 0 and (skipped := stream.read(min(offset, 1 << 20))):
        offset -= len(skipped)
    return stream


def _packed(inside: Any, file: IO[bytes]) -> IO[bytes]:
    return cast("IO[bytes]", Packed(inside, file))


def zstandard(path: Path) -> Any:
    """The package that reads and writes .zst.

    Raises:
        LogError: it is not installed.
    """
    try:
        import zstandard as package  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LogError(f"{path}: .zst needs: pip install 'phasesync[zstd]'") from error
    return package


def _why_bad(raw: bytes) -> str:
    if b"\0" in raw:
        return "holds NUL bytes; a file system or a crash left them"
    return "not JSON" if raw.endswith((b"}", b"\r")) else "torn off"
