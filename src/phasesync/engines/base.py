"""What every engine promises to a weight sync, and the words that it is told in.

An illegal call is refused before it reaches the engine, and the engine is as usable after
the refusal as before. Whatever maps memory takes the ticket of the fence that allowed it. A
failed call leaves what it touched `doubtful`; nothing that may not be repeated is repeated.
"""

import typing
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, TypeAlias

from phasesync.core.model import FenceKey, FenceVerdict, Ticket, Version

__all__ = (
    "GRAPHS",
    "GROUND",
    "KV_CACHE",
    "WEIGHTS",
    "WEIGHT_NAMES",
    "Content",
    "DeviceMemory",
    "EngineDriver",
    "EnginePort",
    "EngineStatus",
    "Evidence",
    "Floor",
    "Gate",
    "Health",
    "InFlight",
    "Tag",
    "Verdicts",
)

Tag = NewType("Tag", str)
WEIGHTS = Tag("weights")
KV_CACHE = Tag("kv_cache")
GRAPHS = Tag("cuda_graph")
# What TensorRT-LLM, which has more tags than others, calls the parts of its weights.
WEIGHT_NAMES = (
    "sampler",
    "drafter",
    "guided_decoder",
    "spec_resource_manager",
    "model_extra",
    "executor_extra",
    "model",
    "draft_model",
    "model_weights",
    "draft_model_weights",
)

InFlight: TypeAlias = Literal["abort", "wait", "keep", "retract", "in_place"]
Health: TypeAlias = Literal["usable", "unknown", "dead"]
Gate: TypeAlias = Literal["open", "shut"]
Content: TypeAlias = Literal["whole", "discarded", "loading", "partial"]


class Floor(NamedTuple):
    """The lowest (attempt, epoch) whose tickets the engine still honours; it only rises."""

    attempt: int
    epoch: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}, epoch {self.epoch}"


GROUND = Floor(0, 0)


class Evidence(NamedTuple):
    """What shows that a commit happened: each rank's version, and checksums where there are any."""

    versions: tuple[str | None, ...]
    checksums: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """All that is known about an engine. No engine reports it, so the port keeps it.

    `gate` is ours, not the scheduler's: vLLM resumes its scheduler by itself. `doubtful` tags are
    those that a failed call may have mapped or not; they count as mapped for whoever needs the
    memory, and as unmapped for whoever needs the content.
    """

    tags: tuple[Tag, ...] = (WEIGHTS, KV_CACHE)
    health: Health = "usable"
    because: str = ""
    gate: Gate = "open"
    asleep: frozenset[Tag] = frozenset()
    doubtful: frozenset[Tag] = frozenset()
    content: Content = "whole"
    kv_stale: bool = False
    session: Version | None = None
    loaded: int = 0
    version: Version | None = None
    floor: Floor = GROUND
    under_way: str | None = None
    unverified: tuple[str, ...] = ()


class DeviceMemory(typing.Protocol):
    """The memory that an engine shares with a trainer; `take` raises where it does not fit."""

    def take(self, owner: str, size_bytes: int) -> None:
        """Map `size_bytes` for `owner`.

        Raises:
            MemoryError: less is free.
        """

    def give(self, owner: str) -> int:
        """Unmap all that `owner` holds; the bytes that came free."""


class Verdicts(typing.Protocol):
    """Where the fence's own verdict is read, never from whoever presents the ticket."""

    def __call__(self, key: FenceKey) -> FenceVerdict | None:
        """What was decided at that fence instance, or None while nothing was."""


class EngineDriver(typing.Protocol):
    """One engine's own calls, unguarded; a port checks before and books after each.

    Every method returns when the engine has finished the work and raises when it did not.
    """

    @property
    def name(self) -> str:
        """What messages call this engine, with its version."""

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The tags that can be released and resumed, in the order in which they are resumed."""

    @property
    def policies(self) -> tuple[InFlight, ...]:
        """What a pause can do with requests that are under way."""

    @property
    def releasable(self) -> tuple[frozenset[Tag], ...]:
        """The sets of tags that one release can name; empty where any set will do."""

    @property
    def keeps_weights(self) -> bool:
        """Whether released weights come back with their content."""

    @property
    def ranks(self) -> int:
        """How many engine ranks take part in a call."""

    @property
    def unverified(self) -> tuple[str, ...]:
        """What could not be checked about this engine's version, one sentence each."""

    async def prepare(self) -> None:
        """Find out, once, what the engine can do; asked before anything else.

        Raises:
            EngineError: it does not answer, or cannot do what a weight sync needs.
        """

    def adopt(self, asleep: frozenset[Tag]) -> None:
        """Take over an engine whose tags `asleep` are released already."""

    async def pause(self, policy: InFlight) -> None:
        """Stop scheduling; what runs is aborted, finished, kept or retracted."""

    async def resume_generation(self, ticket: Ticket | None) -> None:
        """Schedule again; `ticket` travels with the call to where the engine lives."""

    async def release(self, tags: tuple[Tag, ...]) -> None:
        """Unmap the memory behind `tags` on every rank."""

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        """Map the memory behind one tag on every rank; `ticket` travels with the call."""

    async def begin(self, version: Version) -> None:
        """Open a weight update."""

    async def load(self, bucket: object) -> None:
        """Take in one bucket; what a bucket is, is the engine's business."""

    async def finish(self, version: Version) -> Evidence:
        """Close the update and commit `version`; what each rank then holds."""

    async def abandon(self) -> None:
        """Close the update without committing; what the weights are then is nobody's version."""

    async def flush(self) -> None:
        """Drop every cache that older weights filled."""

    async def raise_floor(self, floor: Floor) -> None:
        """Tell a guard that lives beside the engine; without one there is nothing to tell."""

    async def close(self) -> None:
        """Leave no thread or connection behind; the engine itself goes on."""


class EnginePort(typing.Protocol):
    """A refusal, `EngineRefused`, changes nothing; a failure, `EngineError`, is booked."""

    async def pause(self, policy: InFlight = "abort") -> None:
        """Shut the gate, then stop the scheduler."""

    async def resume_generation(self, ticket: Ticket | None = None) -> None:
        """Start the scheduler, then open the gate; refused unless everything is resident."""

    async def release(self, tags: tuple[Tag, ...], ticket: Ticket | None = None) -> None:
        """Unmap `tags`; refused while anything runs or a tag is already released.

        An engine that cannot release them without the others maps those for a moment, which needs
        their memory and a `ticket` that allows it.
        """

    async def resume(self, tag: Tag, ticket: Ticket | None) -> None:
        """Map one tag, weights before KV; refused without a valid ticket."""

    async def begin(self, version: Version) -> None:
        """Open the update to `version`, which must be above the committed one."""

    async def load(self, bucket: object) -> None:
        """Take in one bucket of the open update."""

    async def finish(self, version: Version) -> Evidence:
        """Commit `version` on all ranks, compare them, and drop the caches."""

    async def abandon(self) -> None:
        """Close the open update without a commit; a whole new one must follow."""

    async def flush(self) -> None:
        """Drop the caches; refused while KV is released or the gate is open."""

    async def status(self) -> EngineStatus:
        """What is known now; the engine is asked only the first time, what it can do."""

    async def raise_floor(self, floor: Floor) -> None:
        """Refuse every ticket below `floor` from now on, late ones included."""

    async def spend(self, ticket: Ticket) -> None:
        """Refuse all tickets of its scope that are older than `ticket`, as recovery must."""

    async def close(self) -> None:
        """Leave no thread or connection behind; the engine itself goes on."""
