"""What a rank does not do: hop to a thread, watch or measure where nothing asks for it."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from phasesync.core.model import Arrival, FenceCall, Opened, Rank, RoleName
from phasesync.core.protocol import PhaseDecl
from phasesync.errors import EpochFailed
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import RankRunner, at_once, tell_unready
from phasesync.spec import load

MEMBERS = tuple(Rank(RoleName("trainer"), number) for number in range(2))


class Device:
    """A device whose answers can be counted, by the thread that asked."""

    def __init__(self, *, blocks: bool, measures_at_once: bool = False) -> None:
        self.name = "here/GPU-1"
        self.blocks = blocks
        self.measures_at_once = measures_at_once
        self.asked: list[tuple[str, str]] = []

    def _ask(self, what: str) -> None:
        on = threading.current_thread() is threading.main_thread()
        self.asked.append((what, "loop" if on else "thread"))

    def synchronise(self) -> None:
        self._ask("synchronise")

    def collect_ipc(self) -> None:
        self._ask("collect_ipc")

    def free_bytes(self) -> int:
        self._ask("free_bytes")
        return len(self.asked)


def known(**actions: Any) -> dict[str, Any]:
    async def nothing() -> None:
        """Nothing to do."""

    protocol = load("colocated")
    steps = (*protocol.steps, *protocol.recover)
    names = [step.name for step in steps if isinstance(step, PhaseDecl)]
    return {**dict.fromkeys(names, nothing), **actions}


def one(tmp_path: Path, **more: Any) -> RankRunner:
    given: dict[str, Any] = {"rank": 0, "ranks": 1, "options": {"replica_size": 1}}
    return RankRunner("colocated", runs=tmp_path, **{**given, "actions": known(), **more})


def epoch(runner: RankRunner) -> None:
    async def main() -> None:
        async with runner:
            await runner.run_epoch()

    asyncio.run(main())


def test_figures_are_read_once_a_change_of_memory(tmp_path: Path) -> None:
    device = Device(blocks=False)
    epoch(one(tmp_path, device=device))
    # Seven phases change memory without a fence behind them that measures; two fences measure.
    assert [what for what, _ in device.asked].count("free_bytes") == 9
    assert [what for what, _ in device.asked].count("synchronise") == 2
    (path,) = tmp_path.rglob("*.jsonl")
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    read = {
        line.get("phase") or line["fence"]: line["free_bytes"]
        for line in lines
        if "free_bytes" in line
    }
    assert list(read) == [
        "load_back",
        "train",
        "ready_for_weights",
        "resume_weights",
        "stage",
        "staged",
        "offload",
        "memory_released",
        "resume_kv",
        "ready_to_serve",
        "sleep",
        "asleep",
    ]
    assert read["staged"] == read["stage"], "nothing has touched memory since"


def test_a_device_that_measures_at_once_is_waited_for_in_a_thread_alone(tmp_path: Path) -> None:
    device = Device(blocks=True, measures_at_once=True)
    epoch(one(tmp_path, device=device))
    assert ("synchronise", "thread") in device.asked
    assert ("synchronise", "loop") not in device.asked
    assert device.asked.count(("free_bytes", "loop")) == 7
    slow = Device(blocks=True)
    epoch(one(tmp_path, device=slow))
    assert {where for _, where in slow.asked} == {"thread"}


def test_an_action_at_once_runs_on_the_thread_of_the_loop(tmp_path: Path) -> None:
    ran: dict[str, threading.Thread] = {}

    def plain() -> None:
        ran["plain"] = threading.current_thread()

    @at_once
    def quick() -> None:
        ran["quick"] = threading.current_thread()

    @at_once
    async def later() -> None:
        await asyncio.sleep(0)
        ran["later"] = threading.current_thread()

    epoch(one(tmp_path, actions=known(stage=plain, offload=quick, empty_cache=later)))
    assert ran["plain"] is not threading.main_thread()
    assert ran["quick"] is ran["later"] is threading.main_thread()


def test_an_action_at_once_that_raises_fails_its_phase(tmp_path: Path) -> None:
    @at_once
    def boom() -> None:
        raise ValueError("no")

    with pytest.raises(EpochFailed, match="failed in phase 'offload': ValueError: no"):
        epoch(one(tmp_path, actions=known(offload=boom)))


def test_peers_of_a_rank_without_a_plan_are_told_at_once(tmp_path: Path) -> None:
    hub = InProcessFences()

    async def main() -> EpochFailed:
        first, second = MEMBERS
        more = {"ranks": 2, "fences": hub.endpoint(first, 0), "options": {}, "run": "job"}
        runner = one(tmp_path, **more)
        waiting = asyncio.create_task(runner.start())
        await asyncio.sleep(0.01)
        await tell_unready(
            hub.endpoint(second, 0), ValueError("no such option"), rank=second, members=MEMBERS,
            run="job",
        )  # fmt: skip
        with pytest.raises(EpochFailed) as caught:
            async with asyncio.timeout(20):
                await waiting
        return caught.value

    failed = asyncio.run(main())
    assert (failed.epoch, failed.cause.ranks) == (0, (MEMBERS[1],))
    assert "trainer/1 failed" in str(failed)
    assert "ValueError: no such option" in str(failed)


class Witness:
    """A transport that says what of the journal was on disk at each arrival."""

    def __init__(self, inner: Any, seen: Callable[[str], None]) -> None:
        self._inner = inner
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        self._seen(call.fence)
        opened: Opened = await self._inner.arrive(call, arrival)
        return opened


def test_the_journal_is_on_disk_before_an_action_and_before_an_arrival(tmp_path: Path) -> None:
    """A process that dies in an action, or as soon as it has arrived, leaves the line that says
    so: lines are held back in between alone, and the file has fewer writes than lines."""
    lacks: list[str] = []
    seen: list[str] = []

    def look(where: str) -> None:
        seen.append(where)
        (path,) = tmp_path.rglob("*.jsonl")
        last = orjson.loads(path.read_bytes().splitlines()[-1])
        if last["seq"] != runner.journal.seq - 1 or where not in last.values():
            lacks.append(where)

    steps = [step for step in load("colocated").steps if isinstance(step, PhaseDecl)]
    actions = known(**{step.name: partial(look, step.name) for step in steps})
    fences = Witness(InProcessFences().endpoint(MEMBERS[0]), look)
    runner = one(tmp_path, actions=actions, fences=fences)
    epoch(runner)
    assert len(seen) == 11 + 7 + 1, "all actions, all fences, and the one of the plan"
    assert not lacks


@pytest.mark.parametrize(("size", "peeks"), [(2, 0), (1, 1)])
def test_a_rank_asks_after_failures_elsewhere_only_where_there_is_an_elsewhere(
    tmp_path: Path, size: int, peeks: int
) -> None:
    """Who has met all members of the last fence, with nothing to do behind it, knows all."""
    hub = InProcessFences()
    asked: list[str] = []

    class Asks(Witness):
        async def peek(self, call: FenceCall) -> Any:
            asked.append(call.fence)
            return await self._inner.peek(call)

    async def rank(number: int) -> None:
        member = MEMBERS[number]
        runner = RankRunner(
            "colocated_each",
            rank=number,
            ranks=2,
            options={"replica_size": size},
            fences=Asks(hub.endpoint(member), lambda fence: None),
            actions={name: act for name, act in each().items() if name not in OUTSIDE},
            caller_joins=True,
            runs=tmp_path,
            run="job",
        )
        async with runner:
            await runner.run_epoch()
            await runner.run_epoch()

    async def main() -> None:
        await asyncio.gather(rank(0), rank(1))

    asyncio.run(main())
    # Before the second epoch, and at the end.
    assert asked == ["asleep"] * (2 * 2 * peeks)


def each() -> dict[str, Any]:
    protocol = load("colocated_each")
    steps = (*protocol.steps, *protocol.recover)
    return {step.name: lambda: None for step in steps if isinstance(step, PhaseDecl)}


OUTSIDE = frozenset(
    step.name
    for step in load("colocated_each").steps
    if isinstance(step, PhaseDecl) and step.outside
)
