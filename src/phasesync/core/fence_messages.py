"""What a rank and a coordinator say to each other, as bytes.

A connection starts with a fixed greeting that carries the sha256 of the run's token, and nothing
is parsed before it was compared. Then come frames: four bytes of length, then JSON. A frame
that is longer than its limit is refused by its length alone.
"""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phasesync.core import wire
from phasesync.core.fence import (
    cause_from_json,
    cause_to_json,
    decode_arrivals,
    encode_arrival,
    ranks_from_json,
)
from phasesync.core.model import (
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    FenceVerdict,
    Opened,
    Rank,
    Ticket,
    Version,
)

__all__ = (
    "ANSWER_BYTES_MAX",
    "GREETING_BYTES",
    "NO_REQUEST",
    "REQUEST_BYTES_MAX",
    "Answer",
    "FrameTooLong",
    "Framer",
    "Greeting",
    "WrongGreeting",
    "call_from_json",
    "call_to_json",
    "frame",
    "greeting",
    "members_hash",
    "verdict_bytes",
    "version_of",
)

MAGIC = b"phasesync-1\n"
GREETING_BYTES = len(MAGIC) + 32
REQUEST_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 64 << 20
HEADER_BYTES = 4
NO_REQUEST = 0  # Of what is told without waiting for the answer.


class FrameTooLong(Exception):
    """The other end announced a frame beyond the limit."""


def greeting(token: str) -> bytes:
    """The first bytes of a connection, always as many, whatever the token."""
    return MAGIC + hashlib.sha256(token.encode()).digest()


def version_of(said: bytes) -> str | None:
    """The version in the first bytes of a connection, if they are a greeting of any version."""
    name, end, _ = said.partition(b"\n")
    known = MAGIC.partition(b"-")[0]
    return name.decode("ascii", "replace") if end and name.startswith(known + b"-") else None


def frame(*parts: bytes) -> bytes:
    """One frame of `parts`, each JSON, a line each."""
    body = b"\n".join(parts)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class WrongGreeting(ValueError):
    """Whoever connected does not know the token; `said` is what came in its place."""

    def __init__(self, said: bytes) -> None:
        super().__init__("a wrong greeting")
        self.said = said


class Greeting:
    """Reads the greeting of a connection; nothing that comes is parsed before it is the right one.

    It is compared in constant time, and only when all of it is there.
    """

    def __init__(self, expected: bytes) -> None:
        self._expected = expected
        self._buffer = bytearray()
        self.is_known = False

    def feed(self, data: bytes) -> bytes:
        """What came after the greeting; nothing as long as it is not whole.

        Raises:
            WrongGreeting: it is another one.
        """
        self._buffer += data
        if len(self._buffer) < len(self._expected):
            return b""
        said = bytes(self._buffer[: len(self._expected)])
        if not hmac.compare_digest(said, self._expected):
            raise WrongGreeting(said)
        self.is_known = True
        rest = bytes(self._buffer[len(self._expected) :])
        self._buffer.clear()
        return rest


class Framer:
    """Cuts a stream of bytes into frames."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole now.

        Raises:
            FrameTooLong: a length beyond the limit; the frame itself is not waited for.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if length > self._limit:
                raise FrameTooLong(f"a frame of {length} bytes; at most {self._limit} are taken")
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield body


def members_hash(members: Sequence[Rank]) -> str:
    """Names a list of members that was sent before."""
    return wire.sha256([list(rank) for rank in members])[:16]


def call_to_json(call: FenceCall, members: str) -> list[Any]:
    """A call without its members, which were sent once."""
    return [
        call.key.scope,
        call.key.generation,
        call.fence,
        call.epoch,
        call.version,
        call.digest,
        call.deadline_s,
        members,
    ]


def call_from_json(
    said: Sequence[Any], run: str, attempt: int, members: dict[str, tuple[Rank, ...]]
) -> FenceCall:
    """The call that `call_to_json` wrote; the run is that of the connection."""
    scope, generation, fence, epoch, version, digest, deadline_s, named = said
    return FenceCall(
        key=FenceKey(run, attempt, str(scope), int(generation)),
        fence=FenceName(str(fence)),
        epoch=Epoch(int(epoch)),
        version=Version(int(version)),
        digest=Digest(str(digest)),
        members=members[named],
        deadline_s=float(deadline_s),
    )


def verdict_bytes(verdict: FenceVerdict, *, with_arrivals: bool) -> bytes:
    """A verdict as JSON, made once and sent to all who wait."""
    frames = b"".join(map(encode_arrival, verdict.arrivals)).decode() if with_arrivals else ""
    match verdict:
        case Opened(ticket=ticket):
            return wire.encode(["open", ticket.count, ticket.hash, frames])
        case Broken(fence=fence, cause=cause, missing=missing):
            absent = [list(rank) for rank in missing]
            return wire.encode(["broken", fence, cause_to_json(cause), absent, frames])


class Answer(NamedTuple):
    """What a coordinator answers: to which request, which arrival, and with what."""

    request: int
    order: int | None
    judged: bool
    decided: bool
    said: Any

    @classmethod
    def decode(cls, body: bytes) -> "Answer":
        head, said = body.split(b"\n", 1)
        request, order, judged, decided = wire.decode(head)
        return cls(request, order, judged, decided, wire.decode(said))

    def head(self) -> bytes:
        return wire.encode(self[:4])

    def verdict(self, call: FenceCall) -> FenceVerdict:
        """The verdict in the words of the fence that `call` came to."""
        match self.said:
            case ["open", count, digest, frames]:
                ticket = Ticket(
                    key=call.key, fence=call.fence, epoch=call.epoch, count=count, hash=digest
                )
                return Opened(
                    ticket=ticket,
                    arrivals=tuple(decode_arrivals(frames.encode())),
                    order=self.order,
                    decided=self.decided,
                )
            case [_, fence, cause, absent, frames]:
                return Broken(
                    key=call.key,
                    fence=fence,
                    cause=cause_from_json(cause),
                    missing=ranks_from_json(absent),
                    arrivals=tuple(decode_arrivals(frames.encode())),
                    decided=self.decided,
                )
            case _:
                raise ValueError(f"no verdict: {self.said!r}")
