"""The coordinator: who may speak to it, and what happens when somebody is gone."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest

from phasesync.core import wire
from phasesync.core.fence_messages import GREETING_BYTES, Answer, frame, greeting
from phasesync.core.model import Opened, Rank, RoleName
from phasesync.errors import FenceBroken, PlanError, StoreLost
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FenceWorld, arrives, failure_of
from tests.fences.faults.ranks import Life, listen, lives_of, started, until_entered
from tests.fences.processes import Host, hosted, rank_of, tcp_host

T0 = Rank(RoleName("trainer"), 0)
SIZE = 4
VICTIM = 2
WITHIN_S = 30.0


@asynccontextmanager
async def coordinator() -> AsyncIterator[TcpCoordinator]:
    opened = TcpCoordinator(token="secret")
    await opened.start()
    yield opened
    await opened.close()


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What came until the other end closed."""
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * GREETING_BYTES,
        greeting("another run"),
        greeting("secret") + (1 << 30).to_bytes(4, "big") + b"{",
        greeting("secret") + (4).to_bytes(4, "big") + b"junk",
        greeting("secret") + (12).to_bytes(4, "big") + b'["nonsense"]',
        greeting("secret") + (13).to_bytes(4, "big") + b'["watch",1,2]',
    ],
    ids=["http", "other token", "a GiB", "no JSON", "no request", "no run"],
)
def test_a_stranger_is_refused_and_logged_once(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def knock() -> None:
        async with coordinator() as server:
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*server.address)
                writer.write(said)
                assert await closed(reader) == b""
                writer.close()
            world = FenceWorld(
                lambda run, rank, n: TcpFences(
                    server.address, rank=rank, run=run, incarnation=n, token="secret"
                ),
                2,
            )
            async with world:
                assert all([await world.all_arrive(world.call())])

    with caplog.at_level(logging.WARNING):
        asyncio.run(knock())
    assert len([r for r in caplog.records if "refused a connection" in r.getMessage()]) == 1


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasesync.fences.coordinator.GREETING_S", 0.2)

    async def knock() -> None:
        async with coordinator() as server:
            reader, writer = await asyncio.open_connection(*server.address)
            assert await closed(reader) == b""
            writer.close()

    asyncio.run(knock())


def test_a_wrong_token_is_said_at_the_other_end() -> None:
    async def connect() -> None:
        async with coordinator() as server:
            endpoint = TcpFences(server.address, rank=T0, run="r", token="wrong")
            with pytest.raises(StoreLost, match="compare the run's token on both sides"):
                await endpoint.connect()
            await endpoint.close()

    asyncio.run(connect())


def test_who_comes_when_all_others_have_left_hears_what_they_decided() -> None:
    """Ranks start at different speeds: two disagree and are gone before the third is there."""

    async def check() -> None:
        async with coordinator() as server:

            def make(run: str, rank: Rank, incarnation: int) -> TcpFences:
                return TcpFences(server.address, rank=rank, run=run, token="secret")

            world = FenceWorld(make, 3)
            one, two, three = world.ranks
            for rank in (one, two):
                world.ends[rank] = make(world.run, rank, 0)
                await world.ends[rank].connect()
            call = world.call()
            failed = arrives(call, two, cause=failure_of(two))
            found = await asyncio.gather(world.arrive(one, call), world.arrive(two, call, failed))
            await asyncio.gather(*(end.close() for end in world.ends.values()))
            while server.peers:
                await asyncio.sleep(0.01)
            world.ends = {three: make(world.run, three, 0)}
            await world.ends[three].connect()
            late = await asyncio.wait_for(world.arrive(three, call), 10)
            assert isinstance(late, FenceBroken)
            assert {late.cause} == {
                error.cause for error in found if isinstance(error, FenceBroken)
            }
            await world.close()
            while server.peers:
                await asyncio.sleep(0.01)
            assert server._hubs == {}

    asyncio.run(check())


def test_nobody_at_the_other_end_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()

    async def connect() -> None:
        endpoint = TcpFences(address, rank=T0, run="r")
        with pytest.raises(StoreLost, match="no coordinator at"):
            await endpoint.connect()
        await endpoint.close()

    asyncio.run(connect())


def test_a_fence_of_another_attempt_is_refused() -> None:
    async def arrive() -> None:
        async with coordinator() as server:
            endpoint = TcpFences(server.address, rank=T0, run="r", attempt=1, token="secret")
            await endpoint.connect()
            with pytest.raises(PlanError, match="make one for each attempt"):
                await endpoint.missing(FenceWorld(None, 1, run="r").call())  # type: ignore[arg-type]
            await endpoint.close()

    asyncio.run(arrive())


def test_more_patience_for_a_wait_that_was_given_up_disturbs_nobody() -> None:
    """The coordinator grants it just while the rank's cancellation is on its way."""

    async def check() -> None:
        async with coordinator() as server:

            def make(run: str, rank: Rank, incarnation: int) -> TcpFences:
                return TcpFences(server.address, rank=rank, run=run, token="secret")

            world = FenceWorld(make, 2)
            async with world:
                for peer in server._peers:
                    peer._send(Answer(7, None, True, False, None), wire.encode(["wait", 1.0]))
                got = await world.all_arrive(world.call(0))
                assert all(isinstance(each, Opened) for each in got), got

    asyncio.run(check())


def test_an_endpoint_is_connected_once() -> None:
    async def check() -> None:
        async with coordinator() as server:
            endpoint = TcpFences(server.address, rank=T0, run="r", token="secret")
            await endpoint.connect()
            with pytest.raises(PlanError, match="make others to connect anew"):
                await endpoint.connect()
            await endpoint.close()

    asyncio.run(check())


@pytest.mark.parametrize("size", [8, 64])
def test_a_fence_is_two_messages_a_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def counting(*parts: bytes) -> bytes:
        nonlocal sent
        sent += 1
        return frame(*parts)

    async def count() -> int:
        async with coordinator() as server:
            world = FenceWorld(
                lambda run, rank, n: TcpFences(
                    server.address, rank=rank, run=run, incarnation=n, token="secret"
                ),
                size,
            )
            async with world:
                await world.all_arrive(world.call(0))
                before = sent
                await world.all_arrive(world.call(1))
                after = sent
            return after - before

    for module in ("coordinator", "tcp"):
        monkeypatch.setattr(f"phasesync.fences.{module}.frame", counting)
    assert asyncio.run(count()) == 2 * size


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosted(tcp_host) as host:
        yield host


def lives(host: Host, *, deadline_s: float, **bad: Any) -> AbstractContextManager[list[Life]]:
    """Four ranks; the victim gets what is `bad`."""
    here = {"transport": "tcp", "address": host.address, "deadline_s": deadline_s}
    return lives_of(SIZE, VICTIM, bad, **here)


def test_a_killed_rank_is_known_at_once_without_a_launcher(host: Host) -> None:
    with lives(host, deadline_s=20.0, act="killed") as ranks, started(ranks) as begun:
        begun[VICTIM].process.join(WITHIN_S)
        died = time.monotonic()
        assert listen(begun, WITHIN_S) == []
    reports = [each.report for each in begun if each is not begun[VICTIM]]
    (cause,) = {report.cause for report in reports}
    assert cause is not None
    assert (cause.kind, cause.ranks) == ("dead", (rank_of(VICTIM),))
    assert max(report.came_to[-1].ended_at for report in reports) - died < 1


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_coordinator_that_is_gone_is_lost(signal_number: int) -> None:
    with (
        hosted(tcp_host) as host,
        lives(host, deadline_s=3.0, act="late", late_s=30.0) as ranks,
        started(ranks) as begun,
    ):
        until_entered(ranks[0], SIZE - 1)
        os.kill(host.process.pid, signal_number)
        waiting = [each for each in begun if each is not begun[VICTIM]]
        assert listen(waiting, WITHIN_S) == []
    reports = [each.report for each in waiting]
    assert {report.came_to[-1].kind for report in reports} == {"lost"}
    lag = max(report.ending.lag_s for report in reports if report.ending)
    assert max(report.came_to[-1].waited_s for report in reports) < 3.0 + 1.0 + 0.3 + lag
    assert lag < 1


def test_a_host_that_fell_silent_is_unavailable_and_not_dead() -> None:
    """What the kernel says when keep-alive goes unanswered is said to the transport here."""

    async def check() -> None:
        async with coordinator() as server:

            def make(run: str, rank: Rank, incarnation: int) -> TcpFences:
                return TcpFences(server.address, rank=rank, run=run, token="secret")

            world = FenceWorld(make, 2)
            async with world:
                waiting, silent = world.ranks
                (peer,) = (each for each in server._peers if each.rank == silent)
                peer._transport._fatal_error(TimeoutError(110, "timed out"))  # type: ignore[attr-defined]
                found = await asyncio.wait_for(world.arrive(waiting, world.call()), 10)
                assert isinstance(found, FenceBroken)
                assert (found.cause.kind, found.cause.ranks) == ("unavailable", (silent,))

    asyncio.run(check())
