"""Joins in one process: first failure wins, and nothing is left running or unread."""

import asyncio
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from phasesync.core.model import (
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Rank,
    RoleName,
    RootCause,
    Version,
)
from phasesync.errors import FenceBroken, PlanError
from phasesync.fences.driver import in_thread, join

RANKS = tuple(Rank(RoleName("trainer"), n) for n in range(3))


def call(deadline_s: float = 10.0) -> FenceCall:
    return FenceCall(
        key=FenceKey("r", 0, "world", 0),
        fence=FenceName("transfer_done"),
        epoch=Epoch(1),
        version=Version(1),
        digest=Digest("d"),
        members=RANKS,
        deadline_s=deadline_s,
    )


async def work(n: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return n


async def fails(after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    raise ValueError("no room")


def test_a_join_opens_with_everybody_s_result() -> None:
    joined = asyncio.run(join(call(), {r: work(r.number, 0.01 * r.number) for r in RANKS}))
    assert joined.results == {r: r.number for r in RANKS}
    assert joined.opened.ticket.count == 3


def test_the_first_failure_wins_and_the_rest_is_cancelled_and_told() -> None:
    told: list[Rank] = []

    async def check() -> None:
        since = time.monotonic()
        with pytest.raises(FenceBroken) as broken:
            await join(
                call(),
                {RANKS[0]: work(0, 30), RANKS[1]: fails(0.05), RANKS[2]: work(2, 30)},
                cancel=told.append,
            )
        assert time.monotonic() - since < 2
        assert broken.value.cause == RootCause(
            kind="failed", ranks=(RANKS[1],), error_type="ValueError", error="no room"
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())
    assert told == [RANKS[0], RANKS[2]]


def test_two_failures_leave_no_error_unread(recwarn: pytest.WarningsRecorder) -> None:
    async def check() -> list[object]:
        unread: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: unread.append(c))
        with pytest.raises(FenceBroken):
            await join(call(), {RANKS[0]: fails(), RANKS[1]: fails(), RANKS[2]: fails(0.01)})
        return unread

    assert asyncio.run(check()) == []


def test_there_is_work_for_each_member_and_for_nobody_else() -> None:
    """Else a fence would break at once for a deadline that is far off."""
    stranger = Rank(RoleName("rollout"), 0)
    for ranks, odd in ((RANKS[:2], "trainer/2"), ((*RANKS, stranger), "rollout/0")):
        with pytest.raises(PlanError, match=f"not a member, or without work: {odd}"):
            asyncio.run(join(call(), {rank: work(rank.number) for rank in ranks}))


def test_the_deadline_names_who_is_not_done() -> None:
    async def check() -> None:
        with pytest.raises(FenceBroken) as broken:
            await join(call(0.1), {RANKS[0]: work(0), RANKS[1]: work(1, 30), RANKS[2]: work(2)})
        assert broken.value.cause.kind == "deadline"
        assert broken.value.cause.missing == (RANKS[1],)

    asyncio.run(check())


def test_cancelling_a_join_cancels_the_work() -> None:
    async def check() -> None:
        joining = asyncio.ensure_future(join(call(), {r: work(0, 30) for r in RANKS}))
        await asyncio.sleep(0.05)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


def test_blocking_work_has_a_thread_of_its_own() -> None:
    async def check() -> None:
        joined = await join(
            call(), {r: in_thread(threading.current_thread, name=f"t{r.number}") for r in RANKS}
        )
        names = [joined.results[r].name for r in RANKS]
        assert names == ["t0", "t1", "t2"]

    asyncio.run(check())


def test_a_stuck_thread_does_not_hold_the_join() -> None:
    release = threading.Event()

    async def check() -> None:
        with pytest.raises(FenceBroken):
            await join(call(0.1), {r: in_thread(release.wait) for r in RANKS})

    since = time.monotonic()
    asyncio.run(check())
    assert time.monotonic() - since < 3
    release.set()


def square(n: int) -> int:
    return n * n


def test_processes_join_through_an_executor() -> None:
    async def check() -> None:
        with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
            joined = await join(
                call(), {r: asyncio.wrap_future(pool.submit(square, r.number)) for r in RANKS}
            )
        assert joined.results == {r: r.number**2 for r in RANKS}

    asyncio.run(check())
