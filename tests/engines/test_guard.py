"""`guard(engine)`: what it refuses, whoever calls, and that the engine never hears of it."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from phasesync.core import wire
from phasesync.core.model import Epoch, FenceKey, FenceName, Opened, Ticket
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import FLOOR_PATH, GUARDED, Guard, GuardMiddleware, guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import COLOCATED, TicketRules, VerdictTable, ticket_text
from phasesync.errors import EngineRefused

from .surfaces import AsyncSurface, SyncSurface


class Fences:
    """Opens a fence at once and hands out its ticket."""

    def __init__(self) -> None:
        self.table = VerdictTable()
        self.generation = 0

    def open(
        self, fence: str, epoch: int = 0, *, scope: str = "replica/0", attempt: int = 0
    ) -> Ticket:
        self.generation += 1
        ticket = Ticket(
            key=FenceKey("run", attempt, scope, self.generation),
            fence=FenceName(fence),
            epoch=Epoch(epoch),
            count=2,
            hash=f"{self.generation:064x}",
        )
        self.table.record(Opened(ticket=ticket))
        return ticket


@pytest.fixture
def fences() -> Fences:
    return Fences()


def simulated() -> SimulatedEngine:
    return SimulatedEngine([Budget(16)])


def guarded(opened: Fences, engine: object, **more: Any) -> Guard:
    return guard(engine, run="run", scope="replica/0", verdicts=opened.table, **more)


def bad_tickets(fences: Fences, fence: str) -> dict[str, Ticket | None]:
    """Floor is epoch 3."""
    real = fences.open(fence, 3)
    return {
        "none was given": None,
        "floor": fences.open(fence, 2),
        "scope": fences.open(fence, 3, scope="replica/1"),
        "this is of": fences.open("another", 3),
        "no verdict": Ticket(
            key=FenceKey("run", 0, "replica/0", 999), fence=real.fence, epoch=Epoch(3), count=2,
            hash=real.hash,
        ),
        "gave another ticket": Ticket(
            key=real.key, fence=real.fence, epoch=Epoch(4), count=2, hash=real.hash
        ),
        "is of run": Ticket(
            key=real.key._replace(run="other"), fence=real.fence, epoch=Epoch(3), count=2,
            hash=real.hash,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("tag", [KV_CACHE, "cuda_graph"])
def test_recovery_may_map_what_an_engine_releases_only_with_the_rest(
    fences: Fences, tag: str
) -> None:
    keeper = guarded(fences, SyncSurface(simulated()))
    keeper.check("wake_up", tag, fences.open("let_go"))
    keeper.check("wake_up", tag, fences.open("memory_released", 1))
    with pytest.raises(EngineRefused, match="'memory_released' or 'let_go'; none was given"):
        keeper.check("wake_up", tag, None)


WAKES: dict[str, Callable[[Any, Ticket | None], Any]] = {
    "kv": lambda e, t: e.wake_up(["kv_cache"], ticket=t),
    "kv by keyword": lambda e, t: e.wake_up(tags=["kv_cache"], ticket=t),
    "all": lambda e, t: e.wake_up(ticket=t),
    "both": lambda e, t: e.wake_up(["weights", "kv_cache"], ticket=t),
}


@pytest.mark.parametrize("wake", WAKES)
@pytest.mark.parametrize("surface", [SyncSurface, AsyncSurface])
def test_a_wake_of_kv_without_a_good_ticket_is_refused(
    fences: Fences, wake: str, surface: type[Any]
) -> None:
    engine = surface(simulated())
    guarded(fences, engine, floor=Floor(0, 3))

    async def call(ticket: Ticket | None) -> Any:
        value = WAKES[wake](engine, ticket)
        return await value if inspect.isawaitable(value) else value

    async def story() -> None:
        sleeping = engine.sleep(level=2)
        if sleeping is not None:
            await sleeping
        weights = engine.wake_up(["weights"])  # Weights need no ticket unless `fences` says so.
        if inspect.isawaitable(weights):
            await weights
        reached = list(engine.simulated.calls)
        for said, ticket in bad_tickets(fences, "memory_released").items():
            with pytest.raises(EngineRefused, match=said):
                await call(ticket)
        assert engine.simulated.calls == reached
        await call(fences.open("memory_released", 3))

    asyncio.run(story())


def test_generation_needs_a_ticket_of_its_own_until_the_epoch_is_admitted(fences: Fences) -> None:
    engine = SyncSurface(simulated())
    keeper = guarded(fences, engine, floor=Floor(0, 3))
    for said, ticket in bad_tickets(fences, "ready_to_serve").items():
        with pytest.raises(EngineRefused, match=said):
            engine.generate(["a"], ticket=ticket)  # type: ignore[call-arg]
    assert engine.simulated.calls == []
    good = fences.open("ready_to_serve", 3)
    assert engine.generate(["a"], ticket=good) == ["a@0"]  # type: ignore[call-arg]
    with pytest.raises(EngineRefused, match="none was given"):
        engine.generate(["a"])
    keeper.admit(good)
    assert engine.generate(["a"]) == ["a@0"]
    assert engine.chat("a") == ["a@0"]  # Its own inner `generate` needs no second ticket.
    keeper.raise_floor(Floor(0, 4))
    with pytest.raises(EngineRefused, match="none was given"):
        engine.generate(["a"])


def test_a_stream_is_refused_at_the_call_and_a_sleep_shuts_what_was_admitted(
    fences: Fences,
) -> None:
    engine = AsyncSurface(simulated())
    guarded(fences, engine)

    async def story() -> None:
        with pytest.raises(EngineRefused, match="cannot generate"):
            engine.generate("a", None, "r0")
        await engine.resume_generation(ticket=fences.open("ready_to_serve"))  # type: ignore[call-arg]
        assert [text async for text in engine.generate("a", None, "r1")] == ["a@0"]
        await engine.sleep(level=0)
        with pytest.raises(EngineRefused, match="none was given"):
            engine.generate("a", None, "r2")

    asyncio.run(story())


def test_a_wake_by_remote_procedure_call_is_a_wake(fences: Fences) -> None:
    engine = SyncSurface(simulated())
    guarded(fences, engine)
    engine.sleep(level=2)
    calls: tuple[dict[str, Any], ...] = (
        {"args": (["kv_cache"],)},
        {"kwargs": {"tags": ["kv_cache"]}},
        {},
    )
    for call in calls:
        with pytest.raises(EngineRefused, match="memory_released"):
            engine.collective_rpc("wake_up", **call)
    assert engine.collective_rpc("echo", args=(1,)) == [(1,)]


def test_the_inner_engine_object_is_guarded_too(fences: Fences) -> None:
    outer, inner = SyncSurface(simulated()), SyncSurface(simulated())
    outer.llm_engine = inner  # type: ignore[attr-defined]
    guarded(fences, outer)
    inner.sleep(level=2)
    with pytest.raises(EngineRefused):
        inner.wake_up()
    inner.wake_up(ticket=fences.open("memory_released"))  # type: ignore[call-arg]


def test_a_frozen_leader_is_refused_after_its_replacement_has_resumed(fences: Fences) -> None:
    """Frozen between pass and resume, replaced, then awake: its ticket was good once."""
    engine = SyncSurface(simulated())
    guarded(fences, engine)
    engine.sleep(level=2)
    frozen = fences.open("memory_released", 7)
    engine.wake_up(["weights"])
    engine.wake_up(["kv_cache"], ticket=fences.open("memory_released", 7, attempt=1))  # type: ignore[call-arg]
    engine.sleep(level=2)
    with pytest.raises(EngineRefused, match="floor is attempt 1, epoch 7"):
        engine.wake_up(["kv_cache"], ticket=frozen)  # type: ignore[call-arg]


def test_weights_are_guarded_where_the_fences_say_so(fences: Fences) -> None:
    engine = SyncSurface(simulated())
    guarded(fences, engine, fences=COLOCATED)
    engine.sleep(level=2)
    with pytest.raises(EngineRefused, match="ready_for_weights"):
        engine.wake_up(["weights"])
    engine.wake_up(["weights"], ticket=fences.open("ready_for_weights"))  # type: ignore[call-arg]


def test_a_guard_comes_off_and_there_is_only_one(fences: Fences) -> None:
    engine = SyncSurface(simulated())
    keeper = guarded(fences, engine)
    assert "tags" in inspect.signature(engine.wake_up).parameters
    with pytest.raises(EngineRefused, match="a guard already"):
        guarded(fences, engine)
    keeper.remove()
    assert engine.generate(["a"]) == ["a@0"]
    assert "generate" not in vars(engine)


# --- behind HTTP ---------------------------------------------------------------------------


class Server:
    """An ASGI application over the simulated engine, under the guard's middleware."""

    def __init__(self, fences: Fences) -> None:
        self.engine = simulated()

        class Keeper(GuardMiddleware):
            rules = TicketRules(run="run", scope="replica/0", verdicts=fences.table, fences=GUARDED)

        self.app = Keeper(self.serve)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        match scope["path"]:
            case "/sleep":
                self.engine.sleep((WEIGHTS, KV_CACHE))
            case "/wake_up":
                self.engine.wake(None)
            case "/v1/completions":
                body = self.engine.generate("a").encode()
            case _:
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def ask(
        self,
        path: str,
        *,
        kind: str = "http",
        method: str = "POST",
        query: str = "",
        body: bytes = b"",
        header: tuple[bytes, bytes] | None = None,
        root: str = "",
    ) -> list[dict[str, Any]]:
        """What is sent back."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": kind, "method": method, "path": root + path, "root_path": root,
            "query_string": query.encode(),
            "headers": [] if header is None else [header],
        }  # fmt: skip
        asyncio.run(self.app(scope, receive, send))
        return sent

    def post(
        self,
        path: str,
        query: str = "",
        body: object = None,
        ticket: Ticket | None = None,
        method: str = "POST",
    ) -> tuple[int, bytes]:
        begun, content = self.ask(
            path,
            method=method,
            query=query,
            body=b"" if body is None else wire.encode(body),
            header=(b"X-Phasesync-Ticket", ticket_text(ticket).encode()) if ticket else None,
        )
        return begun["status"], content["body"]


def test_a_server_refuses_what_has_no_ticket_in_its_header(fences: Fences) -> None:
    server = Server(fences)
    assert server.post("/sleep", "level=2")[0] == 200
    reached = list(server.engine.calls)
    for path, query, body in (
        ("/wake_up", "tags=kv_cache", None),
        ("/wake_up", "tags=weights&tags=kv_cache", None),
        ("/wake_up", "", None),
        ("/collective_rpc", "", {"method": "wake_up", "kwargs": {"tags": ["kv_cache"]}}),
        ("/resume_memory_occupation", "", {"tags": ["kv_cache"]}),
        ("/resume", "", None),
        ("/v1/completions", "", {"prompt": "a"}),
    ):
        status, said = server.post(path, query, body)
        assert (status, b"EngineRefused" in said) == (409, True), (path, said)
    assert server.engine.calls == reached
    assert server.post("/wake_up", ticket=fences.open("memory_released"))[0] == 200
    assert server.post("/collective_rpc", body={"method": "echo"})[1] == b'{"method":"echo"}'


def test_a_server_serves_the_admitted_epoch_until_its_floor_rises(fences: Fences) -> None:
    server = Server(fences)
    good = fences.open("ready_to_serve", 1)
    assert server.post("/resume", ticket=good)[0] == 200
    assert server.post("/v1/completions", body={"prompt": "a"}) == (200, b"a@0")
    assert server.post(FLOOR_PATH, body={"attempt": 0, "epoch": 2})[0] == 200
    assert server.post("/v1/completions", body={"prompt": "a"})[0] == 409
    assert server.post("/resume", ticket=good)[0] == 409
    assert server.post(FLOOR_PATH, body={"epoch": "?"})[0] == 422


def test_a_header_that_is_no_ticket_is_refused(fences: Fences) -> None:
    begun, content = Server(fences).ask("/wake_up", header=(b"x-phasesync-ticket", b"{}"))
    assert begun["status"] == 409
    assert b"is no ticket" in content["body"]


GENERATES = """
    /classify /cohere/v2/chat /encode /generate /generate_from_file /generative_scoring
    /inference/v1/generate /invocations /pooling /rerank /score /v1/audio/transcriptions
    /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch /v1/classify
    /v1/completions /v1/embeddings /v1/messages /v1/rerank /v1/responses /v1/score /v1/systemone
    /v2/embed /v2/rerank /vertex_generate /api/chat /of/a/later/engine
"""
CONTROLS = """
    /abort_request /abort_requests /clear_hicache_storage_backend /close_session
    /cohere/v2/chat/render /configure_logging /destroy_weights_update_group /detokenize
    /dump_expert_distribution_record /fault_tolerance/apply /finish_weight_update /flush_cache
    /freeze_gc /get_weights_by_name /init_weight_transfer_engine /init_weights_update_group
    /is_scaling_elastic_ep /load_lora_adapter /open_session /parse_function_call /ping
    /release_memory_occupation /reset_encoder_cache /reset_mm_cache /reset_prefix_cache
    /scale_elastic_ep /send_weights_to_remote_instance /separate_reasoning /set_internal_state
    /shutdown_weight_transfer_engine /sleep /pause /slow_down /start_draft_weight_update
    /start_profile /start_weight_update /stop_profile /tokenize /unload_lora_adapter
    /update_weight_version /update_weights /update_weights_from_disk /update_weights_from_ipc
    /update_weights_from_tensor /v1/chat/completions/derender /v1/chat/completions/render
    /v1/completions/render /v1/detokenize /v1/load_lora_adapter /v1/messages/count_tokens
    /v1/responses/resp_1/cancel /v1/tokenize /v1/unload_lora_adapter /weight_checker
"""


@pytest.mark.parametrize("path", GENERATES.split())
def test_a_route_that_generates_or_is_not_known_wants_a_ticket(fences: Fences, path: str) -> None:
    """The routes of vLLM 0.32 and SGLang 0.5 that generate, and what later ones may bring."""
    server = Server(fences)
    assert server.post(path)[0] == 409
    assert server.post(path, method="PUT")[0] == 409
    assert server.post(path, ticket=fences.open("ready_to_serve"))[0] == 200


@pytest.mark.parametrize("path", CONTROLS.split())
def test_a_route_that_leaves_generation_alone_passes(fences: Fences, path: str) -> None:
    assert Server(fences).post(path)[0] == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/v1/responses/resp_1"])
def test_what_is_only_read_passes(fences: Fences, path: str) -> None:
    assert Server(fences).post(path, method="GET")[0] == 200


def test_a_route_of_ones_own_passes_where_its_guard_says_so(fences: Fences) -> None:
    server = Server(fences)
    assert server.post("/my/books")[0] == 409
    type(server.app).passes = frozenset({"/my/books"})
    assert server.post("/my/books")[0] == 200


@pytest.mark.parametrize("root", ["", "/engines/3"])
def test_a_websocket_and_a_server_below_a_prefix_are_guarded_too(fences: Fences, root: str) -> None:
    server = Server(fences)
    for path in ("/v1/realtime", FLOOR_PATH):
        (closed,) = server.ask(path, kind="websocket", root=root)
        assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert server.ask("/wake_up", root=root)[0]["status"] == 409
    assert server.ask("/tokenize", root=root)[0]["status"] == 200


class Queueing(AsyncSurface):
    """An engine whose generation goes through a method of its own, as in vLLM."""

    async def add_request(self, prompt: str) -> str:
        return f"queued {prompt}"

    async def generate(
        self, prompt: str, params: Any = None, request_id: str = "0"
    ) -> AsyncGenerator[str]:
        yield await self.add_request(prompt)
        async for text in super().generate(prompt, params, request_id):
            yield text


def test_generation_with_a_ticket_passes_the_inner_calls_that_need_one(fences: Fences) -> None:
    engine = Queueing(simulated())
    guarded(fences, engine)

    async def said(**ticket: Any) -> list[str]:
        return [text async for text in engine.generate("a", **ticket)]

    assert asyncio.run(said(ticket=fences.open("ready_to_serve"))) == ["queued a", "a@0"]
    with pytest.raises(EngineRefused, match="cannot generate"):
        asyncio.run(said())
    with pytest.raises(EngineRefused, match="cannot add_request"):
        asyncio.run(engine.add_request("b"))
