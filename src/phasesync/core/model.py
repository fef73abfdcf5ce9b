"""The words of the project as frozen values: who, where, which fence, which arrival.

One word a thing, everywhere: code, YAML, journal, errors and documentation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, NewType, TypeAlias

__all__ = (
    "Arrival",
    "Broken",
    "Device",
    "Digest",
    "Epoch",
    "FenceCall",
    "FenceKey",
    "FenceName",
    "FenceVerdict",
    "GroupName",
    "Opened",
    "OptionName",
    "OptionValue",
    "Phase",
    "Rank",
    "ResourceName",
    "RoleName",
    "RootCause",
    "Ticket",
    "Version",
)

RoleName = NewType("RoleName", str)
Phase = NewType("Phase", str)
FenceName = NewType("FenceName", str)
ResourceName = NewType("ResourceName", str)
GroupName = NewType("GroupName", str)
OptionName = NewType("OptionName", str)
Device = NewType("Device", str)
Digest = NewType("Digest", str)
Epoch = NewType("Epoch", int)
Version = NewType("Version", int)
OptionValue: TypeAlias = bool | int | str


class Rank(NamedTuple):
    """One member of a role, written `trainer/3`. Ranks sort by role, then number."""

    role: RoleName
    number: int

    def __str__(self) -> str:
        return f"{self.role}/{self.number}"

    @classmethod
    def parse(cls, text: str, *, role: str = "trainer") -> "Rank":
        """The rank that `text` (`trainer/3`, or `3` for `role`) names.

        Raises:
            ValueError: `text` is neither.
        """
        name, slash, number = text.rpartition("/")
        if not number.isascii() or not number.isdigit() or (slash and not name):
            raise ValueError(f"{text!r} is no rank; write ROLE/NUMBER, as in 'trainer/3'")
        return cls(RoleName(name or role), int(number))


class FenceKey(NamedTuple):
    """Which instance of a fence: `scope` is `world`, `replica/3` or a named group.

    `generation` counts, without end, the fences that the scope instance has come to in
    this attempt. Fence name, epoch, version and digest are payload, not key.
    """

    run: str
    attempt: int
    scope: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceCall:
    """One instance of a fence as one rank comes to it; all arrivals must agree on it."""

    key: FenceKey
    fence: FenceName
    epoch: Epoch
    version: Version
    digest: Digest
    members: tuple[Rank, ...]
    deadline_s: float

    def arrival(self, rank: Rank, **said: Any) -> "Arrival":
        """The arrival of a rank that agrees; `said` is what else it says, its nonce at least."""
        agreed: dict[str, Any] = {
            "rank": rank,
            "incarnation": 0,
            "fence": self.fence,
            "epoch": self.epoch,
            "version": self.version,
            "digest": self.digest,
            "seq": 0,
        }
        return Arrival(**agreed | said)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Why a fence broke, the same on every rank.

    `kind` is one of `failed` (an action raised), `evidence` (a precondition was not met),
    `digest` (ranks hold different plans), `deadline` (somebody never came), `dead` (a process
    is gone), `restarted` (a newer incarnation took over), `duplicate`, `cancelled`, `store_lost`,
    `disagreement` (ranks under one plan came to different fences, epochs or versions).
    """

    kind: str
    ranks: tuple[Rank, ...]
    phase: str | None = None
    fence: str | None = None
    error_type: str | None = None
    error: str | None = None
    missing: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one rank reports at one fence. A rank that failed arrives too, with its cause."""

    rank: Rank
    incarnation: int
    nonce: str
    fence: FenceName
    epoch: Epoch
    version: Version
    digest: Digest
    seq: int
    cause: RootCause | None = None
    free_bytes: int | None = None
    payload: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return self.cause is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a rank gets by passing a fence, and cannot have otherwise.

    `hash` is the sha256 of the list of arrivals that was judged: rank, incarnation, status,
    seq and free bytes of each, in rank order.
    """

    key: FenceKey
    fence: FenceName
    epoch: Epoch
    count: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The fence is open: every member arrived, all agreed, none had failed.

    `arrivals` are there on the rank that decided, and on every rank where arrivals carry a payload;
    `order` is this rank's place among the arrivals, from 1, where known. `decided` is true on
    the one rank whose verdict stands: it writes `fence.decide`.
    """

    ticket: Ticket
    arrivals: tuple[Arrival, ...] = ()
    order: int | None = None
    decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The fence is broken, for everybody in its scope and for good.

    On the one rank whose verdict stands `decided` is true, and `arrivals` is what it judged.
    """

    key: FenceKey
    fence: FenceName
    cause: RootCause
    missing: tuple[Rank, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    decided: bool = False


FenceVerdict: TypeAlias = Opened | Broken
