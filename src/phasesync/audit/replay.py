"""A run's journals into one audit: by epochs where all adds up, line by line where it does not.

An epoch may be taken as a whole only if every rank ended it, its shape was judged before, and the
plan's fences alone order what may not meet; else each line goes through the kernel and all rules.
The last epoch that was taken so is held back: where the next one is odd, both are gone through.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from phasesync.audit.answer import Answer
from phasesync.audit.gist import Block, Gist, RankLog
from phasesync.audit.healthy import Healthy, Tally
from phasesync.audit.journals import JournalAudit
from phasesync.audit.merge import Merge, Stream
from phasesync.audit.traces import RawLine
from phasesync.core.protocol import Protocol

__all__ = ("audit_journals",)

_SPAN: Final = 2  # epochs that are gone through where one is odd; more while it goes on
_SPAN_MAX: Final = 1 << 20

_Key = tuple[int, int]


def audit_journals(
    run: str,
    logs: Sequence[RankLog],
    members: Iterable[str],
    protocol: Callable[[str], Protocol | None],
    *,
    declared: bool = True,
) -> Answer:
    """The verdict on the journals of one run; `members` are the ranks that should have one."""
    names = tuple(members)
    audit = JournalAudit(run, names, protocol, declared=declared)
    _Rounds(audit, logs, set(names)).go()
    return audit.answer()


class _Chain:
    """One rank's journal, and how far it is read. Blocks come in the order of their keys: epoch,
    and whether they are of it or of what is between it and the next.
    """

    __slots__ = ("_log", "blocks", "epoch", "head", "held", "key", "name", "seq", "version")

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self.name = log.name
        self.blocks = log.blocks
        self.head: Block | None = None
        self.held: Block | None = None
        self.key: _Key = (-1, 1)
        self.epoch = -1
        self.seq: tuple[int, int] | None = None
        self.version: int | None = None
        self.advance()
        if self.head is not None and self.head.after is not None:
            self.epoch = self.head.after
            self.key = (self.epoch, 1)

    def advance(self) -> None:
        self.head = next(self.blocks, None)
        if self.head is not None and self.head.epoch is not None:
            self.epoch = self.head.epoch
            self.key = (self.epoch, 0)
        else:
            self.key = (self.epoch, 1)

    def here(self) -> None:
        """From the first block that was not judged on, have this process read the journal."""
        first = self.held or self.head
        if self._log.again is None or first is None:
            return
        self.blocks = self._log.again(first)
        self._log = self._log._replace(again=None)
        if self.held is not None:
            self.held = next(self.blocks, None)
        if self.head is not None:
            self.head = next(self.blocks, None)

    def until(self, stop: _Key | None) -> Iterator[RawLine]:
        """Its lines, of what is held back and of all blocks before `stop`."""
        if self.held is not None:
            yield from self.held.lines()
            self.held = None
        while self.head is not None and (stop is None or self.key < stop):
            yield from self.head.lines()
            self.version = self.head.version
            self.advance()
        self.seq = None


class _Rounds:
    """Feeds a run to its audit, a round of blocks at a time."""

    def __init__(self, audit: JournalAudit, logs: Sequence[RankLog], members: set[str]) -> None:
        self._audit = audit
        self._chains = [_Chain(log) for log in logs]
        self._names = [each.name for each in self._chains]
        self._is_full = len(set(self._names)) == len(self._names) and set(self._names) == members
        self._healthy: Healthy | None = None
        self._tallies: dict[int, Tally] = {}
        self._span = _SPAN

    def go(self) -> None:
        self._rotated()
        while (here := self._lowest()) is not None:
            key, chains = here
            if key[1]:
                self._settle()
                self._feed([(each.name, each.until((key[0], 2))) for each in chains])
            elif not self._is_ordered():
                self._stretch(None)
            elif self._is_healthy(chains):
                self._hold(chains)
            else:
                self._odd(key[0])
        self._settle()

    def _lowest(self) -> tuple[_Key, list[_Chain]] | None:
        live = [each for each in self._chains if each.head is not None]
        if not live:
            return None
        key = min(each.key for each in live)
        return key, [each for each in live if each.key == key]

    def _rotated(self) -> None:
        """Leave out what not every rank has any more: the epochs that some have rotated away."""
        heads = [(each, each.head) for each in self._chains if each.head is not None]
        after = [head.after for _, head in heads if head.after is not None]
        if not after:
            return
        for each in self._chains:
            while each.head is not None and each.key < (max(after), 1):
                self._audit.omit(each.name, each.head)
                each.advance()
        self._audit.rotated(max(after))

    # ------------------------------------------------------------------ whole epochs

    def _is_ordered(self) -> bool:
        """Whether fences order everything in this plan, found once it is known."""
        if self._healthy is None:
            conformance = self._audit.conformance
            plan = conformance.plan if conformance is not None else None
            if plan is None:
                return False
            self._healthy = Healthy(plan)
            self._is_full = self._is_full and set(self._names) == set(self._healthy.members)
        return self._healthy.is_ordered

    def _is_healthy(self, chains: Sequence[_Chain]) -> bool:
        """Whether an epoch of all ranks can be taken as a whole."""
        epoch = chains[0].key[0]
        tally = self._tallies.pop(epoch, None)
        if not self._is_full or len(chains) != len(self._chains):
            return False
        gists = [each.head.gist for each in chains if each.head is not None]
        known = [gist for gist in gists if gist is not None]
        if len(known) != len(chains) or not self._follows(chains, known):
            return False
        tally = tally or self._new_tally()
        for name, gist in zip(self._names, known, strict=True):
            if name not in tally.names:
                tally.add(name, gist)
        if not tally.is_sound():
            return False
        return not tally.unknown or self._tried(chains, known, tally.unknown.values())

    def _new_tally(self) -> Tally:
        assert self._healthy is not None
        return self._healthy.tally()

    def _take(self, each: _Chain) -> None:
        """Count the next epoch of a rank in with its peers', now that it has just been read."""
        if each.head is None or each.head.gist is None:
            return
        tally = self._tallies.get(each.head.gist.epoch)
        if tally is None:
            tally = self._tallies[each.head.gist.epoch] = self._new_tally()
        tally.add(each.name, each.head.gist)

    def _follows(self, chains: Sequence[_Chain], gists: Sequence[Gist]) -> bool:
        """Whether each goes on where its journal was, and all are of one attempt and plan."""
        first = gists[0]
        for each, gist in zip(chains, gists, strict=True):
            if each.seq is None:
                each.seq = self._audit.position(each.name)
            if (
                (gist.incarnation, gist.seq - 1) != each.seq
                or (gist.attempt, gist.digest) != (first.attempt, first.digest)
                or (each.version is not None and gist.version < each.version)
                or f"{gist.role}/{gist.rank}" != each.name
            ):
                return False
        return True

    def _tried(
        self, chains: Sequence[_Chain], gists: Sequence[Gist], unknown: Iterable[str]
    ) -> bool:
        """Go through new shapes line by line, each where it first occurs, apart from the run."""
        healthy = self._healthy
        assert healthy is not None
        sample = healthy.sample(self._names, unknown)
        names = [self._names[at] for at in sample]
        trial = self._audit.trial([(self._names[at], gists[at]) for at in sample])
        streams = [Stream(chains[at].name, _lines(chains[at].head)) for at in sample]
        for file, number, line in Merge(streams, trial.bad, healthy.absent(names)):
            trial.feed(file, number, line)
        if not trial.is_clean():
            return False
        for at in sample:
            healthy.learn(self._names[at], gists[at].shape)
        return True

    def _hold(self, chains: Sequence[_Chain]) -> None:
        """Take the last epoch as a whole, and keep this one until the next was looked at."""
        self._settle()
        for each in chains:
            head = each.head
            assert head is not None
            assert head.gist is not None
            each.held, each.version = head, head.version
            each.seq = (head.gist.incarnation, head.gist.seq + head.gist.length - 1)
            each.advance()
            self._take(each)

    def _settle(self) -> None:
        held = [(each.name, each.held) for each in self._chains if each.held is not None]
        self._audit.clocks.met(block.gist for _, block in held if block.gist is not None)
        for name, block in held:
            self._audit.skip(name, block)
        for each in self._chains:
            each.held = None

    # ------------------------------------------------------------------ line by line

    def _odd(self, epoch: int) -> None:
        """Go through this epoch and some more, and through the one before it."""
        before = self._audit.oddities()
        self._stretch((epoch + self._span, 0))
        odd = self._audit.oddities() != before
        self._span = min(self._span * 2, _SPAN_MAX) if odd else _SPAN

    def _stretch(self, stop: _Key | None) -> None:
        self._tallies.clear()
        for each in self._chains:
            each.here()
        self._feed([(each.name, each.until(stop)) for each in self._chains])

    def _feed(self, streams: Iterable[tuple[str, Iterable[RawLine]]]) -> None:
        for file, number, line in Merge([Stream(*each) for each in streams], self._audit.bad):
            self._audit.feed(file, number, line)


def _lines(block: Block | None) -> Iterable[RawLine]:
    return block.lines() if block is not None else ()
