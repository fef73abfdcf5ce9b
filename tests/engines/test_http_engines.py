"""SGLang and TensorRT-LLM over HTTP, against servers that fail as the real ones do."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

from phasesync.core.model import Epoch, FenceKey, FenceName, Ticket, Version
from phasesync.engines.base import GRAPHS, KV_CACHE, WEIGHTS, Floor
from phasesync.engines.conformance import check_engine_port
from phasesync.engines.sglang import SglangEngine
from phasesync.engines.tickets import TicketRules
from phasesync.engines.trtllm import WEIGHT_TAGS, TrtllmEngine
from phasesync.engines.vllm import Lora, VllmEngine
from phasesync.errors import EngineError, EngineRefused

from .servers import SglangServer, TrtllmServer, VllmServer

RULES = TicketRules(run="run", scope="replica/0")
S = TypeVar("S")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Any]]:
    """Close whatever server a test makes."""
    made: list[Any] = []

    def keep(server: Any) -> Any:
        made.append(server)
        return server

    yield keep
    for server in made:
        server.close()


def ticket(fence: str) -> Ticket:
    return Ticket(
        key=FenceKey("run", 0, "replica/0", 1),
        fence=FenceName(fence),
        epoch=Epoch(0),
        count=1,
        hash="00" * 32,
    )


def tensors(version: int) -> dict[str, Any]:
    return {"serialized_named_tensors": [str(version)]}


async def to_session(engine: Any, *, tags: tuple[Any, ...] = (WEIGHTS, KV_CACHE)) -> None:
    await engine.pause(engine.driver.policies[0])
    await engine.release(tags)
    await engine.resume(WEIGHTS, ticket("ready_for_weights"))
    await engine.begin(Version(1))


@pytest.mark.parametrize("release", ["0.5.12", "0.5.23"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_over_sglang_keeps_every_promise(serve: Any, release: str, ranks: int) -> None:
    server = serve(SglangServer(release=release, ranks=ranks))

    async def make(rules: TicketRules) -> SglangEngine:
        return SglangEngine(server.url, tickets=rules, version=Version(0), checksums=True)

    run(check_engine_port(make, tensors))
    assert server.version == "2"
    assert server.count("/begin_weight_update") == (2 if release == "0.5.23" else 0)


def test_the_port_over_trtllm_keeps_every_promise(serve: Any) -> None:
    server = serve(TrtllmServer(control_key="secret"))

    async def make(rules: TicketRules) -> TrtllmEngine:
        return TrtllmEngine(
            server.url, tickets=rules, ranks=1, control_key="secret", version=Version(0)
        )

    run(check_engine_port(make, lambda version: {"version": version}, in_flight="wait"))
    released = next(body for _, path, body in server.asked if path == "/release_memory")
    assert released == {"tags": [*WEIGHT_TAGS, "kv_cache"]}


def test_sglang_is_never_told_of_all_tags_and_wakes_graphs_before_kv(serve: Any) -> None:
    server = serve(SglangServer())
    engine = SglangEngine(server.url, tickets=RULES)

    async def story() -> None:
        await to_session(engine, tags=(WEIGHTS, KV_CACHE, GRAPHS))
        await engine.load(tensors(1))
        await engine.finish(Version(1))
        with pytest.raises(EngineRefused, match="'cuda_graph' comes first"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.resume(GRAPHS, ticket("memory_released"))
        await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.resume_generation(ticket("ready_to_serve"))
        await engine.close()

    run(story())
    told = [body["tags"] for _, path, body in server.asked if "memory_occ" in path]
    assert told == [
        ["weights", "kv_cache", "cuda_graph"], ["weights"], ["cuda_graph"], ["kv_cache"],
    ]  # fmt: skip


def test_a_key_error_in_the_scheduler_is_one_the_port_never_causes(serve: Any) -> None:
    """A caller without a ledger gets a scheduler that died and an answer that never comes."""
    server = serve(SglangServer())
    engine = SglangEngine(server.url, tickets=RULES, http_timeout_s=0.3)

    async def story() -> None:
        await engine.pause()
        await engine.release((KV_CACHE,))
        with pytest.raises(EngineRefused, match="it is not released"):
            await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        assert server.engine.dead == ""
        with pytest.raises(EngineError, match="whether the engine did it is unknown"):
            await engine.driver.resume(WEIGHTS, None)
        await engine.close()

    run(story())
    assert server.engine.dead == "KeyError: 'weights'"


def test_a_resume_that_times_out_after_the_work_was_done_is_not_sent_again(serve: Any) -> None:
    server = serve(SglangServer())
    server.hold_after = "/resume_memory_occupation"
    engine = SglangEngine(server.url, tickets=RULES, http_timeout_s=0.3)

    async def story() -> None:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        with pytest.raises(EngineError, match="unknown"):
            await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        with pytest.raises(EngineRefused, match="the engine is unknown"):
            await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        await engine.close()

    run(story())
    assert WEIGHTS not in server.engine.asleep, "the work was done all the same"
    assert server.count("/resume_memory_occupation") == 1


def test_a_release_waits_until_the_server_is_idle(serve: Any) -> None:
    """Released while a request runs, the real scheduler fails an assertion and is gone."""
    server = serve(SglangServer())
    server.running = 1
    engine = SglangEngine(server.url, tickets=RULES, idle_within_s=5)

    async def story() -> None:
        await engine.pause("retract")
        releasing = asyncio.ensure_future(engine.release((WEIGHTS, KV_CACHE)))
        await asyncio.sleep(0.25)
        assert not server.count("/release_memory_occupation")
        server.running = 0
        await releasing
        await engine.close()

    run(story())
    assert server.count("/flush_cache") > 1


def test_a_server_that_stays_busy_fails_the_release_before_it_is_sent(serve: Any) -> None:
    server = serve(SglangServer())
    server.running = 1
    engine = SglangEngine(server.url, tickets=RULES, idle_within_s=0.2)

    async def story() -> None:
        await engine.pause("in_place")
        with pytest.raises(EngineError, match="Flush cache failed"):
            await engine.release((WEIGHTS, KV_CACHE))
        await engine.close()

    run(story())
    assert not server.count("/release_memory_occupation")


def test_a_release_that_is_acknowledged_early_is_listed_as_unverified(serve: Any) -> None:
    server = serve(SglangServer())
    engine = SglangEngine(server.url, tickets=RULES)

    async def story() -> str:
        await engine.pause()
        await engine.release((WEIGHTS, KV_CACHE))
        said = " ".join((await engine.status()).unverified)
        await engine.close()
        return said

    assert "require free_bytes" in run(story())
    held = server.engine.devices[0].held
    assert held["engine/0 kv_cache"] == 8, "200 was answered, and nothing is free yet"


def test_a_failed_update_is_partial_and_its_session_is_closed_before_the_next(serve: Any) -> None:
    server = serve(SglangServer())
    engine = SglangEngine(server.url, tickets=RULES)

    async def story() -> None:
        await to_session(engine)
        server.engine.fail_next["update"] = ValueError("shape mismatch")
        with pytest.raises(EngineError, match="shape mismatch"):
            await engine.load(tensors(1))
        assert (await engine.status()).content == "partial"
        assert server.session
        await engine.begin(Version(1))
        await engine.load(tensors(1))
        await engine.finish(Version(1))
        await engine.close()

    run(story())
    assert server.count("/end_weight_update") == 2


def test_without_a_session_the_real_server_says_success_false(serve: Any) -> None:
    server = serve(SglangServer())
    engine = SglangEngine(server.url, tickets=RULES)

    async def story() -> None:
        await engine.pause()
        with pytest.raises(EngineError, match="must run between begin_weight_update"):
            await engine.driver.load(tensors(1))
        await engine.close()

    run(story())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SglangServer(api_key="secret"), "Unauthorized"),
        (lambda: SglangServer(dp_size=2), "only with dp_size 1"),
    ],
)
def test_sglang_that_cannot_be_used_is_said_at_the_first_call(
    serve: Any, make: Any, said: str
) -> None:
    engine = SglangEngine(serve(make()).url, tickets=RULES)

    async def story() -> None:
        with pytest.raises(EngineError, match=said):
            await engine.pause()
        await engine.close()

    run(story())


def test_sglang_takes_its_key_and_an_unknown_release_is_listed(serve: Any) -> None:
    server = serve(SglangServer(api_key="secret", release="0.6.0"))
    engine = SglangEngine(server.url, tickets=RULES, api_key="secret", source="disk")

    async def story() -> str:
        await engine.pause()
        await engine.begin(Version(1))
        await engine.load({"model_path": "1"})
        await engine.finish(Version(1))
        said = " ".join((await engine.status()).unverified)
        await engine.close()
        return said

    with pytest.warns(RuntimeWarning, match="SGLang 0.6.0 is not one of"):
        assert "0.6.0 is not one of 0.5.12 to 0.5.23" in run(story())


def test_trtllm_refuses_what_it_has_no_route_for(serve: Any) -> None:
    engine = TrtllmEngine(serve(TrtllmServer()).url, tickets=RULES, ranks=1)

    async def story() -> str:
        with pytest.raises(EngineRefused, match="knows only 'wait'"):
            await engine.pause("abort")
        await engine.pause("wait")
        with pytest.raises(EngineRefused, match="no route to reset its prefix cache"):
            await engine.flush()
        said = " ".join((await engine.status()).unverified)
        await engine.close()
        return said

    assert "keeps none" in run(story())


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (lambda: TrtllmServer(control_key="secret"), {}, "Invalid RL control"),
        (lambda: TrtllmServer(supported=False), {}, "not over a socket"),
        (TrtllmServer, {"weight_tags": ("weights",)}, "Unknown memory tag 'weights'"),
    ],
)
def test_trtllm_that_cannot_release_says_why(
    serve: Any, make: Any, more: dict[str, Any], said: str
) -> None:
    engine = TrtllmEngine(serve(make()).url, tickets=RULES, ranks=1, **more)

    async def story() -> None:
        await engine.pause("wait")
        with pytest.raises(EngineError, match=said):
            await engine.release((WEIGHTS, KV_CACHE))
        assert (await engine.status()).doubtful == {WEIGHTS, KV_CACHE}
        await engine.close()

    run(story())


def test_a_trtllm_wake_that_does_not_fit_is_never_retried(serve: Any) -> None:
    server = serve(TrtllmServer())
    engine = TrtllmEngine(server.url, tickets=RULES, ranks=1)

    async def story() -> None:
        await to_session(engine)
        await engine.load({"version": 1})
        await engine.finish(Version(1))
        server.engine.devices[0].take("a peer's parameters", 8)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        with pytest.raises(EngineRefused, match="replace it"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.close()

    run(story())
    assert server.count("/resume_memory") == 2


def test_an_adapter_that_an_earlier_attempt_has_loaded_is_loaded_anew(serve: Any) -> None:
    """The server refuses a name twice, and what it holds by that name may be older."""
    server = serve(VllmServer("0.32.0"))
    held: dict[str, str] = {"policy@1": "/of/an/attempt/before"}

    def load(body: Any) -> Any:
        if body["lora_name"] in held:
            told = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return 400, {"error": {"message": told, "type": "InvalidUserInput"}}
        held[body["lora_name"]] = body["lora_path"]
        return 200, "Success"

    def unload(body: Any) -> Any:
        del held[body["lora_name"]]
        return 200, "Success"

    server.routes["POST", "/v1/load_lora_adapter"] = load
    server.routes["POST", "/v1/unload_lora_adapter"] = unload
    engine = VllmEngine(server.url, tickets=RULES, transfer=Lora(), level=1)

    async def story() -> None:
        await engine.pause()
        for version in (1, 2):
            await engine.begin(Version(version))
            await engine.load(f"/adapters/{version}")
            await engine.finish(Version(version))
            assert held == {f"policy@{version}": f"/adapters/{version}"}
        await engine.close()

    run(story())


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_what_the_servers_guard_refuses_never_reached_the_engine(serve: Any, kind: str) -> None:
    """Another leader has raised the floor beside it: this one hears so, and nothing broke."""
    said = {"error": {"type": "EngineRefused", "message": "server cannot wake: below the floor"}}
    server, made, path = {
        "vllm": (VllmServer("0.32.0"), VllmEngine, "/wake_up"),
        "sglang": (SglangServer(), SglangEngine, "/resume_memory_occupation"),
        "trtllm": (TrtllmServer(), partial(TrtllmEngine, ranks=2), "/resume_memory"),
    }[kind]
    engine = made(serve(server).url, tickets=RULES)  # type: ignore[operator]
    wake = server.routes["POST", path]

    async def story() -> None:
        await engine.pause(engine.driver.policies[-1])
        await engine.release((WEIGHTS, KV_CACHE))
        server.routes["POST", path] = lambda _: (409, said)
        with pytest.raises(EngineRefused, match="below the floor"):
            await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        status = await engine.status()
        assert (status.health, status.asleep) == ("usable", {WEIGHTS, KV_CACHE})
        server.routes["POST", path] = wake
        await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        await engine.close()

    run(story())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "write http://HOST:PORT"),
        ("http://127.0.0.1:99999", "write http://HOST:PORT"),
        ("http://127.0.0.1:port", "write http://HOST:PORT"),
        ("http://me:secret@127.0.0.1:8000", "user or password"),
        ("http://127.0.0.1:8000?key=1", "address alone"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once_and_keeps_its_secret(
    url: str, said: str
) -> None:
    with pytest.raises(EngineError, match=said) as refused:
        SglangEngine(url, tickets=RULES)
    assert "secret" not in str(refused.value)


def test_a_redirect_is_named_and_not_followed(serve: Any) -> None:
    server = serve(SglangServer())
    server.moved_to = "https://router/v1"
    engine = SglangEngine(server.url + "/elsewhere/", tickets=RULES)

    async def story() -> None:
        with pytest.raises(EngineError, match="redirects to https://router/v1; give the URL that"):
            await engine.status()
        assert server.count("/elsewhere/server_info") == 1
        await engine.close()

    run(story())


def test_a_proxy_in_the_environment_does_not_catch_a_call(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = SglangEngine(serve(SglangServer()).url + "/", tickets=RULES)

    async def story() -> str:
        status = await engine.status()
        await engine.close()
        return status.health

    assert run(story()) == "usable"


def test_the_floor_rises_while_another_call_hangs(serve: Any) -> None:
    """A frozen call is what the floor is for; it must not wait behind one."""
    server = serve(SglangServer())
    hold = threading.Event()
    server.routes["POST", "/pause_generation"] = lambda _: (hold.wait(20), (200, {}))[1]
    engine = SglangEngine(server.url, tickets=RULES)

    async def story() -> None:
        await engine.status()
        pausing = asyncio.create_task(engine.pause("abort"))
        while not server.count("/pause_generation"):
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.raise_floor(Floor(0, 3)), 10)
        assert not pausing.done()
        hold.set()
        await pausing
        await engine.close()

    run(story())


@pytest.mark.parametrize("release", ["0.24.0", "0.32.0"])
def test_the_port_over_a_vllm_server_keeps_every_promise(serve: Any, release: str) -> None:
    server = serve(VllmServer(release))

    async def make(rules: TicketRules) -> VllmEngine:
        return VllmEngine(server.url, tickets=rules, version=Version(0))

    run(check_engine_port(make, lambda version: {"version": str(version)}))
    assert server.label == (None if release == "0.24.0" else "2")


def test_a_vllm_release_that_nobody_has_tried_is_listed_as_unverified(serve: Any) -> None:
    engine = VllmEngine(serve(VllmServer("0.41.2")).url, tickets=RULES)

    async def story() -> str:
        said = " ".join((await engine.status()).unverified)
        await engine.close()
        return said

    with pytest.warns(RuntimeWarning, match="vLLM 0.41.2 is not one of"):
        assert "0.41.2 is not one of 0.24 to 0.33" in run(story())


def test_a_vllm_server_without_its_dev_mode_is_named(serve: Any) -> None:
    engine = VllmEngine(serve(VllmServer("0.32.0", dev_mode=False)).url, tickets=RULES)

    async def story() -> None:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.pause()
        await engine.close()

    run(story())


def test_a_wake_that_does_not_fit_on_a_vllm_server_is_never_retried(serve: Any) -> None:
    server = serve(VllmServer("0.24.0"))
    engine = VllmEngine(server.url, tickets=RULES)

    async def story() -> None:
        await to_session(engine)
        await engine.load({"version": "1"})
        await engine.finish(Version(1))
        server.engine.devices[0].take("a peer's parameters", 8)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        with pytest.raises(EngineRefused, match="replace it"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.close()

    run(story())
    assert server.count("/wake_up") == 2


def test_a_port_adopts_an_engine_that_sleeps_already(serve: Any) -> None:
    server = serve(VllmServer("0.32.0"))
    server.engine.sleep((WEIGHTS, KV_CACHE))
    engine = VllmEngine(server.url, tickets=RULES, asleep=(WEIGHTS, KV_CACHE))

    async def story() -> None:
        with pytest.raises(EngineRefused, match="weights' comes first"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.resume(WEIGHTS, ticket("ready_for_weights"))
        with pytest.raises(EngineRefused, match="weights are discarded"):
            await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.begin(Version(1))
        await engine.load({"version": "1"})
        await engine.finish(Version(1))
        await engine.resume(KV_CACHE, ticket("memory_released"))
        await engine.resume_generation(ticket("ready_to_serve"))
        await engine.close()

    run(story())
