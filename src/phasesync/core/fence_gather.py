"""What a rank has in its hands that brings the arrivals of its host to the store.

Who has come, what is brought, and what each is told: bookkeeping, without a socket or a clock. It
may forget everything at any moment: whoever hears no more from it comes by itself, with the nonce
that it had, and so counts once.
"""

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple, TypeAlias

from phasesync.core import wire
from phasesync.core.fence_keys import Verdict
from phasesync.core.fence_messages import call_to_json
from phasesync.core.fence_steps import Brought, Passed, plainly
from phasesync.core.model import Arrival, FenceCall, Opened, Rank

__all__ = (
    "Batch",
    "Came",
    "Gathering",
    "Hear",
    "Word",
    "head_of",
    "passed_at_once",
    "word_of",
    "words",
)


class Word(NamedTuple):
    """What a rank is told by who brought its arrival: its place among them, whether it is known to
    have been judged, the verdict, and to who decided it what was judged."""

    order: int | None
    judged: bool
    verdict: Verdict
    ruling: Opened | None = None


Hear: TypeAlias = Callable[[Word], Any]


class Came(NamedTuple):
    """An arrival that was handed over, its frame, and who is to hear of it."""

    arrival: Arrival
    line: bytes
    hear: Hear


class Batch(NamedTuple):
    """What is to be brought now; `whole` are all that were, if all before have been counted."""

    arrivals: tuple[Arrival, ...]
    lines: bytes
    whole: tuple[Arrival, ...]
    whole_bytes: int
    register: bool


class Gathering:
    """The arrivals at one fence instance that one rank brings."""

    __slots__ = ("_brought", "_came", "_orders", "_ranks", "_register", "call")

    def __init__(self, call: FenceCall) -> None:
        self.call = call
        self._came: list[Came] = []
        self._ranks: set[Rank] = set()
        self._brought = 0
        self._orders: list[int] = []
        self._register = False

    @property
    def ranks(self) -> frozenset[Rank]:
        """Who has come."""
        return frozenset(self._ranks)

    def take(self, came: Came, *, register: bool) -> None:
        """Somebody has come; `register` says that it must be known who waits here."""
        self._came.append(came)
        self._ranks.add(came.arrival.rank)
        self._register |= register

    def waits_for(self, expected: Set[Rank]) -> bool:
        """Whether one of the members that are expected here has not come."""
        return len(self._ranks) < len(self.call.members) and not self._ranks.issuperset(
            rank for rank in self.call.members if rank in expected
        )

    @property
    def is_brought(self) -> bool:
        """Whether all who came are brought."""
        return self._brought == len(self._came)

    def batch(self) -> Batch | None:
        """Who has come and is not brought; they are from now on."""
        fresh = self._came[self._brought :]
        if not fresh:
            return None
        are_counted = len(self._orders) == self._brought
        self._brought = len(self._came)
        register, self._register = self._register, False
        return Batch(
            tuple(came.arrival for came in fresh),
            b"".join([came.line for came in fresh]),
            tuple(came.arrival for came in self._came) if are_counted else (),
            sum(len(came.line) for came in self._came),
            register,
        )

    def counted(self, batch: Batch, order: int) -> None:
        """A batch has been brought, the last of it as number `order`."""
        self._orders += range(order - len(batch.arrivals) + 1, order + 1)

    def told(self, brought: Brought) -> Iterator[tuple[Came, Word]]:
        """What each of those who came is to hear; who came first hears first.

        Who came since the last batch was brought is in nobody's ruling.
        """
        assert brought.verdict is not None
        for at, came in enumerate(self._came):
            ruling = brought.ruling if at < self._brought else None
            is_known = ruling is None and at < len(self._orders)
            order = self._orders[at] if is_known else None if ruling is None else at + 1
            yield came, Word(order, ruling is not None, brought.verdict, ruling)


def passed_at_once(call: FenceCall, arrival: Arrival, word: Word) -> Passed | None:
    """What a word means for an arrival, where that can be said without a look at the log."""
    order, judged, verdict, ruling = word
    if ruling is not None:
        opened = Opened(ticket=ruling.ticket, arrivals=ruling.arrivals, order=order, decided=True)
        return Passed(verdict, opened)
    if judged and not verdict.payload and verdict.broken is None:
        return Passed(verdict, Opened(ticket=verdict.ticket(call), order=order))
    answer = plainly(call, arrival, order, verdict)
    return None if answer is None else Passed(verdict, answer)


# --- What ranks of one host say to each other: a head of JSON, a line break, and what follows ----


def head_of(what: str, request: int, *, register: bool, call: FenceCall, members: str) -> bytes:
    """The head of a rank's request: to bring its arrival, or to watch a fence."""
    return wire.encode((what, request, register, call_to_json(call, members)))


def words(request: int, word: Word, verdict: bytes) -> tuple[bytes, bytes]:
    """A word as it is sent: its head, and the verdict as it stands in the store."""
    return wire.encode((request, word.order, word.judged)), verdict


def word_of(body: bytes) -> tuple[int, Word]:
    """The request that is answered, and the word."""
    head, text = body.split(b"\n", 1)
    request, order, judged = wire.decode(head)
    return request, Word(order, judged, Verdict.decode(text))
