"""`guard(engine)`: what it refuses, whoever calls, and that the engine never hears of it."""

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from phasesync.core import wire
from phasesync.core.model import Epoch, FenceKey, FenceName, Opened, Ticket
from phasesync.engines.base import KV_CACHE, WEIGHTS, Floor
from phasesync.engines.guard import FLOOR_PATH, GUARDED, Guard, GuardMiddleware, guard
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.tickets import COLOCATED, TicketRules, VerdictTable, ticket_text
from phasesync.engines.trtllm import WEIGHT_TAGS
from phasesync.errors import EngineError, EngineRefused

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


class Executor(SyncSurface):
    """What vLLM keeps below its engine, in the same process, with a wake of its own."""


class Deep(AsyncSurface):
    """The objects of vLLM below the one that a user holds, each with calls of its own."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine)
        self.engine_core = Core(engine)


class Core:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.simulated = engine
        self.model_executor = Executor(engine)

    async def sleep_async(self, level: int = 1) -> None:
        self.simulated.sleep((WEIGHTS, KV_CACHE))

    async def resume_scheduler_async(self) -> None:
        self.simulated.resume()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return getattr(self.simulated, method)(*args)


def test_the_calls_below_the_engine_are_guarded_down_to_its_executor(fences: Fences) -> None:
    engine = Deep(simulated())
    keeper = guarded(fences, engine)
    core, executor = engine.engine_core, engine.engine_core.model_executor

    async def story() -> None:
        keeper.admit(fences.open("ready_to_serve"))
        await core.sleep_async()
        assert not keeper.is_open  # However it was put to sleep.
        reached = list(engine.simulated.calls)
        for call in (
            core.resume_scheduler_async,
            lambda: core.call_utility_async("wake_up", ["kv_cache"]),
            lambda: core.call_utility_async("collective_rpc", "wake_up"),
            lambda: core.call_utility_async("resume_scheduler"),
        ):
            with pytest.raises(EngineRefused):
                await call()
        for wake in (executor.wake_up, lambda: executor.collective_rpc("wake_up")):
            with pytest.raises(EngineRefused):
                wake()
        assert engine.simulated.calls == reached
        executor.wake_up(["weights"])

    asyncio.run(story())


class Decorated(AsyncSurface):
    """Methods that do not look like what they return."""

    def encode(self, prompt: str) -> Coroutine[Any, Any, list[str]]:
        return self.twice(prompt)

    def chat(self, prompt: str) -> AsyncGenerator[str]:
        return AsyncSurface.generate(self, prompt, None, "0")

    async def twice(self, prompt: str) -> list[str]:
        return [await self.add_request(prompt), prompt]

    async def add_request(self, prompt: str) -> str:
        return f"queued {prompt}"


def test_a_method_in_disguise_passes_its_own_calls(fences: Fences) -> None:
    engine: Any = Decorated(simulated())
    guarded(fences, engine)
    ticket = fences.open("ready_to_serve")

    async def story() -> None:
        with pytest.raises(EngineRefused):
            engine.encode("a")
        assert await engine.encode("a", ticket=ticket) == ["queued a", "a"]
        assert [text async for text in engine.chat("a", ticket=ticket)] == ["a@0"]
        with pytest.raises(EngineRefused):
            await engine.add_request("b")

    asyncio.run(story())


class Later(SyncSurface):
    """An engine of a release that nobody has seen."""

    def dream(self) -> None: ...

    def get_dreams(self) -> None: ...

    def checkpoint_restore(self) -> None: ...


@pytest.mark.parametrize(
    "tags",
    [["weights", "scheduling"], ["scheduling"], ["model", "dreams"], [["kv_cache"]], 5, "kv_cache"],
)
def test_a_wake_of_more_than_weights_is_a_wake_of_kv(fences: Fences, tags: Any) -> None:
    engine = SyncSurface(simulated())
    guarded(fences, engine)
    with pytest.raises(EngineRefused, match="'kv_cache' needs a ticket"):
        engine.wake_up(tags)
    with pytest.raises(EngineRefused, match="'kv_cache' needs a ticket"):
        engine.collective_rpc("wake_up", args=(tags,))
    with pytest.raises(EngineRefused, match="'kv_cache' needs a ticket"):
        engine.collective_rpc(Executor.wake_up, args=(tags,))  # type: ignore[arg-type]


def test_a_guard_says_what_it_does_not_know(fences: Fences) -> None:
    engine = Later(simulated())
    keeper = guarded(fences, engine)
    assert keeper.unverified == ("what Later of replica/0 does in dream()",)
    with pytest.raises(EngineRefused, match="'kv_cache' needs a ticket"):
        engine.checkpoint_restore()


class Handle:
    """A method of an actor's handle, as Ray has it."""

    def remote(self) -> None: ...


def test_what_is_no_engine_of_this_process_gets_no_guard(fences: Fences) -> None:
    handle = type("Handle", (), {"wake_up": Handle()})()
    with pytest.raises(EngineError, match=r"is a handle; .* inside the actor"):
        guarded(fences, handle)
    for other in ("http://127.0.0.1:8000", object(), Guard):
        with pytest.raises(EngineError, match=r"no wake_up\(\) to guard"):
            guarded(fences, other)


def test_a_guard_gives_back_what_another_had_put_on_before(fences: Fences) -> None:
    engine = SyncSurface(simulated())
    engine.generate = lambda *_: ["patched"]  # type: ignore[method-assign]
    patched = engine.generate
    keeper = guarded(fences, engine)
    with pytest.raises(EngineRefused):
        engine.generate(["a"])
    keeper.remove()
    assert engine.generate is patched
    guarded(fences, engine)


class Slotted:
    __slots__ = ("__phasesync_guard__", "calls")

    def wake_up(self) -> None: ...


def test_an_engine_that_cannot_be_wrapped_is_not_half_guarded(fences: Fences) -> None:
    engine = Slotted()
    with pytest.raises((AttributeError, TypeError)):
        guarded(fences, engine)
    assert getattr(engine, "__phasesync_guard__", None) is None


def test_a_ticket_that_mapped_kv_does_not_do_so_again_after_a_release(fences: Fences) -> None:
    """Even in its own epoch: the memory may be another's by now."""
    engine = SyncSurface(simulated())
    keeper = guarded(fences, engine)
    engine.sleep(level=2)
    used = fences.open("memory_released", 4)
    engine.wake_up(["weights"])
    keeper.check("wake_up", KV_CACHE, used)
    keeper.check("wake_up", "cuda_graph", used)  # One fence allows both, while nothing is released.
    engine.sleep(level=0)
    keeper.check("wake_up", KV_CACHE, used)
    engine.sleep(level=2)
    with pytest.raises(EngineRefused, match=r"released since; .* a new fence"):
        engine.wake_up(["kv_cache"], ticket=used)  # type: ignore[call-arg]
    keeper.check("wake_up", KV_CACHE, fences.open("memory_released", 4))


@pytest.mark.parametrize("meanwhile", ["floor", "sleep"])
def test_who_is_admitted_late_does_not_open_what_came_after(fences: Fences, meanwhile: str) -> None:
    """While the fence is asked, another thread raises the floor or puts the engine to sleep."""
    engine = SyncSurface(simulated())

    def slow(key: FenceKey) -> Any:
        if meanwhile == "floor":
            keeper.raise_floor(Floor(0, 9))
        else:
            engine.sleep(level=2)
        return fences.table(key)

    keeper = guard(engine, run="run", scope="replica/0", verdicts=slow)
    with pytest.raises(
        EngineRefused, match="floor is" if meanwhile == "floor" else "has been shut"
    ):
        keeper.admit(fences.open("ready_to_serve", 8))
    assert not keeper.is_open


def test_a_verdict_that_cannot_be_read_refuses_and_says_so(fences: Fences) -> None:
    def gone(key: FenceKey) -> Any:
        raise RuntimeError("store is gone")

    engine = SyncSurface(simulated())
    keeper = guard(engine, run="run", scope="replica/0", verdicts=gone)
    with pytest.raises(EngineRefused, match=r"cannot be read \(RuntimeError: store is gone\)"):
        keeper.check("wake_up", KV_CACHE, fences.open("memory_released"))
    with pytest.raises(EngineRefused, match="is of run 'other'"):  # What is plain is not asked.
        keeper.check(
            "wake_up",
            KV_CACHE,
            Ticket(
                key=FenceKey("other", 0, "replica/0", 1), fence=FenceName("memory_released"),
                epoch=Epoch(0), count=1, hash="",
            ),
        )  # fmt: skip


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


@pytest.mark.parametrize(
    "body",
    [
        b'{"method": "wake_up", "timeout": NaN}',
        b'{"method": "echo", "method": "wake_up"}',
        b'\xef\xbb\xbf{"method": "wake_up"}',
        b'{"method": "wake_up", "args": {"a": 1}}',
        b'{"method": "wake_up", "kwargs": "tags"}',
        b'{"method": "wake_up", "args": [5]}',
    ],
)
def test_a_procedure_call_that_is_read_otherwise_by_the_engine_is_a_wake(
    fences: Fences, body: bytes
) -> None:
    assert Server(fences).ask("/collective_rpc", body=body)[0]["status"] == 409


def test_the_weights_of_tensorrt_llm_have_names_of_their_own(fences: Fences) -> None:
    server = Server(fences)
    ticket = fences.open("ready_for_weights")
    for names in (list(WEIGHT_TAGS), ["model"]):
        assert server.post("/resume_memory", body={"tags": names}, ticket=ticket)[0] == 200
    assert server.post("/resume_memory", body={"tags": ["model", "kv_cache"]})[0] == 409


def test_a_health_check_that_generates_is_generation(fences: Fences) -> None:
    server = Server(fences)
    assert server.post("/health_generate", method="GET")[0] == 409
    assert server.post("/health", method="GET")[0] == 200


def test_a_server_serves_others_while_its_guard_waits_for_a_verdict(fences: Fences) -> None:
    server = Server(fences)
    asked, answered = threading.Event(), threading.Event()

    def late(key: FenceKey) -> Any:
        asked.set()
        assert answered.wait(20)
        return fences.table(key)

    type(server.app).rules = TicketRules(run="run", scope="replica/0", verdicts=late)
    server.app = type(server.app)(server.serve)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    def scope(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }

    async def story() -> None:
        header = (b"x-phasesync-ticket", ticket_text(fences.open("memory_released")).encode())
        waking = asyncio.create_task(server.app(scope("/wake_up", header), receive, send))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        await server.app(scope("/tokenize"), receive, send)
        assert sent[0]["status"] == 200
        assert not waking.done()
        answered.set()
        await waking

    asyncio.run(story())
    assert [message["status"] for message in sent if "status" in message] == [200, 200]


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
