"""Ranks of one host as processes: one brings the arrivals of all, over a store.

What they say to each other goes through the same medium, under keys of its own. That the leader is
dead is known from its connection: another process closes it when the leader has crashed.
"""

from collections.abc import Callable, Generator
from typing import Any

from phasesync.checker.messages import Note, Process, View
from phasesync.core.fence import encode_arrival
from phasesync.core.fence_gather import Came, Gathering, Word, passed_at_once, word_of, words
from phasesync.core.fence_keys import CompareSet, Put, Tell, Wait, writer
from phasesync.core.fence_steps import (
    Brought,
    Passed,
    admitting,
    arriving,
    bringing,
    connecting,
    watching,
)
from phasesync.core.model import Opened, Rank

from .lives import SPACE, arrival, call, noted, told

Life = Generator[Any, Any, Any]


def handed(rank: Rank, generation: int) -> str:
    return f"here/{rank}/{generation}/handed"


def answer(rank: Rank, generation: int) -> str:
    return f"here/{rank}/{generation}/answer"


def follower(size: int, rank: Rank, generations: int) -> Callable[[], Life]:
    """It hands its arrival over; when its connection closes instead, it comes by itself."""

    def steps() -> Life:
        yield from connecting(SPACE, rank, 0, nonce=str(rank))
        opened: int | None = None
        by_itself = False
        for generation in range(generations):
            asked, own = call(size, generation), arrival(rank, generation)
            passed: Passed | None = None
            if not by_itself:
                yield Put(handed(rank, generation), encode_arrival(own))
                yield Note(("arrived", generation))
                said = yield Wait(answer(rank, generation))
                by_itself = said == CLOSED
                if not by_itself:
                    _, word = word_of(said)
                    passed = passed_at_once(asked, own, word)
                    if passed is None:
                        passed = yield from admitting(SPACE, asked, own, word.order, word.verdict)
            if passed is None:
                passed = yield from noted(
                    arriving(SPACE, asked, own, register=True, opened_before=opened, wait=True),
                    generation,
                )
            yield told(generation, passed.answer)
            opened = generation if isinstance(passed.answer, Opened) else opened

    return steps


CLOSED = b"closed"


def leader(
    size: int, rank: Rank, generations: int, followers: tuple[Rank, ...], *, together: bool
) -> Callable[[], Life]:
    """It takes what is handed over, and brings it: all `together`, or each as it comes."""

    def steps() -> Life:
        yield from connecting(SPACE, rank, 0, nonce=str(rank))
        opened: int | None = None
        me = writer(rank, 0)
        for generation in range(generations):
            asked, own = call(size, generation), arrival(rank, generation)
            gathering = Gathering(asked)
            heard: list[Word] = []
            yield Note(("arrived", generation))
            gathering.take(Came(own, encode_arrival(own), heard.append), register=True)
            brought: Brought | None = None
            for each in followers:
                if not together:
                    brought = yield from bring(gathering, me, opened, brought)
                line = yield Wait(handed(each, generation))
                came = Came(arrival(each, generation), line, each)  # type: ignore[arg-type]
                gathering.take(came, register=False)
            brought = yield from bring(gathering, me, opened, brought)
            if brought.verdict is None:
                verdict = yield from watching(SPACE, asked, me, register=False)
                brought = Brought(None, verdict)
            yield from tell(gathering, brought, generation)
            passed = passed_at_once(asked, own, heard[0])
            if passed is None:
                word = heard[0]
                passed = yield from admitting(SPACE, asked, own, word.order, word.verdict)
            yield told(generation, passed.answer)
            opened = generation if isinstance(passed.answer, Opened) else opened

    return steps


def bring(gathering: Gathering, me: str, opened: int | None, before: Brought | None) -> Life:
    """Bring what has come, as the transport does; a fence with a verdict is not brought again."""
    batch = gathering.batch()
    assert batch is not None
    steps = bringing(
        SPACE,
        gathering.call,
        batch.arrivals,
        me,
        lines=batch.lines,
        whole=batch.whole,
        whole_bytes=batch.whole_bytes,
        register=batch.register,
        opened_before=opened,
    )
    brought: Brought = yield from silently(steps)
    if brought.order is not None:
        gathering.counted(batch, brought.order)
    return before if before is not None and before.verdict is not None else brought


def silently(steps: Life) -> Life:
    """The steps without what they tell ahead of tidying up."""
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as end:
            return end.value
        reply = None if isinstance(operation, Tell) else (yield operation)


def tell(gathering: Gathering, brought: Brought, generation: int) -> Life:
    """Answer all who came; an answer comes once, whatever else closes the connection."""
    assert brought.verdict is not None
    text = brought.verdict.encode()
    for came, word in gathering.told(brought):
        if isinstance(came.hear, Rank):
            body = b"\n".join(words(1, word, text))
            yield CompareSet(answer(came.hear, generation), body)
        else:
            came.hear(word)


def closing(rank: Rank, followers: tuple[Rank, ...], generations: int) -> Process:
    """The kernel closes the connections of a leader that has crashed."""

    def steps() -> Life:
        for each in followers:
            for generation in range(generations):
                yield CompareSet(answer(each, generation), CLOSED)

    return Process(
        f"kernel of {rank}", steps, when=lambda view: str(rank) in view.crashed | view.cut
    )


def crashed_before_a_word(view: View, rank: Rank) -> bool:
    """Whether the leader died with arrivals in its hands."""
    return str(rank) in view.crashed and not any(
        note[0] in {"open", "broken"} for note in view.notes.get(str(rank), ())
    )
