"""Who is no rank may knock at a coordinator's port: it is refused and logged once."""

import asyncio
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from phasesync.core import fence_messages
from phasesync.core.fence_messages import frame, greeting
from phasesync.core.model import Opened, Rank, RoleName
from phasesync.errors import StoreLost
from phasesync.fences.tcp import TcpCoordinator, TcpFences
from phasesync.testing import FenceWorld

RESET = struct.pack("ii", 1, 0)
TOKEN = "secret"


@asynccontextmanager
async def coordinator() -> AsyncIterator[tuple[TcpCoordinator, FenceWorld]]:
    """A coordinator with two ranks of which one waits; at the end the other comes, and both pass.

    Whatever the strangers did meanwhile, no error came out of the coordinator's callbacks.
    """
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    server = TcpCoordinator(token=TOKEN)
    await server.start()
    world = FenceWorld(
        lambda run, rank, n: TcpFences(
            server.address, rank=rank, run=run, incarnation=n, token=TOKEN
        ),
        2,
    )
    await world.open()
    call = world.call(deadline_s=60.0)
    waiting = asyncio.ensure_future(world.arrive(world.ranks[0], call))
    await asyncio.sleep(0.05)
    yield server, world
    assert not waiting.done()
    assert isinstance(await world.arrive(world.ranks[1], call), Opened)
    assert isinstance(await waiting, Opened)
    await world.close()
    await server.close()
    assert errors == []


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "refused a connection" in line]


def run_with(
    strange: Callable[[TcpCoordinator], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> list[str]:
    async def play() -> None:
        async with coordinator() as (server, _):
            await strange(server)
            until = asyncio.get_running_loop().time() + 10
            while server.peers > 2 and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.01)
            assert server.peers == 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    return refusals(caplog)


def test_a_port_scan_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scan(server: TcpCoordinator) -> None:
        for number in range(200):
            end = socket.create_connection(server.address)
            if number % 2:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()
            await asyncio.sleep(0)

    (said,) = run_with(scan, caplog)
    assert said.endswith("127.0.0.1: it left before it had greeted")


@pytest.mark.parametrize("text", [b"\x16\x03\x01" + bytes(200), b"SSH-2.0-x\r\n" * 9, bytes(44)])
def test_garbage_before_the_token_is_not_parsed(
    text: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def knock(server: TcpCoordinator) -> None:
        monkeypatch.setattr(fence_messages.Framer, "feed", None)
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(text)
        await asyncio.sleep(0.1)
        writer.close()
        monkeypatch.undo()

    (said,) = run_with(knock, caplog)
    assert said.endswith("it does not know the token of this run")


def test_one_byte_at_a_time_is_cut_when_its_time_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasesync.fences.coordinator.GREETING_S", 0.3)

    async def dribble(server: TcpCoordinator) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        with suppress(ConnectionError):
            for byte in greeting(TOKEN)[:-1]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    (said,) = run_with(dribble, caplog)
    assert "it said nothing" in said


def test_a_frame_of_a_gibibyte_is_refused_by_its_length_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def send(server: TcpCoordinator) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(greeting(TOKEN) + (1 << 30).to_bytes(4, "big"))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    (said,) = run_with(send, caplog)
    assert str(1 << 30) in said


def test_another_version_is_refused_by_name_on_both_sides(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = b"phasesync-0\n" + greeting(TOKEN)[len(fence_messages.MAGIC) :]

    async def greet(server: TcpCoordinator) -> None:
        monkeypatch.setattr("phasesync.fences.tcp.greeting", lambda token: older)
        rank = TcpFences(server.address, rank=Rank(RoleName("t"), 7), run="r", token=TOKEN)
        monkeypatch.undo()
        with pytest.raises(StoreLost, match="and the versions of phasesync"):
            await rank.connect()
        await rank.close()

    (said,) = run_with(greet, caplog)
    assert "it greets as phasesync-0, and this is phasesync-1: install one phasesync" in said


REQUESTS = (
    b'["hello",1,["trainer",7],0,"r",0]',
    b'["members","d",[["trainer",7]]]',
    b'["arrive",2,["world",0,"f",1,1,"d",5.0,"d"],"[1]"]',
    b'["watch",3,["world",0,"f",1,1,"d",5.0,"d"]]',
    b'["lost",4,{"kind":"dead","ranks":[["trainer",7]]},0]',
    b'["beat",["trainer",7],"[]"]',
)
PIECES = (b"null", b"1e400", b"-1", b"[]", b"{}", b'""', b"true", b"[[[[[[", b"\xff", b'"\\ud800"')


def test_what_knows_the_token_and_talks_nonsense_is_cut_and_raises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests with a piece of each replaced by chance, as another version might send them."""
    rng = random.Random(7)

    def spoiled() -> bytes:
        said = rng.choice(REQUESTS)
        start = rng.randrange(len(said))
        return said[:start] + rng.choice(PIECES) + said[start + rng.randrange(8) :]

    async def babble(server: TcpCoordinator) -> None:
        for _ in range(400):
            reader, writer = await asyncio.open_connection(*server.address)
            first = REQUESTS[: rng.randrange(3)]
            writer.write(greeting(TOKEN) + b"".join(map(frame, (*first, spoiled(), os.urandom(9)))))
            writer.write_eof()
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()

    (said,) = run_with(babble, caplog)
    assert "no request" in said or "a frame" in said
