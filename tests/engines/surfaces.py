"""The simulated engine under the method names that vLLM gives its own, with its semantics."""

from collections.abc import AsyncGenerator
from typing import Any

from phasesync.engines.base import KV_CACHE, WEIGHTS, Tag
from phasesync.engines.simulated import SimulatedEngine


class SyncSurface:
    """The calls of a synchronous engine object."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.simulated = engine

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.simulated.pause(mode)
        if level:
            self.simulated.sleep((WEIGHTS, KV_CACHE))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.simulated.wake(None if tags is None else [Tag(tag) for tag in tags])

    def generate(self, prompts: list[str], use_tqdm: bool = True) -> list[str]:
        return [self.simulated.generate(prompt) for prompt in prompts]

    def chat(self, prompt: str) -> list[str]:
        return self.generate([prompt])

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self.simulated.flush()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method == "wake_up":
            return [self.simulated.wake(*args, **(kwargs or {}))]
        if method == "echo":
            return [args]
        raise AttributeError(method)

    def start_weight_update(self) -> None:
        self.simulated.start_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        self.simulated.update(request["update_info"]["version"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.simulated.finish_update()

    def get_weight_version(self) -> str | None:
        return self.simulated.version


class AsyncSurface:
    """The calls of an asynchronous engine object."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.simulated = engine

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.simulated.pause(mode)
        if level:
            self.simulated.sleep((WEIGHTS, KV_CACHE))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.simulated.wake(None if tags is None else [Tag(tag) for tag in tags])

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.simulated.pause(mode)

    async def resume_generation(self) -> None:
        self.simulated.resume()

    async def generate(self, prompt: str, params: Any, request_id: str) -> AsyncGenerator[str]:
        yield self.simulated.generate(prompt)
