"""Payload: what must not overlap on a communicator, and what must outlive its readers.

A buffer or a communicator is misused at the moment somebody takes it again, not when the damage
shows.
"""

from typing import Final

from phasesync.audit.answer import Finding
from phasesync.audit.events import Event, Name, of_epoch
from phasesync.audit.facts import Facts, Open, group_of
from phasesync.audit.ledgers import ALL, tags_of

__all__ = ("Exclusive", "Lifetime")

_KEPT: Final = 512


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
                        f"rank {event.rank} entered {event.phase}{of_epoch(event.epoch)} on group "
                        f"{group} while its {other.phase}{of_epoch(other.epoch)} is under way "
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
                    and _overtook(event, other, facts)
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
                        f"rank {event.rank} is in {event.phase}{of_epoch(event.epoch)} and rank "
                        f"{other.rank} in {other.phase}{of_epoch(other.epoch)}, on one group",
                        other,
                        waiting=facts.waiting(),
                    )
                )
        return found


def _overtook(event: Event, other: Event, facts: Facts) -> bool:
    """Whether `event` is of the same course as `other`, only further on: its rank has done what
    the other rank still does. Two ranks that went different ways overtake nobody.
    """
    pair = {"write", "send", "receive"}
    return (
        event.phase == other.phase
        or {event.action, other.action} <= pair
        or other.phase in facts.ranks[event.rank].finished(other.epoch)
        or event.phase in facts.ranks[other.rank].finished(event.epoch)
    )


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
    which has freed it already; a slot that was filled with another bucket while the one before was
    still read from it; an engine that releases tags which another one reads from it, and whose
    read then does not end. Cannot see: a consumer that logs no load. Sources: slime issue
    1348, SGLang issue 6626, SGLang PR 18646, verl PR 5619.
    """

    rule = "R-LIFETIME"
    wants = frozenset({"free", "receive", "send", "write", "compute", "release"})

    def __init__(self) -> None:
        self._freed: dict[tuple[Name, str, int | None], Event] = {}
        self._senders: dict[tuple[str, int | None], set[Name]] = {}
        self._guessed: set[int] = set()  # whose bucket it is follows from there being one sender
        self._slots: dict[str, dict[Name, str]] = {}
        self._under: list[tuple[Event, Event]] = []
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if len(self._found) + len(self._under) >= _KEPT:
            return
        if event.kind == "end" and start is not None and "slot" in start.event.attrs:
            self._filled(event, start.event, facts)
        if event.kind != "start" or event.action == "compute":
            return
        if event.action == "release":
            self._unmapped(event, facts)
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

    def _filled(self, event: Event, start: Event, facts: Facts) -> None:
        """A slot holds another bucket now; whoever still reads the one before reads both.

        A sender that waits inside its phase until the slot is free ends it only afterwards.
        """
        slot, bucket = str(start.attrs["slot"]), start.attrs.get("bucket")
        if bucket is None or event.action in ("receive", "free"):
            return
        if len(self._slots) > 4096:
            self._slots.pop(next(iter(self._slots)))
        filled = self._slots.setdefault(slot, {})
        before = filled.get(event.rank)
        filled[event.rank] = str(bucket)
        if before in (None, str(bucket)) or len(filled) > 1:
            return  # Where several fill slots of that number, no line says whose is read.
        for rank in facts.ranks.values():
            for each in rank.opened("receive", "write") if rank.name != event.rank else ():
                attrs = each.event.attrs
                if _handles(each.event) is None:
                    self._guessed.add(start.at)
                elif not _names(each.event, event.rank):
                    continue
                if str(attrs.get("slot")) == slot and str(attrs.get("bucket")) == before:
                    why = (
                        f"rank {event.rank} filled slot {slot} with bucket {bucket} while rank "
                        f"{rank.name} still read bucket {before} from it"
                    )
                    self._found.append(Finding.on("R-LIFETIME", start, why, each.event, event))
                    return

    def _unmapped(self, event: Event, facts: Facts) -> None:
        """An engine lets go of memory that another one reads from it."""
        tags = tags_of(event)
        if not facts.tags.concerns(event):
            return
        for rank in facts.ranks.values():
            for each in rank.opened("receive") if rank.name != event.rank else ():
                theirs = tags_of(each.event)
                alike = ALL in tags or bool(set(tags) & set(theirs))
                if ALL not in theirs and alike and _names(each.event, event.rank):
                    self._under.append((event, each.event))

    def _has(self, reader: Event, free: Event, bucket: str | None) -> bool:
        if reader is free or reader.action not in ("receive", "write", "send"):
            return False
        theirs = _bucket(reader)
        if reader.rank == free.rank:
            return reader.action == "send" and bucket is not None and theirs == bucket
        if isinstance(_handles(reader), list | tuple):
            named = _names(reader, free.rank)
            return named and (bucket is None or theirs is None or theirs == bucket)
        if reader.action != "receive" or bucket is None or theirs != bucket:
            return False
        # Where several send a bucket of that number, only a group says whose it is.
        senders = self._senders.get((bucket, free.epoch), set())
        own = len(senders | {free.rank}) == 1
        if own:
            self._guessed.add(free.at)
        shared = group_of(reader) is not None and group_of(reader) == group_of(free)
        return reader.epoch == free.epoch and (own or shared)

    def _late_reader(self, event: Event, bucket: str | None) -> None:
        handles = _handles(event)
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
        found = [
            finding.doubted(facts.silent(facts.header.kind(finding.guilty[0])))
            if finding.at in self._guessed and finding.guilty
            else finding
            for finding in self._found
        ]
        for release, reader in self._under:
            if facts.outcome(reader) != "good":
                why = (
                    f"rank {release.rank} entered {release.phase} while rank {reader.rank} was "
                    f"still in {reader.phase}, which reads from it"
                )
                lost = facts.failures_after(release.at, [reader.rank])
                found.append(Finding.on("R-LIFETIME", release, why, reader, *lost[:1]))
        return found


def _handles(reader: Event) -> object:
    """From whom a phase reads, where it says so."""
    return reader.attrs.get("handles", reader.attrs.get("sources"))


def _names(reader: Event, rank: Name) -> bool:
    """Whether a phase says that it reads from `rank`."""
    handles = _handles(reader)
    several = handles if isinstance(handles, list | tuple) else [handles]
    return str(rank) in {str(handle).rpartition("/")[2] for handle in several}


def _hashable(value: object) -> bool:
    return isinstance(value, int | str)


def _bucket(event: Event) -> str | None:
    bucket = event.attrs.get("bucket", event.attrs.get("slot"))
    return str(bucket) if bucket is not None else event.means.bucket
