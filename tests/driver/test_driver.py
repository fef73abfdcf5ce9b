"""One process drives all ranks: its calls, its joins, and what it makes of a failure."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from phasesync.core.model import Rank, RoleName
from phasesync.errors import EpochFailed, EpochOrderError, PlanError, RankLost
from phasesync.runtime import Driver, Turn
from phasesync.runtime.calls import GRACE_S
from tests.runtime.world import World

BASIC = ("sync", "offload", "empty_cache", "resume_kv")
RANKS = 4


def rank_of(number: int) -> Rank:
    return Rank(RoleName("trainer"), number)


def nothing() -> None:
    """An action that has nothing to do."""


def driver(tmp_path: Path, **more: Any) -> Driver:
    actions = {**dict.fromkeys(BASIC, nothing), **more.pop("actions", {})}
    given: dict[str, Any] = {
        "ranks": RANKS,
        "options": {"replica_size": 2},
        "actions": actions,
        "caller_joins": True,
        "runs": tmp_path,
        "run": "driven",
    }
    return Driver("basic", **{**given, **more})


def lines(tmp_path: Path, number: int) -> list[dict[str, Any]]:
    text = (tmp_path / "driven" / f"trainer-{number}.0.jsonl").read_bytes()
    return [orjson.loads(line) for line in text.splitlines()]


def facts(tmp_path: Path, number: int, *events: str) -> list[str]:
    return [
        f"{line['event']} {line.get('phase') or line.get('fence')}"
        for line in lines(tmp_path, number)
        if line["event"] in events
    ]


def at(number: int, bad: Callable[[], Any]) -> Callable[[Turn], Any]:
    """The action does `bad` on one rank, and nothing on the others."""
    return lambda turn: bad() if turn.rank.number == number else None


async def failed(one: Driver) -> EpochFailed:
    with pytest.raises(EpochFailed) as caught:
        await one.run_epoch()
    return caught.value


def test_all_ranks_go_through_the_protocol(tmp_path: Path) -> None:
    seen: list[tuple[int, str, int]] = []

    def note(turn: Turn) -> None:
        seen.append((turn.rank.number, turn.phase, turn.version))

    async def main() -> None:
        async with driver(tmp_path, actions=dict.fromkeys(BASIC, note)) as one:
            report = await one.run_epoch(version=7)
            assert (report.epoch, report.version, len(report.ranks)) == (1, 7, RANKS)

    asyncio.run(main())
    assert {rank for rank, phase, _ in seen if phase == "offload"} == set(range(RANKS))
    assert sorted(rank for rank, phase, _ in seen if phase == "resume_kv") == [0, 2]
    assert {version for _, _, version in seen} == {7}
    resume = next(line for line in lines(tmp_path, 2) if line.get("phase") == "resume_kv")
    assert (resume["ticket"]["fence"], resume["ticket"]["count"]) == ("memory_released", 2)


def test_calls_of_different_ranks_run_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(RANKS, timeout=20)
    actions = {"offload": together.wait}

    async def main() -> None:
        async with driver(tmp_path, actions=actions) as one:
            await one.run_epoch()

    asyncio.run(main())


def test_a_replica_does_not_wait_for_another(tmp_path: Path) -> None:
    opened = asyncio.Event()

    async def offload(turn: Turn) -> None:
        if turn.rank.number == 3:
            await asyncio.wait_for(opened.wait(), 20)

    async def resume_kv(turn: Turn) -> None:
        if turn.rank.number == 0:
            opened.set()

    async def main() -> None:
        actions = {"offload": offload, "resume_kv": resume_kv}
        async with driver(tmp_path, actions=actions, options={"replica_size": 2}) as one:
            await one.run_epoch()

    asyncio.run(main())


def test_an_answer_may_come_from_an_executor(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:

        async def main() -> None:
            actions = {"sync": lambda: pool.submit(time.sleep, 0.01)}
            async with driver(tmp_path, actions=actions) as one:
                await one.run_epoch()

        asyncio.run(main())


def test_an_executor_s_error_is_the_rank_s(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("no room")

    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:

        async def main() -> EpochFailed:
            actions = {"sync": at(1, lambda: pool.submit(fails))}
            async with driver(tmp_path, actions=actions) as one:
                return await failed(one)

        error = asyncio.run(main())
    cause = error.cause
    assert (cause.kind, cause.ranks, cause.phase) == ("failed", (rank_of(1),), "sync")
    assert (cause.error_type, cause.error) == ("ValueError", "no room")
    assert error.rank == rank_of(1)


def test_the_first_failure_cuts_off_the_rest_and_leaves_nothing_unread(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    ends: list[str] = []
    began: set[int] = set()

    async def offload(turn: Turn) -> None:
        began.add(turn.rank.number)
        if turn.rank.number == 1:
            while len(began) < 4:
                await asyncio.sleep(0.01)
            raise ValueError("first")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append(str(turn.rank))
            raise ValueError("on the way out") from None

    async def main() -> EpochFailed:
        unread: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: unread.append(said))
        actions = {"offload": offload}
        async with driver(tmp_path, actions=actions, options={"replica_size": 4}) as one:
            error = await failed(one)
        assert unread == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return error

    since = time.monotonic()
    error = asyncio.run(main())
    assert time.monotonic() - since < GRACE_S / 2
    assert error.cause.error == "first"
    assert sorted(ends) == ["trainer/0", "trainer/2", "trainer/3"]
    assert not recwarn.list


def test_blocking_work_that_is_cut_off_is_waited_for(tmp_path: Path) -> None:
    ends: list[float] = []
    begun = threading.Event()
    before = set(threading.enumerate())  # Another test's engine may not be collected yet.

    def offload(turn: Turn) -> None:
        if turn.rank.number == 1:
            begun.wait(20)
            raise ValueError("first")
        begun.set()
        time.sleep(0.3)
        ends.append(time.monotonic())

    async def main() -> float:
        async with driver(tmp_path, actions={"offload": offload}) as one:
            await failed(one)
            return time.monotonic()

    assert asyncio.run(main()) >= max(ends)
    for left in set(threading.enumerate()) - before:
        if left.name.startswith("phasesync"):
            left.join(5)
            assert not left.is_alive()


def colocated(tmp_path: Path, world: World, **more: Any) -> Driver:
    return Driver(
        world.protocol,
        ranks=world.ranks,
        actions={**world.actions(), **more},
        options={"replica_size": world.size, **world.options},
        runs=tmp_path,
        run="driven",
    )


def test_a_failed_epoch_is_recovered_and_run_again(tmp_path: Path) -> None:
    world = World(ranks=RANKS, runs=tmp_path, fail=(1, "offload", 1))

    async def main() -> EpochFailed:
        async with colocated(tmp_path, world) as one:
            error = await failed(one)
            assert (await one.run_epoch()).epoch == 2
        return error

    error = asyncio.run(main())
    assert (error.cause.kind, error.cause.ranks) == ("failed", (rank_of(1),))
    assert (error.can_retry, error.replace, error.poisoned) == (True, (), ())


def test_a_lost_rank_is_dead_and_the_others_recover_without_it(tmp_path: Path) -> None:
    world = World(ranks=RANKS, runs=tmp_path)
    offload = world.actions()["offload"]

    async def lost(turn: Turn) -> None:
        if turn.rank.number == 1 and turn.epoch == 2:
            raise RankLost("its process is gone") from ConnectionResetError("reset")
        await offload(turn)

    async def main() -> EpochFailed:
        async with colocated(tmp_path, world, offload=lost) as one:
            await one.run_epoch()
            return await failed(one)

    error = asyncio.run(main())
    cause = error.cause
    assert (cause.kind, cause.ranks, cause.phase) == ("dead", (rank_of(1),), "offload")
    assert (cause.error_type, cause.error) == ("ConnectionResetError", "its process is gone")
    assert (error.replace, error.can_retry) == ((rank_of(1),), False)
    assert "recover.begin None" in facts(tmp_path, 0, "recover.begin")
    assert facts(tmp_path, 1, "recover.begin") == []
    causes = {
        line["error"]
        for n in range(RANKS)
        for line in lines(tmp_path, n)
        if line["event"] == "epoch.end" and line["level"] == "error"
    }
    assert len(causes) == 1


def test_what_is_unavailable_is_not_dead(tmp_path: Path) -> None:
    def away() -> None:
        raise RankLost("no answer", kind="unavailable")

    async def main() -> EpochFailed:
        async with driver(tmp_path, actions={"sync": at(2, away)}) as one:
            return await failed(one)

    error = asyncio.run(main())
    assert (error.cause.kind, error.cause.ranks, error.replace) == (
        "unavailable",
        (rank_of(2),),
        (),
    )


def test_who_watches_processes_ends_a_wait(tmp_path: Path) -> None:
    stuck = threading.Event()

    async def watch(one: Driver) -> None:
        await asyncio.sleep(0.1)
        await one.report_lost(rank_of(3), "killed by SIGKILL", phase="offload")
        stuck.set()
        await asyncio.Event().wait()

    async def main() -> EpochFailed:
        actions = {"offload": at(3, lambda: stuck.wait(20))}
        async with driver(tmp_path, actions=actions, watch=watch) as one:
            return await failed(one)

    error = asyncio.run(main())
    assert (error.cause.kind, error.cause.ranks) == ("dead", (rank_of(3),))


def test_a_controller_without_an_event_loop(tmp_path: Path) -> None:
    with driver(tmp_path).blocking() as one:
        assert [one.run_epoch(version=v).version for v in (3, 5)] == [3, 5]
        with pytest.raises(EpochOrderError, match="4 is older"):
            one.run_epoch(version=4)
    assert facts(tmp_path, 0, "rank.exit") == ["rank.exit None"]


def test_a_cancelled_driver_leaves_all_fences_broken(tmp_path: Path) -> None:
    async def offload(turn: Turn) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        async with driver(tmp_path, actions={"offload": offload}) as one:
            running = asyncio.create_task(one.run_epoch())
            await asyncio.sleep(0.2)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    for number in range(RANKS):
        assert lines(tmp_path, number)[-2]["error_type"] == "Cancelled"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"devices": ["a/cpu0"]}, "1 devices for 4 ranks"),
        ({"ranks": 3}, "give a multiple of 2"),
        ({"actions": {"ofload": nothing}}, "no phase 'ofload'"),
    ],
)
def test_what_makes_no_plan_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        driver(tmp_path, **more)
