"""Is this ticket good for this call on this engine? One answer for ports, guards and servers.

A ticket is believed only if the fence's own verdict says the same, and only at or above the
floor. The floor lives beside the engine, not in the caller: it is what refuses a leader that
was frozen between pass and resume, replaced, and then woke up. So do incarnations: a ticket names
those that were judged, and one that was judged with a rank that has been replaced since is stale,
whatever its epoch.
"""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from phasesync.core import wire
from phasesync.core.model import (
    Arrival,
    Broken,
    Epoch,
    FenceKey,
    FenceName,
    FenceVerdict,
    Opened,
    Rank,
    Ticket,
)
from phasesync.engines.base import GRAPHS, GROUND, KV_CACHE, Floor, Verdicts
from phasesync.errors import EngineRefused

__all__ = (
    "COLOCATED",
    "TICKET_HEADER",
    "TicketRules",
    "VerdictTable",
    "Warden",
    "parse_ticket",
    "ticket_headers",
    "ticket_text",
)

TICKET_HEADER = "x-phasesync-ticket"

COLOCATED: Mapping[str, tuple[str, ...]] = {
    "weights": ("ready_for_weights",),
    "kv_cache": ("memory_released", "let_go"),
    "cuda_graph": ("memory_released", "let_go"),
    "generate": ("ready_to_serve",),
}


# What must not be mapped twice by one fence with a release in between.
_MAPPED = frozenset({KV_CACHE, GRAPHS})


def ticket_text(ticket: Ticket) -> str:
    """`ticket` as one line of JSON, as an HTTP header carries it."""
    return wire.canonical(asdict(ticket) | {"key": list(ticket.key)}).decode("ascii")


def ticket_headers(ticket: Ticket | None) -> dict[str, str]:
    """How a ticket travels with an HTTP call; nothing where there is none."""
    return {} if ticket is None else {TICKET_HEADER: ticket_text(ticket)}


def parse_ticket(text: str | bytes) -> Ticket:
    """The ticket that `ticket_text` wrote.

    Raises:
        ValueError: the text is no ticket.
    """
    try:
        value = wire.decode(text)
        run, attempt, scope, generation = value["key"]
        ticket = Ticket(
            key=FenceKey(str(run), int(attempt), str(scope), int(generation)),
            fence=FenceName(str(value["fence"])),
            epoch=Epoch(int(value["epoch"])),
            count=int(value["count"]),
            hash=str(value["hash"]),
        )
    except (wire.JsonError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no ticket; write what ticket_text() gives") from error
    return ticket


@dataclass(slots=True)
class VerdictTable:
    """Verdicts by key, for a process that closes fences itself or is told of them by who does."""

    _verdicts: dict[FenceKey, FenceVerdict] = field(default_factory=dict)

    def record(self, verdict: FenceVerdict) -> None:
        """Keep `verdict`; the first one stands, as it does at the fence."""
        key = verdict.ticket.key if isinstance(verdict, Opened) else verdict.key
        self._verdicts.setdefault(key, verdict)

    def __call__(self, key: FenceKey) -> FenceVerdict | None:
        return self._verdicts.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRules:
    """Which tickets an engine takes.

    `scope` is the engine's own scope instance, `replica/3`; a ticket of `world` is as good, since
    the world contains the replica. `fences` names, for each thing that is asked for, the
    fences that allow it; what is not named needs no ticket. Without `verdicts` the fence itself
    cannot be asked, and `unverified` says so.
    """

    run: str
    scope: str
    verdicts: Verdicts | None = None
    fences: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: COLOCATED)

    @property
    def unverified(self) -> tuple[str, ...]:
        if self.verdicts is not None:
            return ()
        return ("tickets are not compared with the fence's verdict: no `verdicts` were given",)


class Warden:
    """The floor of one engine and the tickets it has honoured; safe to ask from any thread."""

    def __init__(self, rules: TicketRules, *, floor: Floor = GROUND) -> None:
        self.rules = rules
        self._floor = floor
        self._newest: dict[tuple[int, str], int] = {}
        self._incarnations: dict[tuple[int, Rank], int] = {}
        self._mapped: dict[tuple[int, str], int] = {}
        self._given_up: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    @property
    def floor(self) -> Floor:
        return self._floor

    def raise_floor(self, floor: Floor) -> Floor:
        """The floor, now no lower than `floor`; it never sinks."""
        with self._lock:
            self._floor = max(self._floor, floor)
            return self._floor

    def expect(self, attempt: int, incarnations: Mapping[Rank, int]) -> None:
        """Refuse from now on what was judged with older incarnations of these ranks."""
        with self._lock:
            for rank, incarnation in incarnations.items():
                self._meet(attempt, rank, incarnation)

    def spend(self, key: FenceKey) -> None:
        """Refuse from now on all tickets of `key.scope` that are older than `key`."""
        verdict, _ = self._ask(key)
        judged = verdict.arrivals if isinstance(verdict, Opened) else ()
        with self._lock:
            self._note(key, judged)

    def refusal(self, wanted: str, ticket: Ticket | None) -> str | None:
        """Why `ticket` does not allow `wanted`, or None; then the floor has risen to it.

        `wanted` is a tag or `generate`. A true ticket is learned from, needed or not.
        """
        fences = self.rules.fences.get(wanted)
        if fences is None:
            if isinstance(ticket, Ticket):
                self._learn(ticket)
            return None
        if ticket is None:
            return f"{wanted!r} needs a ticket of fence {_either(fences)}; none was given"
        if not isinstance(ticket, Ticket):
            return f"{wanted!r} needs a ticket of fence {_either(fences)}; {ticket!r} is none"
        if (reason := self._claims(wanted, fences, ticket)) is not None:
            return reason
        # Outside the lock: the fence may answer late, and the floor must be free to rise meanwhile.
        verdict, unread = self._ask(ticket.key)
        with self._lock:
            judged = verdict.arrivals if isinstance(verdict, Opened) else ()
            reason = (
                self._claims(wanted, fences, ticket)
                or unread
                or self._disputed(ticket, verdict)
                or self._replaced(ticket.key, judged)
            )
            if reason is None:
                self._floor = max(self._floor, Floor(ticket.key.attempt, ticket.epoch))
                self._note(ticket.key, judged)
                if wanted in _MAPPED:
                    at = (ticket.key.attempt, ticket.key.scope)
                    self._mapped[at] = max(self._mapped.get(at, -1), ticket.key.generation)
        return reason

    def give_up(self) -> None:
        """Memory was released: no ticket that mapped it before maps it again."""
        with self._lock:
            self._given_up = dict(self._mapped)

    def _learn(self, ticket: Ticket) -> None:
        ours = ticket.key.run == self.rules.run and ticket.key.scope in self._scopes
        if not ours or self.rules.verdicts is None:
            return
        verdict, _ = self._ask(ticket.key)
        if isinstance(verdict, Opened) and verdict.ticket == ticket:
            with self._lock:
                self._note(ticket.key, verdict.arrivals)

    @property
    def _scopes(self) -> tuple[str, str]:
        return ("world", self.rules.scope)

    def _ask(self, key: FenceKey) -> tuple[FenceVerdict | None, str | None]:
        """The fence's verdict, or None, and why it cannot be read where it cannot."""
        if self.rules.verdicts is None:
            return None, None
        try:
            return self.rules.verdicts(key), None
        except EngineRefused as refused:
            return None, str(refused)
        except Exception as error:
            # Any function may stand here, and a store raises what it likes. Unread is not good.
            told = f"{type(error).__name__}: {error}"
            return None, f"the verdict of {key.scope}, {key.generation} cannot be read ({told})"

    def _replaced(self, key: FenceKey, judged: tuple[Arrival, ...]) -> str | None:
        for arrival in judged:
            now = self._incarnations.get((key.attempt, arrival.rank), arrival.incarnation)
            if arrival.incarnation < now:
                return (
                    f"the ticket was judged with incarnation {arrival.incarnation} of "
                    f"{arrival.rank}, which has been replaced: it is incarnation {now} now"
                )
        return None

    def _claims(self, wanted: str, fences: tuple[str, ...], ticket: Ticket) -> str | None:
        key = ticket.key
        if ticket.fence not in fences:
            return (
                f"{wanted!r} needs a ticket of fence {_either(fences)}; this is of {ticket.fence!r}"
            )
        if key.run != self.rules.run:
            return f"the ticket is of run {key.run!r}; this engine serves run {self.rules.run!r}"
        if key.scope not in self._scopes:
            return f"the ticket is of scope {key.scope!r}; this engine is {self.rules.scope!r}"
        if (held := Floor(key.attempt, ticket.epoch)) < self._floor:
            return f"the ticket is of {held}; the engine's floor is {self._floor}"
        if (newest := self._newest.get((key.attempt, key.scope), -1)) > key.generation:
            return (
                f"the ticket is of generation {key.generation}; "
                f"scope {key.scope!r} has come to {newest}"
            )
        if wanted in _MAPPED and self._given_up.get((key.attempt, key.scope), -1) >= key.generation:
            return (
                f"a ticket as new as this (generation {key.generation}) has mapped memory that was "
                "released since; after a release, a new fence must be passed"
            )
        return None

    def _disputed(self, ticket: Ticket, verdict: FenceVerdict | None) -> str | None:
        if self.rules.verdicts is None:
            return None
        key = ticket.key
        where = f"fence {ticket.fence!r} ({key.scope}, generation {key.generation})"
        match verdict:
            case None:
                return (
                    f"{where} has no verdict: the ticket was not made by it, or the fence is over "
                    "and its members have met at another since"
                )
            case Broken():
                return f"{where} broke; it gave no ticket"
            case Opened(ticket=real) if real == ticket:
                return None
            case Opened(ticket=real):
                told = [
                    f"{name} {mine!r} is {theirs!r} there"
                    for name, mine, theirs in (
                        ("fence", ticket.fence, real.fence),
                        ("epoch", ticket.epoch, real.epoch),
                        ("count", ticket.count, real.count),
                        ("hash", ticket.hash, real.hash),
                    )
                    if mine != theirs
                ]
                return f"{where} gave another ticket: {', '.join(told)}"

    def _note(self, key: FenceKey, judged: tuple[Arrival, ...]) -> None:
        at = (key.attempt, key.scope)
        self._newest[at] = max(self._newest.get(at, -1), key.generation)
        for arrival in judged:
            self._meet(key.attempt, arrival.rank, arrival.incarnation)

    def _meet(self, attempt: int, rank: Rank, incarnation: int) -> None:
        at = (attempt, rank)
        self._incarnations[at] = max(self._incarnations.get(at, 0), incarnation)


def _either(fences: tuple[str, ...]) -> str:
    return " or ".join(map(repr, fences))
