"""R-EPOCH: a fence must be left on its own arrivals, all of them, and on no others.

A fence that is left early is broken at the moment it is left, long before anything fails.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phasesync.audit.answer import Finding
from phasesync.audit.events import Event, Name, number, version_number
from phasesync.audit.facts import Facts, Open, group_of, instance_of, ranks_in

__all__ = ("FenceEpoch",)

_KEPT: Final = 512
# What asks for a version and may end on that one or a later one, never on an earlier one.
_ONE_VERSION: Final = frozenset({"wait", "receive", "poll"})
_IDENTITY: Final = ("epoch", "call", "key", "ticket", "generation", "slot_epoch")
_SOURCE: Final = (
    "arrival_epoch",
    "arrived_epoch",
    "arrival_epochs",
    "completion_epoch",
    "token_epoch",
    "from_epoch",
    "of_epoch",
    "matched_epoch",
    "arrival_call",
    "from_call",
)


@dataclass(slots=True)
class _Instance:
    """One call of a fence: who came, and who went on."""

    arrived: dict[Name, Event] = field(default_factory=dict)
    ended: dict[Name, Event] = field(default_factory=dict)
    early: dict[Name, Event] = field(default_factory=dict)


class FenceEpoch:
    """R-EPOCH: a fence was left on arrivals of another epoch or call, or with too few.

    Sees: a rank that goes on before a member of that fence came (a member by `members`, by an
    earlier call at which both met, or because a rank went on all alone); a key of an earlier epoch
    that let a part of its ranks through while the rest stand at another call of that fence; an
    `arrivals` count below the members; a phase that ends with another identity than it began with.
    Cannot see: membership of a fence that no line tells. Sources: checkpoint-engine issue 106, verl
    PR 7764, PyTorch issue 135712.
    """

    rule = "R-EPOCH"
    wants = frozenset({"fence", "wait", "receive", "poll"})

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], _Instance] = {}
        self._calls: dict[tuple[object, ...], int] = {}
        self._met: dict[tuple[str, str], frozenset[Name]] = {}
        self._most: dict[tuple[str, str], float] = {}
        self._keyed: dict[tuple[object, ...], tuple[int | None, frozenset[Name]]] = {}
        self._alone: set[int] = set()  # who went on all by itself, as far as lines tell
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "end" and event.attrs and start is not None:
            self._identity(event, start.event)
        if len(self._found) >= _KEPT:
            return
        if event.action != "fence":
            if event.kind == "end" and start is not None and "arrivals" in event.attrs:
                self._too_few(event, start.event)
            return
        name = (event.phase, str(event.attrs.get("group", "")))
        if event.kind == "start":
            self._arrive(event, name, facts)
        elif event.kind == "end":
            self._leave(event, start, name, facts)

    def _identity(self, event: Event, start: Event) -> None:
        for name in _IDENTITY:
            if (
                name in event.attrs
                and name in start.attrs
                and event.attrs[name] != start.attrs[name]
            ):
                self._report(
                    event, f"began for {name} {start.attrs[name]}, ended on {event.attrs[name]}"
                )
                return
        if event.action in _ONE_VERSION and "version" in event.attrs and "version" in start.attrs:
            want = version_number(start.attrs["version"])
            got = version_number(event.attrs["version"])
            if want is not None and got is not None and got < want:
                self._report(event, f"began for version {want:g}, ended on {got:g}")
                return
        here = start.attrs.get("epoch", event.epoch)
        for name in _SOURCE:
            if name not in event.attrs:
                continue
            value = event.attrs[name]
            several = value if isinstance(value, list | tuple) else [value]
            if any(str(each) != str(here) for each in several) and not name.endswith("call"):
                self._report(event, f"belongs to epoch {here}, ended on arrivals of {value}")
                return

    def _too_few(self, event: Event, start: Event) -> None:
        """A wait for several signals that says how many there should be, and how many came."""
        expected = number(event.attrs.get("expected", start.attrs.get("expected")))
        said = event.attrs["arrivals"]
        count = float(len(said)) if isinstance(said, list | tuple) else number(said)
        if expected is not None and count is not None and count < expected:
            self._report(event, f"ended with {count:g} of {expected:g} arrivals")

    def _report(self, event: Event, why: str) -> None:
        self._found.append(Finding.on("R-EPOCH", event, f"rank {event.rank}: {event.phase} {why}"))

    def _key(self, event: Event, name: tuple[str, str], *, advance: bool) -> tuple[object, ...]:
        base = (*name, event.epoch, instance_of(event), event.rank)
        call = self._calls.get(base, 0) + (1 if advance else 0)
        if advance:
            if len(self._calls) > 65536:
                self._calls.clear()
            self._calls[base] = call
        return (*name, event.epoch, instance_of(event), call)

    def _arrive(self, event: Event, name: tuple[str, str], facts: Facts) -> None:
        key = self._key(event, name, advance=True)
        instance = self._open.get(key)
        if instance is None:
            if len(self._open) > 256:
                self._close(next(iter(self._open)))
            instance = self._open[key] = _Instance()
        instance.arrived[event.rank] = event
        members = self._members(name, event, facts)
        for other, ended in instance.ended.items():
            if other in instance.early or facts.header.kind(other) != facts.header.kind(event.rank):
                continue
            before = [rank for rank, came in instance.arrived.items() if came.at < ended.at]
            known = members is not None and event.rank in members and other in members
            if known or before == [other]:
                instance.early[other] = ended
                if not known:
                    self._alone.add(ended.at)
                self._found.append(
                    Finding.on(
                        "R-EPOCH",
                        ended,
                        f"rank {other} left {ended.phase} before rank {event.rank} came to it",
                        event,
                    )
                )

    def _members(self, name: tuple[str, str], event: Event, facts: Facts) -> frozenset[Name] | None:
        said = event.attrs.get("members")
        if isinstance(said, list | tuple) and said:
            return frozenset(ranks_in(said, facts.header.ranks))
        group = group_of(event)
        if group is not None and group in facts.members:
            return frozenset(facts.members[group])
        return self._met.get(name)

    def _leave(self, event: Event, start: Open | None, name: tuple[str, str], facts: Facts) -> None:
        source = start.event if start is not None else event
        key = self._key(source, name, advance=False)
        instance = self._open.get(key)
        if instance is None or event.rank not in instance.arrived:
            return
        instance.ended[event.rank] = event
        self._count(event, source, name, instance, facts)
        if event.rank in instance.early:
            return
        elsewhere = [
            (rank, each.event)
            for rank in facts.header.peers(event.rank, facts.ranks)
            if rank not in instance.arrived
            for each in facts.ranks[rank].opened("fence")
            if each.event.phase == event.phase
            and each.event.attrs.get("group") == source.attrs.get("group")
        ]
        if len(instance.arrived) == 1 and elsewhere:
            rank, other = elsewhere[0]
            instance.early[event.rank] = event
            self._alone.add(event.at)
            self._found.append(
                Finding.on(
                    "R-EPOCH",
                    event,
                    f"rank {event.rank} left {event.phase} while rank {rank} was at another "
                    "call of it",
                    other,
                )
            )
        elif self._is_left_over(event, source, name, instance, [rank for rank, _ in elsewhere]):
            instance.early[event.rank] = event
        elif instance.ended.keys() == instance.arrived.keys():
            first = min(each.at for each in instance.ended.values())
            if len(instance.arrived) > 1 and all(
                came.at < first for came in instance.arrived.values()
            ):
                self._met[name] = self._met.get(name, frozenset()) | instance.arrived.keys()

    def _is_left_over(
        self,
        event: Event,
        start: Event,
        name: tuple[str, str],
        instance: _Instance,
        elsewhere: list[Name],
    ) -> bool:
        """Whether a key of an earlier epoch let some of its ranks through, while the others stand
        at another call.
        """
        identity = instance_of(start)
        if not identity:
            return False
        key = (*name, *identity)
        epoch, came = self._keyed.get(key, (event.epoch, frozenset[Name]()))
        if epoch == event.epoch:
            if len(self._keyed) > 4096:
                self._keyed.pop(next(iter(self._keyed)))
            self._keyed[key] = (epoch, came | instance.arrived.keys())
            return False
        others = [rank for rank in elsewhere if rank in came]
        if not others or not came > instance.arrived.keys():
            return False
        self._report(
            event,
            f"ended on what {' '.join(identity)} was in epoch {epoch}, while rank "
            f"{', '.join(map(str, others[:16]))} was at another call of it",
        )
        return True

    def _count(
        self,
        event: Event,
        start: Event,
        name: tuple[str, str],
        instance: _Instance,
        facts: Facts,
    ) -> None:
        said = event.attrs.get("arrivals", event.attrs.get("count"))
        count = float(len(said)) if isinstance(said, list | tuple) else number(said)
        if count is None:
            return
        members = self._members(name, start, facts)
        expected = number(event.attrs.get("expected", start.attrs.get("expected")))
        most = expected or (float(len(members)) if members else self._most.get(name, 0.0))
        if count < most:
            instance.early[event.rank] = event
            self._report(event, f"ended with {count:g} of {most:g} arrivals")
        self._most[name] = max(count, self._most.get(name, 0.0))

    def _close(self, key: tuple[object, ...]) -> None:
        self._open.pop(key, None)

    def finish(self, facts: Facts) -> list[Finding]:
        found = [
            finding.doubted(facts.silent(facts.header.kind(finding.guilty[0])))
            if finding.at in self._alone and finding.guilty
            else finding
            for finding in self._found
        ]
        for key, instance in self._open.items():
            members = self._met.get((str(key[0]), str(key[1])))
            if members is None:
                continue
            found += self._never(instance, members - self._beside(key), facts)
        return found

    def _beside(self, key: tuple[object, ...]) -> frozenset[Name]:
        """Who was at the same fence under another key: another part of the ranks has its own."""
        return frozenset(
            rank
            for other, instance in self._open.items()
            if other[:3] == key[:3] and other[3] != key[3]
            for rank in instance.arrived
        )

    def _never(self, instance: _Instance, members: Iterable[Name], facts: Facts) -> list[Finding]:
        """Ranks that went on although a usual member never came, and was alive elsewhere since."""
        found = []
        for rank, ended in instance.ended.items():
            if rank in instance.early:
                continue
            for member in members:
                other = facts.ranks[member]
                if (
                    member not in instance.arrived
                    and other.last is not None
                    and other.last.at > ended.at
                    and other.exit is None
                    and other.last.epoch == ended.epoch
                ):
                    why = f"rank {rank} left {ended.phase}, to which rank {member} never came"
                    found.append(Finding.on("R-EPOCH", ended, why, other.last))
                    break
        return found
