"""Memory: who took a device before it was given back.

All of it follows from figures per device (`delta_gib`, `need_gib`, `free_gib`, capacity), or,
where a log has none, from an out-of-memory error together with a peer that was visibly not done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phasesync.audit.answer import NOTE, SUSPECTED, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import Facts, Open
from phasesync.audit.vocabulary import is_memory_error

__all__ = ("TAKES", "Fence")

# Actions that may take memory.
TAKES: Final = frozenset(
    {"acquire", "train", "serve", "write", "receive", "send", "compute", "load_model"}
)
_QUIET: Final = frozenset({"fence", "window", "wait", "life", "poll", "lock", "pause", "drain"})
_KEPT: Final = 512


@dataclass(slots=True)
class _Grab:
    """A phase that took memory while it was not certain that there was room."""

    event: Event
    short: dict[str, tuple[float, float]]
    late: dict[Name, tuple[str, Event | None]] = field(default_factory=dict)
    fenced_without: tuple[Name, ...] = ()
    fence: Event | None = None
    unmeasured: bool = False
    failed: Event | None = None


class Fence:
    """R-FENCE and R-BUDGET: memory was taken on a device before those who hold it let go.

    Sees: a phase with `need_gib` on devices whose ledger has less room. If a rank on such a device
    is still inside a phase, or has not done a release that the taker (or the other holders)
    already did, the taker came too early: R-FENCE. If nobody there is late, the order itself does
    not fit: R-BUDGET, and the plan is guilty. Without figures it needs an out-of-memory error and
    a peer that was late. Where the taker passed a fence that the late rank is no member of, the
    fence covered too little: R-COVERS. Cannot see: memory that no line mentions; a device whose
    releases were never measured is no evidence. Sources: verl PR 7851, PR 5208, PR 6685;
    torch_memory_saver issue 99.
    """

    rule = "R-FENCE"
    wants = None

    def __init__(self) -> None:
        self._grabs: list[_Grab] = []
        self._open: dict[tuple[Name, str], _Grab] = {}
        self._fences: dict[Name, tuple[Event, tuple[Name, ...]]] = {}
        self._arrived: dict[tuple[int | None, str, str], dict[Name, None]] = {}

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.action == "fence":
            self._note_fence(event, facts)
        elif event.kind == "start":
            if event.action == "release" and self._open:
                self._overtaken(event, facts)
            taking = event.action in TAKES and ("gpus" in event.attrs or event.action == "acquire")
            if taking or "need_gib" in event.attrs:
                self._start(event, facts)
        elif event.kind in ("fail", "exit"):
            grab = self._open.pop((event.rank, event.phase), None)
            if grab is not None and is_memory_error(event.attrs.get("error")):
                grab.failed = event
        elif event.kind == "end":
            self._open.pop((event.rank, event.phase), None)

    def _note_fence(self, event: Event, facts: Facts) -> None:
        key = (event.epoch, event.phase, str(event.attrs.get("group", "")))
        if event.kind == "start":
            if len(self._arrived) > 64:
                self._arrived.pop(next(iter(self._arrived)))
            self._arrived.setdefault(key, {})[event.rank] = None
        elif event.kind == "end":
            self._fences[event.rank] = (event, tuple(self._arrived.get(key, ())))

    def _overtaken(self, event: Event, facts: Facts) -> None:
        """A holder begins to let go while somebody already takes what it has not given back."""
        for grab in self._open.values():
            if grab.event.rank == event.rank or grab.event.epoch != event.epoch:
                continue
            if any(event.rank in facts.devices.holders(device) for device in grab.short):
                grab.late.setdefault(event.rank, (f"began {event.phase} only afterwards", event))

    def _start(self, event: Event, facts: Facts) -> None:
        if len(self._grabs) >= _KEPT:
            return
        devices = facts.devices
        short = devices.short(event)
        touched = tuple(short) if short else devices.touched(event)
        late: dict[Name, tuple[str, Event | None]] = {}
        for device in touched:
            for holder in devices.holders(device):
                reason = _late(event, holder, device, facts)
                if reason is not None:
                    late[holder] = reason
        if not short and not late:
            return
        grab = _Grab(event, short, late)
        grab.unmeasured = any(
            _unmeasured(holder, event.epoch, facts)
            for device in short
            for holder in devices.holders(device)
        )
        passed = self._fences.get(event.rank)
        if passed is not None and late and passed[0].epoch == event.epoch:
            outside = tuple(rank for rank in late if rank not in passed[1])
            if len(outside) == len(late) and _released_before(event, passed[0], facts):
                grab.fence, grab.fenced_without = passed[0], outside
        self._grabs.append(grab)
        self._open[(event.rank, event.phase)] = grab

    def finish(self, facts: Facts) -> list[Finding]:
        found: list[Finding] = []
        budget: list[_Grab] = []
        for grab in self._grabs:
            silent = _silent(grab, facts)
            if silent and (unknown := _unknown(grab, silent)) is not None:
                found.append(unknown)
                continue
            finding = self._judge(grab, facts)
            if finding is None and grab.short and not grab.late:
                budget.append(grab)
            elif finding is not None:
                found.append(finding)
        return found + _budget(budget, facts)

    def _judge(self, grab: _Grab, facts: Facts) -> Finding | None:
        event = grab.event
        if not grab.late:
            return None
        oom = grab.failed is not None and _names(grab, facts)
        overlap = [why for why in grab.late.values() if why[1] is not None]
        if grab.unmeasured and not oom:
            return None
        if not grab.short and not oom:
            if not overlap or "gpus" not in event.attrs:
                return None
            who = ", ".join(map(str, grab.late))
            return Finding.on(
                "R-FENCE",
                event,
                f"{event.phase} began while {who} had not let go; it fitted this time",
                strength=NOTE,
                guilty=(),
            )
        lines = [why[1] for why in grab.late.values() if why[1] is not None]
        who = "; ".join(f"rank {name} {why[0]}" for name, why in sorted(grab.late.items(), key=str))
        room = "; ".join(
            f"device {device} has room for {room:g} of the {need:g} GiB it needs"
            for device, (room, need) in grab.short.items()
        )
        because = f"rank {event.rank} entered {event.phase} too early: {who}"
        if room:
            because += f" ({room})"
        if grab.fence is not None:
            return Finding.on(
                "R-COVERS",
                grab.fence,
                f"the fence that rank {event.rank} passed has not "
                f"{', '.join(map(str, grab.fenced_without))} among its members; {because}",
                event,
                *lines,
            )
        return Finding.on(
            "R-FENCE", event, because, *lines, *([grab.failed] if grab.failed else [])
        )


def _silent(grab: _Grab, facts: Facts) -> list[Name]:
    """The ranks on the devices taken of which the log has no line: whether they let go, it cannot
    tell.
    """
    devices = tuple(grab.short) or facts.devices.touched(grab.event)
    holders = [rank for device in devices for rank in facts.devices.holders(device)]
    known = {*facts.header.initial_gib, *facts.devices.device_of.values()}
    # One whose number is no device may be on any, as an engine beside its trainers is.
    holders += [r for r in facts.silent() if str(r) in devices or str(r) not in known]
    return [rank for rank in dict.fromkeys(holders) if facts.ranks[rank].first is None]


def _unknown(grab: _Grab, silent: list[Name]) -> Finding | None:
    """What is left of a phase that took memory beside ranks without a log, if anything."""
    for rank in silent:
        grab.late.pop(rank, None)
    if grab.late or not grab.short:
        return None
    who = ", ".join(map(str, silent[:16]))
    device, (room, need) = next(iter(grab.short.items()))
    return Finding.on(
        "R-DUMPSET",
        grab.event,
        f"{grab.event.phase} needs {need:g} GiB on device {device}, which has room for {room:g} by "
        f"the lines at hand; whether rank {who} let go there, no line tells",
        *([grab.failed] if grab.failed else []),
        strength=SUSPECTED,
        guilty=(),
        record_next=(f"the log of rank {who}",),
    )


def _names(grab: _Grab, facts: Facts) -> bool:
    """Whether the error can be on the device of somebody who was late."""
    failed = grab.failed
    if failed is None:
        return False
    gpu = failed.attrs.get("gpu", failed.attrs.get("device"))
    if gpu is not None:
        return any(rank in grab.late for rank in facts.devices.holders(str(gpu)))
    return "gpus" in grab.event.attrs


def _late(event: Event, holder: Name, device: str, facts: Facts) -> tuple[str, Event | None] | None:
    """Why `holder` has not let go of `device` yet, as seen when `event` begins."""
    rank = facts.ranks[holder]
    if rank.exit is not None:
        return None
    for each in rank.open:
        if each.event is event or each.event.action in _QUIET:
            continue
        if holder == event.rank and each.event.action != "release":
            continue
        if each.event.action == "acquire":
            continue
        if (
            each.event.action in ("serve", "compute")
            and holder != event.rank
            and (facts.header.kind(holder) != facts.header.kind(event.rank))
        ):
            continue
        return f"is still in {each.event.phase}", each.event
    if holder == event.rank:
        return None
    epoch = event.epoch
    mine = _releases(facts, event.rank, epoch)
    if not mine:
        # A driver has no course of its own: compare the holder with those in its place.
        for other in facts.header.peers(holder, facts.ranks):
            if other not in (holder, event.rank):
                mine |= _releases(facts, other, epoch)
    missing = mine - _releases(facts, holder, epoch)
    if missing and facts.header.kind(holder) == facts.header.kind(event.rank):
        return f"has not done {', '.join(sorted(missing))}", None
    if missing and not _releases(facts, event.rank, epoch):
        return f"has not done {', '.join(sorted(missing))}", None
    return None


def _releases(facts: Facts, rank: Name, epoch: int | None) -> set[str]:
    return {
        phase
        for phase, event in facts.ranks[rank].finished(epoch).items()
        if event.action == "release"
    }


def _released_before(event: Event, fence: Event, facts: Facts) -> bool:
    """Whether the taker let go itself before it passed the fence: the fence was meant for that."""
    done = facts.ranks[event.rank].finished(event.epoch)
    return any(each.action == "release" and each.at < fence.at for each in done.values())


def _unmeasured(holder: Name, epoch: int | None, facts: Facts) -> bool:
    """Whether the holder released something in this epoch, and no line says how much."""
    return holder not in facts.devices.measured and bool(_releases(facts, holder, epoch))


def _budget(grabs: Iterable[_Grab], facts: Facts) -> list[Finding]:
    """R-BUDGET for phases that did not fit although nobody was late."""
    by_phase: dict[tuple[int | None, str], list[_Grab]] = {}
    for grab in grabs:
        by_phase.setdefault((grab.event.epoch, grab.event.phase), []).append(grab)
    found = []
    for (_, phase), alike in by_phase.items():
        first = alike[0]
        device, (room, need) = next(iter(first.short.items()))
        if any(grab.unmeasured for grab in alike):
            found.append(
                Finding.on(
                    "R-BUDGET",
                    first.event,
                    f"{phase} does not fit by the figures at hand, but releases before it have "
                    "none",
                    strength=SUSPECTED,
                    guilty=(),
                    record_next=("free GiB per device at the end of every release",),
                )
            )
            continue
        because = (
            f"{phase} needs {need:g} GiB on device {device}, which has room for {room:g} GiB, and "
            "nobody there is late: the order of phases itself does not fit"
        )
        found.append(
            Finding.on(
                "R-BUDGET",
                first.event,
                because,
                *[grab.event for grab in alike[1:]],
                guilty=(),
            )
        )
    return found
