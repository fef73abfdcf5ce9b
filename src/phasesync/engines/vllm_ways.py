"""The four ways to reach a vLLM engine, each with the same few verbs.

`has` and `takes` answer from what the target itself shows: a signature, a handle or the routes
that a server publishes. What a way cannot see it says it cannot see; nothing here goes by the
number of a release.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from phasesync.engines.calls import CallThread, Http, Reply
from phasesync.engines.tickets import ticket_headers
from phasesync.errors import EngineError, EngineLost

__all__ = ("ActorWay", "AsyncWay", "LocalWay", "ServerWay", "Way", "way_to")


_LOOK_EVERY_S = 0.2


class LocalWay:
    """An `LLM`: each call blocks, so all are made in one thread of the engine's own."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._thread = CallThread("phasesync-vllm")

    def has(self, name: str) -> bool:
        return callable(self._find(name))

    def takes(self, name: str, parameter: str) -> bool:
        return parameter in _parameters(self._find(name))

    @property
    def config(self) -> Any:
        return getattr(getattr(self.llm, "llm_engine", None), "vllm_config", None)

    @property
    def guard(self) -> Any:
        return getattr(self.llm, "__phasesync_guard__", None)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = self._find(name)
        return await self._thread.run(lambda: method(*args, **kwargs))

    async def close(self) -> None:
        self._thread.close()

    def _find(self, name: str) -> Any:
        found = getattr(self.llm, name, None)
        # `LLM` leaves `is_sleeping` and the LoRA calls to the engine below it.
        return found or getattr(getattr(self.llm, "llm_engine", None), name, None)


class AsyncWay:
    """An `AsyncLLM`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def has(self, name: str) -> bool:
        return callable(getattr(self.llm, name, None))

    def takes(self, name: str, parameter: str) -> bool:
        return parameter in _parameters(getattr(self.llm, name, None))

    @property
    def config(self) -> Any:
        return getattr(self.llm, "vllm_config", None)

    @property
    def guard(self) -> Any:
        return getattr(self.llm, "__phasesync_guard__", None)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A call to an engine that died under it is never answered; the engine's own watch knows.
        work = asyncio.ensure_future(getattr(self.llm, name)(*args, **kwargs))
        try:
            while not (await asyncio.wait({work}, timeout=_LOOK_EVERY_S))[0]:
                if getattr(self.llm, "errored", False):
                    raise EngineLost(f"the engine died; whether it did {name} is unknown")
            return work.result()
        finally:
            work.cancel()

    async def close(self) -> None:
        """An `AsyncLLM` has its own event loop tasks; nothing of them is ours."""


class ActorWay:
    """A Ray actor whose methods are those of the engine that it holds."""

    config: Any = None

    def __init__(self, handle: Any, *, guarded: bool) -> None:
        self.handle = handle
        self.guard = handle if guarded else None

    def has(self, name: str) -> bool:
        return hasattr(getattr(self.handle, name, None), "remote")

    def takes(self, name: str, parameter: str) -> bool:
        # A handle does not tell its methods' parameters apart from their names.
        return self.has(name) and parameter not in _LATER.get(name, ())

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(self.handle, name).remote(*args, **kwargs)
        except Exception as error:
            if "ActorDied" in type(error).__name__ or "ActorUnavailable" in type(error).__name__:
                raise EngineLost(f"the actor is gone; whether it did {name} is unknown") from error
            raise

    async def close(self) -> None:
        """The actor is its owner's to end."""


# Parameters that not every release has; not sent to an actor, whose release is not told.
_LATER: Mapping[str, tuple[str, ...]] = {
    "finish_weight_update": ("weight_version",),
    "pause_generation": ("clear_cache",),
    "sleep": ("mode",),
}

_ROUTES: Mapping[str, tuple[str, str]] = {
    "pause_generation": ("POST", "/pause"),
    "resume_generation": ("POST", "/resume"),
    "sleep": ("POST", "/sleep"),
    "wake_up": ("POST", "/wake_up"),
    "is_sleeping": ("GET", "/is_sleeping"),
    "release_kv_cache_memory": ("POST", "/release_kv_cache_memory"),
    "reset_prefix_cache": ("POST", "/reset_prefix_cache"),
    "init_weight_transfer_engine": ("POST", "/init_weight_transfer_engine"),
    "start_weight_update": ("POST", "/start_weight_update"),
    "update_weights": ("POST", "/update_weights"),
    "finish_weight_update": ("POST", "/finish_weight_update"),
    "get_weight_version": ("GET", "/weight_info"),
    "compute_weight_checksums": ("POST", "/weight_checker"),
    "collective_rpc": ("POST", "/collective_rpc"),
    "get_world_size": ("GET", "/get_world_size"),
    "load_lora_adapter": ("POST", "/v1/load_lora_adapter"),
    "unload_lora_adapter": ("POST", "/v1/unload_lora_adapter"),
}
_IN_BODY = frozenset(
    {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "compute_weight_checksums",
        "collective_rpc",
        "load_lora_adapter",
        "unload_lora_adapter",
    }
)
_ANSWER: Mapping[str, str] = {
    "is_sleeping": "is_sleeping",
    "get_weight_version": "weight_version",
    "compute_weight_checksums": "checksums",
    "collective_rpc": "results",
    "get_world_size": "world_size",
    "reset_prefix_cache": "success",
}


class ServerWay:
    """An HTTP server started with `VLLM_SERVER_DEV_MODE=1`."""

    config: Any = None
    guard: Any = None

    def __init__(self, url: str, *, timeout_s: float, headers: Mapping[str, str]) -> None:
        self.http = Http(url, timeout_s=timeout_s, headers=headers)
        self.version: str | None = None
        self._api: Mapping[str, Any] | None = None

    async def probe(self) -> None:
        """Ask which version it is, and which routes it has."""
        told = await self.http.call("GET", "/version")
        self.version = told.body.get("version") if isinstance(told.body, dict) else None
        api = await self.http.call("GET", "/openapi.json")
        self._api = api.body.get("paths") if isinstance(api.body, dict) else None

    @property
    def publishes(self) -> bool:
        return self._api is not None

    def has(self, name: str) -> bool:
        return name in _ROUTES and (self._api is None or _ROUTES[name][1] in self._api)

    def takes(self, name: str, parameter: str) -> bool:
        if not self.has(name):
            return False
        if self._api is None:
            return True
        method, path = _ROUTES[name]
        about = self._api[path].get(method.lower(), {})
        listed = {item.get("name") for item in about.get("parameters", ())}
        # Releases that read the request by hand list nothing; then the parameter is passed.
        return parameter in listed if listed else True

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method, path = _ROUTES[name]
        ticket = kwargs.pop("ticket", None)
        headers = ticket_headers(ticket)
        body = kwargs if name in _IN_BODY and method == "POST" else None
        query = [] if body is not None else _pairs(kwargs)
        reply = await self.http.call(method, path, query=query, body=body, headers=headers)
        reply.check_admitted()
        if not reply.ok:
            raise EngineError(f"{method} {path}: {reply.why}")
        return _value(name, reply)

    async def close(self) -> None:
        self.http.close()


Way: TypeAlias = LocalWay | AsyncWay | ActorWay | ServerWay


def _pairs(kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Query parameters: a list is repeated, a truth value is written as JSON writes it."""
    flat = ((key, item) for key, value in kwargs.items() for item in _listed(value))
    return [(key, str(item).lower() if isinstance(item, bool) else str(item)) for key, item in flat]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _value(name: str, reply: Reply) -> Any:
    if not isinstance(reply.body, dict):
        return None
    if name == "wake_up":
        status = reply.body.get("status")
        return None if status is None else status == "awake"
    return reply.body.get(_ANSWER[name]) if name in _ANSWER else None


def _parameters(method: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return frozenset()


def way_to(llm: Any, *, guarded: bool, timeout_s: float, headers: Mapping[str, str]) -> Way:
    if isinstance(llm, str):
        return ServerWay(llm, timeout_s=timeout_s, headers=headers)
    if hasattr(getattr(llm, "sleep", None), "remote"):
        return ActorWay(llm, guarded=guarded)
    if inspect.iscoroutinefunction(getattr(llm, "sleep", None)):
        return AsyncWay(llm)
    if callable(getattr(llm, "sleep", None)):
        return LocalWay(llm)
    raise EngineError(
        f"{type(llm).__name__} is no vLLM engine; give an LLM, an AsyncLLM, a URL or a Ray actor"
    )
