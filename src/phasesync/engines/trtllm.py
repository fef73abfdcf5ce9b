"""TensorRT-LLM's `trtllm-serve`, through its routes for reinforcement learning.

It knows eight memory tags and more where others know `weights`, so one tag here stands for many
there. It has no route to pause, to abort or to reset its prefix cache, and keeps no weight version:
our own gate drains it, and what nobody can see is listed as unverified. Newer servers demand a
signature over every body.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any

from phasesync.core.model import Ticket, Version
from phasesync.engines.base import KV_CACHE, WEIGHT_NAMES, WEIGHTS, Evidence, Floor, InFlight, Tag
from phasesync.engines.calls import Http
from phasesync.engines.gate import Late
from phasesync.engines.guard import raise_floor_at
from phasesync.engines.port import LedgerPort
from phasesync.engines.tickets import TicketRules, ticket_headers
from phasesync.errors import EngineError, EngineRefused

__all__ = ("WEIGHT_TAGS", "TrtllmDriver", "TrtllmEngine")

# Newer servers keep the weights proper apart; older ones refuse a tag that they do not know.
_NEWER = ("model_weights", "draft_model_weights")
WEIGHT_TAGS = tuple(name for name in WEIGHT_NAMES if name not in _NEWER)
_SIGNATURE = "x-trtllm-rl-control-auth"
_ROUTES = ("/release_memory", "/resume_memory", "/update_weights")


class TrtllmDriver:
    """TensorRT-LLM's own calls. See `TrtllmEngine` for the arguments."""

    tags: tuple[Tag, ...] = (WEIGHTS, KV_CACHE)
    policies: tuple[InFlight, ...] = ("wait",)
    releasable: tuple[frozenset[Tag], ...] = ()
    keeps_weights = False

    def __init__(self, http: Http, *, weight_tags: tuple[str, ...], ranks: int) -> None:
        self._http = http
        self._names: Mapping[Tag, list[str]] = {
            WEIGHTS: list(weight_tags),
            KV_CACHE: ["kv_cache"],
        }
        self.ranks = ranks
        self._release: str | None = None
        self._unverified = [
            "which version each rank holds: trtllm-serve keeps none",
            "that no cached block outlives its weights: trtllm-serve has no route to reset its "
            "prefix cache; start it with enable_block_reuse: false",
        ]
        if not set(weight_tags) & set(_NEWER):
            self._unverified.append(
                "that the tags released hold all weights: a server that keeps them under "
                "'model_weights' needs weight_tags=(*WEIGHT_TAGS, 'model_weights')"
            )

    @property
    def name(self) -> str:
        return f"TensorRT-LLM {self._release or '(version unknown)'}"

    @property
    def unverified(self) -> tuple[str, ...]:
        return tuple(self._unverified)

    async def prepare(self) -> None:
        told = await self._http.call("GET", "/version")
        if not told.ok:
            raise EngineError(f"GET /version: {told.why}")
        self._release = told.body.get("version") if isinstance(told.body, dict) else None
        api = await self._http.call("GET", "/openapi.json")
        paths = api.body.get("paths", {}) if isinstance(api.body, dict) else {}
        missing = [route for route in _ROUTES if route not in paths]
        if paths and missing:
            raise EngineError(f"{self.name} has no {', '.join(missing)}; a weight sync needs them")
        if not paths:
            self._unverified.append("the server does not publish its routes; none was checked")

    def adopt(self, asleep: frozenset[Tag]) -> None:
        """Nothing here depends on what is released."""

    async def pause(self, policy: InFlight) -> None:
        """The gate is shut by the port and drained there; the server itself cannot be told."""

    async def resume_generation(self, ticket: Ticket | None) -> None:
        """The port opens the gate; the server itself was never stopped."""

    async def release(self, tags: tuple[Tag, ...]) -> None:
        names = [name for tag in tags for name in self._names[tag]]
        await self._tell("/release_memory", {"tags": names})

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        await self._tell("/resume_memory", {"tags": self._names[tag]}, ticket)

    async def begin(self, version: Version) -> None:
        """There is no session; the first bucket begins the update."""

    async def load(self, bucket: object) -> None:
        if not isinstance(bucket, Mapping):
            raise EngineError(f"a bucket maps each device to its handles; {bucket!r} does not")
        await self._tell("/update_weights", {"weights": dict(bucket)})

    async def finish(self, version: Version) -> Evidence:
        # Nothing more to load is how the server is told to finalise what it has.
        await self._tell("/update_weights", {"weights": None})
        return Evidence((str(version),))

    async def abandon(self) -> None:
        await self._tell("/update_weights", {"weights": None})

    async def flush(self) -> None:
        raise EngineRefused(
            f"{self.name} has no route to reset its prefix cache; release 'kv_cache' before the "
            "update instead"
        )

    async def raise_floor(self, floor: Floor) -> None:
        await raise_floor_at(self._http, floor)

    async def close(self) -> None:
        self._http.close()

    async def _tell(self, path: str, body: Mapping[str, Any], ticket: Ticket | None = None) -> None:
        headers = ticket_headers(ticket)
        reply = await self._http.call("POST", path, body=body, headers=headers)
        reply.check_admitted()
        said = reply.body.get("status") if isinstance(reply.body, dict) else None
        if not reply.ok or said != "success":
            raise EngineError(f"POST {path}: {reply.why}")


class TrtllmEngine(LedgerPort):
    """An `EnginePort` over `trtllm-serve`.

    A bucket is the `weights` of `/update_weights`: handles by device. `weight_tags` are the
    server's own tags that `weights` stands for. Send requests inside `admission()`, which is what a
    pause drains; `control_key` signs the calls of newer servers.
    """

    def __init__(
        self,
        url: str,
        *,
        tickets: TicketRules,
        ranks: int,
        weight_tags: tuple[str, ...] = WEIGHT_TAGS,
        version: Version | None = None,
        asleep: tuple[Tag, ...] = (),
        control_key: str | None = None,
        deadlines_s: Mapping[str, float] = {},
        late: Late = "reject",
        http_timeout_s: float = 900.0,
    ) -> None:
        sign = None if control_key is None else _signer(control_key)
        driver = TrtllmDriver(
            Http(url, timeout_s=http_timeout_s, sign=sign), weight_tags=weight_tags, ranks=ranks
        )
        super().__init__(
            driver,
            tickets=tickets,
            version=version,
            asleep=asleep,
            deadlines_s=deadlines_s,
            late=late,
        )


def _signer(key: str) -> Callable[[bytes], Mapping[str, str]]:
    """The header that a server with a control key wants: an HMAC of the body."""

    def sign(body: bytes) -> Mapping[str, str]:
        digest = hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
        return {_SIGNATURE: f"sha256={digest}"}

    return sign
