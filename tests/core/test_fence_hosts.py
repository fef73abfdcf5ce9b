"""What a fence costs where one rank of each host brings the arrivals of all: counted, not timed."""

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
from tests.core.test_fence_steps import SPACE, DictStore, World

from phasesync.core.fence import encode_arrival
from phasesync.core.fence_gather import Came, Gathering, passed_at_once
from phasesync.core.fence_keys import Add, CompareSet, Get, Read, Tell, Wait, writer
from phasesync.core.fence_steps import Brought, admitting, bringing, watching
from phasesync.core.model import Opened

HOST = 8
MESSAGES = {"Append": 1, "Count": 2, "Put": 1, "Get": 2, "Wait": 4, "Read": 4, "Tell": 0}
ASKS = (Add, CompareSet, Get, Read, Wait)  # These are waited for.
BEFORE = 10  # Fences until tidying up has become regular.


class Timed:
    """A store on which each message takes one step of time, and all may be under way at once."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.there: dict[str, int] = {}

    def run(self, steps: Generator[Any, Any, Any], since: int) -> tuple[Any, int]:
        """What comes of the steps, and when it is known."""
        reply, now, told, ahead = None, since, None, ""
        try:
            while True:
                operation = steps.send(reply)
                if isinstance(operation, Tell):
                    self.store.perform(operation)
                    reply, told = None, now
                    continue
                reply = self.store.perform(operation)
                came = now + 1
                if isinstance(operation, Wait):
                    came = max(came, self.there[operation.key])
                is_known = isinstance(operation, Get) and operation.key == ahead
                ahead = getattr(operation, "ahead", "")
                if isinstance(operation, ASKS) and not is_known:
                    # A wait is a wait and a get; a read looks and then gets.
                    rounds = 2 if isinstance(operation, Wait | Read) else 1
                    now = came + 2 * rounds - 1
                self.there.setdefault(operation.key, came)
        except StopIteration as end:
            return end.value, now if told is None else told


def one_fence(world: World, timed: Timed, generation: int) -> int:
    """All arrive at time 0; when the last of them hears that it may pass."""
    call = world.call(generation)
    hosts = [world.ranks[at : at + HOST] for at in range(0, world.size, HOST)]
    brought: list[tuple[Brought, int, str]] = []
    for ranks in hosts:
        arrivals = [world.arrival(rank, generation) for rank in ranks]
        lines = b"".join(map(encode_arrival, arrivals))
        me = writer(ranks[0], 0)
        steps = bringing(
            SPACE,
            call,
            arrivals,
            me,
            lines=lines,
            whole=arrivals,
            whole_bytes=len(lines),
            register=generation == 0,
            opened_before=generation - 1 if generation else None,
        )
        came, at = timed.run(steps, 1)  # The last of the host has handed its arrival over.
        brought.append((came, at, me))
    latest = 0
    for came, at, me in brought:
        verdict, heard = came.verdict, at
        if verdict is None:
            verdict, heard = timed.run(watching(SPACE, call, me, register=False), at)
        assert isinstance(verdict.read_by(call), Opened)
        latest = max(latest, heard + 1)  # The others of the host are told.
    return latest


def costs(size: int) -> tuple[int, int]:
    """Messages to the store, and the longest chain, of a fence of so many ranks."""
    world, timed = World(size=size, generations=BEFORE + 1), Timed()
    timed.store.values[SPACE.boot] = b"here"
    chain = 0
    before: Counter[str] = Counter()
    for generation in range(BEFORE + 1):
        before = Counter(timed.store.operations)
        timed.there.clear()
        chain = one_fence(world, timed, generation)
    asked = Counter(timed.store.operations) - before
    return sum(MESSAGES.get(name, 2) * count for name, count in asked.items()), chain


@pytest.mark.parametrize(("size", "expected"), [(8, 14), (64, 65), (1024, 905)])
def test_a_host_costs_seven_messages_however_many_ranks_it_has(size: int, expected: int) -> None:
    """7 a host, and 9 for deciding and tidying up. Besides, each other rank of a host is told once
    and tells once: 14, 112 and 1,792 messages that leave no host."""
    messages, _ = costs(size)
    assert messages == expected
    assert 2 * (size - size // HOST) == {8: 14, 64: 112, 1024: 1792}[size]


def test_the_longest_chain_does_not_grow_with_the_ranks() -> None:
    """Hand over, count, read the log, decide; wake, read, tell: ten messages in a row."""
    assert costs(8)[1] == 4, "on one host: hand over, decide, tell"
    assert costs(64)[1] == costs(512)[1] == costs(1024)[1] == 10


def test_a_rank_that_brings_all_decides_for_all() -> None:
    world, timed = World(size=3, generations=1), Timed()
    arrivals = [world.arrival(rank, 0) for rank in world.ranks]
    lines = b"".join(map(encode_arrival, arrivals))
    named: dict[str, Any] = {"lines": lines, "whole_bytes": len(lines), "register": True}
    steps = bringing(
        SPACE, world.call(0), arrivals, "t/0.0", whole=arrivals, opened_before=None, **named
    )
    timed.store.values[SPACE.boot] = b"here"
    brought, _ = timed.run(steps, 0)
    assert isinstance(brought.ruling, Opened)
    assert brought.order == 3
    assert not brought.verdict.plain, "others must look whether they were among them"


def test_a_sleeper_with_all_arrivals_in_its_hands_decides_nothing_when_it_wakes() -> None:
    """The fence broke and was tidied up: its verdict is taken back before it is told."""
    world, timed = World(size=2, generations=1), Timed()
    timed.store.values[SPACE.boot] = b"here"
    timed.store.values[SPACE.head("world")] = b"12"
    before = dict(timed.store.values)
    arrivals = [world.arrival(rank, 0) for rank in world.ranks]
    lines = b"".join(map(encode_arrival, arrivals))
    steps = bringing(
        SPACE,
        world.call(0),
        arrivals,
        "t/0.0",
        lines=lines,
        whole=arrivals,
        whole_bytes=len(lines),
        register=False,
        opened_before=None,
    )
    brought, _ = timed.run(steps, 0)
    assert brought.ruling is None
    assert brought.order is None
    assert timed.store.values == before


def test_who_comes_after_the_last_batch_is_in_nobodys_ruling() -> None:
    """A second arrival of a rank, while the first is under way, does not pass with it."""
    world, timed = World(size=2, generations=1), Timed()
    timed.store.values[SPACE.boot] = b"here"
    call = world.call(0)
    heard: list[Any] = []
    gathering = Gathering(call)
    arrivals = [world.arrival(rank, 0) for rank in world.ranks]
    for each in arrivals:
        gathering.take(Came(each, encode_arrival(each), heard.append), register=False)
    batch = gathering.batch()
    assert batch is not None
    again = replace(arrivals[1], nonce="again")
    gathering.take(Came(again, encode_arrival(again), heard.append), register=False)
    assert not gathering.is_brought
    steps = bringing(
        SPACE,
        call,
        batch.arrivals,
        "t/0.0",
        lines=batch.lines,
        whole=batch.whole,
        whole_bytes=batch.whole_bytes,
        register=False,
        opened_before=None,
    )
    brought, _ = timed.run(steps, 0)
    words = {came.arrival.nonce: word for came, word in gathering.told(brought)}
    assert [word.judged for word in words.values()] == [True, True, False]
    assert passed_at_once(call, again, words["again"]) is None, "it has to look for itself"
    admitted, _ = timed.run(admitting(SPACE, call, again, None, brought.verdict), 0)
    assert admitted.answer is None
