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
from phasesync.engines.base import GROUND, Floor, Verdicts

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
        with self._lock:
            self._note(key, _judged_by(self._asked(key)))

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
        with self._lock:
            # The fence is asked last, and once: that may be a round trip, and the engine waits.
            if (reason := self._claims(wanted, fences, ticket)) is not None:
                return reason
            verdict = self._asked(ticket.key)
            judged = _judged_by(verdict)
            reason = self._verdict(ticket, verdict) or self._replaced(ticket.key, judged)
            if reason is None:
                self._floor = max(self._floor, Floor(ticket.key.attempt, ticket.epoch))
                self._note(ticket.key, judged)
        return reason

    def _learn(self, ticket: Ticket) -> None:
        ours = ticket.key.run == self.rules.run and ticket.key.scope in self._scopes
        with self._lock:
            if ours and self.rules.verdicts is not None:
                verdict = self._asked(ticket.key)
                if self._verdict(ticket, verdict) is None:
                    self._note(ticket.key, _judged_by(verdict))

    @property
    def _scopes(self) -> tuple[str, str]:
        return ("world", self.rules.scope)

    def _asked(self, key: FenceKey) -> FenceVerdict | None:
        return None if self.rules.verdicts is None else self.rules.verdicts(key)

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
        return None

    def _verdict(self, ticket: Ticket, verdict: FenceVerdict | None) -> str | None:
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


def _judged_by(verdict: FenceVerdict | None) -> tuple[Arrival, ...]:
    """The arrivals that the fence judged, where its verdict tells them."""
    return verdict.arrivals if isinstance(verdict, Opened) else ()


def _either(fences: tuple[str, ...]) -> str:
    return " or ".join(map(repr, fences))
