"""A journal cut into epochs and what is between them, each epoch with its gist.

What is kept of a block is its bytes; what was made of its lines is gone once the gist is taken, so
that thousands of ranks fit into memory. Lines as the journal writes them are found by their first
bytes and read many at a time; whatever looks otherwise is cut line by line.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from phasesync.audit.gist import Block, Gist, gist_of
from phasesync.audit.templates import Guess, Templates
from phasesync.core.wire import JsonError, decode
from phasesync.logs.lines import (
    LINE_MAX,
    Line,
    Packed,
    Raw,
    TooLong,
    decoded,
    on_disk,
    open_log,
    pieces,
)

__all__ = ("Place", "blocks_of", "kept", "reread")

_LINES_MAX: Final = 1 << 16
_BYTES_MAX: Final = 16 << 20
_PIECE: Final = 1 << 15
_MARK: Final = b'\n{"event":"epoch.'
_BEGINS: Final = b'{"event":"epoch.begin"'
_ENDS: Final = b'{"event":"epoch.end"'
_STARTS: Final = b'{"event":"phase.start"'
_ARRIVES: Final = b'{"event":"fence.arrive"'
_PART: Final = b'{"event":"journal.part"'


class Place(NamedTuple):
    """Where a block stands: which file of its chain, at which byte, after how many lines."""

    file: int
    offset: int
    lines: int


def blocks_of(
    files: Sequence[tuple[Path, str]],
    start: Place | None = None,
    templates: Templates | None = None,
) -> Iterator[Block]:
    """The blocks of a chain of files, from `start` on; one process has one set of templates.

    Raises:
        LogError: a file cannot be opened, or needs a package that is not installed.
    """
    known = templates if templates is not None else Templates()
    for number, (path, name) in enumerate(files):
        if start is None or number > start.file:
            yield from _in_file(path, name, Place(number, 0, 0), known)
        elif number == start.file:
            yield from _in_file(path, name, start, known)


def _in_file(path: Path, name: str, start: Place, templates: Templates) -> Iterator[Block]:
    place = start
    with open_log(path, start.offset) as stream:
        for block in _read_to(stream, _by_marks(stream, name, start, templates)):
            yield block
            place = Place(place.file, block.place.offset + block.size, block.last)
    with open_log(path, place.offset) as stream:
        yield from _read_to(stream, _by_lines(stream, name, place))


def _read_to(stream: IO[bytes], blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks, each with how far its file was read, where their own size does not tell."""
    if not isinstance(stream, Packed):
        return blocks
    return (block._replace(read=on_disk(stream)) for block in blocks)


# ------------------------------------------------------------------------------ by first bytes


def _by_marks(stream: IO[bytes], name: str, start: Place, templates: Templates) -> Iterator[Block]:
    """Blocks up to the last `epoch.end` or `epoch.begin`; the rest is cut by lines."""
    place, guess = start, templates.of_one()
    text, begin, looked, is_over = b"", 0, 0, False
    while True:
        found = _next(text, begin, looked, is_over=is_over)
        if isinstance(found, int):
            if is_over or len(text) - begin > _BYTES_MAX:
                return
            try:
                piece = stream.read(_PIECE)
            except Exception:  # Whatever it is, reading by lines comes to it again and says it.
                return
            is_over = not piece
            text, begin, looked = text[begin:] + piece, 0, found - begin
            continue
        cut, whole = found
        block = _block(name, place, text[begin:cut], guess, whole=whole)
        yield block
        begin, looked = cut, max(cut - 1, 0)
        if begin == len(text):
            text, begin, looked = b"", 0, 0
        place = Place(place.file, block.place.offset + block.size, block.last)


def _next(text: bytes, begin: int, looked: int, *, is_over: bool) -> tuple[int, bool] | int:
    """Where the block from `begin` on ends, and whether it is of an epoch that ended; from where
    on to look once more has been read, where that is not known yet.
    """
    while (at := text.find(_MARK, looked)) >= 0:
        if text.startswith(_BEGINS, at + 1):
            if at + 1 != begin:
                return at + 1, False
        elif text.startswith(_ENDS, at + 1):
            cut = text.find(b"\n", at + 1) + 1
            if not cut or (len(text) - cut < len(_ARRIVES) and not is_over):
                return at
            if not text.startswith((_STARTS, _ARRIVES), cut):
                return cut, True
            # The caller has done the rest of the epoch, and that is told before the next one.
            rest = text.find(_MARK, cut)
            if rest >= 0 and text.startswith(_BEGINS, rest + 1):
                return rest + 1, True
            return (cut, True) if is_over or 0 <= rest < len(text) - len(_ENDS) else at
        elif len(text) - at <= len(_ENDS) and not is_over:
            return at
        looked = at + 1
    return max(begin, looked, len(text) - len(_ENDS))


def _block(name: str, place: Place, text: bytes, guess: Guess, *, whole: bool) -> Block:
    """One block of whole lines."""
    first: dict[str, Any] = {}
    gist: Gist | None = None
    if whole and text.startswith(_BEGINS) and len(text) <= LINE_MAX:
        gist = guess.gist(text)
        if gist is not None:
            return _known(name, place, text, gist)
    count = text.count(b"\n")
    if text.startswith((_BEGINS, _PART)):
        try:
            if whole and len(text) <= LINE_MAX:
                lines = decode(b"[" + text[:-1].replace(b"\n", b",") + b"]")
                first = lines[0]
                gist = gist_of(lines) if len(lines) == count else None
                if gist is not None:
                    guess.learn(text, lines, gist)
            else:
                first = decode(text[: text.index(b"\n")])
        except (JsonError, RecursionError):
            first = {}
    lines_of = partial(kept, name, place.lines + 1, text)
    return _made(name, place, (count, len(text)), first, gist, lines_of)


def _known(name: str, place: Place, text: bytes, gist: Gist) -> Block:
    """An epoch that is written like one before."""
    last = place.lines + gist.length
    lines_of = partial(kept, name, place.lines + 1, text)
    epoch, version = gist.epoch, gist.version
    return Block(name, gist.length, len(text), lines_of, epoch, version, gist, last, None, place)


def _made(
    name: str,
    place: Place,
    extent: tuple[int, int],
    first: dict[str, Any],
    gist: Gist | None,
    lines: Any,
) -> Block:
    count, size = extent
    event = first.get("event")
    begins = event == "epoch.begin"
    return Block(
        file=name,
        length=count,
        size=size,
        lines=lines,
        epoch=_whole(first.get("epoch")) if begins else None,
        version=_whole(first.get("version")) if begins else None,
        gist=gist,
        last=place.lines + count,
        after=_whole(first.get("after_epoch")) if event == "journal.part" else None,
        place=place,
    )


def kept(name: str, first: int, text: bytes) -> Iterator[Line]:
    """The lines of a block that was kept as it is in the file."""
    for number, raw in enumerate(text.split(b"\n")[:-1], first):
        line = decoded(number, raw if len(raw) <= LINE_MAX else TooLong(len(raw)), name)
        if line is not None:
            yield line


# ------------------------------------------------------------------------------ line by line


class _Cutting:
    """Lines of one file as they become a block."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.begin(place)

    def begin(self, place: Place) -> None:
        self.place = place
        self.raws: list[Raw] = []
        self.read: list[dict[str, Any]] = []
        self.size = 0
        self.is_odd = False

    def cut(self, *, whole: bool = False) -> Block:
        """The lines so far; what was made of them is gone before the next block is asked for."""
        place, raws, read = self.place, self.raws, self.read
        gist = gist_of(read) if whole and not self.is_odd else None
        lines = partial(_held, self.name, place.lines + 1, raws)
        first = read[0] if read else {}
        block = _made(self.name, place, (len(raws), self.size), first, gist, lines)
        self.begin(Place(place.file, place.offset + self.size, place.lines + len(raws)))
        return block


def _held(name: str, first: int, raws: Sequence[Raw]) -> Iterator[Line]:
    for number, raw in enumerate(raws, first):
        line = decoded(number, raw, name)
        if line is not None:
            yield line


def _by_lines(stream: IO[bytes], name: str, start: Place) -> Iterator[Block]:
    """The blocks of one file, from `start` on, whatever it holds."""
    cut = _Cutting(name, start)
    going: Block | None = None
    for found in pieces(stream):
        for raw in found:
            data: Any = None
            size = 0
            if isinstance(raw, bytes):
                size = len(raw) + 1
                try:
                    data = decode(raw)
                except (JsonError, RecursionError):
                    data = None
            elif isinstance(raw, TooLong):
                size = raw.length + 1
            event = data.get("event") if type(data) is dict else None
            if event == "epoch.begin" and cut.raws:
                yield cut.cut()
                going = None
            if type(data) is dict:
                cut.read.append(data)
            else:
                cut.is_odd = True
            cut.raws.append(raw)
            cut.size += size
            if event == "epoch.end":
                data = None
                yield _goes_on(cut.cut(whole=True), going)
                going = None
            elif len(cut.raws) >= _LINES_MAX or cut.size >= _BYTES_MAX:
                data = None
                going = _goes_on(cut.cut(), going)
                yield going
    if cut.raws:
        yield _goes_on(cut.cut(), going)


def _goes_on(block: Block, before: Block | None) -> Block:
    """An epoch that is too long for one block is of that epoch in all of them."""
    return block if before is None or before.epoch is None else block._replace(epoch=before.epoch)


def reread(files: Sequence[tuple[Path, str]], place: Place, count: int) -> Iterator[Line]:
    """The `count` lines at `place` once more, from the file."""
    path, name = files[place.file]
    number, end = place.lines, place.lines + count
    with open_log(path, place.offset) as stream:
        for found in pieces(stream):
            for raw in found:
                number += 1
                line = decoded(number, raw, name)
                if line is not None:
                    yield line
                if number >= end:
                    return


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
