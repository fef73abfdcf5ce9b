"""Fences on uvloop: Ray's async actors run on it where it is installed, and so do engines' servers.

Its transports are not of asyncio's classes, and it connects to fewer kinds of addresses.
"""

import asyncio
import os
from collections.abc import Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.runtime import RankRunner
from phasesync.testing import FenceWorld, check_fence_transport
from tests.fences.scopes import SCOPE_PROMISES, SIZE
from tests.fences.test_conformance import TRANSPORTS, tcp_store
from tests.fences.test_scopes import followed, on_hosts


def on_uvloop(work: Coroutine[Any, Any, None]) -> None:
    try:
        uvloop = import_module("uvloop")
    except ModuleNotFoundError:
        work.close()
        if os.environ.get("CI"):
            pytest.fail("fences are tested on uvloop too: pip install -c constraints.txt uvloop")
        pytest.skip("uvloop is not installed")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


@pytest.mark.parametrize("name", ["tcp", "tcp_store"])
def test_a_transport_keeps_all_promises(name: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with TRANSPORTS[name](tmp_path) as make:
            await check_fence_transport(make, together=name == "tcp")

    on_uvloop(check())


def test_the_ranks_of_a_host_come_together(tmp_path: Path) -> None:
    async def check() -> None:
        async with on_hosts()(tmp_path) as make:
            world = FenceWorld(make, SIZE)
            try:
                await world.open()
                await SCOPE_PROMISES[0](world)
                assert followed(world)
            finally:
                await world.close()

    on_uvloop(check())


def test_ranks_run_their_epochs(tmp_path: Path) -> None:
    store = tcp_store()

    async def rank(number: int) -> None:
        async with RankRunner(
            "basic",
            rank=number,
            ranks=2,
            fences=store,
            actions=dict.fromkeys(("sync", "offload", "empty_cache", "resume_kv"), lambda: None),
            caller_joins=True,
            runs=tmp_path,
        ) as runner:
            for epoch in (1, 2):
                assert (await runner.run_epoch()).epoch == epoch

    async def both() -> None:
        await asyncio.gather(rank(0), rank(1))

    on_uvloop(both())
