"""An epoch of one rank in brief: what other ranks must agree with, and the shape of the rest.

It is made of the rank's own lines alone, so that any process can make it. Nothing that a rule could
object to may be left out: an epoch with a line that is odd in any way has no gist, and is gone
through line by line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

from phasesync.audit.merge import wall_ns
from phasesync.audit.traces import RawLine
from phasesync.core.wire import sha256

__all__ = (
    "FIXED",
    "SAME",
    "WEIGHED",
    "Block",
    "Gist",
    "Key",
    "RankLog",
    "Shape",
    "gist_of",
    "shared",
)

Key = tuple[str, int]
Shape = tuple[tuple[object, ...], ...]

# Equal on all lines of an epoch, where the first has them: a line of somebody else is odd.
SAME: Final = (
    "level", "run", "role", "rank", "incarnation", "host", "pid", "attempt", "digest", "epoch",
    "version",
)  # fmt: skip
# What a phase's lines may say that rules weigh: part of the shape, or else no gist.
FIXED: Final = ("device_complete", "exclusive", "group", "tags")
WEIGHED: Final = frozenset(
    {
        *FIXED,
        "bucket",
        "bytes",
        "checksum",
        "expected_bytes",
        "expected_checksum",
        "expected_params",
        "kv_version",
        "output",
        "params",
        "received_bytes",
        "slot",
    }
)


class Gist(NamedTuple):
    """What one rank says of one epoch, apart from when: plain values, so that a pipe carries it.

    `arrived` holds (fence instance, seq, free bytes), `passed` (instance, hash, count), `judged`
    (instance, rows, their hash), `joined` (instance, members) where the caller's join stands for
    the fence, `clock` the last fence passed with the wall times of arrival and pass.
    """

    role: str
    rank: int
    incarnation: int
    attempt: object
    digest: object
    host: str
    epoch: int
    version: int
    seq: int
    length: int
    shape: Shape
    arrived: tuple[tuple[Key, int, object], ...]
    passed: tuple[tuple[Key, str, int], ...]
    judged: tuple[tuple[Key, list[list[Any]], str], ...]
    joined: tuple[tuple[Key, int], ...]
    clock: tuple[Key, int, int] | None


class Block(NamedTuple):
    """A piece of one journal: an epoch from `epoch.begin` to `epoch.end`, or what is between two.

    It has `length` lines of `size` bytes. `epoch` is None for lines between epochs. `after` is set
    where a journal begins anew behind parts that were rotated away: the last epoch before it.
    `place` is for whoever made it, and `read`: how far its file was read for it, if compressed.
    """

    file: str
    length: int
    size: int
    lines: Callable[[], Iterable[RawLine]]
    epoch: int | None = None
    version: int | None = None
    gist: Gist | None = None
    last: int = 0
    after: int | None = None
    place: Any = None
    read: int | None = None


class RankLog(NamedTuple):
    """The journal of one rank, all its files in order. `again` reads from one of its blocks on,
    in this process, where another one made them.
    """

    name: str
    blocks: Iterator[Block]
    again: Callable[[Block], Iterator[Block]] | None = None


def gist_of(lines: Sequence[Mapping[str, Any]]) -> Gist | None:
    """The gist of a whole epoch's lines; None where any of them is odd."""
    try:
        return _gist(lines)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None


@lru_cache(maxsize=64)
def _same(fields: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return itemgetter("event", "seq", *fields)


def _gist(lines: Sequence[Mapping[str, Any]]) -> Gist | None:
    first = lines[0]
    seq = first["seq"]
    if first["event"] != "epoch.begin" or not _is_ended(lines):
        return None
    version = first.get("version", first["epoch"])
    if first["level"] != "info" or not type(seq) is type(first["epoch"]) is type(version) is int:
        return None
    fields = _same(tuple([name for name in SAME if name in first]))
    same = fields(first)[2:]
    shape: list[tuple[object, ...]] = []
    arrived: list[tuple[Key, int, object]] = []
    passed: list[tuple[Key, str, int]] = []
    judged: list[tuple[Key, list[list[Any]], str]] = []
    joined: list[tuple[Key, int]] = []
    came: Mapping[str, Any] = {}
    went: Mapping[str, Any] = {}
    for at, line in enumerate(lines, seq):
        found = fields(line)
        event = found[0]
        if found[1] != at or found[2:] != same:
            return None
        if event in ("phase.start", "phase.end"):
            if line.keys().isdisjoint(WEIGHED):
                shape.append((event, line["phase"], len(line), line.get("caller")))
            else:
                shape.append(_weighed(event, line))
        elif event == "fence.arrive":
            caller = line.get("caller")
            shape.append((event, line["fence"], len(line), caller))
            if line.get("status", "ok") != "ok":
                return None
            if caller != "outside":
                came = line
                key = (line["scope"], line["generation"])
                arrived.append((key, at, line.get("free_bytes")))
        elif event == "fence.pass":
            key = (line["scope"], line["generation"])
            ticket = line.get("ticket")
            shape.append((event, line["fence"], len(line), line.get("caller")))
            if ticket is None:
                joined.append((key, line["joined"]))
            else:
                went = line
                passed.append((key, ticket["hash"], ticket["count"]))
        elif event == "fence.decide":
            if line["verdict"] != "open":
                return None
            rows = line["judged"]
            judged.append(((line["scope"], line["generation"]), rows, sha256(rows)))
        elif event != "phase.progress":
            # Who comes last decides, and progress comes as often as it likes: no part of a shape.
            shape.append((event, None, len(line)))
    return Gist(
        role=first["role"],
        rank=first["rank"],
        incarnation=first.get("incarnation", 0),
        attempt=first.get("attempt"),
        digest=first.get("digest"),
        host=str(first.get("host", "")),
        epoch=first["epoch"],
        version=version,
        seq=seq,
        length=len(lines),
        shape=shared(tuple(shape)),
        arrived=tuple(arrived),
        passed=tuple(passed),
        judged=tuple(judged),
        joined=tuple(joined),
        clock=_clock(came, went),
    )


def _is_ended(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing follows the epoch's end but what its caller did: that is told afterwards."""
    for line in reversed(lines):
        if line["event"] == "epoch.end":
            return True
        if line.get("caller") != "outside":
            return False
    return False


@lru_cache(maxsize=1024)
def shared(shape: Shape) -> Shape:
    """One value for all equal shapes: thousands of ranks have the same."""
    return shape


def _weighed(event: object, line: Mapping[str, Any]) -> tuple[object, ...]:
    """The shape of a phase's line with values: those that are the same in every epoch."""
    told = [name for name in line if name in WEIGHED]
    if any(name not in FIXED for name in told):
        raise ValueError("its values are judged each time")
    return (event, line["phase"], len(line), line.get("caller"), *((n, str(line[n])) for n in told))


def _clock(came: Mapping[str, Any], went: Mapping[str, Any]) -> tuple[Key, int, int] | None:
    """When the rank came to its last fence and left it, by its host's clock."""
    if not went or (came["scope"], came["generation"]) != (went["scope"], went["generation"]):
        return None
    key = (went["scope"], went["generation"])
    return (key, wall_ns(came["timestamp"]), wall_ns(went["timestamp"]))
