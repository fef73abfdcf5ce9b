"""Fences and payload: what a fence must wait for, and what must not overlap.

A fence that is left early, or that ends over work it should cover, is broken at the moment it
ends, long before anything fails.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phasesync.audit.answer import Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import Facts, Open, group_of, instance_of, ranks_in

__all__ = ("Covers", "Exclusive", "FenceEpoch", "FencePost", "Lifetime")

_KEPT: Final = 512
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
    earlier call at which both met, or because a rank went on all alone); an `arrivals` count below
    the members; a phase that ends with another identity than it began with. Cannot see: membership
    of a fence that no line tells. Sources: checkpoint-engine issue 106, verl PR 7764.
    """

    rule = "R-EPOCH"
    wants = frozenset({"fence", "wait", "receive", "poll"})

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], _Instance] = {}
        self._calls: dict[tuple[object, ...], int] = {}
        self._met: dict[tuple[str, str], frozenset[Name]] = {}
        self._most: dict[tuple[str, str], float] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "end" and event.attrs and start is not None:
            self._identity(event, start.event)
        if event.action != "fence" or len(self._found) >= _KEPT:
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
        if event.action == "wait" and "version" in event.attrs and "version" in start.attrs:
            want, got = number(start.attrs["version"]), number(event.attrs["version"])
            if want is not None and got is not None and got < want:
                self._report(event, f"waited for version {want:g}, ended on {got:g}")
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
            if (members is not None and event.rank in members and other in members) or before == [
                other
            ]:
                instance.early[other] = ended
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
            self._found.append(
                Finding.on(
                    "R-EPOCH",
                    event,
                    f"rank {event.rank} left {event.phase} while rank {rank} was at another "
                    "call of it",
                    other,
                )
            )
        elif instance.ended.keys() == instance.arrived.keys():
            first = min(each.at for each in instance.ended.values())
            if len(instance.arrived) > 1 and all(
                came.at < first for came in instance.arrived.values()
            ):
                self._met[name] = self._met.get(name, frozenset()) | instance.arrived.keys()

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
        found = list(self._found)
        for key, instance in self._open.items():
            members = self._met.get((str(key[0]), str(key[1])))
            if members is None:
                continue
            found += self._never(instance, members, facts)
        return found

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


class Covers:
    """R-COVERS: a fence or phase ended over work that it should cover.

    Sees: a phase that says `device_complete: false`, followed by a fence or by somebody who takes
    the memory, with no synchronisation between; a rank that passes a fence with its own transfer
    still under way, after which that transfer never ends and everybody waits; a dispatch that
    ended while its target still runs. Cannot see: asynchronous work that no line tells. Sources:
    RLinf PR 1540, OpenRLHF `offload_deepspeed_states`, verl PR 7347, ROLL `add_lora`.
    """

    rule = "R-COVERS"
    wants = None

    def __init__(self) -> None:
        self._pending: dict[Name, Event] = {}
        self._over: list[tuple[Event, Event]] = []
        self._took: list[tuple[Event, Event, str]] = []
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        complete = event.attrs.get("device_complete") if event.attrs else None
        if complete is False and event.kind == "end":
            if event.action == "fence":
                self._add(event, event, "it ended with the device not drained")
            else:
                self._pending[event.rank] = event
            return
        if event.kind == "start":
            if event.action in ("acquire", "free", "serve") and self._pending:
                self._taken(event, facts)
            return
        if event.kind != "end":
            return
        if complete is True or event.action == "synchronize":
            self._pending.pop(event.rank, None)
            return
        if event.action == "fence":
            pending = self._pending.pop(event.rank, None)
            if pending is not None:
                why = f"{pending.phase} of rank {event.rank} was not complete on its device"
                self._add(event, pending, f"{event.phase} ended while {why}", guilty=pending.rank)
            elif len(self._over) < _KEPT:
                began = start.event.at if start is not None else event.at
                for each in facts.ranks[event.rank].opened("send", "receive", "collective"):
                    if each.event.at < began:
                        self._over.append((event, each.event))
        elif start is not None and (
            start.event.attrs.get("dispatch") or "target" in start.event.attrs
        ):
            self._detached(event, start.event, facts)

    def _taken(self, event: Event, facts: Facts) -> None:
        devices = set(facts.devices.touched(event))
        for rank, pending in list(self._pending.items()):
            if rank == event.rank or facts.devices.own(rank) in devices:
                del self._pending[rank]
                why = f"{pending.phase} of rank {rank} was not complete on its device"
                self._took.append((pending, event, f"{event.phase} began while {why}"))

    def _detached(self, event: Event, start: Event, facts: Facts) -> None:
        target = start.attrs.get("target", start.attrs.get("targets"))
        for rank in ranks_in(target, facts.header.ranks) if target is not None else ():
            known = facts.ranks.get(rank)
            if known is None:
                continue
            running = [
                each.event
                for each in known.open
                if each.event.phase == event.phase and each.event.at > start.at
            ]
            if running:
                why = f"{event.phase} ended on rank {event.rank} while rank {rank} still runs it"
                self._add(event, running[0], why)

    def _add(self, event: Event, other: Event, why: str, guilty: Name | None = None) -> None:
        if len(self._found) < _KEPT:
            ranks = None if guilty is None else (guilty,)
            self._found.append(Finding.on("R-COVERS", event, why, other, guilty=ranks))

    def finish(self, facts: Facts) -> list[Finding]:
        for pending, taker, why in self._took[:_KEPT]:
            if facts.failures_after(taker.at):
                self._add(pending, taker, why)
        found = list(self._found)
        if facts.failures or not facts.waiting():
            return found
        for fence, work in self._over:
            still = any(each.event is work for each in facts.ranks[work.rank].open)
            if still and group_of(work) != group_of(fence):
                why = (
                    f"{fence.phase} ended on rank {fence.rank} while its {work.phase}"
                    f"{_on(work)} was still under way; it never ended, and everybody waits"
                )
                found.append(Finding.on("R-COVERS", fence, why, work, waiting=facts.waiting()))
        return found


def _on(event: Event) -> str:
    group = group_of(event)
    return f" on group {group}" if group is not None else ""


class FencePost:
    """R-FENCE-POST: a rank serves or enters a collective before its peers finished resuming.

    Sees: serving, or a collective on a group, that begins while a peer is still inside a resume
    (or still has to do the resume that this rank did), and that then fails or never ends although
    the peer's resume did not fail. Ranks are peers if they share a role, and a replica where roles
    tell one. Cannot see: coupling between engines that work alone. Sources: vLLM PR 45612, slime
    `continue_generation`.
    """

    rule = "R-FENCE-POST"
    wants = frozenset({"serve", "collective", "acquire"})

    def __init__(self) -> None:
        self._early: list[tuple[Event, Name, Event | None]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "start" or event.action == "acquire" or len(self._early) >= _KEPT:
            return
        if event.action == "collective" and group_of(event) is None:
            return
        mine = _acquires(facts, event.rank, event.epoch)
        if not mine:
            return
        for peer in facts.header.peers(event.rank, facts.ranks):
            if peer == event.rank or facts.ranks[peer].exit is not None:
                continue
            if not _coupled(event, peer, facts):
                continue
            resuming = facts.ranks[peer].opened("acquire")
            if resuming:
                self._early.append((event, peer, resuming[-1].event))
            elif mine - _acquires(facts, peer, event.epoch):
                self._early.append((event, peer, None))

    def finish(self, facts: Facts) -> list[Finding]:
        found = []
        seen: set[int] = set()
        for event, peer, opened in self._early:
            resuming = opened
            if event.at in seen:
                continue
            if resuming is None:
                # It was only behind if it did resume later.
                later = [
                    each
                    for phase, each in facts.ranks[peer].started(event.epoch).items()
                    if each.action == "acquire"
                    and each.at > event.at
                    and phase in facts.ranks[event.rank].started(event.epoch)
                ]
                if not later:
                    continue
                resuming = later[0]
            outcome = facts.outcome(event)
            peer_failed = facts.outcome(resuming) == "bad"
            hurt = [
                failure
                for failure in facts.failures_after(event.at, [event.rank, peer])
                if failure.action != "acquire"
            ]
            if peer_failed or (outcome == "good" and not hurt):
                continue
            if outcome == "open" and not hurt and not facts.waiting() and opened is None:
                continue
            seen.add(event.at)
            found.append(
                Finding.on(
                    "R-FENCE-POST",
                    event,
                    f"rank {event.rank} entered {event.phase} before rank {peer} finished "
                    f"{resuming.phase}",
                    resuming,
                    *hurt[:2],
                )
            )
        return found


def _acquires(facts: Facts, rank: Name, epoch: int | None) -> set[str]:
    return {
        phase
        for phase, event in facts.ranks[rank].finished(epoch).items()
        if event.action == "acquire"
    }


def _coupled(event: Event, peer: Name, facts: Facts) -> bool:
    group = group_of(event)
    if group is not None and group in facts.members:
        return peer in facts.members[group]
    mine, other = facts.header.role(event.rank), facts.header.role(peer)
    if not mine or group is not None:
        return True
    one, two = _replica(mine), _replica(other)
    return one is not None and one == two


def _replica(role: str) -> str | None:
    for word in role.lower().replace("-", " ").split():
        if word.rstrip("0123456789") in ("replica", "dp", "node", "group") and word[-1].isdigit():
            return word
        if word.rstrip("0123456789") in ("tp", "pp") and word[-1].isdigit():
            return "tp"
    return None


class Exclusive:
    """R-EXCL: two payloads (epoch, phase) at once on one communicator.

    Sees: a rank that begins payload on a group on which its own payload of another epoch or phase
    is still under way; or ranks of one side that are in payloads of different epochs on one group,
    with the log ending there. Buckets of one phase in a pipeline are one payload, and so are a
    send and its receive. Cannot see: groups that no line names. Sources: AReaL PR 1596, AReaL
    issue 1439, verl PR 7846.
    """

    rule = "R-EXCL"
    wants = frozenset({"send", "receive", "write", "collective", "serve", "train"})

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._apart: list[tuple[Event, Event]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "start" or len(self._found) >= _KEPT:
            return
        group = group_of(event)
        if group is None or group.lower() in ("none", "null") or "queued_behind" in event.attrs:
            return
        for each in facts.ranks[event.rank].open:
            other = each.event
            if other is event or group_of(other) != group or other.action == "fence":
                continue
            if not _one_payload(other, event):
                self._found.append(
                    Finding.on(
                        "R-EXCL",
                        event,
                        f"rank {event.rank} entered {event.phase} of epoch {event.epoch} on group "
                        f"{group} while its {other.phase} of epoch {other.epoch} is under way "
                        "there",
                        other,
                    )
                )
                return
        for peer in facts.groups.get(group, ()):
            if peer == event.rank:
                continue
            for each in facts.ranks[peer].open:
                other = each.event
                if (
                    group_of(other) == group
                    and other.epoch != event.epoch
                    and other.action != "fence"
                    and len(self._apart) < _KEPT
                ):
                    self._apart.append((event, other))

    def finish(self, facts: Facts) -> list[Finding]:
        found = list(self._found)
        if not facts.waiting() and not facts.failures:
            return found
        for event, other in self._apart:
            both = (facts.outcome(event), facts.outcome(other))
            if "good" not in both:
                found.append(
                    Finding.on(
                        "R-EXCL",
                        event,
                        f"rank {event.rank} is in {event.phase} of epoch {event.epoch} and rank "
                        f"{other.rank} in {other.phase} of epoch {other.epoch}, on one group",
                        other,
                        waiting=facts.waiting(),
                    )
                )
        return found


def _one_payload(one: Event, other: Event) -> bool:
    """Whether two phases of one rank on one group are parts of one piece of work."""
    if one.epoch != other.epoch:
        return False
    if one.phase == other.phase or one.means.action == other.means.action:
        return one.attrs.get("version") == other.attrs.get("version")
    return {one.action, other.action} <= {"write", "send", "receive"}


class Lifetime:
    """R-LIFETIME: a buffer was freed while a consumer still had it.

    Sees: a rank frees (or reuses) a bucket while another rank is inside a load of that bucket that
    has its handle, or while its own transfer of it runs; a load that names the handle of a rank
    which has freed it already. Cannot see: a consumer that logs no load. Sources: slime issue
    1348, SGLang issue 6626.
    """

    rule = "R-LIFETIME"
    wants = frozenset({"free", "receive", "send", "write"})

    def __init__(self) -> None:
        self._freed: dict[tuple[Name, str, int | None], Event] = {}
        self._senders: dict[tuple[str, int | None], set[Name]] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "start" or len(self._found) >= _KEPT:
            return
        bucket = _bucket(event)
        if event.action == "send":
            if bucket is not None:
                if len(self._senders) > 4096:
                    self._senders.pop(next(iter(self._senders)))
                self._senders.setdefault((bucket, event.epoch), set()).add(event.rank)
            return
        if event.action != "free":
            self._late_reader(event, bucket)
            return
        if bucket is not None:
            if len(self._freed) > 4096:
                self._freed.pop(next(iter(self._freed)))
            self._freed[(event.rank, bucket, event.epoch)] = event
        for rank in facts.ranks.values():
            for each in rank.open:
                if self._has(each.event, event, bucket):
                    self._found.append(
                        Finding.on(
                            "R-LIFETIME",
                            event,
                            f"rank {event.rank} entered {event.phase} while rank {rank.name} was "
                            f"still in {each.event.phase}",
                            each.event,
                        )
                    )
                    return

    def _has(self, reader: Event, free: Event, bucket: str | None) -> bool:
        if reader is free or reader.action not in ("receive", "write", "send"):
            return False
        theirs = _bucket(reader)
        if reader.rank == free.rank:
            return reader.action == "send" and bucket is not None and theirs == bucket
        handles = reader.attrs.get("handles", reader.attrs.get("sources"))
        if isinstance(handles, list | tuple):
            named = str(free.rank) in {str(handle).rpartition("/")[2] for handle in handles}
            return named and (bucket is None or theirs is None or theirs == bucket)
        if reader.action != "receive" or bucket is None or theirs != bucket:
            return False
        # Where several send a bucket of that number, only a group says whose it is.
        senders = self._senders.get((bucket, free.epoch), set())
        own = len(senders | {free.rank}) == 1
        shared = group_of(reader) is not None and group_of(reader) == group_of(free)
        return reader.epoch == free.epoch and (own or shared)

    def _late_reader(self, event: Event, bucket: str | None) -> None:
        handles = event.attrs.get("handles", event.attrs.get("sources"))
        if bucket is None or not isinstance(handles, list | tuple):
            return
        for handle in handles[:4096]:
            for rank in (handle, str(handle)):
                freed = self._freed.get((rank, bucket, event.epoch)) if _hashable(rank) else None
                if freed is not None:
                    self._found.append(
                        Finding.on(
                            "R-LIFETIME",
                            freed,
                            f"rank {freed.rank} freed bucket {bucket} before rank {event.rank} "
                            "read it",
                            event,
                        )
                    )
                    return

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found


def _hashable(value: object) -> bool:
    return isinstance(value, int | str)


def _bucket(event: Event) -> str | None:
    bucket = event.attrs.get("bucket", event.attrs.get("slot"))
    return str(bucket) if bucket is not None else event.means.bucket
