"""Faults by chance: whatever happens, no split verdict, no early pass, no hang, nothing left.

    python -m tests.fences.faults.chance --faults 10000 [--first 0] [--over store tcp ...]

Scenarios are numbered; one that failed is played again alone by `--first NUMBER --faults 1`.
Most play many ranks in one event loop; `in_processes` does it with real ones.
"""

import asyncio
import random
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from phasesync.core.model import Arrival, Digest, Epoch, FenceCall, Rank, RoleName, RootCause
from phasesync.errors import FenceBroken, StaleArrival, StoreLost
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FenceWorld, arrives

__all__ = ("GROUNDS", "KINDS", "SHARES", "Tally", "play_many")

DEADLINE_S = 0.5
GRACE_S = 1.0
GENERATIONS = 5
LAG_S_MAX = 0.25  # A loop that stood still for longer makes deadlines pass by itself.
TOGETHER = 20

Tally = Counter[str]
Make = Callable[[str, Rank, int], FenceTransport]


@dataclass(frozen=True)
class Ground:
    """What scenarios are played over: how to get an endpoint, and how its rank dies."""

    make: Make
    lose: Callable[["Scenario", Rank], Awaitable[None]]
    keys: Callable[[], int] = lambda: 0
    together: int = TOGETHER
    prepare: Callable[[str], None] = lambda run: None


@dataclass(eq=False)
class Scenario:
    """One run of a few ranks, with faults at chance places."""

    number: int
    ground: Ground
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    outcomes: dict[int, dict[Rank, Any]] = field(default_factory=lambda: defaultdict(dict))
    entered: dict[int, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    faulty: dict[tuple[Rank, int], str] = field(default_factory=dict)
    injected: Tally = field(default_factory=Counter)
    slowest_s: float = 0.0
    lost: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.number)
        self.world = FenceWorld(self.ground.make, self.rng.randint(2, 5), run=self.run)
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            where = (self.rng.choice(self.world.ranks), self.rng.randrange(GENERATIONS))
            self.faulty[where] = self.rng.choice(tuple(KINDS))

    async def play(self) -> None:
        self.ground.prepare(self.run)
        await self.world.open()
        try:
            await asyncio.gather(*(self._live(rank) for rank in self.world.ranks))
        finally:
            await self.world.close()
        self._check()

    async def _live(self, rank: Rank) -> None:
        for generation in range(GENERATIONS):
            call = self.world.call(generation, deadline_s=DEADLINE_S)
            arrival = arrives(call, rank, payload=(("param_offload", "true"),))
            await asyncio.sleep(self.rng.random() * 0.02)
            kind = self.faulty.get((rank, generation))
            if kind is not None:
                self.injected[kind] += 1
            act = KINDS[kind] if kind else Scenario.arrive
            if await act(self, call, arrival) is GONE:
                return

    async def arrive(
        self, call: FenceCall, arrival: Arrival, end: Any = None, *, count: bool = True
    ) -> object:
        """Arrive, and note what came of it, and whether it came too early."""
        generation = call.key.generation
        self.entered[generation].add(arrival.rank)
        since = time.monotonic()
        outcome: Any
        try:
            opened = await (end or self.world.ends[arrival.rank]).arrive(call, arrival)
            outcome = ("open", opened.ticket.hash)
        except FenceBroken as error:
            outcome = ("broken", error.cause)
        except StaleArrival:
            outcome = ("stale", None)
        except StoreLost as error:
            outcome = ("lost", str(error))
        self.slowest_s = max(self.slowest_s, time.monotonic() - since)
        if outcome[0] == "open":
            missing = set(call.members) - self.entered[generation]
            assert not missing, f"passed before {missing} arrived"
        if count or outcome[0] == "open":
            self.outcomes[generation][arrival.rank] = outcome
        return None

    def _check(self) -> None:
        for generation, outcomes in self.outcomes.items():
            verdicts = {o for o in outcomes.values() if o[0] in ("open", "broken")}
            assert len(verdicts) <= 1, f"generation {generation}: {outcomes}"
            self.lost |= "lost" in {kind for kind, _ in outcomes.values()}

    def misblamed(self) -> Iterator[str]:
        """Causes that name a rank which had done nothing, or nobody."""
        for generation, outcomes in self.outcomes.items():
            guilty = {rank for rank, at in self.faulty if at <= generation}
            for cause in {said for kind, said in outcomes.values() if kind == "broken"}:
                named = {rank for rank in (*cause.ranks, *cause.missing) if rank != STRANGER}
                both = cause.kind in ("digest", "disagreement") and "trainer/" in cause.error
                if not named <= guilty or not (cause.ranks or both):
                    yield f"generation {generation} names {cause}"


GONE = object()
STRANGER = Rank(RoleName("trainer"), 99)


async def _late(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    await asyncio.sleep(DEADLINE_S * 1.3)
    return await self.arrive(call, arrival)


async def _skips(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """It comes to the next fence later than the others to this one, so that they know first."""
    await asyncio.sleep(DEADLINE_S * 0.4)
    return None


async def _dies(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    await self.ground.lose(self, arrival.rank)
    return GONE


async def _dies_waiting(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """It arrives and dies before it can have heard; the fence may open without it."""
    waiting = asyncio.ensure_future(self.arrive(call, arrival, count=False))
    for _ in range(self.rng.randrange(6)):
        await asyncio.sleep(0)
    await self.ground.lose(self, arrival.rank)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    return GONE


async def _leaves(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """It closes its transport and says goodbye, in the middle of the run."""
    await self.world.ends[arrival.rank].close()
    return GONE


async def _fails(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    cause = RootCause(kind="failed", ranks=(arrival.rank,), error_type="ValueError", error="no")
    return await self.arrive(call, replace(arrival, cause=cause))


async def _options(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """Another option makes another digest; each such rank has its own."""
    digest = Digest(f"other {arrival.rank.number}")
    payload = (("param_offload", f"other {arrival.rank.number}"),)
    return await self.arrive(call, replace(arrival, digest=digest, payload=payload))


async def _epoch(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    return await self.arrive(call, replace(arrival, epoch=Epoch(99 + arrival.rank.number)))


async def _twice(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    again = asyncio.ensure_future(self.arrive(call, replace(arrival, nonce="again"), count=False))
    await self.arrive(call, arrival)
    return await again


async def _restarts(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """A newer incarnation comes while the old one is still there."""
    newer = await self.world.newcomer(arrival.rank, 1)
    again = asyncio.ensure_future(
        self.arrive(call, replace(arrival, incarnation=1), newer, count=False)
    )
    await self.arrive(call, arrival)
    await again
    return GONE


async def _cancelled(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """Cancelled after so many turns of the loop, or after a while."""
    arriving = asyncio.ensure_future(self.arrive(call, arrival))
    for _ in range(self.rng.randrange(16)):
        await asyncio.sleep(0)
    await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.01, 0.05)))
    arriving.cancel()
    with suppress(asyncio.CancelledError):
        await arriving
    return None


async def _stranger(self: Scenario, call: FenceCall, arrival: Arrival) -> object:
    """Somebody who is no member of the fence arrives at it as well."""
    end = await self.world.newcomer(STRANGER, 0)
    strange = replace(arrival, rank=STRANGER, nonce="strange")
    knocking = asyncio.ensure_future(end.arrive(call, strange))
    await self.arrive(call, arrival)
    knocking.cancel()
    await asyncio.gather(knocking, return_exceptions=True)
    return None


KINDS: Mapping[str, Callable[[Scenario, FenceCall, Arrival], Awaitable[object]]] = {
    "late": _late,
    "skips": _skips,
    "dies": _dies,
    "dies waiting": _dies_waiting,
    "leaves": _leaves,
    "fails": _fails,
    "options": _options,
    "epoch": _epoch,
    "twice": _twice,
    "restarts": _restarts,
    "cancelled": _cancelled,
    "stranger": _stranger,
}


# --- Grounds ---------------------------------------------------------------------------------


async def _told(scenario: Scenario, rank: Rank) -> None:
    """Whoever watches processes tells; the endpoint itself never says goodbye.

    A rank that leaves cannot tell: it may have closed its own endpoint by then.
    """
    leavers = {each for (each, _), kind in scenario.faulty.items() if kind == "leaves"}
    stay = [each for each in scenario.world.ranks if each != rank and each not in leavers]
    world = scenario.world
    teller = world.ends[stay[0]] if stay else await world.newcomer(STRANGER, 0)
    cause = RootCause(kind="dead", ranks=(rank,), error="killed")
    await teller.report_lost(cause, incarnation=0)


async def _cut(scenario: Scenario, rank: Rank) -> None:
    """The connection closes without a goodbye, as when a process is killed."""
    end: Any = scenario.world.ends[rank]
    transport = getattr(end, "_inner", end)._transport
    transport.abort()


@asynccontextmanager
async def _inprocess() -> AsyncIterator[Ground]:
    hubs: dict[str, InProcessFences] = {}

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return hubs.setdefault(run, InProcessFences()).endpoint(rank, incarnation)

    yield Ground(make, _told)


@asynccontextmanager
async def _tcp() -> AsyncIterator[Ground]:
    coordinator = TcpCoordinator(token="secret")
    await coordinator.start()

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return TcpFences(
            coordinator.address, rank=rank, incarnation=incarnation, run=run, token="secret"
        )

    try:
        yield Ground(make, _cut, keys=lambda: coordinator.peers + len(coordinator._hubs))
    finally:
        await coordinator.close()


def _over_store(kind: str, together: int) -> Callable[[], Any]:
    @asynccontextmanager
    async def ground() -> AsyncIterator[Ground]:
        dist: Any = import_module("torch.distributed")
        store = (
            dist.HashStore()
            if kind == "HashStore"
            else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )

        def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
            return StoreFences(store, rank=rank, incarnation=incarnation, run=run)

        yield Ground(make, _told, keys=store.num_keys, together=together)

    return ground


@asynccontextmanager
async def _ray() -> AsyncIterator[Ground]:
    """The coordinators are actors; the ranks of a scenario share this process."""
    ray: Any = import_module("ray")
    fences: Any = import_module("phasesync.fences.ray")

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        made: FenceTransport = fences.RayFences(rank=rank, run=run, incarnation=incarnation)
        return made

    def actors() -> int:
        return len(ray.util.list_named_actors(all_namespaces=True))

    def prepare(run: str) -> None:
        fences.start_coordinator(run, idle_exit_s=1.0)

    yield Ground(make, _cut, keys=actors, together=4, prepare=prepare)


GROUNDS: Mapping[str, Callable[[], Any]] = {
    "inprocess": _inprocess,
    "tcp": _tcp,
    "hash store": _over_store("HashStore", 12),
    "tcp store": _over_store("TCPStore", 3),
    "ray": _ray,
}
# Of all faults, so many over each; the rest is for real processes.
SHARES: Mapping[str, float] = {
    "inprocess": 0.38,
    "tcp": 0.34,
    "hash store": 0.12,
    "tcp store": 0.05,
    "ray": 0.01,
}


# --- Many ------------------------------------------------------------------------------------


def play_many(over: str, first: int, faults: int) -> Tally:
    """Play scenarios from `first` on until so many faults were injected; which, and how many.

    Raises:
        AssertionError: a promise was broken; the message names the scenario.
    """
    return asyncio.run(_play_many(over, first, faults))


async def _play_many(over: str, first: int, faults: int) -> Tally:
    tally: Tally = Counter()
    async with GROUNDS[over]() as ground:
        keys, sockets = ground.keys(), _sockets()
        number = first
        while tally.total() < faults:
            left = faults - tally.total()
            batch = [Scenario(number + i, ground) for i in range(min(ground.together, left))]
            number += len(batch)
            await _play_batch(over, batch)
            for scenario in batch:
                tally += scenario.injected
            await _nothing_left(ground, keys, sockets, f"{over}: up to scenario {number}")
    return tally


async def _play_batch(over: str, batch: Sequence[Scenario]) -> None:
    lag_s = 0.0

    async def tick() -> None:
        nonlocal lag_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lag_s = max(lag_s, time.monotonic() - before - 0.01)

    ticking = asyncio.ensure_future(tick())
    played = await asyncio.gather(*(s.play() for s in batch), return_exceptions=True)
    ticking.cancel()
    for scenario, failed in zip(batch, played, strict=True):
        said = f"{over}, scenario {scenario.number}, {scenario.faulty}"
        if failed is not None:
            raise AssertionError(f"{said}: {failed!r}") from failed
        limit_s = DEADLINE_S + GRACE_S + 0.3 + 3 * lag_s
        assert scenario.slowest_s < limit_s, f"{said}: waited {scenario.slowest_s:.1f} s"
        if lag_s < LAG_S_MAX:
            wrong = list(scenario.misblamed())
            assert not wrong, f"{said}: {wrong}"
    # A loop that stands still for longer than the grace may take the transport for lost, and so
    # may a rank whose new connection hangs in a name service: now and then, on one of many.
    lost = sum(scenario.lost for scenario in batch)
    assert lag_s > LAG_S_MAX or lost <= 1, f"{lost} of {len(batch)} lost their transport"


async def _nothing_left(ground: Ground, keys: int, sockets: int, where: str) -> None:
    """No key, actor, connection, thread or task of any scenario; they have a moment to end."""
    until = time.monotonic() + 15
    while (left := _left(ground, keys, sockets)) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    assert not left, f"{where}: left behind {left}"


def _left(ground: Ground, keys: int, sockets: int) -> dict[str, Any]:
    left = {
        "keys": max(ground.keys() - keys, 0),
        "sockets": max(_sockets() - sockets, 0),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("phasesync.")],
        "tasks": [task for task in asyncio.all_tasks() if task is not asyncio.current_task()],
    }
    return {name: value for name, value in left.items() if value and value not in ([], 0)}


def _sockets() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += str(entry.readlink()).startswith("socket:")
    return count
