"""Memory cells (device x resource), and what an action does to them at each moment of its life.

A cell is one number. What a verb does is a row of `_EFFECTS`; nothing else changes memory.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from phasesync.core.plan import Act, Plan, Touch
from phasesync.core.protocol import Verb

__all__ = (
    "INPUTS",
    "KEEPS",
    "NONE",
    "PARTIAL",
    "SHARED",
    "Mapped",
    "Moment",
    "apply",
    "cell",
    "content_of",
    "input_lost",
    "mapped_of",
    "synchronised",
    "touched",
)


class Mapped(IntEnum):
    """Whether memory is mapped; `unknown` and `lost` count as mapped for `never`."""

    NO = 0
    YES = 1
    UNKNOWN = 2
    LOST = 3


class Moment(StrEnum):
    """When in an action's life an effect falls."""

    START = "start"
    END = "end"
    FAIL = "fail"
    SYNC = "sync"  # the device was synchronised: what was enqueued has happened


NONE = -1
PARTIAL = -2
KEEPS = -3
_VERSION = -4

#: Verbs that may be in progress together on one cell: all of them leave it as it is for others.
SHARED = frozenset((Verb.NEEDS, Verb.USES, Verb.FILLS, Verb.HOLDS, Verb.AGREES))


def cell(mapped: Mapped, content: int = NONE) -> int:
    """A memory cell as one number."""
    return mapped | (content + 2) << 2


def mapped_of(value: int) -> Mapped:
    """Whether the cell is mapped."""
    return Mapped(value & 3)


def content_of(value: int) -> int:
    """The cell's content: NONE, PARTIAL or a weight version."""
    return (value >> 2) - 2


_EFFECTS: dict[tuple[Verb, Moment], tuple[int, int]] = {
    (Verb.ACQUIRES, Moment.START): (Mapped.UNKNOWN, KEEPS),
    (Verb.ACQUIRES, Moment.END): (Mapped.YES, NONE),
    (Verb.ACQUIRES, Moment.FAIL): (Mapped.UNKNOWN, NONE),
    (Verb.RELEASES, Moment.START): (Mapped.UNKNOWN, KEEPS),
    (Verb.RELEASES, Moment.END): (Mapped.NO, NONE),
    (Verb.RELEASES, Moment.FAIL): (Mapped.UNKNOWN, NONE),
    (Verb.RELEASES, Moment.SYNC): (Mapped.NO, NONE),
    (Verb.WRITES, Moment.START): (KEEPS, PARTIAL),
    (Verb.WRITES, Moment.END): (KEEPS, _VERSION),
    (Verb.WRITES, Moment.FAIL): (KEEPS, PARTIAL),
    (Verb.FILLS, Moment.START): (KEEPS, _VERSION),
    (Verb.FILLS, Moment.END): (KEEPS, _VERSION),
    (Verb.FILLS, Moment.FAIL): (KEEPS, _VERSION),
    (Verb.DISCARDS, Moment.START): (KEEPS, PARTIAL),
    (Verb.DISCARDS, Moment.END): (KEEPS, NONE),
    (Verb.DISCARDS, Moment.FAIL): (KEEPS, PARTIAL),
}


def apply(plan: Plan, value: int, touch: Touch, moment: Moment, version: int) -> int:
    """The cell after `touch` at `moment` of an action that works on weight `version`."""
    if touch.verb is Verb.ENSURES:
        return _ensured(plan, value, touch, moment)
    row = _EFFECTS.get((touch.verb, moment))
    if row is None:
        return value
    mapped, content = row
    if content == _VERSION:
        content = version
    if content != KEEPS and not plan.content[touch.cell]:
        content = NONE
    return cell(
        mapped_of(value) if mapped == KEEPS else Mapped(mapped),
        content_of(value) if content == KEEPS else content,
    )


def _ensured(plan: Plan, value: int, touch: Touch, moment: Moment) -> int:
    """Recovery puts a cell back to `start:`; what is there stays, what failed is unknown."""
    goal = Mapped.YES if plan.start[touch.cell] else Mapped.NO
    if mapped_of(value) is goal:
        return value
    if moment is Moment.END:
        content = PARTIAL if plan.content[touch.cell] and goal is Mapped.YES else NONE
        return cell(goal, content)
    return cell(Mapped.UNKNOWN, content_of(value))


INPUTS = frozenset(
    (Verb.NEEDS, Verb.USES, Verb.WRITES, Verb.FILLS, Verb.DISCARDS, Verb.HOLDS, Verb.AGREES)
)


def input_lost(cells: Sequence[int], act: Act) -> bool:
    """Whether a crash took what the action works on: then it fails, and nobody broke a rule."""
    return any(
        touch.verb in INPUTS and cells[touch.cell] & 3 == Mapped.LOST for touch in act.touches
    )


def touched(
    plan: Plan, cells: tuple[int, ...], act: Act, moment: Moment, version: int
) -> tuple[int, ...]:
    if not act.touches:
        return cells
    after = list(cells)
    for touch in act.touches:
        if moment is Moment.END and act.enqueued and touch.verb is Verb.RELEASES:
            continue
        after[touch.cell] = apply(plan, after[touch.cell], touch, moment, version)
    return tuple(after)


def synchronised(plan: Plan, cells: tuple[int, ...], pending: tuple[int, ...]) -> tuple[int, ...]:
    if not pending:
        return cells
    after = list(cells)
    for number in pending:
        after[number] = apply(plan, after[number], Touch(Verb.RELEASES, number), Moment.SYNC, 0)
    return tuple(after)
