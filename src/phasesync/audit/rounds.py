"""Whole epochs at a time: what every rank did as its program says, under tickets that add up.

Line by line is for what is odd. An epoch whose lines have a shape that was judged before, in which
all tickets of a fence agree with the judged list and with each rank's own arrival, cannot break a
property: that is proved for the plan once, from the fences alone, whatever the clocks say.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from typing import Any, Final, NamedTuple

from phasesync.core.kernel import SHARED
from phasesync.core.plan import Act, Plan, Wait
from phasesync.core.wire import sha256

__all__ = (
    "Block",
    "Healthy",
    "Numbered",
    "Shape",
    "Unordered",
    "is_separate",
    "shape_of",
    "unordered",
)

Numbered = tuple[int, dict[str, Any]]
Shape = tuple[tuple[object, object, int], ...]
_INFO: Final = {"info"}
# Whoever comes last decides, and progress comes as often as it likes: no part of a shape.
_ANYBODY: Final = frozenset({"fence.decide", "phase.progress"})
_SHAPES_MAX: Final = 65536
_VALUES: Final = frozenset(
    {
        "checksum",
        "device_complete",
        "exclusive",
        "expected_bytes",
        "expected_checksum",
        "expected_params",
        "group",
        "kv_version",
        "output",
        "params",
        "received_bytes",
        "tags",
    }
)


class Block(NamedTuple):
    """One epoch of one rank: its lines, from the one after the last epoch to `epoch.end`."""

    lines: list[Numbered]
    whole: bool


class Healthy:
    """Knows the shapes that were judged, and tells whether a round of blocks needs no more."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, Shape], None] = {}

    def learn(self, name: str, shape: Shape, block: Block) -> None:
        """This shape was gone through line by line, and nothing was found.

        Lines whose values matter, and not their shape, are gone through every time.
        """
        if len(self._shapes) < _SHAPES_MAX and not any(
            key in _VALUES for _, line in block.lines for key in line
        ):
            self._shapes[(name, shape)] = None

    def knows(self, name: str, shape: Shape) -> bool:
        return (name, shape) in self._shapes

    @staticmethod
    def adds_up(blocks: Sequence[Block], members: Sequence[str]) -> bool:
        """Whether all tickets of a round are of what was judged, and that of all who came."""
        hashes: dict[tuple[object, object], str] = {}
        counts: dict[tuple[object, object], int] = {}
        arrived: dict[tuple[object, object], dict[str, tuple[Any, Any, Any]]] = {}
        judged: dict[tuple[object, object], Any] = {}
        for name, block in zip(members, blocks, strict=True):
            for _, line in block.lines:
                event = line["event"]
                if event == "fence.pass":
                    ticket = line.get("ticket")
                    if ticket is None:
                        return False
                    key = (line["scope"], line["generation"])
                    if hashes.setdefault(key, ticket["hash"]) != ticket["hash"]:
                        return False
                    counts[key] = ticket["count"]
                elif event == "fence.arrive":
                    if line["status"] != "ok":
                        return False
                    key = (line["scope"], line["generation"])
                    known = arrived.get(key)
                    if known is None:
                        known = arrived[key] = {}
                    known[name] = (line["incarnation"], line["seq"], line.get("free_bytes"))
                elif event == "fence.decide":
                    if line["verdict"] != "open":
                        return False
                    judged[(line["scope"], line["generation"])] = line["judged"]
        for key, found in hashes.items():
            here = arrived.get(key, {})
            rows = judged.get(key)
            if rows is None or counts[key] != len(rows) or len(here) != len(rows):
                return False
            for row in rows:
                own = here.get(row[0])
                if own is None or row[2] != "ok" or (row[1], row[3], row[4]) != own:
                    return False
            if sha256(rows) != found:
                return False
        return True


def shape_of(block: Block, seq: int) -> tuple[Shape, int] | None:
    """What a block's lines are, apart from their numbers, and the last `seq`; None if any is odd.

    `seq` is the number that its first line must have.
    """
    if not block.whole:
        return None
    lines = [line for _, line in block.lines]
    try:
        last = seq + len(lines)
        if [line["seq"] for line in lines] != list(range(seq, last)):
            return None
        if {line["level"] for line in lines} != _INFO:
            return None
        shape = tuple(
            [
                (line["event"], line.get("phase") or line.get("fence"), len(line))
                for line in lines
                if line["event"] not in _ANYBODY
            ]
        )
    except (KeyError, TypeError):
        return None
    return shape, last - 1


class Unordered(NamedTuple):
    """Two actions that may not meet, and between which no fence stands."""

    one: int
    act: Act
    other: int
    other_act: Act


def unordered(plan: Plan, most: int = 8) -> list[Unordered]:
    """Pairs of actions, this epoch's or the next one's, that luck alone keeps apart."""
    found: list[Unordered] = []
    checked: set[tuple[tuple[str, ...], ...]] = set()
    for part in (part for _, groups in plan.groups for part in groups):
        alike = tuple(tuple(step[0] for step in plan.programs[member]) for member in part)
        if alike in checked:
            continue
        checked.add(alike)
        for one, other in combinations(part, 2):
            found += islice(_loose(plan, one, other), most - len(found))
            if len(found) >= most:
                return found
    return found


def is_separate(plan: Plan) -> bool:
    """Whether no device is touched by two groups, so that each can be judged alone."""
    owner: dict[int, int] = {}
    width = len(plan.protocol.resources)
    parts = [part for _, groups in plan.groups for part in groups]
    for number, part in enumerate(parts):
        for member in part:
            for act, _ in _acts(plan, member):
                for touch in act.touches:
                    if owner.setdefault(touch.cell // width, number) != number:
                        return False
    return bool(parts)


def _acts(plan: Plan, member: int) -> Iterator[tuple[Act, int]]:
    """The actions of two epochs of a rank, with their places."""
    steps = plan.programs[member]
    for epoch in range(2):
        for at, step in enumerate(steps):
            if isinstance(step, Act) and step.touches:
                yield step, epoch * len(steps) + at


def _fences(plan: Plan, member: int) -> dict[int, list[int]]:
    """Where in two epochs a rank comes to the fences of each scope."""
    places: dict[int, list[int]] = {}
    steps = plan.programs[member]
    for epoch in range(2):
        for at, step in enumerate(steps):
            if isinstance(step, Wait):
                places.setdefault(step.scope, []).append(epoch * len(steps) + at)
    return places


def _loose(plan: Plan, one: int, other: int) -> Iterator[Unordered]:
    """The pairs of actions of two ranks that may not meet and have no fence between them."""
    mine, theirs = _fences(plan, one), _fences(plan, other)
    common = [
        pair
        for scope, places in mine.items()
        if scope in theirs
        for pair in zip(places, theirs[scope], strict=False)
    ]
    for a, p in _acts(plan, one):
        for b, q in _acts(plan, other):
            if _conflict(plan, a, b) and not any(
                (p < f and g < q) or (q < g and f < p) for f, g in common
            ):
                yield Unordered(one, a, other, b)


def _conflict(plan: Plan, a: Act, b: Act) -> bool:
    """Whether two actions may not be in progress at once, or in the wrong order."""
    width = len(plan.protocol.resources)
    cells = {touch.cell: touch.verb for touch in b.touches}
    for touch in a.touches:
        verb = cells.get(touch.cell)
        if verb is not None and not (verb in SHARED and touch.verb in SHARED):
            return True
        for pair in plan.never_on[touch.cell // width]:
            if touch.cell in pair.cells and any(
                cell in cells for cell in pair.cells if cell != touch.cell
            ):
                return True
    return False
