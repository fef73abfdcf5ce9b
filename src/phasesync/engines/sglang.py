"""SGLang's HTTP server, 0.5.12 to 0.5.23.

What it does that a weight sync must not run into: releasing while anything runs fails an assertion
in the scheduler; resuming a tag that is not released is a KeyError there, after which nothing is
ever answered; no tags at all means all of them; a release may be acknowledged before every rank has
freed; flushing while KV is released has crashed; a failed update leaves its session open. So tags
are always named, idleness is made sure of first, and a resume is sent once.
"""

import asyncio
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from phasesync.core.model import Ticket, Version
from phasesync.engines.base import (
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    Evidence,
    Floor,
    InFlight,
    Tag,
)
from phasesync.engines.calls import Http, Reply
from phasesync.engines.gate import Late
from phasesync.engines.guard import raise_floor_at
from phasesync.engines.port import LedgerPort
from phasesync.engines.tickets import TicketRules, ticket_headers
from phasesync.errors import EngineError

__all__ = ("SglangDriver", "SglangEngine", "Source")

Source: TypeAlias = Literal["tensor", "distributed", "disk", "ipc"]
_IN_SESSION = frozenset({"tensor", "distributed"})
_FLUSH_EVERY_S = 0.1


class SglangDriver:
    """SGLang's own calls. See `SglangEngine` for the arguments."""

    tags: tuple[Tag, ...] = (WEIGHTS, GRAPHS, KV_CACHE)
    policies: tuple[InFlight, ...] = ("abort", "retract", "in_place")
    releasable: tuple[frozenset[Tag], ...] = ()

    def __init__(
        self,
        http: Http,
        *,
        source: Source,
        keeps_weights: bool,
        checksums: bool,
        idle_within_s: float,
    ) -> None:
        self._http = http
        self._source: Source = source
        self.keeps_weights = keeps_weights
        self._checksums = checksums
        self._idle_within_s = idle_within_s
        self._release: str | None = None
        self._ranks = 1
        self._asleep: frozenset[Tag] = frozenset()
        self._has_sessions = False
        self._session_open = False
        self._unverified = [
            "that every rank had freed its memory when a release was acknowledged; let the next "
            "fence require free_bytes"
        ]

    @property
    def name(self) -> str:
        return f"SGLang {self._release or '(version unknown)'}"

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def unverified(self) -> tuple[str, ...]:
        return tuple(self._unverified)

    async def prepare(self) -> None:
        info = await self._ask("GET", "/server_info")
        self._release = str(info["version"]) if "version" in info else None
        if "tp_size" not in info:
            self._unverified.append(
                "that this is one server and has one rank: /server_info tells no tp_size, as a "
                "router's does not, which would send each call to another replica"
            )
        sizes = [int(info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")]
        self._ranks = sizes[0] * sizes[1] * sizes[2]
        if self._source == "tensor" and sizes[2] > 1:
            raise EngineError(f"{self.name} takes tensors only with dp_size 1, not {sizes[2]}")
        if self._release is None or not _known(self._release):
            why = f"{self.name} is not one of 0.5.12 to 0.5.23; its answers were not seen before"
            self._unverified.append(why)
            warnings.warn(why, RuntimeWarning, stacklevel=2)
        api = await self._http.call("GET", "/openapi.json")
        paths = api.body.get("paths", {}) if isinstance(api.body, dict) else {}
        self._has_sessions = "/begin_weight_update" in paths
        if not paths:
            self._unverified.append("whether updates need a session: the routes are not published")

    def adopt(self, asleep: frozenset[Tag]) -> None:
        self._asleep = asleep

    async def pause(self, policy: InFlight) -> None:
        await self._ask("POST", "/pause_generation", {"mode": policy})

    async def resume_generation(self, ticket: Ticket | None) -> None:
        await self._ask("POST", "/continue_generation", {"torch_empty_cache": True}, ticket)

    async def release(self, tags: tuple[Tag, ...]) -> None:
        if KV_CACHE not in self._asleep:
            # A flush succeeds exactly when nothing runs, which a release takes for granted.
            await self.flush()
        await self._ask("POST", "/release_memory_occupation", {"tags": list(tags)})
        self._asleep = self._asleep | set(tags)

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        await self._ask("POST", "/resume_memory_occupation", {"tags": [tag]}, ticket)
        self._asleep = self._asleep - {tag}

    async def begin(self, version: Version) -> None:
        if self._session_open:
            await self.abandon()
        if self._has_sessions and self._source in _IN_SESSION:
            await self._ask("POST", "/begin_weight_update", {"selector": "all"})
            self._session_open = True

    async def load(self, bucket: object) -> None:
        if not isinstance(bucket, Mapping):
            raise EngineError(
                f"a bucket is the body of /update_weights_from_{self._source}, not {bucket!r}"
            )
        # The flush is ours to make, at the commit and with KV mapped; here it could crash.
        body = {**bucket, "flush_cache": False}
        await self._ask("POST", f"/update_weights_from_{self._source}", body)

    async def finish(self, version: Version) -> Evidence:
        await self.abandon()
        told = {"new_version": str(version), "abort_all_requests": False}
        await self._ask("POST", "/update_weight_version", told)
        info = await self._ask("GET", "/model_info")
        return Evidence((info.get("weight_version"),), await self._sums())

    async def abandon(self) -> None:
        if self._session_open:
            await self._ask("POST", "/end_weight_update", {})
            self._session_open = False

    async def flush(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._idle_within_s
        while not (reply := await self._http.call("POST", "/flush_cache")).ok:
            if reply.status != 400 or loop.time() > until:
                raise EngineError(f"POST /flush_cache: {reply.why}")
            await asyncio.sleep(_FLUSH_EVERY_S)

    async def raise_floor(self, floor: Floor) -> None:
        await raise_floor_at(self._http, floor)

    async def close(self) -> None:
        self._http.close()

    async def _sums(self) -> tuple[tuple[str, str], ...]:
        if not self._checksums:
            return ()
        told = await self._ask("POST", "/weights_checker", {"action": "checksum"})
        ranks = told.get("ranks") or []
        if len(ranks) != self._ranks:
            raise EngineError(f"checksums came from {len(ranks)} of {self._ranks} ranks")
        return tuple(
            (f"rank {number}", str(rank["per_gpu_checksum"])) for number, rank in enumerate(ranks)
        )

    async def _ask(
        self, method: str, path: str, body: object = None, ticket: Ticket | None = None
    ) -> Mapping[str, Any]:
        headers = ticket_headers(ticket)
        reply = await self._http.call(method, path, body=body, headers=headers)
        reply.check_admitted()
        if not reply.ok or _denied(reply):
            raise EngineError(f"{method} {path}: {reply.why}")
        return reply.body if isinstance(reply.body, dict) else {}


def _denied(reply: Reply) -> bool:
    """Some routes answer 200 and say in the body that they did nothing."""
    return isinstance(reply.body, dict) and reply.body.get("success") is False


def _known(release: str) -> bool:
    parts = release.split(".")
    patch = parts[2].partition("rc")[0] if len(parts) > 2 else ""
    return parts[:2] == ["0", "5"] and patch.isdigit() and 12 <= int(patch) <= 23


class SglangEngine(LedgerPort):
    """An `EnginePort` over the HTTP server of SGLang.

    A bucket is the body of `/update_weights_from_SOURCE`. `keeps_weights` says that the server was
    started with a CPU backup of its weights. `idle_within_s` is how long a release waits for the
    last requests. `api_key` is the server's admin key, or its only one.
    """

    def __init__(
        self,
        url: str,
        *,
        tickets: TicketRules,
        source: Source = "tensor",
        keeps_weights: bool = False,
        version: Version | None = None,
        asleep: tuple[Tag, ...] = (),
        checksums: bool = False,
        api_key: str | None = None,
        idle_within_s: float = 60.0,
        deadlines_s: Mapping[str, float] = {},
        late: Late = "reject",
        http_timeout_s: float = 900.0,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        driver = SglangDriver(
            Http(url, timeout_s=http_timeout_s, headers=headers),
            source=source,
            keeps_weights=keeps_weights,
            checksums=checksums,
            idle_within_s=idle_within_s,
        )
        super().__init__(
            driver,
            tickets=tickets,
            version=version,
            asleep=asleep,
            deadlines_s=deadlines_s,
            late=late,
        )
