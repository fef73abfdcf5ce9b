"""vLLM, as an `LLM`, an `AsyncLLM`, an HTTP server or a Ray actor that holds one of the first two.

What vLLM does that a weight sync must not run into: a wake that names one wrong tag wakes nothing
and says so in a log; a full wake resumes the scheduler; a failed wake cannot be repeated; one
failed call with several ranks leaves every later reply one behind; which tags are asleep is
reported by no call. Signatures differ between releases, so each is looked up, none is assumed.
"""

import hashlib
import warnings
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from phasesync.core.model import Ticket, Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, Evidence, Floor, InFlight, Tag
from phasesync.engines.gate import Late
from phasesync.engines.guard import raise_floor_at
from phasesync.engines.port import LedgerPort
from phasesync.engines.tickets import TicketRules
from phasesync.engines.vllm_ways import ActorWay, AsyncWay, LocalWay, ServerWay, Way, way_to
from phasesync.errors import EngineError, EngineLost

__all__ = ("Lora", "Rpc", "Session", "VllmDriver", "VllmEngine")

KNOWN = tuple(f"0.{minor}" for minor in range(24, 34))
_EMPTY = hashlib.sha256(b"").hexdigest()
_EXTENSION = "phasesync_version"
_DEATHS = frozenset({"EngineDeadError", "EngineGenerateError"})


@dataclass(frozen=True, slots=True)
class Session:
    """vLLM's own weight-transfer engine (IPC, NCCL, ...); a bucket is its `update_info`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """Methods of the workers, called on all of them; a bucket is the arguments of `load`.

    A mapping is passed by keyword, a tuple by position, anything else as the one argument. vLLM's
    own `reload_weights` is such a method: `Rpc()` with buckets `{"weights_path": FOLDER}`.
    """

    load: str = "reload_weights"
    begin: str | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter beside the resident base; a bucket is the folder that holds it.

    Each version has a name of its own, `NAME@VERSION`, so that no request can mix two: ask
    `VllmEngine.lora_request` for the one to send.
    """

    name: str = "policy"


Transfer: TypeAlias = Session | Rpc | Lora


_NEEDED: Mapping[str, tuple[str, ...]] = {"sleep": ("level",), "wake_up": ("tags",)}
_NEEDED_BY: Mapping[type[Any], tuple[str, ...]] = {
    Session: ("start_weight_update", "update_weights", "finish_weight_update"),
    Rpc: ("collective_rpc",),
    Lora: (),
}


class VllmDriver:
    """vLLM's own calls. See `VllmEngine` for the arguments."""

    tags: tuple[Tag, ...] = (WEIGHTS, KV_CACHE)

    def __init__(
        self,
        way: Way,
        *,
        level: int,
        transfer: Transfer,
        ranks: int | None,
        extension: bool | None,
        checksums: bool,
    ) -> None:
        self._way = way
        self._level = level
        self._transfer = transfer
        self._ranks = ranks
        self._extension = extension
        self._checksums = checksums
        self._policy: InFlight = "abort"
        self._asleep: frozenset[Tag] = frozenset()
        self._release: str | None = None
        self._unverified: list[str] = []
        self._adapter: tuple[str, int, str] | None = None
        self._adapters = 0
        self._version = Version(0)

    @property
    def name(self) -> str:
        return f"vLLM {self._release or '(version unknown)'}"

    @property
    def policies(self) -> tuple[InFlight, ...]:
        return ("abort", "wait", "keep")

    @property
    def releasable(self) -> tuple[frozenset[Tag], ...]:
        both = frozenset((WEIGHTS, KV_CACHE))
        if not self._way.has("release_kv_cache_memory"):
            return (both,)
        # Where KV is released by itself, a sleep after it releases the weights; elsewhere it is
        # answered with a warning and does nothing.
        rest = frozenset(self.tags) - self._asleep
        return tuple({both, frozenset((KV_CACHE,)), *({rest} if rest < both else ())})

    @property
    def keeps_weights(self) -> bool:
        return self._level == 1

    @property
    def ranks(self) -> int:
        return self._ranks or 1

    @property
    def unverified(self) -> tuple[str, ...]:
        return tuple(self._unverified)

    @property
    def adapter(self) -> tuple[str, int, str] | None:
        """Name, number and folder of the LoRA adapter that was committed last."""
        return self._adapter

    async def prepare(self) -> None:
        if isinstance(self._way, ServerWay):
            await self._way.probe()
            self._release = self._way.version
            if not self._way.publishes:
                self._unverified.append("the server does not publish its routes; none was checked")
        elif not isinstance(self._way, ActorWay):
            self._release = _installed()
        self._check_release()
        self._check_calls()
        await self._check_ranks()

    def _check_release(self) -> None:
        if self._release is None:
            self._unverified.append("which vLLM this is; its calls were checked by name only")
        elif not self._release.startswith(tuple(f"{known}." for known in KNOWN)):
            why = (
                f"vLLM {self._release} is not one of {KNOWN[0]} to {KNOWN[-1]}; its calls were "
                "checked by name and parameter, their behaviour was not"
            )
            self._unverified.append(why)
            warnings.warn(why, RuntimeWarning, stacklevel=2)

    def _check_calls(self) -> None:
        missing = [
            f"{name}({', '.join(parameters)})"
            for name, parameters in _NEEDED.items()
            if not all(self._way.takes(name, parameter) for parameter in parameters)
        ]
        missing += [name for name in _NEEDED_BY[type(self._transfer)] if not self._way.has(name)]
        if missing:
            raise EngineError(
                f"{self.name} has no {', '.join(missing)}; a weight sync needs them. "
                "An HTTP server must be started with VLLM_SERVER_DEV_MODE=1"
            )
        if not self._way.has("reset_prefix_cache"):
            raise EngineError(f"{self.name} cannot reset its prefix cache; old answers would stay")

    async def _check_ranks(self) -> None:
        parallel = getattr(self._way.config, "parallel_config", None)
        if self._ranks is None and parallel is not None:
            self._ranks = getattr(parallel, "world_size_across_dp", None) or parallel.world_size
        if self._ranks is None and self._way.has("get_world_size"):
            self._ranks = int(await self._way.call("get_world_size"))
        if self._ranks is None:
            self._unverified.append("how many ranks the engine has; give `ranks`. Taken as 1")
        if self._extension is None and parallel is not None:
            self._extension = _holds_extension(getattr(parallel, "worker_extension_cls", ""))
        if not self._extension:
            self._unverified.append(
                "that all ranks hold the committed version: the workers lack "
                "phasesync.engines.vllm_worker.WorkerExtension"
            )

    def adopt(self, asleep: frozenset[Tag]) -> None:
        self._asleep = asleep

    async def pause(self, policy: InFlight) -> None:
        self._policy = policy
        if self._way.has("pause_generation"):
            await self._call("pause_generation", mode=policy)
        # An `LLM` schedules only inside a call, and its calls are made one after another.

    async def resume_generation(self, ticket: Ticket | None) -> None:
        if self._way.has("resume_generation"):
            await self._call("resume_generation", **self._with(ticket))
        elif self._way.guard is not None and ticket is not None:
            admit = self._way.guard.admit
            if isinstance(self._way, ActorWay):
                await self._way.call("admit", ticket)
            else:
                admit(ticket)

    async def release(self, tags: tuple[Tag, ...]) -> None:
        if frozenset(tags) == {KV_CACHE}:
            await self._call("release_kv_cache_memory")
        else:
            mode = {"mode": self._policy} if self._has_mode() else {}
            await self._call("sleep", level=self._level, **mode)
        if self._way.has("is_sleeping") and not await self._call("is_sleeping"):
            raise EngineError("sleep was acknowledged, and the engine says that it is awake")
        self._asleep = self._asleep | set(tags)

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        still = self._asleep - {tag}
        awake = await self._call("wake_up", tags=[tag], **self._with(ticket))
        if awake is None and self._way.has("is_sleeping"):
            awake = not await self._call("is_sleeping")
        if awake is not None and bool(awake) != (not still):
            raise EngineError(
                f"wake_up([{str(tag)!r}]) left the engine {'awake' if awake else 'asleep'}; "
                f"by our ledger {', '.join(sorted(still)) or 'nothing'} should be asleep"
            )
        self._asleep = still
        if not still and self._way.has("pause_generation"):
            # Fully awake, vLLM schedules again by itself; nothing may be served yet.
            clear = (
                {"clear_cache": False} if self._way.takes("pause_generation", "clear_cache") else {}
            )
            await self._call("pause_generation", mode="keep", **clear)

    async def begin(self, version: Version) -> None:
        self._version = version
        match self._transfer:
            case Session():
                await self._call("start_weight_update")
            case Rpc(begin=str(name)):
                await self._rpc(name)
            case Rpc() | Lora():
                pass

    async def load(self, bucket: object) -> None:
        match self._transfer:
            case Session():
                await self._update(bucket)
            case Rpc(load=name):
                match bucket:
                    case Mapping():
                        await self._rpc(name, kwargs=dict(bucket))
                    case tuple():
                        await self._rpc(name, args=bucket)
                    case _:
                        await self._rpc(name, args=(bucket,))
            case Lora(name=name):
                await self._add_adapter(name, str(bucket))

    async def finish(self, version: Version) -> Evidence:
        match self._transfer:
            case Session() if self._way.takes("finish_weight_update", "weight_version"):
                await self._call("finish_weight_update", weight_version=str(version))
            case Session():
                await self._call("finish_weight_update")
            case Rpc(finish=str(name)):
                await self._rpc(name)
            case Rpc() | Lora():
                pass
        return Evidence(await self._committed(version), await self._sums())

    async def abandon(self) -> None:
        match self._transfer:
            case Session():
                await self._call("finish_weight_update")
            case Rpc(finish=str(name)):
                await self._rpc(name)
            case Rpc() | Lora():
                pass

    async def flush(self) -> None:
        if await self._call("reset_prefix_cache") is False:
            raise EngineError("the prefix cache is still held by requests; it was not reset")

    async def raise_floor(self, floor: Floor) -> None:
        match self._way:
            case ServerWay(http=http):
                await raise_floor_at(http, floor)
            case ActorWay(guard=None):
                pass
            case ActorWay():
                await self._way.call("raise_floor", floor)
            case _:
                if self._way.guard is not None:
                    self._way.guard.raise_floor(floor)

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let vLLM's weight-transfer engine join; `init_info` is its own."""
        if isinstance(self._way, ServerWay):
            await self._call("init_weight_transfer_engine", init_info=dict(init_info))
            return
        await self._call("init_weight_transfer_engine", _request("Init", init_info=dict(init_info)))

    async def close(self) -> None:
        await self._way.close()

    async def _update(self, bucket: object) -> None:
        if isinstance(self._way, ServerWay):
            await self._call("update_weights", update_info=bucket)
        else:
            await self._call("update_weights", _request("Update", update_info=bucket))

    async def _add_adapter(self, name: str, folder: str) -> None:
        old = self._adapter
        new = f"{name}@{self._version}"
        number = await self._free_number()
        if isinstance(self._way, ServerWay):
            await self._load_adapter(new, folder)
            if old is not None and old[0] != new:
                await self._call("unload_lora_adapter", lora_name=old[0])
        else:
            if not await self._call("add_lora", _lora(new, number, folder)):
                raise EngineError(f"adapter {new!r} was not added")
            if old is not None:
                await self._call("remove_lora", old[1])
        self._adapter = (new, number, folder)

    async def _load_adapter(self, name: str, folder: str) -> None:
        try:
            await self._call("load_lora_adapter", lora_name=name, lora_path=folder)
        except EngineError as error:
            # An attempt before this one got as far; what it loaded may be another version's start.
            if "already been loaded" not in str(error):
                raise
            await self._call("unload_lora_adapter", lora_name=name)
            await self._call("load_lora_adapter", lora_name=name, lora_path=folder)

    async def _free_number(self) -> int:
        """A number that no adapter has: one that has it would be served on, whatever is loaded."""
        taken = await self._call("list_loras") if self._way.has("list_loras") else ()
        self._adapters = max([self._adapters, *taken]) + 1
        return self._adapters

    async def _committed(self, version: Version) -> tuple[str | None, ...]:
        if self._extension:
            await self._rpc("phasesync_commit", args=(str(version),))
            return tuple(await self._rpc(_EXTENSION))
        if isinstance(self._transfer, Session) and self._way.has("get_weight_version"):
            return (await self._call("get_weight_version"),)
        return (str(version),)

    async def _sums(self) -> tuple[tuple[str, str], ...]:
        if not self._checksums:
            return ()
        if isinstance(self._way, ServerWay):
            each = [await self._call("compute_weight_checksums", action="checksum")]
        else:
            each = await self._rpc("compute_weight_checksums")
        found = {name: digest for sums in each for name, digest in sums.items()}
        empty = [name for name, digest in found.items() if digest == _EMPTY]
        if empty and len(empty) == len(found):
            raise EngineError("every checksum is that of an empty tensor; they prove nothing")
        return tuple(sorted((name, found[name]) for name in found if name not in set(empty)))

    async def _rpc(
        self, method: str, *, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        results = await self._call(
            "collective_rpc", method=method, args=args, kwargs=dict(kwargs or {})
        )
        told = list(results or ())
        if results is not None and len(told) != self.ranks:
            raise EngineError(f"{method} was answered by {len(told)} of {self.ranks} ranks")
        return told

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._way.call(name, *args, **kwargs)
        except Exception as error:
            # Ray hands over a class of its own that inherits from the engine's.
            if any(kind.__name__ in _DEATHS for kind in type(error).__mro__):
                raise EngineLost(f"the engine died; whether it did {name} is unknown") from error
            raise

    def _with(self, ticket: Ticket | None) -> dict[str, Any]:
        sent = self._way.guard is not None or isinstance(self._way, ServerWay)
        return {"ticket": ticket} if sent and ticket is not None else {}

    def _has_mode(self) -> bool:
        # An engine inside this process cannot wait; it has nothing to wait for either.
        return not isinstance(self._way, LocalWay) and self._way.takes("sleep", "mode")


def _installed() -> str | None:
    try:
        release = getattr(import_module("vllm"), "__version__", None)
    except ModuleNotFoundError:
        return None
    return None if release is None else str(release)


def _request(kind: str, **fields: Any) -> Any:
    """vLLM's own request class where it is installed; `LLM` takes the plain dict as well."""
    try:
        module = import_module("vllm.distributed.weight_transfer.base")
    except ModuleNotFoundError:
        return fields
    return getattr(module, f"WeightTransfer{kind}Request")(**fields)


def _lora(name: str, number: int, folder: str) -> Any:
    try:
        module = import_module("vllm.lora.request")
    except ModuleNotFoundError as error:
        raise EngineError("LoRA needs vLLM in this process: pip install vllm") from error
    return module.LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)


def _holds_extension(path: str) -> bool:
    """Whether the worker extension that the engine was built with answers for versions."""
    module, _, name = path.rpartition(".")
    if not module:
        return False
    try:
        return hasattr(getattr(import_module(module), name, None), _EXTENSION)
    except ImportError:
        return False


class VllmEngine(LedgerPort):
    """An `EnginePort` over vLLM 0.24 to 0.33.

    `llm` is an `LLM`, an `AsyncLLM`, the URL of a server, or the handle of a Ray actor whose
    methods are the engine's. `level` is the sleep level of a release: 2 discards the weights, 1
    keeps them in host memory. `transfer` says how weights arrive. `ranks` and `extension` are found
    out for an `LLM` and an `AsyncLLM`; for an actor, give them, and `guarded` if it wears a guard.
    `checksums` makes each commit hash the weights on every rank, as slow as reading them all.
    """

    def __init__(
        self,
        llm: Any,
        *,
        tickets: TicketRules,
        transfer: Transfer | None = None,
        level: int = 2,
        version: Version | None = None,
        asleep: tuple[Tag, ...] = (),
        ranks: int | None = None,
        extension: bool | None = None,
        guarded: bool = False,
        checksums: bool = False,
        deadlines_s: Mapping[str, float] = {},
        late: Late = "reject",
        headers: Mapping[str, str] = {},
        http_timeout_s: float = 900.0,
    ) -> None:
        transfer = Session() if transfer is None else transfer
        if level not in (1, 2):
            raise EngineError(f"a release is sleep level 1 or 2, not {level}")
        if isinstance(transfer, Lora) and level != 1:
            raise EngineError("LoRA needs its base resident: give level=1, which keeps the weights")
        self._vllm = VllmDriver(
            way_to(llm, guarded=guarded, timeout_s=http_timeout_s, headers=headers),
            level=level,
            transfer=transfer,
            ranks=ranks,
            extension=extension,
            checksums=checksums,
        )
        super().__init__(
            self._vllm,
            tickets=tickets,
            version=version,
            asleep=asleep,
            deadlines_s=deadlines_s,
            late=late,
        )

    @property
    def lora_request(self) -> Any:
        """The `LoRARequest` of the adapter that was committed last, or None."""
        adapter = self._vllm.adapter
        return None if adapter is None else _lora(*adapter)

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let vLLM's weight-transfer engine join the trainer's group; done once."""
        await self._call("pause", policy="abort")
        await self._vllm.init_transfer(init_info)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`LLM.generate` behind our gate and in the engine's thread.

        Raises:
            EngineRefused: the engine is not serving, and late requests are turned away.
        """
        async with self.admission():
            return await self._vllm._call("generate", *args, **kwargs)

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """`AsyncLLM.generate` behind our gate.

        Raises:
            EngineRefused: the engine is not serving, and late requests are turned away.
        """
        way = self._vllm._way
        if not isinstance(way, AsyncWay):
            raise EngineError("only an AsyncLLM streams; call generate()")
        async with self.admission():
            async for output in way.llm.generate(*args, **kwargs):
                yield output
