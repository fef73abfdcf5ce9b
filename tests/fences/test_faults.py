"""Faults by chance: whatever happens, no split verdict, no early pass, no hang, nothing left.

`PHASESYNC_FAULTS=10000 pytest tests/fences/test_faults.py` runs as many scenarios; a seed that
failed is run again alone by its number.
"""

import asyncio
import os
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest

from phasesync.core.model import Arrival, Digest, Epoch, FenceCall, Rank, RootCause
from phasesync.errors import FenceBroken, StaleArrival, StoreLost
from phasesync.fences.base import FenceTransport
from phasesync.fences.inprocess import InProcessFences
from phasesync.fences.store import StoreFences
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FenceWorld, arrives
from tests.fences.processes import (
    Part,
    hosted,
    rank_of,
    results,
    running,
    store_host,
    store_rank,
    tcp_host,
    tcp_rank,
)

COUNT = int(os.environ.get("PHASESYNC_FAULTS", "120"))
DEADLINE_S = 0.5
GENERATIONS = 5
FAULTS = ("late", "cancelled", "fails", "digest", "epoch", "dies", "skips", "twice", "restarts")


@dataclass(eq=False)
class Scenario:
    """One run of a few ranks, with faults at chance places."""

    seed: int
    make: Callable[[str, Rank, int], FenceTransport]
    lose: Callable[[FenceTransport, "Scenario", Rank], Awaitable[None]]
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    outcomes: dict[int, dict[Rank, Any]] = field(default_factory=lambda: defaultdict(dict))
    entered: dict[int, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    faulty: dict[tuple[Rank, int], str] = field(default_factory=dict)
    slowest_s: float = 0.0
    lost: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.world = FenceWorld(self.make, self.rng.randint(2, 5), run=self.run)
        for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
            where = (self.rng.choice(self.world.ranks), self.rng.randrange(GENERATIONS))
            self.faulty[where] = self.rng.choice(FAULTS)

    async def play(self) -> None:
        await self.world.open()
        try:
            await asyncio.gather(*(self._live(rank) for rank in self.world.ranks))
        finally:
            await self.world.close()
        self._check()

    async def _live(self, rank: Rank) -> None:
        end = self.world.ends[rank]
        for generation in range(GENERATIONS):
            call = self.world.call(generation, deadline_s=DEADLINE_S)
            arrival = arrives(call, rank)
            await asyncio.sleep(self.rng.random() * 0.02)
            fault = self.faulty.get((rank, generation))
            if fault == "dies":
                await self.lose(end, self, rank)
                return
            if fault == "skips":
                continue
            if fault == "late":
                await asyncio.sleep(DEADLINE_S * 1.3)
            arrival = BAD.get(fault or "", _unchanged)(arrival)
            if fault == "twice":
                again = asyncio.ensure_future(
                    self._arrive(end, call, replace(arrival, nonce="again"), count=False)
                )
                await self._arrive(end, call, arrival)
                await again
            elif fault == "restarts":
                newer = await self.world.newcomer(rank, 1)
                again = asyncio.ensure_future(
                    self._arrive(newer, call, replace(arrival, incarnation=1), count=False)
                )
                await self._arrive(end, call, arrival)
                await again
                return
            elif fault == "cancelled":
                await self._cancelled(end, call, arrival)
            else:
                await self._arrive(end, call, arrival)

    async def _cancelled(self, end: FenceTransport, call: FenceCall, arrival: Arrival) -> None:
        arriving = asyncio.ensure_future(self._arrive(end, call, arrival))
        await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.01, 0.05)))
        arriving.cancel()
        try:
            await arriving
        except asyncio.CancelledError:
            return

    async def _arrive(
        self, end: FenceTransport, call: FenceCall, arrival: Arrival, *, count: bool = True
    ) -> None:
        generation = call.key.generation
        self.entered[generation].add(arrival.rank)
        since = time.monotonic()
        outcome: Any
        try:
            outcome = ("open", (await end.arrive(call, arrival)).ticket.hash)
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

    def _check(self) -> None:
        for generation, outcomes in self.outcomes.items():
            verdicts = {o for o in outcomes.values() if o[0] in ("open", "broken")}
            assert len(verdicts) <= 1, f"generation {generation}: {outcomes}"
            self.lost |= "lost" in {kind for kind, _ in outcomes.values()}


def _unchanged(arrival: Arrival) -> Arrival:
    return arrival


BAD: dict[str, Callable[[Arrival], Arrival]] = {
    "fails": lambda a: replace(
        a, cause=RootCause(kind="failed", ranks=(a.rank,), error_type="ValueError", error="no")
    ),
    "digest": lambda a: replace(a, digest=Digest("other")),
    "epoch": lambda a: replace(a, epoch=Epoch(99)),
}


async def told(end: FenceTransport, scenario: Scenario, rank: Rank) -> None:
    """Whoever watches processes tells; the endpoint itself never says goodbye."""
    survivor = next(r for r in scenario.world.ranks if r != rank)
    cause = RootCause(kind="dead", ranks=(rank,), error="killed")
    await scenario.world.ends[survivor].report_lost(cause, incarnation=0)


async def cut(end: FenceTransport, scenario: Scenario, rank: Rank) -> None:
    """The connection closes without a goodbye, as when a process is killed."""
    assert isinstance(end, TcpFences)
    assert end._transport is not None
    end._transport.abort()


def threads() -> set[str]:
    """The fences' own threads; those of other tests' engines are not ours."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("phasesync.")}


async def play_all(
    seeds: list[int],
    make: Callable[[str, Rank, int], FenceTransport],
    lose: Callable[[FenceTransport, Scenario, Rank], Awaitable[None]],
    *,
    together: int = 20,
) -> None:
    lag_s = 0.0

    async def tick() -> None:
        nonlocal lag_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lag_s = max(lag_s, time.monotonic() - before - 0.01)

    ticking = asyncio.ensure_future(tick())
    for first in range(0, len(seeds), together):
        scenarios = [Scenario(seed, make, lose) for seed in seeds[first : first + together]]
        played = await asyncio.gather(*(s.play() for s in scenarios), return_exceptions=True)
        for scenario, failed in zip(scenarios, played, strict=True):
            if failed is not None:
                raise AssertionError(f"seed {scenario.seed}: {scenario.faulty}: {failed}") from (
                    failed if isinstance(failed, Exception) else None
                )
        # A loop that stands still for longer than the grace may take the transport for lost, and so
        # may a rank whose new connection hangs in a name service: now and then, on one of many.
        lost = sum(scenario.lost for scenario in scenarios)
        assert lag_s > 0.3 or lost <= 1, f"{lost} of {len(scenarios)} lost their store"
        slowest = max(scenario.slowest_s for scenario in scenarios)
        assert slowest < DEADLINE_S + 1.0 + 0.3 + 3 * lag_s, f"a rank hung for {slowest:.1f} s"
    ticking.cancel()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_faults_in_process() -> None:
    hubs: dict[str, InProcessFences] = {}

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return hubs.setdefault(run, InProcessFences()).endpoint(rank, incarnation)

    asyncio.run(play_all(list(range(COUNT)), make, told))


def test_faults_over_tcp() -> None:
    async def play() -> None:
        coordinator = TcpCoordinator(token="secret")
        await coordinator.start()

        def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
            return TcpFences(
                coordinator.address, rank=rank, incarnation=incarnation, run=run, token="secret"
            )

        try:
            await play_all(list(range(COUNT)), make, cut)
            assert coordinator.peers == 0
        finally:
            await coordinator.close()

    asyncio.run(play())


@pytest.mark.parametrize(("kind", "share"), [("HashStore", 2), ("TCPStore", 12)])
def test_faults_over_a_store(kind: str, share: int) -> None:
    dist: Any = import_module("torch.distributed")
    store = (
        dist.HashStore()
        if kind == "HashStore"
        else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )

    def make(run: str, rank: Rank, incarnation: int) -> FenceTransport:
        return StoreFences(store, rank=rank, incarnation=incarnation, run=run)

    asyncio.run(play_all(list(range(COUNT // share)), make, told, together=24 // share))
    until = time.monotonic() + 10
    while threads() and time.monotonic() < until:
        time.sleep(0.05)
    assert threads() == set()


PROCESS_COUNT = max(COUNT // 40, 1)


@pytest.mark.parametrize("seed", range(PROCESS_COUNT))
@pytest.mark.parametrize("kind", ["store", "tcp"])
def test_a_process_killed_between_any_two_operations(kind: str, seed: int) -> None:
    """Fences as fast as they go, and a kernel timer that kills one rank somewhere in them."""
    rng = random.Random(seed)
    host_of, rank_process = {"store": (store_host, store_rank), "tcp": (tcp_host, tcp_rank)}[kind]
    victim, size = rng.randrange(3), 3
    with hosted(host_of) as host:
        part = Part(
            number=0,
            size=size,
            run=secrets.token_hex(4),
            address=("tcp", host.address) if kind == "store" else host.address,
            deadline_s=10.0,
            generations=100_000,
        )
        parts = [replace(part, number=n) for n in range(size)]
        parts[victim] = replace(part, number=victim, act="doomed", late_s=rng.uniform(0.05, 0.4))
        with running(rank_process, parts) as started:
            seen = results(started, 60.0)
    assert sorted(seen) == [n for n in range(size) if n != victim]
    one, two = seen.values()
    assert one.outcomes == two.outcomes, "the survivors saw different verdicts"
    kind_of_end, cause = one.last
    assert (kind_of_end, cause.kind, cause.ranks) == ("broken", "dead", (rank_of(victim),))
    assert max(one.waited_s[-1], two.waited_s[-1]) < 5, "they waited for the deadline"
