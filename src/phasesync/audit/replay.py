"""A run's journals into one audit: by epochs where all adds up, line by line where it does not.

An epoch may be taken as a whole only if every rank ended it, its shape was judged before, and the
plan's fences alone order what may not meet; else each line goes through the kernel and all rules.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from phasesync.audit.answer import Answer
from phasesync.audit.journals import JournalAudit
from phasesync.audit.merge import Merge, Stream
from phasesync.audit.rounds import (
    Block,
    Healthy,
    Numbered,
    Shape,
    is_separate,
    shape_of,
    unordered,
)
from phasesync.audit.traces import RawLine
from phasesync.core.protocol import Protocol

__all__ = ("EpochFile", "audit_journals")


_SHARED = ("members", "devices", "place", "groups", "options")


class EpochFile(NamedTuple):
    """One journal, an epoch at a time: its lines, and those that could not be read."""

    name: str
    epochs: Iterator[tuple[list[Numbered], Sequence[RawLine]]]


def audit_journals(
    run: str,
    files: Sequence[EpochFile],
    members: Iterable[str],
    protocol: Callable[[str], Protocol | None],
    *,
    declared: bool = True,
) -> Answer:
    """The verdict on the journals of one run; `members` are the ranks that should have one."""
    names = tuple(members)
    audit = JournalAudit(run, names, protocol, declared=declared)
    _Rounds(audit, files, set(names)).go()
    return audit.answer()


class _Good(NamedTuple):
    """A line that was read, as `Merge` takes it."""

    number: int
    data: dict[str, Any] | None
    problem: str | None = None


class _Rounds:
    """Feeds a run to its audit: whole epochs where all adds up, line by line where anything is
    odd.
    """

    def __init__(self, audit: JournalAudit, files: Sequence[EpochFile], members: set[str]) -> None:
        self._audit = audit
        self._files = files
        self._members = members
        self._healthy = Healthy()
        self._seqs = [-1] * len(files)
        self._names = [""] * len(files)
        self._ordered: bool | None = None
        self._plan: dict[str, Any] | None = None

    def go(self) -> None:
        while True:
            blocks: list[Block | None] = []
            for file in self._files:
                found = next(file.epochs, None)
                if found is None:
                    blocks.append(None)
                    continue
                lines, bad = found
                for raw in bad:
                    self._audit.bad(file.name, raw)
                if self._ordered is None:
                    self._share(lines)
                blocks.append(Block(lines, not bad and bool(lines)))
            if all(block is None for block in blocks):
                return
            if not self._round(blocks):
                return

    def _share(self, lines: list[Numbered]) -> None:
        """All ranks write the same plan; thousands of copies of it need not be kept."""
        for _, line in lines[:8]:
            if line.get("event") != "plan":
                continue
            if self._plan is None:
                self._plan = line
            for field in _SHARED:
                if line.get(field) == self._plan.get(field):
                    line[field] = self._plan.get(field)

    def _round(self, blocks: list[Block | None]) -> bool:
        """Take in one block of each rank; False once the rest was fed line by line."""
        whole = [block for block in blocks if block is not None]
        if not self._aligned(blocks, whole):
            self._rest(blocks)
            return False
        shapes = [shape_of(block, seq + 1) for block, seq in zip(whole, self._seqs, strict=True)]
        if self._adds_up(whole, shapes):
            for name, file, block in zip(self._names, self._files, whole, strict=True):
                self._audit.skip(name, file.name, block)
        else:
            before = self._audit.oddities()
            self._feed(blocks)
            if self._audit.oddities() == before:
                for name, shape, block in zip(self._names, shapes, whole, strict=True):
                    if shape is not None:
                        self._healthy.learn(name, shape[0], block)
        for index, block in enumerate(whole):
            seq = block.lines[-1][1].get("seq")
            self._seqs[index] = seq if type(seq) is int else -2
        return True

    def _aligned(self, blocks: list[Block | None], whole: list[Block]) -> bool:
        """Whether all ranks that should be there end the same epoch in this round."""
        if len(whole) != len(blocks) or not all(block.whole for block in whole):
            return False
        ends = [block.lines[-1][1] for block in whole]
        first = ends[0]
        if any(
            end.get("event") != "epoch.end"
            or end.get("epoch") != first.get("epoch")
            or end.get("attempt") != first.get("attempt")
            for end in ends
        ):
            return False
        self._names = [f"{end.get('role')}/{end.get('rank')}" for end in ends]
        return len(set(self._names)) == len(self._names) and set(self._names) == self._members

    def _adds_up(self, blocks: list[Block], shapes: list[tuple[Shape, int] | None]) -> bool:
        if not self._is_ordered():
            return False
        for name, shape in zip(self._names, shapes, strict=True):
            if shape is None or not self._healthy.knows(name, shape[0]):
                return False
        try:
            return Healthy.adds_up(blocks, self._names)
        except (KeyError, TypeError, IndexError):
            return False

    def _is_ordered(self) -> bool:
        """Whether fences order everything in this plan, found once it is known."""
        if self._ordered is None:
            conformance = self._audit.conformance
            plan = conformance.plan if conformance is not None else None
            if plan is None:
                return False
            self._ordered = is_separate(plan) and not unordered(plan, 1)
        return self._ordered

    def _feed(self, blocks: Sequence[Block | None]) -> None:
        streams = [
            Stream(file.name, [_Good(*line) for line in block.lines])
            for file, block in zip(self._files, blocks, strict=True)
            if block is not None
        ]
        for file, number, line in Merge(streams, self._audit.bad):
            self._audit.feed(file, number, line)

    def _rest(self, blocks: Sequence[Block | None]) -> None:
        """Line by line from here on: ranks are no longer in step."""
        streams = [
            Stream(file.name, self._lines(file, block))
            for file, block in zip(self._files, blocks, strict=True)
        ]
        for file, number, line in Merge(streams, self._audit.bad):
            self._audit.feed(file, number, line)

    @staticmethod
    def _lines(file: EpochFile, block: Block | None) -> Iterator[RawLine]:
        for number, line in block.lines if block is not None else ():
            yield _Good(number, line)
        for lines, bad in file.epochs:
            yield from bad
            for number, line in lines:
                yield _Good(number, line)
