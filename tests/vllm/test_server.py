"""vLLM's own HTTP server, guarded in its own process: epochs over HTTP, and what it refuses."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phasesync.core import wire
from phasesync.core.fence import judged_list
from phasesync.core.model import Opened, Ticket, Version
from phasesync.engines.tickets import TICKET_HEADER, ticket_text
from phasesync.engines.vllm import Rpc, VllmEngine
from phasesync.errors import EngineError, EngineRefused
from phasesync.journal import Journal

from .conftest import PROMPT, Models
from .cycle import LEADER, Fences, colocated_epoch
from .sender import free_port

ROOT = Path(__file__).parents[2]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


class Server:
    """The process, where it listens, and where its guard reads the fences' verdicts."""

    def __init__(self, folder: str, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = folder
        self.journal = Journal(log.with_name("runs"), run="run", rank=LEADER, ranks=1)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
        settings["PHASESYNC_RUNS"] = str(log.with_name("runs"))
        arguments = {
            "--model": folder,
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "float32",
            "--max-model-len": 128,
            "--max-num-seqs": 8,
            "--block-size": 32,
            "--kv-cache-memory-bytes": 64 << 20,
            "--worker-cls": "tests.vllm.sleepy_worker.SleepyWorker",
            "--worker-extension-cls": "tests.vllm.sleepy_worker.Extension",
            "--middleware": "tests.vllm.served_guard.ReplicaGuard",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--enforce-eager", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
        command += [str(part) for pair in arguments.items() for part in pair]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=settings, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self, within_s: float = 110) -> None:
        until = time.monotonic() + within_s
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(self.log.read_text()[-3000:])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # A server that goes in a hurry leaves its engine behind.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def opened(self, verdict: Opened) -> None:
        ticket = verdict.ticket
        self.journal.write(
            "fence.decide",
            fence=ticket.fence,
            epoch=ticket.epoch,
            attempt=ticket.key.attempt,
            scope=ticket.key.scope,
            generation=ticket.key.generation,
            verdict="open",
            judged=judged_list(verdict.arrivals),
        )

    def post(self, path: str, body: object = None, ticket: Ticket | None = None) -> tuple[int, Any]:
        """A request as anybody may send it, past every port."""
        headers = {"Content-Type": "application/json"}
        if ticket is not None:
            headers[TICKET_HEADER] = ticket_text(ticket)
        content = b"" if body is None else wire.encode(body)
        asked = urllib.request.Request(self.url + path, content, headers, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, wire.decode(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, wire.decode(error.read())

    def say(self, ticket: Ticket | None = None) -> tuple[int, Any]:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.post("/v1/completions", body, ticket)
        return status, answer["choices"][0]["token_ids"] if status == 200 else answer


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(models.folders[0], tmp_path_factory.mktemp("server") / "log")
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def test_whole_epochs_over_http_serve_exactly_what_the_trainer_holds(
    server: Server, models: Models
) -> None:
    fences = Fences(on_open=server.opened)
    engine = VllmEngine(server.url, tickets=fences.rules(), transfer=Rpc(), extension=True)

    async def story() -> list[Any]:
        said = []
        for epoch in range(2):
            bucket = {"weights_path": models.folders[epoch + 1]}
            await colocated_epoch(engine, fences, epoch, [bucket])
            said.append(await asyncio.to_thread(server.say))
        status = await engine.status()
        assert (status.version, status.unverified) == (2, ())
        await engine.close()
        return said

    assert run(story()) == [(200, models.say(1, PROMPT)), (200, models.say(2, PROMPT))]


def test_the_server_refuses_whoever_asks_and_goes_on_serving(
    server: Server, models: Models
) -> None:
    fences = Fences(on_open=server.opened)
    fences.generation = 1000
    assert server.post("/phasesync/floor", {"attempt": 0, "epoch": 7})[0] == 200
    for said, ticket in fences.bad("ready_to_serve", 7).items():
        status, answer = server.say(ticket)
        assert (status, said in str(answer)) == (409, True), answer
    assert server.post("/sleep?level=1")[0] == 200
    assert server.post("/wake_up?tags=weights")[0] == 200
    wakes: tuple[tuple[str, object], ...] = (
        ("/wake_up?tags=kv_cache", None),
        ("/wake_up", None),
        ("/collective_rpc", {"method": "wake_up", "kwargs": {"tags": ["kv_cache"]}}),
    )
    for said, ticket in fences.bad("memory_released", 7).items():
        for path, body in wakes:
            status, answer = server.post(path, body, ticket)
            assert (status, said in str(answer)) == (409, True), answer
    released = fences.open("memory_released", 7)
    assert server.post("/wake_up?tags=kv_cache", ticket=released) == (
        200,
        {"status": "awake", "tags": ["kv_cache"]},
    )
    assert server.say(fences.open("ready_to_serve", 7)) == (200, models.say(2, PROMPT))


def test_the_server_refuses_a_leader_that_was_replaced(server: Server, models: Models) -> None:
    """Its ticket is genuine and of the epoch under way; who was judged tells that it is stale."""
    fences = Fences(on_open=server.opened)
    fences.generation = 1500
    told = {"attempt": 0, "epoch": 8, "incarnations": {str(LEADER): 1}}
    assert server.post("/phasesync/floor", told)[0] == 200
    assert server.post("/sleep?level=1")[0] == 200
    assert server.post("/wake_up?tags=weights")[0] == 200
    for said, ticket in fences.bad("memory_released", 8, replaced=True).items():
        status, answer = server.post("/wake_up?tags=kv_cache", ticket=ticket)
        assert (status, said in str(answer)) == (409, True), answer
    released = fences.open("memory_released", 8)
    assert server.post("/wake_up?tags=kv_cache", ticket=released)[0] == 200
    stale = fences.open("ready_to_serve", 8, incarnation=0)
    status, answer = server.say(stale)
    assert (status, "has been replaced" in str(answer)) == (409, True), answer
    assert server.say(fences.open("ready_to_serve", 8)) == (200, models.say(2, PROMPT))


def test_a_server_that_is_gone_leaves_the_outcome_unknown(server: Server, models: Models) -> None:
    """Last in this file: it ends the server in the middle of an update."""
    fences = Fences(on_open=server.opened)
    fences.generation = 2000
    engine = VllmEngine(server.url, tickets=fences.rules(), transfer=Rpc(), extension=True)

    async def story() -> None:
        await engine.pause()
        await engine.begin(Version(1))
        server.process.kill()
        server.process.wait()
        with pytest.raises(EngineError, match="whether the engine did it is unknown"):
            await engine.load({"weights_path": models.folders[0]})
        with pytest.raises(EngineRefused, match="the engine is unknown"):
            await engine.finish(Version(1))
        await engine.close()

    run(story())
