"""What an epoch costs a rank: fences and the rest apart, beside the bare calls in the same run.

python -m tests.bench.epoch_cost [PROTOCOL] [EPOCHS]
python -m tests.bench.epoch_cost --cold [ROUNDS]

Warm: CPU time. All actions do nothing and the rank is alone, so that its fences open at once: what
is left is phasesync's own work. Figures are the least of several rounds.

Busy: wall time. Actions are blocking calls of some milliseconds that leave nothing of phasesync in
the processor's caches, as real ones do, and fences go over a TCPStore. What is not spent in the
actions is phasesync's share; figures are medians. The bare calls are the same from a thread.

Cold: see `tests.bench.cold_epochs`.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.bench.cold_epochs import cold, told

from phasesync.core.model import Arrival, FenceCall, Opened, Rank, RoleName
from phasesync.core.plan import Act
from phasesync.core.protocol import PhaseDecl
from phasesync.fences.inprocess import InProcessEndpoint, InProcessFences
from phasesync.runtime import RankRunner, at_once
from phasesync.spec import load

__all__ = ("Cost", "Share", "measure", "share")

ROUNDS = 7
_CHILL = 32 << 20  # More than most caches hold.


class Cost(NamedTuple):
    """Microseconds of CPU time an epoch; `steps` are phases and fences, `lines` of the journal."""

    bare_us: float
    fences_us: float
    rest_us: float
    steps: int
    lines: float

    @property
    def times_bare(self) -> float:
        return (self.fences_us + self.rest_us) / self.bare_us


class _Timed:
    """A transport that knows how long arrivals took it; they never wait here."""

    def __init__(self, inner: InProcessEndpoint) -> None:
        self._inner = inner
        self.boot = inner.boot
        self.took_ns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        began = time.process_time_ns()
        try:
            return await self._inner.arrive(call, arrival)
        finally:
            self.took_ns += time.process_time_ns() - began


@at_once
def _nothing() -> None:
    """An action that is called and is over."""


async def _later() -> None:
    """One that is awaited."""


def _actions(protocol: str) -> dict[str, Callable[[], Any]]:
    """Every third action is awaited, as about so many of verl's are."""
    declared = load(protocol)
    own = [
        step.name
        for step in (*declared.steps, *declared.recover)
        if isinstance(step, PhaseDecl) and not step.outside
    ]
    return {name: _nothing if number % 3 else _later for number, name in enumerate(own)}


def _runner(protocol: str, **more: Any) -> RankRunner:
    """The one rank of a run that waits for nobody."""
    return RankRunner(protocol, rank=0, ranks=1, options={"replica_size": 1}, **more)


async def _least(epochs: int, once: Callable[[], Awaitable[object]]) -> float:
    """The least CPU time of an epoch, of several rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(epochs):
            await once()
        found.append((time.process_time() - began) / epochs)
    return min(found)


async def _measured(protocol: str, epochs: int) -> Cost:
    actions = _actions(protocol)
    rank = Rank(RoleName("trainer"), 0)
    fences = _Timed(InProcessFences().endpoint(rank))
    with tempfile.TemporaryDirectory() as runs:
        given = {"actions": actions, "fences": fences, "caller_joins": True, "runs": runs}
        async with _runner(protocol, **given) as runner:
            called = [
                actions[step.phase]
                for step in runner.plan.programs[0]
                if isinstance(step, Act) and step.phase in actions
            ]

            async def bare() -> None:
                for action in called:
                    answer = action()
                    if answer is not None:
                        await asyncio.ensure_future(answer)

            for _ in range(20):
                await runner.run_epoch()
            before = runner.journal.seq, fences.took_ns
            whole = await _least(epochs, runner.run_epoch)
            lines, took_ns = runner.journal.seq - before[0], fences.took_ns - before[1]
            at_fences = took_ns / 1e9 / (ROUNDS * epochs)
            return Cost(
                await _least(epochs, bare) * 1e6,
                at_fences * 1e6,
                (whole - at_fences) * 1e6,
                len(runner.plan.programs[0]),
                lines / (ROUNDS * epochs),
            )


def measure(protocol: str = "colocated_each", epochs: int = 100) -> Cost:
    """The cost of one rank's epoch under `protocol`."""
    return asyncio.run(_measured(protocol, epochs))


class Share(NamedTuple):
    """Milliseconds of wall time an epoch that are not spent in the actions."""

    bare_ms: float
    fences_ms: float
    rest_ms: float


def _busy_actions(protocol: str, spent_ns: list[int]) -> dict[str, Callable[[], Any]]:
    source = bytes(_CHILL)

    def act() -> None:
        began = time.perf_counter_ns()
        bytearray(source)
        spent_ns[0] += time.perf_counter_ns() - began

    steps = (*load(protocol).steps, *load(protocol).recover)
    return {step.name: act for step in steps if isinstance(step, PhaseDecl)}


async def _busy(protocol: str, epochs: int) -> Share:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spent_ns = [0]
    actions = _busy_actions(protocol, spent_ns)
    own: list[float] = []
    waits: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as runs:
        given = {"actions": actions, "fences": store, "runs": runs, "run": "busy"}
        async with _runner(protocol, **given) as runner:
            act = next(iter(actions.values()))
            calls = sum(isinstance(step, Act) for step in runner.plan.programs[0])
            for _ in range(epochs):
                began, spent_ns[0] = time.perf_counter_ns(), 0
                report = await runner.run_epoch()
                own.append((time.perf_counter_ns() - began - spent_ns[0]) / 1e6)
                waits.append(sum(report.waits_s.values()) * 1e3)
                began, spent_ns[0] = time.perf_counter_ns(), 0
                for _ in range(calls):
                    await asyncio.to_thread(act)
                bare.append((time.perf_counter_ns() - began - spent_ns[0]) / 1e6)
    at_fences = statistics.median(waits)
    return Share(statistics.median(bare), at_fences, statistics.median(own) - at_fences)


def share(protocol: str = "colocated", epochs: int = 30) -> Share:
    """phasesync's share of one rank's epoch around blocking actions."""
    return asyncio.run(_busy(protocol, epochs))


def _say_all(given: list[str]) -> None:
    cost = measure(given[0] if given else "colocated_each", int(given[1]) if given[1:] else 100)
    print("warm, CPU time")
    print(f"bare calls  {cost.bare_us:8.1f} us an epoch")
    print(f"fences      {cost.fences_us:8.1f} us, opened at once")
    print(f"the rest    {cost.rest_us:8.1f} us, {cost.rest_us / cost.steps:.1f} us a step")
    print(f"steps {cost.steps}, journal lines {cost.lines:.0f}, {cost.times_bare:.1f} times bare")
    found = share()
    print("busy, wall time, 11 blocking actions and 7 fences over a TCPStore")
    print(f"bare calls  {found.bare_ms:8.2f} ms an epoch, in threads")
    print(f"fences      {found.fences_ms:8.2f} ms")
    print(f"the rest    {found.rest_ms:8.2f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cold"]:
        rounds = int(sys.argv[2]) if sys.argv[2:] else 8
        print("\n".join(told(cold(rounds=rounds))))
    else:
        _say_all(sys.argv[1:])
