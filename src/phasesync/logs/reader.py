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

from phasesync.audit.gist import Block
from phasesync.errors import PhasesyncError
from phasesync.logs.blocks import blocks_of

__all__ = ("frames", "main", "send")

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
    live: dict[int, Iterator[Block]] = {
        number: blocks_of([(Path(path), name) for path, name in files])
        for number, files in enumerate(chains)
    }
    while live:
        frame: list[tuple[int, list[Any]]] = []
        for number in list(live):
            found: list[Any] = []
            for block in live[number]:
                found.append(_plain(block))
                if block.epoch is not None:
                    break
            else:
                del live[number]
                found.append(None)
            frame.append((number, found))
            if len(frame) == _CHAINS:
                send(out, frame)
                frame = []
        send(out, frame)


def _plain(block: Block) -> tuple[Any, ...]:
    text = block.lines.args[2] if block.length <= _SMALL else None  # type: ignore[attr-defined]
    if type(text) is not bytes or len(text) > _SMALL_BYTES:
        text = None
    gist = block.gist
    return (
        tuple(block.place), block.length, block.size, block.epoch, block.version, block.after,
        block.last, tuple(gist) if gist is not None else None, text, block.read,
    )  # fmt: skip
