"""The store algorithm under a driver that chooses who moves next, and who dies between steps."""

import os
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest

from phasesync.core.fence import Lost
from phasesync.core.fence_keys import (
    Add,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Put,
    Read,
    Space,
    Tell,
    Verdict,
    Wait,
    writer,
)
from phasesync.core.fence_loss import leaving, reporting, sweeping
from phasesync.core.fence_steps import Passed, arriving, connecting, expiring, failing
from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    RoleName,
    RootCause,
    Version,
)

SPACE = Space.of("r", 0)


class DictStore:
    """A store as the steps know it: one operation at a time."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.operations: Counter[str] = Counter()

    def perform(self, operation: Any) -> Any:
        self.operations[type(operation).__name__] += 1
        return self.PERFORM[type(operation)](self, operation)

    def append(self, operation: Append) -> None:
        self.values[operation.key] = self.values.get(operation.key, b"") + operation.value

    def add(self, operation: Add) -> int:
        count = int(self.values.get(operation.key, b"0")) + operation.amount
        self.values[operation.key] = str(count).encode()
        return count

    def count(self, operation: Count) -> None:
        self.values[operation.key] = str(
            int(self.values.get(operation.key, b"0")) + operation.amount
        ).encode()

    def put(self, operation: Put) -> None:
        self.values[operation.key] = operation.value

    def get(self, operation: Get) -> bytes:
        return self.values.get(operation.key, b"")

    def wait(self, operation: Wait) -> bytes:
        return self.values[operation.key]

    def read(self, operation: Read) -> bytes | None:
        return self.values.get(operation.key)

    def compare_set(self, operation: CompareSet) -> bytes:
        return self.values.setdefault(operation.key, operation.value)

    def delete(self, operation: Delete) -> None:
        self.values.pop(operation.key, None)

    def tell(self, operation: Tell) -> None:
        pass

    PERFORM: ClassVar[dict[type, Callable[..., Any]]] = {
        Append: append,
        Add: add,
        Count: count,
        Put: put,
        Get: get,
        Wait: wait,
        Read: read,
        CompareSet: compare_set,
        Delete: delete,
        Tell: tell,
    }


Life = Generator[Any, Any, None]


@dataclass
class World:
    """Ranks that go through fences, a watcher of processes, and what was seen."""

    size: int
    generations: int
    store: DictStore = field(default_factory=DictStore)
    arrived: Counter[int] = field(default_factory=Counter)
    verdicts: dict[int, set[str]] = field(default_factory=dict)
    passes: list[tuple[Rank, int, str]] = field(default_factory=list)
    finished: set[Rank] = field(default_factory=set)
    unjudged: list[tuple[Rank, int]] = field(default_factory=list)
    waits_at: dict[Rank, int] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> list[Rank]:
        return [Rank(RoleName("t"), n) for n in range(self.size)]

    @cached_property
    def members(self) -> tuple[Rank, ...]:
        return tuple(self.ranks)

    def call(self, generation: int) -> FenceCall:
        return FenceCall(
            key=FenceKey("r", 0, "world", generation),
            fence=FenceName("f"),
            epoch=Epoch(0),
            version=Version(0),
            digest=Digest("d"),
            members=self.members,
            deadline_s=1.0,
        )

    def arrival(self, rank: Rank, generation: int) -> Arrival:
        return self.call(generation).arrival(rank, nonce=f"{rank}@{generation}", seq=generation)

    def life(self, rank: Rank) -> Life:
        """A rank goes through every generation; after a break it goes on to the next."""
        yield from connecting(SPACE, rank, 0, nonce=str(rank))
        opened: int | None = None
        register = True
        for generation in range(self.generations):
            self.waits_at[rank] = generation
            steps = arriving(
                SPACE,
                self.call(generation),
                self.arrival(rank, generation),
                register=register,
                opened_before=opened,
                wait=True,
            )
            passed = yield from self.watched(steps, generation)
            del self.waits_at[rank]
            assert isinstance(passed, Passed)
            register = isinstance(passed.answer, Broken)
            match passed.answer:
                case Opened(ticket=ticket):
                    assert self.arrived[generation] == self.size, "passed before all arrived"
                    self.verdicts.setdefault(generation, set()).add("open " + ticket.hash)
                    self.passes.append((rank, generation, ticket.hash))
                    opened = generation
                case Broken(cause=cause):
                    self.verdicts.setdefault(generation, set()).add(f"broken {cause}")
                case None:
                    self.unjudged.append((rank, generation))
        used = {"world": (max((opened or 0) - 8, 0), self.generations - 1)}
        yield from leaving(SPACE, rank, used, peers=self.size)
        self.finished.add(rank)

    def watched(self, steps: Any, generation: int) -> Generator[Any, Any, Any]:
        """The same steps; an arrival counts from the moment its frame is in the log."""
        log = SPACE.at("world", generation).log
        reply = None
        while True:
            try:
                operation = steps.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(operation, Append) and operation.key == log:
                self.arrived[generation] += 1
            reply = yield operation

    def deadline(self, rank: Rank, generation: int) -> Life:
        verdict = yield from expiring(SPACE, self.call(generation), writer(rank, 0), {})
        assert verdict is None or isinstance(verdict, Verdict)

    def report(self, rank: Rank) -> Life:
        cause = RootCause(kind="dead", ranks=(rank,), error="killed")
        yield from reporting(SPACE, Lost(rank=rank, incarnation=0, cause=cause))

    def failing(self, rank: Rank, generation: int) -> Life:
        cause = RootCause(kind="cancelled", ranks=(rank,))
        arrival = self.arrival(rank, generation)
        yield from failing(SPACE, self.call(generation), replace(arrival, cause=cause))


@dataclass
class Scheduler:
    """Chooses by chance who performs its next operation; a wait may go on when its key is there."""

    world: World
    rng: random.Random
    lives: dict[str, Life] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)

    def start(self, name: str, life: Life) -> None:
        self.lives[name] = life
        self._advance(name, None)

    def stop(self, name: str) -> None:
        self.lives.pop(name, None)
        self.pending.pop(name, None)

    def ready(self) -> list[str]:
        values = self.world.store.values
        return sorted(
            name
            for name, operation in self.pending.items()
            if not (isinstance(operation, Wait) and operation.key not in values)
        )

    def move(self) -> bool:
        ready = self.ready()
        if not ready:
            return False
        name = self.rng.choice(ready)
        self._advance(name, self.world.store.perform(self.pending.pop(name)))
        return True

    def _advance(self, name: str, reply: Any) -> None:
        try:
            self.pending[name] = self.lives[name].send(reply)
        except StopIteration:
            self.stop(name)


def check(world: World) -> None:
    """No two verdicts of one generation."""
    for generation, verdicts in world.verdicts.items():
        assert len(verdicts) == 1, f"generation {generation}: {verdicts}"


@pytest.mark.parametrize("seed", range(150))
def test_without_faults_all_pass_and_no_key_is_left(seed: int) -> None:
    world = World(size=1 + seed % 4, generations=14)
    scheduler = Scheduler(world, random.Random(seed))
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    while scheduler.move():
        pass
    assert len(world.passes) == world.size * world.generations
    check(world)
    assert world.store.values == {}


@pytest.mark.parametrize("seed", range(150))
def test_a_rank_that_dies_anywhere_is_known_without_a_deadline(seed: int) -> None:
    rng = random.Random(seed)
    world = World(size=2 + seed % 3, generations=4)
    scheduler = Scheduler(world, rng)
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    victim = rng.choice(world.ranks)
    for _ in range(rng.randrange(120)):
        scheduler.move()
    died = str(victim) in scheduler.lives
    scheduler.stop(str(victim))
    if died:
        for _ in range(rng.randrange(12)):
            scheduler.move()
        scheduler.start("launcher", world.report(victim))
    while scheduler.move():
        pass
    check(world)
    survivors = {rank for rank in world.ranks if rank != victim}
    assert survivors <= world.finished, f"somebody waits for ever: {world.waits_at}"
    assert not world.unjudged
    scheduler.start("launcher", sweeping(SPACE))
    while scheduler.move():
        pass
    assert world.store.values == {}


@pytest.mark.parametrize("seed", range(60))
def test_an_older_incarnation_that_leaves_last_leaves_no_key(seed: int) -> None:
    """It leaves while the last of the run sweeps, or when that is done."""
    world = World(size=2, generations=2)
    scheduler = Scheduler(world, random.Random(seed))
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    while len(world.finished) < seed % 3 and scheduler.move():
        pass
    for _ in range(seed % 7):
        scheduler.move()
    older = leaving(SPACE, world.ranks[0], {"world": (0, 1)}, peers=world.size)
    scheduler.start("older", older)
    while scheduler.move():
        pass
    assert world.finished == set(world.ranks)
    assert world.store.values == {}


@pytest.mark.parametrize("seed", range(40))
def test_an_older_incarnation_that_arrives_after_the_run_was_swept_leaves_no_key(seed: int) -> None:
    """It writes who the members are once more, and is the only one of them to leave."""
    world = World(size=2, generations=2)
    scheduler = Scheduler(world, random.Random(seed))
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    while len(world.finished) < world.size and scheduler.move():
        pass
    rank = world.ranks[0]

    def older() -> Generator[Any, Any, Any]:
        arrival = replace(world.arrival(rank, 1), nonce="older")
        yield from arriving(
            SPACE, world.call(1), arrival, register=True, opened_before=None, wait=False
        )
        yield from leaving(SPACE, rank, {"world": (0, 1)}, peers=world.size)

    for n in range(1 + seed % 2):  # With two of them there are as many leavers as members.
        scheduler.start(f"older {n}", older())
    while scheduler.move():
        pass
    assert world.store.values == {}


@pytest.mark.parametrize("seed", range(60))
def test_a_second_process_that_fails_while_the_run_is_swept_leaves_no_key(seed: int) -> None:
    """It has said long ago who waits where, and writes only that it failed before it leaves."""
    world = World(size=2, generations=2)
    scheduler = Scheduler(world, random.Random(seed))
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    while len(world.finished) < 1 + seed % 2 and scheduler.move():
        pass
    for _ in range(seed % 7):
        scheduler.move()
    rank = world.ranks[0]

    def second() -> Life:
        yield from world.failing(rank, 1)
        yield from leaving(SPACE, rank, {"world": (0, 1)}, peers=world.size)

    scheduler.start("second", second())
    while scheduler.move():
        pass
    assert world.finished == set(world.ranks)
    assert world.store.values == {}


def test_a_deadline_after_the_run_was_swept_decides_nothing() -> None:
    """An incarnation waits at the last fence while another of its rank passes, and all leave."""
    world = World(size=2, generations=2)
    scheduler = Scheduler(world, random.Random(1))
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    while scheduler.move():
        pass
    got: list[Any] = []

    def older() -> Generator[Any, Any, Any]:
        got.append((yield from expiring(SPACE, world.call(1), writer(world.ranks[0], 1), {})))

    scheduler.start("older", older())
    while scheduler.move():
        pass
    assert got == [None]
    assert world.store.values == {}


@pytest.mark.parametrize("seed", range(200))
def test_deadlines_cancellations_and_deaths_never_split_a_verdict(seed: int) -> None:
    rng = random.Random(1000 + seed)
    world = World(size=2 + seed % 3, generations=12)
    scheduler = Scheduler(world, rng)
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    for step in range(4000):
        if rng.random() < 0.02 and world.waits_at:
            rank, generation = rng.choice(sorted(world.waits_at.items()))
            kind = rng.choice(("deadline", "cancel"))
            life = world.deadline if kind == "deadline" else world.failing
            scheduler.start(f"{kind} {rank} {step}", life(rank, generation))
        if rng.random() < 0.002 and len(scheduler.lives) > 1:
            scheduler.stop(rng.choice(sorted(scheduler.lives)))
        if not scheduler.move():
            for rank, generation in sorted(world.waits_at.items()):
                if str(rank) in scheduler.lives:
                    scheduler.start(f"last {rank}", world.deadline(rank, generation))
            if not scheduler.ready():
                break
    check(world)
    alive = {rank for rank in world.ranks if str(rank) in scheduler.lives}
    assert not alive, f"somebody waits for ever: {world.waits_at}"


def test_a_sleeper_is_not_released_by_an_old_verdict() -> None:
    """It arrives again at each generation that was, with the keys half gone or all gone."""
    for generation in range(13):
        world = World(size=2, generations=14)
        scheduler = Scheduler(world, random.Random(generation))
        for rank in world.ranks:
            scheduler.start(str(rank), world.life(rank))
        while world.arrived[13] < 2:
            scheduler.move()
        sleeper = world.ranks[0]
        late = replace(world.arrival(sleeper, generation), nonce="late")
        got: list[Any] = []

        def sleep(late: Arrival = late, generation: int = generation, got: Any = got) -> Life:
            call = World(size=2, generations=14).call(generation)
            got.append(
                (
                    yield from arriving(
                        SPACE, call, late, register=False, opened_before=None, wait=True
                    )
                )
            )

        scheduler.start("sleeper", sleep())
        while scheduler.move():
            pass
        assert got, f"generation {generation}: it waits for its deadline"
        answers = [passed.answer for passed in got]
        assert all(not isinstance(answer, Opened) for answer in answers), (generation, answers)


@pytest.mark.parametrize("seed", range(100))
def test_who_comes_while_a_fence_is_tidied_up_is_told_at_once(seed: int) -> None:
    """A late incarnation arrives operation by operation while keys are removed under it."""
    rng = random.Random(seed)
    world = World(size=1 + seed % 3, generations=14)
    scheduler = Scheduler(world, rng)
    for rank in world.ranks:
        scheduler.start(str(rank), world.life(rank))
    generation = rng.randrange(5)
    while world.arrived[generation + rng.choice((2, 9))] < world.size:
        scheduler.move()
    late = replace(world.arrival(world.ranks[0], generation), incarnation=1, nonce="late")
    got: list[Any] = []

    def come() -> Life:
        steps = arriving(
            SPACE, world.call(generation), late, register=True, opened_before=None, wait=True
        )
        got.append((yield from steps))

    scheduler.start("late", come())
    while scheduler.move():
        pass
    assert world.finished == set(world.ranks)
    assert [passed.answer for passed in got] == [None]


def test_a_long_run_keeps_a_fixed_number_of_keys() -> None:
    """`PHASESYNC_EPOCHS=100000` makes it as long as a long training."""
    world = World(size=2, generations=int(os.environ.get("PHASESYNC_EPOCHS", "5000")))
    lives = [world.life(rank) for rank in world.ranks]
    pending = [next(life) for life in lives]
    most = 0
    while lives:
        for n in reversed(range(len(lives))):
            operation = pending[n]
            if isinstance(operation, Wait) and operation.key not in world.store.values:
                continue
            most = max(most, len(world.store.values))
            try:
                pending[n] = lives[n].send(world.store.perform(operation))
            except StopIteration:
                del lives[n], pending[n]
    assert len(world.passes) == 2 * world.generations
    assert most <= 2 * 10 + 8
    assert world.store.values == {}


@pytest.mark.parametrize(("size", "expected"), [(8, 65), (64, 457), (1024, 7177)])
def test_a_fence_costs_seven_messages_a_rank(size: int, expected: int) -> None:
    """Messages on the wire: append and put are one way, wait is a wait and a get, read looks and
    then gets, the rest is a request and a reply. Counted at the tenth fence, when tidying up has
    become regular. That is 7 N, and 9 for deciding and tidying up; none goes to more than one
    key, so what is asked of the store does not grow faster than N."""
    messages = {"Append": 1, "Put": 1, "Get": 2, "Wait": 4, "Read": 4, "Tell": 0}
    world = World(size=size, generations=11)
    lives = {rank: world.life(rank) for rank in world.ranks}
    pending: dict[Rank, Any] = {rank: next(life) for rank, life in lives.items()}
    counted: list[Counter[str]] = []
    for generation in range(10):
        before = Counter(world.store.operations)
        verdict = SPACE.at("world", generation).verdict
        for rank, life in lives.items():
            while not (isinstance(pending[rank], Wait) and verdict not in world.store.values):
                following = SPACE.at("world", generation + 1).log
                operation = pending[rank]
                if isinstance(operation, Append) and operation.key == following:
                    break
                pending[rank] = life.send(world.store.perform(operation))
        for rank, life in lives.items():
            if isinstance(pending[rank], Wait) and pending[rank].key == verdict:
                pending[rank] = life.send(world.store.perform(pending[rank]))
        counted.append(Counter(world.store.operations) - before)
    sent = sum(messages.get(name, 2) * n for name, n in counted[-1].items())
    assert sent == expected
