"""Journals for an audit, read by this process, or by several where there is much to read.

Ranks are parsed independently of each other, so their files are shared out. Where a reader cannot
be started or dies, this process goes on from the last block that it had: slower, and not wrong.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from phasesync.audit.gist import Block, Gist, RankLog, Shape, shared
from phasesync.audit.templates import Templates
from phasesync.errors import LogError
from phasesync.logs.blocks import Place, blocks_of, kept, reread
from phasesync.logs.reader import SHAPE, frames, send
from phasesync.logs.sources import Source, chains

__all__ = ("reading",)

_MUCH: Final = 64 << 20  # bytes; below, a second process costs more than it brings
_PACKED: Final = 8  # how much larger a compressed journal is than its file
_APART: Final = 256  # blocks a reader may be ahead of what was asked for
_PIPE: Final = 1 << 20  # bytes; a reader is that far ahead of who judges
_JUDGE: Final = 0.6  # of a reader's work on a file is what its judging costs
_START: Final = "import sys; sys.path[:] = {path!r}; from phasesync.logs.reader import main; main()"

_Files = list[tuple[Path, str]]


@contextmanager
def reading(
    files: Sequence[Source],
    *,
    jobs: int | None = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[list[RankLog]]:
    """The journals of one run, a log a rank; `jobs` processes read them (None: as many as pay).

    `progress` is told how many more bytes of the files have been read, as they lie on disk.

    Raises:
        LogError: a file cannot be opened, or needs a package that is not installed.
    """
    own = [(rank, [(each.path, each.name) for each in chain]) for rank, chain in chains(files)]
    sizes = [sum(_size(path) for path, _ in chain) for _, chain in own]
    shares = _shares(sizes, _jobs(jobs, sum(sizes)))
    with ExitStack() as stack:
        found: list[RankLog | None] = [None] * len(own)
        for share in shares[1:]:
            reader = stack.enter_context(_started([own[at][1] for at in share]))
            for number, at in enumerate(share):
                rank, chain = own[at]
                blocks = reader.blocks(number, chain)
                found[at] = RankLog(rank, _told(blocks, chain, progress), partial(_again, chain))
        templates = Templates()
        for at in shares[0]:
            rank, chain = own[at]
            blocks = blocks_of(chain, templates=templates)
            found[at] = RankLog(rank, _told(blocks, chain, progress))
        yield [each for each in found if each is not None]


def _size(path: Path) -> int:
    size = path.stat().st_size
    return size if path.name.endswith(".jsonl") else size * _PACKED


def _jobs(jobs: int | None, size: int) -> int:
    if jobs is not None:
        return max(1, jobs)
    if size < _MUCH:
        return 1
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every system.
        return os.cpu_count() or 1


def _shares(sizes: Sequence[int], jobs: int) -> list[list[int]]:
    """Which chains each process reads, this one first: it judges as well, and so reads less."""
    jobs = min(jobs, len(sizes))
    weights = [max(1e-9, 1 - _JUDGE * (jobs - 1)), *[1.0] * (jobs - 1)]
    shares: list[list[int]] = [[] for _ in weights]
    loads = [0.0] * len(weights)
    for at, size in enumerate(sizes):
        least = min(range(len(weights)), key=lambda each: (loads[each] + size + 1) / weights[each])
        loads[least] += size + 1
        shares[least].append(at)
    return [shares[0], *(share for share in shares[1:] if share)]


def _told(
    blocks: Iterator[Block], chain: _Files, progress: Callable[[int], None] | None
) -> Iterator[Block]:
    if progress is None:
        return blocks
    return _telling(blocks, chain, progress)


def _telling(
    blocks: Iterator[Block], chain: _Files, progress: Callable[[int], None]
) -> Iterator[Block]:
    """The blocks; of each is told how much further into the chain of files it ends."""
    sizes = [path.stat().st_size for path, _ in chain]
    before = [sum(sizes[:at]) for at in range(len(sizes))]
    done = 0
    for block in blocks:
        yield block
        place = block.place
        end = block.read if block.read is not None else place.offset + block.size
        at = before[place.file] + min(end, sizes[place.file])
        if at > done:
            progress(at - done)
            done = at
    progress(sum(sizes) - done)


def _again(chain: _Files, block: Block) -> Iterator[Block]:
    return blocks_of(chain, Place(*block.place))


@contextmanager
def _started(share: Sequence[_Files]) -> Iterator["_Reader"]:
    """A reader of `share`; its process ends with the block."""
    reader = _Reader(share)
    try:
        yield reader
    finally:
        reader.stop()


class _Reader:
    """One process that reads, and what it has read and was not asked for yet."""

    def __init__(self, share: Sequence[_Files]) -> None:
        self._waiting: list[deque[Any]] = [deque() for _ in share]
        self._shapes: list[Shape] = []
        self._held = 0
        self._frames: Iterator[Any] = iter(())
        self._process: subprocess.Popen[bytes] | None = None
        code = _START.format(path=[each or str(Path.cwd()) for each in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pipesize=_PIPE,
                start_new_session=True,  # An interrupt is this process's, which then ends it.
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            send(self._process.stdin, [[(str(p), name) for p, name in chain] for chain in share])
            self._process.stdin.close()
            self._frames = frames(self._process.stdout)
        except OSError:
            self.stop()

    def blocks(self, number: int, chain: _Files) -> Iterator[Block]:
        """The blocks of one of its chains, read here from where the process left off."""
        waiting = self._waiting[number]
        at: Place | None = None
        while waiting or self._read():
            if not waiting:
                continue
            self._held -= 1
            plain = waiting.popleft()
            if plain is None:
                return
            at = Place(*plain[0])
            yield _block(chain, at, plain, self._shapes)
        rest = blocks_of(chain, at)
        if at is not None:
            next(rest, None)
        yield from rest

    def _read(self) -> bool:
        """Take in the next frame; False where there will be none."""
        if self._held > _APART * len(self._waiting):
            self.stop()  # Its ranks are far apart: read each as far as it is asked for.
            return False
        frame = next(self._frames, None)
        if frame is None:
            return False
        if isinstance(frame, str):
            raise LogError(frame)
        new, blocks = frame
        self._shapes += map(shared, new)
        for number, found in blocks:
            self._waiting[number].extend(found)
            self._held += len(found)
        return True

    def stop(self) -> None:
        process, self._process = self._process, None
        self._frames = iter(())
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _block(chain: _Files, at: Place, plain: tuple[Any, ...], shapes: Sequence[Shape]) -> Block:
    _, count, size, epoch, version, after, last, gist, text, read = plain
    return Block(
        file=chain[at.file][1],
        length=count,
        size=size,
        lines=partial(kept, chain[at.file][1], at.lines + 1, text)
        if text is not None
        else partial(reread, chain, at, count),
        epoch=epoch,
        version=version,
        gist=_gist(gist, shapes) if gist is not None else None,
        last=last,
        after=after,
        place=at,
        read=read,
    )


def _gist(plain: tuple[Any, ...], shapes: Sequence[Shape]) -> Gist:
    return Gist._make((*plain[:SHAPE], shapes[plain[SHAPE]], *plain[SHAPE + 1 :]))
