"""The other processes that read: journals in, gists out, over a pipe.

A reader is started with this module alone, never by importing the caller's own program again. It
writes plain values in the order that whoever judges asks for them, and stops when the pipe does.
"""

import gc
import marshal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from phasesync.audit.gist import Block, Gist, Shape
from phasesync.audit.templates import Templates
from phasesync.errors import PhasesyncError
from phasesync.logs.blocks import blocks_of

__all__ = ("SHAPE", "frames", "main", "send")

SHAPE: Final = Gist._fields.index("shape")  # where a gist has it; on the pipe it is a number

_CHAINS: Final = 32  # a frame; the judge works on one while the next is read
_SMALL: Final = 8  # lines of a block that is sent whole
_SMALL_BYTES: Final = 1 << 14


def send(stream: IO[bytes], value: Any) -> None:
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def frames(stream: IO[bytes]) -> Iterator[Any]:
    """What the other end sent, until it ends."""
    while len(head := stream.read(8)) == 8:
        data = stream.read(int.from_bytes(head, "little"))
        yield marshal.loads(data)


def main() -> None:
    """Read the chains that stdin names; to stdout, an epoch of each at a time."""
    gc.disable()  # Nothing here makes a cycle.
    out = sys.stdout.buffer
    for chains in frames(sys.stdin.buffer):
        try:
            _serve(chains, out)
        except PhasesyncError as error:
            send(out, str(error))
        except BrokenPipeError:
            return


def _serve(chains: Iterable[Iterable[tuple[str, str]]], out: IO[bytes]) -> None:
    templates = Templates()
    live: dict[int, Iterator[Block]] = {
        number: blocks_of([(Path(path), name) for path, name in files], templates=templates)
        for number, files in enumerate(chains)
    }
    shapes = _Shapes()
    while live:
        frame: list[tuple[int, list[Any]]] = []
        for number in list(live):
            found: list[Any] = []
            for block in live[number]:
                found.append(_plain(block, shapes))
                if block.epoch is not None:
                    break
            else:
                del live[number]
                found.append(None)
            frame.append((number, found))
            if len(frame) == _CHAINS:
                send(out, (shapes.new(), frame))
                frame = []
        send(out, (shapes.new(), frame))


class _Shapes:
    """Shapes of epochs by number, each told once: ranks by the thousand have the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Shape]] = {}
        self._new: list[Shape] = []
        self._count = 0

    def number(self, shape: Shape) -> int:
        known = self._known.get(id(shape))
        if known is None:
            known = self._known[id(shape)] = (self._count, shape)  # Held, so that its id is its.
            self._new.append(shape)
            self._count += 1
        return known[0]

    def new(self) -> list[Shape]:
        """Those that were not told yet, in the order of their numbers."""
        new, self._new = self._new, []
        return new


def _plain(block: Block, shapes: _Shapes) -> tuple[Any, ...]:
    text = block.lines.args[2] if block.length <= _SMALL else None  # type: ignore[attr-defined]
    if type(text) is not bytes or len(text) > _SMALL_BYTES:
        text = None
    gist = block.gist
    told: tuple[Any, ...] | None = None
    if gist is not None:
        told = (*gist[:SHAPE], shapes.number(gist.shape), *gist[SHAPE + 1 :])
    return (
        tuple(block.place), block.length, block.size, block.epoch, block.version, block.after,
        block.last, told, text, block.read,
    )  # fmt: skip
