"""An engine without a model that errs the way real ones do, for tests and for `phasesync demo`.

Each quirk was seen in a released engine and is on by default; none is softened here, because a port
that is only ever tested against a polite engine is not tested. Its memory is whatever
`DeviceMemory` is handed in, so a wake that does not fit really fails, on the rank where it does not
fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from phasesync.core.model import Ticket, Version
from phasesync.engines.base import (
    KV_CACHE,
    WEIGHTS,
    DeviceMemory,
    Evidence,
    Floor,
    InFlight,
    Tag,
)

__all__ = ("Budget", "Quirks", "SimulatedDriver", "SimulatedEngine")


class Budget:
    """A device of `capacity_bytes`; it counts, and refuses what does not fit."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(self.held.values())

    def take(self, owner: str, size_bytes: int) -> None:
        """Map `size_bytes` for `owner`.

        Raises:
            MemoryError: less is free.
        """
        if size_bytes > self.free_bytes:
            raise MemoryError(
                f"out of memory: {owner} wants {size_bytes} bytes, {self.free_bytes} are free"
            )
        self.held[owner] = self.held.get(owner, 0) + size_bytes

    def give(self, owner: str) -> int:
        """Unmap all that `owner` holds; the bytes that came free."""
        return self.held.pop(owner, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """How the engine errs.

    `wrong_tag`: a wake that names a tag which is not asleep wakes nothing and says so only in a
    log (vLLM), or kills the scheduler with a KeyError (SGLang). `resumes_itself`: a full wake
    resumes the scheduler (vLLM). `acknowledges_early`: a release answers before the memory is
    free (SGLang); `settle()` frees it. `keeps_weights`: level 1 sleep. `replies_shift`: with
    several ranks, a failed call leaves a reply behind that answers the next one (vLLM).
    `sleeps_whole`: a sleep while anything is asleep is taken for done (vLLM 0.24).
    """

    wrong_tag: str = "ignored"
    resumes_itself: bool = True
    acknowledges_early: bool = False
    keeps_weights: bool = False
    replies_shift: bool = True
    sleeps_whole: bool = False


@dataclass(slots=True)
class SimulatedEngine:
    """One replica over `devices`, a rank on each."""

    devices: Sequence[DeviceMemory]
    weights_bytes: int = 4
    kv_bytes: int = 8
    quirks: Quirks = Quirks()
    tags: tuple[Tag, ...] = (WEIGHTS, KV_CACHE)
    name: str = "engine/0"
    version: str | None = "0"
    paused: bool = False
    dead: str = ""
    asleep: set[Tag] = field(default_factory=set)
    session: bool = False
    torn: bool = False
    partial: bool = False
    filled: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fail_next: dict[str, Exception] = field(default_factory=dict)
    _unsettled: set[Tag] = field(default_factory=set)
    _left_behind: Exception | None = None

    def __post_init__(self) -> None:
        for tag in self.tags:
            self._map(tag)

    def size_bytes(self, tag: Tag) -> int:
        return self.weights_bytes if tag == WEIGHTS else self.kv_bytes if tag == KV_CACHE else 1

    def generate(self, prompt: str) -> str:
        """The prompt, and the weights that answered it; a stale cache answers with older ones.

        Raises:
            RuntimeError: nothing is scheduled, or memory that a forward pass reads is not mapped;
                the latter kills the engine.
        """
        self._enter("generate")
        if self.paused:
            raise RuntimeError("would block: the scheduler is paused")
        if self.asleep or self.torn:
            self.dead = "illegal memory access in a forward pass"
            raise RuntimeError(self.dead)
        if self.partial:
            self.dead = "a forward pass met tensors without data"
            raise RuntimeError(self.dead)
        return f"{prompt}@{self.filled.setdefault(prompt, self.version or 'nothing')}"

    def pause(self, mode: str = "abort") -> None:
        self._enter(f"pause({mode})")
        self.paused = True

    def resume(self) -> None:
        self._enter("resume")
        self.paused = False

    def sleep(self, tags: Sequence[Tag]) -> None:
        """Unmap `tags`; what is asleep already stays so, without a word."""
        self._enter(f"sleep({', '.join(tags)})")
        self.paused = self.paused or self.quirks.resumes_itself
        if self.torn or (self.quirks.sleeps_whole and self.asleep):
            return
        for tag in set(tags) - self.asleep:
            self.asleep.add(tag)
            if tag == KV_CACHE:
                self.filled.clear()
            elif tag == WEIGHTS and not self.quirks.keeps_weights:
                self.version = None
            self._unsettled.add(tag)
        if not self.quirks.acknowledges_early:
            self.settle()

    def settle(self) -> None:
        """Free what a release that was acknowledged early has not freed yet."""
        for tag in self._unsettled:
            for device in self.devices:
                device.give(self._owner(tag))
        self._unsettled.clear()

    def wake(self, tags: Sequence[Tag] | None = None) -> bool:
        """Map `tags`, or all; whether everything is mapped now.

        Raises:
            RuntimeError: it did not fit on some rank. The ranks before it stay mapped, and no
                second attempt succeeds.
        """
        self._enter(f"wake({'all' if tags is None else ', '.join(tags)})")
        wanted = tuple(self.tags if tags is None else tags)
        wrong = [tag for tag in wanted if tag not in self.asleep]
        if self.quirks.wrong_tag == "key_error" and wrong:
            self.dead = f"KeyError: {wrong[0]!r}"
            raise KeyError(wrong[0])
        if tags is not None and wrong:
            return not self.asleep
        if self.torn:
            raise RuntimeError("CUDA Error: invalid argument")
        for tag in wanted:
            if tag in self.asleep:
                try:
                    self._map(tag)
                except MemoryError as error:
                    self.torn = True
                    raise RuntimeError(f"CUDA Error: {error}") from error
                self.asleep.discard(tag)
        if not self.asleep and self.quirks.resumes_itself:
            self.paused = False
        return not self.asleep

    def start_update(self) -> None:
        self._enter("start_update")
        if self.session:
            raise RuntimeError("a weight update is already active")
        self.session = True

    def update(self, content: str) -> None:
        """Load one bucket of version `content`; a failure closes the session, half done."""
        try:
            self._enter(f"update({content})")
            if not self.session:
                raise RuntimeError("start_weight_update must be called first")
            if WEIGHTS in self.asleep:
                raise RuntimeError("setStorage: out of bounds for storage of size 0")
        except Exception:
            self.partial = self.partial or self.session
            self.session = False
            raise
        self.version = content

    def finish_update(self) -> None:
        self._enter("finish_update")
        if not self.session:
            raise RuntimeError("no weight update is active")
        self.session = False
        self.partial = False

    def flush(self) -> bool:
        """Drop the prefix cache; False while something holds it. With KV unmapped it crashes."""
        self._enter("flush")
        if KV_CACHE in self.asleep:
            self.dead = "flush of a cache that is not mapped"
            raise RuntimeError(self.dead)
        self.filled.clear()
        return True

    def versions(self) -> tuple[str | None, ...]:
        """What each rank says that it holds."""
        self._enter("versions")
        return tuple(self.version for _ in self.devices)

    def _owner(self, tag: Tag) -> str:
        return f"{self.name} {tag}"

    def _map(self, tag: Tag) -> None:
        for device in self.devices:
            device.take(self._owner(tag), self.size_bytes(tag))

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.dead:
            raise RuntimeError(f"the engine is dead: {self.dead}")
        if (reply := self._left_behind) is not None:
            # The answer to the call before; the answer to this one now waits for the next.
            self._left_behind = RuntimeError(f"no reply to {call!r} yet")
            raise reply
        if (error := self.fail_next.pop(call.partition("(")[0], None)) is not None:
            if self.quirks.replies_shift and len(self.devices) > 1:
                self._left_behind = error
            raise error


class SimulatedDriver:
    """A simulated engine behind the same port as a real one; a bucket is a version to hold."""

    policies: tuple[InFlight, ...] = ("abort", "wait", "keep")
    unverified: tuple[str, ...] = ()

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def tags(self) -> tuple[Tag, ...]:
        return self.engine.tags

    @property
    def releasable(self) -> tuple[frozenset[Tag], ...]:
        return (frozenset(self.tags),) if self.engine.quirks.sleeps_whole else ()

    @property
    def keeps_weights(self) -> bool:
        return self.engine.quirks.keeps_weights

    @property
    def ranks(self) -> int:
        return len(self.engine.devices)

    async def prepare(self) -> None:
        """Nothing has to be found out about it."""

    def adopt(self, asleep: frozenset[Tag]) -> None:
        """It knows by itself what is asleep."""

    async def pause(self, policy: InFlight) -> None:
        self.engine.pause(policy)

    async def resume_generation(self, ticket: Ticket | None) -> None:
        self.engine.resume()

    async def release(self, tags: tuple[Tag, ...]) -> None:
        self.engine.sleep(tags)

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        self.engine.wake([tag])
        if self.engine.quirks.resumes_itself and not self.engine.paused:
            # The gate is ours: nothing is scheduled before every rank may be served.
            self.engine.pause("keep")

    async def begin(self, version: Version) -> None:
        self.engine.start_update()

    async def load(self, bucket: object) -> None:
        self.engine.update(str(bucket))

    async def finish(self, version: Version) -> Evidence:
        self.engine.finish_update()
        return Evidence(self.engine.versions())

    async def abandon(self) -> None:
        self.engine.finish_update()
        self.engine.partial = True

    async def flush(self) -> None:
        if not self.engine.flush():
            raise RuntimeError("the cache is still held; nothing was flushed")

    async def raise_floor(self, floor: Floor) -> None:
        self.engine.calls.append(f"floor({floor})")

    async def close(self) -> None:
        self.engine.calls.append("close")
