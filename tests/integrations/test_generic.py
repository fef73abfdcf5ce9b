"""An ad-hoc body under a protocol: order at run time and at test time, failures as everywhere."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank, RoleName
from phasesync.errors import EpochFailed, EpochOrderError, PlanError
from phasesync.fences.inprocess import InProcessFences
from phasesync.integrations.generic import Body, check_body, phase, protocol
from phasesync.report.audit import audit_paths

Made = Callable[..., Body[Any, Any]]


def made(log: list[str], rank: int, hub: InProcessFences, runs: Path, fails: int = -1) -> Any:
    """A body as users have them, for one rank of a replica of two."""

    @protocol(
        "colocated",
        rank=rank,
        ranks=2,
        fences=lambda: hub.endpoint(Rank(RoleName("trainer"), rank)),
        runs=runs,
        run=runs.name,
        actions={"reclaim": lambda: None, "reset": lambda: None},
    )
    async def sync(step: int) -> int:
        async with phase("trim_cache"):
            log.append(f"{rank} trim_cache")
        async with phase("resume_weights") as mine:
            if mine:
                log.append(f"{rank} resume_weights behind {mine.ticket and mine.ticket.fence}")
        async with phase("stage"):
            log.append(f"{rank} stage")
        async with phase("load") as mine:
            if mine:
                log.append(f"{rank} load")
        async with phase("offload"):
            if rank == fails:
                raise RuntimeError("boom")
            await asyncio.sleep(0.05 * rank)
            log.append(f"{rank} offload")
        async with phase("empty_cache"):
            log.append(f"{rank} empty_cache")
        async with phase("resume_kv") as mine:
            if mine:
                log.append(f"{rank} resume_kv behind {mine.ticket and mine.ticket.fence}")
        return step

    return sync


def test_blocks_wait_for_what_the_protocol_wants(tmp_path: Path) -> None:
    log: list[str] = []

    async def main() -> None:
        hub = InProcessFences()
        bodies = [made(log, rank, hub, tmp_path) for rank in range(2)]
        for step in (1, 2):
            assert await asyncio.gather(*(body(step) for body in bodies)) == [step, step]
        for body in bodies:
            await body.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    first = log[: len(log) // 2]
    assert first.index("0 resume_kv behind memory_released") > first.index("1 empty_cache")
    assert "0 resume_weights behind ready_for_weights" in first
    assert [answer.verdict for answer in audit_paths([tmp_path])] == ["ok"]


def test_a_body_that_raises_stops_its_peers_with_the_same_cause(tmp_path: Path) -> None:
    log: list[str] = []

    async def main() -> list[Any]:
        hub = InProcessFences()
        bodies = [made(log, rank, hub, tmp_path, fails=1) for rank in range(2)]
        return await asyncio.gather(*(body(1) for body in bodies), return_exceptions=True)

    said = asyncio.run(asyncio.wait_for(main(), 20))
    assert all(isinstance(answer, EpochFailed) for answer in said)
    assert said[0].cause == said[1].cause
    assert (said[0].cause.phase, said[0].cause.error) == ("offload", "boom")
    assert "0 resume_kv behind memory_released" not in log


def alone(body: Any, tmp_path: Path, run: str = "alone") -> Any:
    options = {"replica_size": 1}
    run = f"{tmp_path.name}-{run}"
    return protocol("basic", rank=0, ranks=1, options=options, runs=tmp_path, run=run)(body)


def called(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_block_out_of_order_is_refused_before_it_runs(tmp_path: Path) -> None:
    ran = []

    async def sync() -> None:
        async with phase("resume_kv"):
            ran.append("resume_kv")

    with pytest.raises(EpochOrderError, match="'resume_kv' yet; next is phase 'sync'"):
        called(alone(sync, tmp_path))
    assert not ran


def test_a_block_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    async def short() -> None:
        """No block at all."""

    async def strange() -> None:
        async with phase("ofload"):
            pass

    with pytest.raises(EpochOrderError, match="ended before phase 'sync'"):
        called(alone(short, tmp_path, "short"))
    with pytest.raises(EpochOrderError, match="no phase 'ofload' in this protocol"):
        called(alone(strange, tmp_path, "strange"))


def test_a_phase_outside_any_body_is_refused() -> None:
    async def main() -> None:
        async with phase("offload"):
            pass

    with pytest.raises(EpochOrderError, match="stands outside"):
        asyncio.run(main())


def test_the_order_is_checked_without_running(tmp_path: Path) -> None:
    check_body(made([], 0, InProcessFences(), tmp_path))

    async def swapped() -> None:
        async with phase("resume_kv"):
            pass
        async with phase("offload"):
            pass

    async def short() -> None:
        async with phase("offload"):
            pass

    with pytest.raises(EpochOrderError, match=r"test_generic.py:\d+: phase 'offload' stands after"):
        check_body(alone(swapped, tmp_path))
    with pytest.raises(EpochOrderError, match="no block for phase 'sync'"):
        check_body(alone(short, tmp_path))


# --- What a user does by mistake, and otherwise ---------------------------------------------------


async def all_blocks() -> None:
    for name in ("sync", "offload", "empty_cache", "resume_kv"):
        async with phase(name):
            await asyncio.sleep(0)


async def nested() -> None:
    async with phase("sync"), phase("offload"):
        pass


async def twice() -> None:
    async with phase("sync"):
        pass
    async with phase("sync"):
        pass


async def skipped() -> None:
    async with phase("sync"):
        pass
    async with phase("empty_cache"):
        pass


async def left_early() -> int:
    async with phase("sync"):
        return 5


async def side_by_side() -> None:
    async def one(name: str) -> None:
        async with phase(name):
            await asyncio.sleep(0.01)

    await asyncio.gather(one("sync"), one("offload"))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (nested, "cannot enter 'offload' inside the block of 'sync'; blocks stand one after"),
        (twice, "cannot enter 'sync' again; next is phase 'offload'"),
        (skipped, "cannot enter 'empty_cache' yet; next is phase 'offload'"),
        (left_early, "the body of trainer/0 ended before phase 'offload'"),
        (side_by_side, "cannot enter 'offload' beside the block of 'sync'; blocks stand one"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_mistake_has_its_own_words(body: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(EpochOrderError, match=why):
        called(alone(body, tmp_path))


def test_an_error_that_the_body_swallows_fails_the_epoch_all_the_same(tmp_path: Path) -> None:
    async def swallows() -> None:
        try:
            async with phase("sync"):
                raise ValueError("of the block")
        except ValueError:
            pass
        async with phase("offload"):
            raise AssertionError("entered")

    with pytest.raises(EpochFailed, match="in phase 'sync': ValueError: of the block"):
        called(alone(swallows, tmp_path))


def plain() -> None:
    """Not a coroutine function: it would have run before anybody looked."""


async def yields() -> Any:
    yield 1


@pytest.mark.parametrize("body", [plain, yields, staticmethod(all_blocks)])
def test_what_is_no_coroutine_function_is_refused_where_it_stands(
    body: Any, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"no coroutine function; @phasesync.protocol stands on an"):
        alone(body, tmp_path)


def test_a_call_while_another_is_under_way_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    body = alone(all_blocks, tmp_path)

    async def main() -> Any:
        said = await asyncio.gather(body(), body(), return_exceptions=True)
        await body()
        return said

    first, second = asyncio.run(asyncio.wait_for(main(), 10))
    assert first is None
    assert isinstance(second, EpochOrderError)
    assert "all_blocks is in an epoch that another call has begun" in str(second)


class Trainer:
    """Bodies that are methods; each object is a rank of its own."""

    hub: InProcessFences
    runs: Path

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []

    @protocol(
        "basic",
        rank=lambda self: self.rank,
        ranks=2,
        fences=lambda self: self.hub.endpoint(Rank(RoleName("trainer"), self.rank)),
        runs=lambda self: self.runs,
        run="methods",
    )
    async def sync(self, step: int) -> int:
        """One sync."""
        for name in ("sync", "offload", "empty_cache"):
            async with phase(name):
                self.log.append(name)
        async with phase("resume_kv") as mine:
            if mine:
                self.log.append("resume_kv")
        return step + self.rank

    @staticmethod
    @protocol(
        "basic", rank=0, ranks=1, options={"replica_size": 1}, runs=lambda: Trainer.runs, run="s"
    )
    async def of_nobody() -> str:
        await all_blocks()
        return "static"

    @classmethod
    @protocol(
        "basic",
        rank=0,
        ranks=1,
        options={"replica_size": 1},
        runs=lambda cls: cls.runs,
        run="c",
    )
    async def of_all(cls) -> str:
        await all_blocks()
        return cls.__name__


def test_methods_are_bodies_too(tmp_path: Path) -> None:
    async def main() -> None:
        Trainer.hub, Trainer.runs = InProcessFences(), tmp_path
        both = [Trainer(0), Trainer(1)]
        for step in (1, 2):
            said = await asyncio.gather(*(each.sync(step) for each in both))
            assert said == [step, step + 1]
        assert [each.log.count("resume_kv") for each in both] == [2, 0]
        for each in both:
            await each.sync.close()
        assert await Trainer.of_nobody() == "static"
        assert await Trainer.of_all() == "Trainer"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert Trainer.sync.__doc__ == "One sync."
    assert [answer.verdict for answer in audit_paths([tmp_path / "methods"])] == ["ok"]


async def branches(flag: bool) -> None:
    if flag:
        async with phase("sync"):
            pass
        async with phase("offload"):
            pass
    else:
        async with phase("sync"):
            pass
        try:
            async with phase("offload"):
                pass
        finally:
            print("through")
    async with phase("empty_cache"):
        pass
    async with phase("resume_kv") as mine:
        print(mine)


async def returns(flag: bool) -> None:
    if flag:
        async with phase("sync"):
            pass
        async with phase("offload"):
            pass
        async with phase("empty_cache"):
            pass
        async with phase("resume_kv") as mine:
            print(mine)
        return
    await branches(flag)
    async with phase("sync"):
        pass


async def wrong_branch(flag: bool) -> None:
    async with phase("offload"):
        pass
    if flag:
        async with phase("empty_cache"):
            pass
    else:
        async with phase("sync"):
            pass


async def forgets_to_ask() -> None:
    async with phase("resume_kv"):
        pass


def test_branches_are_alternatives_and_a_leaders_block_asks_whose_it_is(tmp_path: Path) -> None:
    check_body(alone(branches, tmp_path))
    check_body(alone(returns, tmp_path))
    check_body(Trainer(0).sync)
    with pytest.raises(EpochOrderError, match=r"\d+: phase 'sync' stands after 'offload'"):
        check_body(alone(wrong_branch, tmp_path))
    with pytest.raises(EpochOrderError, match="'resume_kv' is the leader's alone, and this block"):
        check_body(alone(forgets_to_ask, tmp_path))
