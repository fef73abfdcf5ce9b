"""The fences of one run where all arrivals come to one place: in one loop, or at a coordinator.

No clock and no socket: who hears a verdict is a callback, and that a deadline has passed is
told. The first verdict of a fence stays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from phasesync.core.fence import Lost, Waiting, judge, missing_of
from phasesync.core.model import (
    Arrival,
    Broken,
    FenceCall,
    FenceKey,
    FenceVerdict,
    Rank,
)

__all__ = ("GENERATIONS_KEPT", "Hear", "Hub", "Instance")

GENERATIONS_KEPT = 8  # A decided fence is remembered so long, for whoever comes late.

Hear: TypeAlias = Callable[[FenceVerdict], None]


@dataclass(eq=False, slots=True)
class Instance:
    """One fence instance: who has arrived, who wants to hear, what was decided and by whom."""

    call: FenceCall
    arrivals: list[Arrival] = field(default_factory=list)
    verdict: FenceVerdict | None = None
    decider: Rank | None = None
    hearers: dict[Hear, None] = field(default_factory=dict)
    arrived: set[Rank] = field(default_factory=set)
    troubled: bool = False
    _members: frozenset[Rank] = frozenset()
    _counted: set[tuple[Rank, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._members = frozenset(self.call.members)

    def hear(self, hear: Hear) -> None:
        """Call `hear` with the verdict: now, if there is one, else when there is."""
        if self.verdict is not None:
            hear(self.verdict)
        else:
            self.hearers[hear] = None

    def unhear(self, hear: Hear) -> None:
        self.hearers.pop(hear, None)

    def judged(self, arrival: Arrival) -> bool:
        """Whether this very arrival was among those judged."""
        return (arrival.rank, arrival.incarnation, arrival.nonce) in self._counted

    def answer_for(self, rank: Rank | None) -> FenceVerdict | None:
        """The verdict; who decided it gets it marked as its own."""
        if self.verdict is None or rank is None or rank != self.decider:
            return self.verdict
        return replace(self.verdict, decided=True)

    def missing(self) -> tuple[Rank, ...]:
        return missing_of(self.call, self.arrived)

    def take(self, arrival: Arrival) -> None:
        """Count an arrival; one that can do more than make the count full marks trouble."""
        first = self.arrivals[0] if self.arrivals else arrival
        self.troubled |= (
            not arrival.ok
            or arrival.rank in self.arrived
            or arrival.rank not in self._members
            or arrival.digest != first.digest
            or (arrival.fence, arrival.epoch, arrival.version)
            != (first.fence, first.epoch, first.version)
        )
        self.arrivals.append(arrival)
        self.arrived.add(arrival.rank)
        self._counted.add((arrival.rank, arrival.incarnation, arrival.nonce))

    def judge(
        self,
        lost: list[Lost],
        by: Rank | None,
        *,
        expired: bool = False,
        seen: Mapping[Rank, str] | None = None,
    ) -> None:
        """Decide, unless it is decided."""
        if self.verdict is not None:
            return
        ruling = judge(self.call, self.arrivals, lost=lost, expired=expired, seen=seen)
        if isinstance(ruling, Waiting):
            return
        if isinstance(ruling, Broken):
            ruling = replace(ruling, arrivals=tuple(self.arrivals))
        self.verdict, self.decider = ruling, by
        hearers, self.hearers = self.hearers, {}
        for hear in hearers:
            hear(ruling)


class Hub:
    """All fences of one run."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, int, str], dict[int, Instance]] = {}
        self._lost: list[Lost] = []

    def instance(self, call: FenceCall) -> Instance:
        """The fence instance of a call, which breaks at once if a member is lost."""
        instances = self._scopes.setdefault(call.key[:3], {})
        instance = instances.get(call.key.generation)
        if instance is None:
            instance = instances[call.key.generation] = Instance(call)
            oldest = max(instances) - GENERATIONS_KEPT
            for old in [n for n, i in instances.items() if n < oldest and i.verdict is not None]:
                del instances[old]
            instance.judge(self._lost, None)
        return instance

    def find(self, key: FenceKey) -> Instance | None:
        return self._scopes.get(key[:3], {}).get(key.generation)

    def arrive(self, call: FenceCall, arrival: Arrival) -> Instance:
        """Count an arrival, and decide if it decides. A decided fence counts nobody."""
        instance = self.instance(call)
        if instance.verdict is None:
            instance.take(arrival)
            # Judging each of N arrivals against all before would cost N squared.
            if instance.troubled or len(instance.arrived) >= len(call.members):
                instance.judge(self._lost, arrival.rank)
        return instance

    def expire(self, instance: Instance, by: Rank, seen: Mapping[Rank, str] | None = None) -> None:
        """The deadline of a rank that waits has passed."""
        instance.judge(self._lost, by, expired=True, seen=seen)

    def lose(self, lost: Lost) -> None:
        """A rank is gone: break what it keeps shut, now and later."""
        self._lost.append(lost)
        for instances in self._scopes.values():
            for instance in list(instances.values()):
                instance.judge(self._lost, None)

    def awaited(self, came: set[Rank]) -> bool:
        """Whether a member of some fence has never been here, and is not known to be lost."""
        known = came | {gone.rank for gone in self._lost}
        return any(
            not known.issuperset(instance.call.members)
            for instances in self._scopes.values()
            for instance in instances.values()
        )

    def come_back(self, rank: Rank, incarnation: int) -> None:
        """A later incarnation of a lost rank is no longer lost."""
        self._lost = [
            gone for gone in self._lost if gone.rank != rank or gone.incarnation >= incarnation
        ]
