"""An ad-hoc body under a protocol: order at run time and at test time, failures as everywhere."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank, RoleName
from phasesync.errors import EpochFailed, EpochOrderError
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
