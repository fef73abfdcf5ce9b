"""What the fence keeps in a key-value store, and the operations by which it gets there.

An operation is a value: the store transport performs it on a real store, the checker on a
dict. What the keys hold must be readable by whoever comes later, so every line and every
verdict is JSON.

Keys of one attempt, below `ps/RUN/ATTEMPT`:

    SCOPE/GENERATION/log   arrivals, appended       SCOPE/head     last generation that opened
    SCOPE/GENERATION/n     arrivals, counted        scopes         who may wait where, appended
    SCOPE/GENERATION/v     the verdict              members/HASH   a list of members, once
    lost                   ranks found gone         left, leavers  who has finished
    boot                   this start of the store  hosts          hosts that have ranks
    pids/HOST              processes of the ranks of a host, appended
    beat/RANK              a rank's last sign of life
    beating                there are such signs
    asks                   who is asked to write down what it does, appended
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from phasesync.core import wire
from phasesync.core.fence import Lost, cause_from_json, cause_to_json, ranks_from_json
from phasesync.core.fence_messages import members_hash
from phasesync.core.model import Broken, FenceCall, Opened, Rank, RoleName, Ticket

__all__ = (
    "NOT_THERE",
    "REPORTER",
    "Add",
    "Append",
    "CompareSet",
    "Count",
    "Delete",
    "Get",
    "Gone",
    "Keys",
    "Left",
    "Operation",
    "Process",
    "Put",
    "Read",
    "Registered",
    "Space",
    "Steps",
    "Tell",
    "Verdict",
    "Wait",
    "beside",
    "lost_among",
    "writer",
)

NOT_THERE = "(not there)"  # What a store answers for a missing key, where it is asked for this.
REPORTER = "observer"  # Writes verdicts on behalf of who reports a loss, and is no member.


class Append(NamedTuple):
    """Add `value` to the end of `key`. One way: only a later reply proves that it came."""

    key: str
    value: bytes


class Add(NamedTuple):
    """Add to a counter; the reply is its new value. The key `ahead` may be read next: as it is
    after this, so that a store may be asked for both at once."""

    key: str
    amount: int
    ahead: str = ""


class Count(NamedTuple):
    """Add to a counter, whatever it is then. One way: nobody waits for the new value."""

    key: str
    amount: int


class Put(NamedTuple):
    """Write `key`. One way."""

    key: str
    value: bytes


class Get(NamedTuple):
    """The reply is the value of a key that should be there, at once: empty if it is not."""

    key: str


class Read(NamedTuple):
    """The reply is the value of a key, or None."""

    key: str


class Wait(NamedTuple):
    """The reply is the value of a key, once it is there."""

    key: str


class CompareSet(NamedTuple):
    """Write `key` if it is empty; the reply is what it then holds. The key `ahead` may be read
    next, as with `Add`, whether it is there or not."""

    key: str
    value: bytes
    ahead: str = ""


class Delete(NamedTuple):
    """Remove `key`, if it is there."""

    key: str


class Tell(NamedTuple):
    """Hand `result` to whoever waits for these steps; what follows is tidying up."""

    result: Any


Operation: TypeAlias = Append | Add | Count | Put | Get | Read | Wait | CompareSet | Delete | Tell
Steps: TypeAlias = Generator[Operation, Any, Any]


class Keys(NamedTuple):
    """The three keys of one fence instance."""

    log: str
    counter: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Space:
    """Where one attempt of one run keeps its keys."""

    root: str

    @classmethod
    def of(cls, run: str, attempt: int, *, token: str = "") -> "Space":
        """The key space of an attempt; a token sets it apart from a run of the same name."""
        mark = "." + wire.sha256(token)[:16] if token else ""
        return cls(f"ps/{run}{mark}/{attempt}")

    def at(self, scope: str, generation: int) -> Keys:
        base = f"{self.root}/{scope}/{generation}"
        return Keys(f"{base}/log", f"{base}/n", f"{base}/v")

    def head(self, scope: str) -> str:
        return f"{self.root}/{scope}/head"

    def members(self, digest: str) -> str:
        return f"{self.root}/members/{digest}"

    @property
    def scopes(self) -> str:
        return f"{self.root}/scopes"

    @property
    def lost(self) -> str:
        return f"{self.root}/lost"

    @property
    def left(self) -> str:
        return f"{self.root}/left"

    @property
    def leavers(self) -> str:
        return f"{self.root}/leavers"

    @property
    def boot(self) -> str:
        return f"{self.root}/boot"

    @property
    def hosts(self) -> str:
        return f"{self.root}/hosts"

    def pids(self, host: str) -> str:
        return f"{self.root}/pids/{host}"

    def beat(self, rank: Rank) -> str:
        return f"{self.root}/beat/{rank}"

    @property
    def beating(self) -> str:
        return f"{self.root}/beating"

    @property
    def asks(self) -> str:
        return f"{self.root}/asks"

    @property
    def of_the_run(self) -> tuple[str, ...]:
        """The keys of which there is one. `boot` goes before what leavers write: whoever leaves
        later finds it gone, and removes what it wrote itself."""
        return (
            self.hosts,
            self.scopes,
            self.lost,
            self.beating,
            self.asks,
            self.boot,
            self.left,
            self.leavers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What stands in a verdict's key; everybody reads it, so it is short.

    `plain` says that exactly the arrivals 1..count were judged; else a rank looks for itself in
    the first `log_bytes` of the log, whose arrivals must have the hash.
    """

    by: str
    count: int = 0
    hash: str = ""
    plain: bool = False
    log_bytes: int = 0
    payload: bool = False
    broken: wire.Json | None = None

    def encode(self) -> bytes:
        if self.broken is not None:
            return wire.encode({"broken": self.broken, "by": self.by})
        opened = (self.count, self.hash, self.plain, self.log_bytes, self.payload)
        return wire.encode({"open": opened, "by": self.by})

    @classmethod
    def decode(cls, text: bytes) -> "Verdict":
        said = wire.decode(text)
        if "broken" in said:
            return cls(by=said["by"], broken=said["broken"])
        count, digest, plain, log_bytes, payload = said["open"]
        return cls(
            by=said["by"],
            count=count,
            hash=digest,
            plain=plain,
            log_bytes=log_bytes,
            payload=payload,
        )

    @classmethod
    def of_broken(cls, broken: Broken, *, by: str) -> "Verdict":
        said = {
            "fence": broken.fence,
            "cause": cause_to_json(broken.cause),
            "missing": [list(rank) for rank in broken.missing],
        }
        return cls(by=by, broken=said)

    def read_by(self, call: FenceCall, me: str = "") -> Opened | Broken:
        """The verdict in the words of the fence that `call` came to, for the writer `me`."""
        decided = self.by == me
        if self.broken is not None:
            return Broken(
                key=call.key,
                fence=self.broken["fence"] or call.fence,
                cause=cause_from_json(self.broken["cause"]),
                missing=ranks_from_json(self.broken["missing"]),
                decided=decided,
            )
        return Opened(ticket=self.ticket(call), decided=decided)

    def spares(self, call: FenceCall) -> bool:
        """Whether it speaks of nobody who is a member now.

        Who reports a loss breaks the next fence of a scope before anybody has come there, with the
        members of the fence before. If they are others by then, they meet beside it.
        """
        if self.by != REPORTER or self.broken is None:
            return False
        lost = ranks_from_json(self.broken["cause"].get("ranks", ()))
        return bool(lost) and set(lost).isdisjoint(call.members)

    def ticket(self, call: FenceCall) -> Ticket:
        """What a verdict to open gives who passes."""
        return Ticket(
            key=call.key, fence=call.fence, epoch=call.epoch, count=self.count, hash=self.hash
        )


def beside(call: FenceCall, deadline_s: float | None = None) -> FenceCall:
    """Where the members of `call` meet if the verdict there spares them: a scope instance that only
    those with the same list of members come to."""
    scope = f"{call.key.scope}~{members_hash(call.members)}"
    left_s = call.deadline_s if deadline_s is None else deadline_s
    return replace(call, key=call.key._replace(scope=scope), deadline_s=left_s)


def writer(rank: Rank, incarnation: int) -> str:
    """The name under which a rank's incarnation writes verdicts."""
    return f"{rank}.{incarnation}"


class Registered(NamedTuple):
    """A line of `scopes`: from `generation` on, these members may wait in `scope`."""

    scope: str
    generation: int
    members: str

    def line(self) -> bytes:
        return wire.encode(list(self)) + b"\n"

    @classmethod
    def lines(cls, log: bytes | None) -> list["Registered"]:
        return [cls(*line) for line in sorted({tuple(row) for row in _rows(log)})]


class Gone(NamedTuple):
    """A line of `lost`: a rank found gone, or, without a cause, back as a new incarnation."""

    rank: Rank
    incarnation: int
    cause: wire.Json | None

    def line(self) -> bytes:
        return wire.encode([*self.rank, self.incarnation, self.cause]) + b"\n"

    @classmethod
    def lines(cls, log: bytes | None) -> list["Gone"]:
        return [cls(Rank(RoleName(row[0]), row[1]), row[2], row[3]) for row in _rows(log)]


def lost_among(lines: Iterable[Gone]) -> tuple[Lost, ...]:
    """Who is lost and has not come back as a later incarnation."""
    lines = list(lines)
    back = {(line.rank, line.incarnation) for line in lines if line.cause is None}
    return tuple(
        Lost(rank=line.rank, incarnation=line.incarnation, cause=cause_from_json(line.cause))
        for line in lines
        if line.cause is not None
        and not any(rank == line.rank and n > line.incarnation for rank, n in back)
    )


class Left(NamedTuple):
    """A line of `left`: a rank has finished, having used these generations of these scopes.

    Whoever is no rank of the run (a launcher) leaves such lines with `rank` None.
    """

    rank: Rank | None
    used: Mapping[str, Sequence[int]]

    def line(self) -> bytes:
        return wire.encode([self.rank and list(self.rank), self.used]) + b"\n"

    @classmethod
    def lines(cls, log: bytes | None) -> list["Left"]:
        return [cls(rank and Rank(*rank), used) for rank, used in _rows(log)]


class Process(NamedTuple):
    """A line of `pids`: which process a rank is, when that started, where one may hold a
    connection to it from another host, and where those of its own host hand their arrivals over."""

    rank: Rank
    incarnation: int
    pid: int
    started: int
    address: str = ""
    door: str = ""

    def line(self) -> bytes:
        return wire.encode([*self.rank, *self[1:]]) + b"\n"

    @classmethod
    def lines(cls, log: bytes | None) -> list["Process"]:
        return [cls(Rank(RoleName(row[0]), row[1]), *row[2:]) for row in _rows(log)]


def _rows(log: bytes | None) -> list[Any]:
    return [wire.decode(line) for line in (log or b"").splitlines()]
