"""Memory: who took a device before it was given back, and what was not given back.

All of it follows from figures per device (`delta_gib`, `need_gib`, `free_gib`, capacity), or,
where a log has none, from an out-of-memory error together with a peer that was visibly not done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from phasesync.audit.answer import BROKEN, NOTE, SUSPECTED, Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import Facts, Open
from phasesync.audit.vocabulary import is_memory_error
from phasesync.audit.waits import unrecovered

__all__ = ("Drift", "Fence", "Freed", "Rollback")

_TAKES: Final = frozenset(
    {"acquire", "train", "serve", "write", "receive", "send", "compute", "load_model"}
)
_QUIET: Final = frozenset({"fence", "window", "wait", "life", "poll", "lock", "pause", "drain"})
_KEPT: Final = 512
_NOTICEABLE: Final = 0.5  # GiB


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
            if event.action in _TAKES and (
                "need_gib" in event.attrs or "gpus" in event.attrs or event.action == "acquire"
            ):
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
        who = "; ".join(f"{name} {why[0]}" for name, why in sorted(grab.late.items(), key=str))
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


class Freed:
    """R-FREED: a release ended, and did not free what it said.

    Sees: explicit figures at the end of a release (`freed_gib`, `delta_gib`, `free_gib`) that are
    far below what was expected or what peers freed in the same phase; where the figure is only a
    `delta_gib` of nothing, it also wants the shortage that follows. Cannot see: releases without
    figures. Then an out-of-memory error later is `inconclusive`. Sources: slime PR 579, miles PR
    86, slime issue 1497.
    """

    rule = "R-FREED"
    wants = frozenset({"release"})

    def __init__(self) -> None:
        self._ends: dict[
            tuple[int | None, str], dict[Name, tuple[Event, float | None, float | None]]
        ]
        self._ends = {}
        self._found: list[tuple[Event, str, bool]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "end" or not event.attrs:
            return
        freed, free = _freed(event, facts), number(event.attrs.get("free_gib"))
        expected = next(
            (
                figure
                for name in ("expected_freed_gib", "expected_gib", "expect_gib", "should_free_gib")
                if (figure := number(event.attrs.get(name))) is not None
            ),
            None,
        )
        if expected is not None and freed is not None and freed < 0.5 * expected:
            why = f"{event.phase} freed {freed:g} of the {expected:g} GiB that it should"
            self._found.append((event, why, True))
            return
        wanted = number(event.attrs.get("expected_free_gib"))
        if wanted is not None and free is not None and free + _NOTICEABLE < 0.9 * wanted:
            why = f"{event.phase} left {free:g} GiB free where {wanted:g} were expected"
            self._found.append((event, why, True))
            return
        if freed is None and free is None:
            return
        if len(self._ends) > 128:
            self._compare(self._ends.pop(next(iter(self._ends))), facts)
        self._ends.setdefault((event.epoch, event.phase), {})[event.rank] = (event, freed, free)

    def _compare(
        self, ends: dict[Name, tuple[Event, float | None, float | None]], facts: Facts
    ) -> None:
        for rank, (event, freed, free) in ends.items():
            peers = facts.header.peers(rank, ends)
            others = [ends[peer][1] for peer in peers if peer != rank]
            usual = median([each for each in others if each is not None] or [0.0])
            if freed is not None and usual > 2 * _NOTICEABLE and freed < 0.5 * usual:
                left = f", {free:g} GiB free" if free is not None else ""
                why = (
                    f"{event.phase} on rank {rank} freed {freed:g} GiB{left}; "
                    f"its peers freed {usual:g}"
                )
                self._found.append((event, why, free is not None or "freed_gib" in event.attrs))
                continue
            frees = [ends[peer][2] for peer in peers if peer != rank]
            roomy = median([each for each in frees if each is not None] or [0.0])
            if free is not None and freed is None and roomy > 4 and free < 0.5 * roomy:
                why = (
                    f"{event.phase} left {free:g} GiB free on rank {rank}; its peers have {roomy:g}"
                )
                self._found.append((event, why, True))
            elif freed is not None and abs(freed) < 0.01 and len(peers) == 1:
                self._found.append((event, f"{event.phase} ended and freed nothing", False))

    def finish(self, facts: Facts) -> list[Finding]:
        for ends in self._ends.values():
            self._compare(ends, facts)
        self._ends.clear()
        found = []
        for event, why, certain in self._found:
            short = [
                failure
                for failure in facts.failures_after(event.at)
                if is_memory_error(failure.attrs.get("error"))
            ]
            if short or certain:
                found.append(Finding.on("R-FREED", event, why, *short[:4]))
        for failure in facts.failures:
            if not is_memory_error(failure.attrs.get("error")) or failure.action not in _TAKES:
                continue
            if unrecovered(failure, facts) is not None or failure.kind == "exit":
                found.append(_suspect(failure))
        return found


def _suspect(failure: Event) -> Finding:
    return Finding.on(
        "R-FREED",
        failure,
        f"rank {failure.rank} ran out of memory in {failure.phase}; no line tells residue that a "
        "release left behind from a phase that simply needs too much",
        strength=SUSPECTED,
        guilty=(),
        record_next=("free GiB per rank at the end of every release and at the fence before it",),
    )


def _freed(event: Event, facts: Facts) -> float | None:
    said = number(event.attrs.get("freed_gib"))
    if said is not None:
        return said
    delta = facts.devices.delta(event)
    return None if delta is None else -sum(delta.values())


class Rollback:
    """R-ROLLBACK: a phase failed and left memory mapped.

    Sees: what a failed phase changed on a device, net of its own start, that no later release of
    that rank took back before somebody else needed the device. Cannot see: a failure without
    figures. Sources: vLLM issue 36651 and its rollback; SGLang resume after a partial failure.
    """

    rule = "R-ROLLBACK"
    wants = None

    def __init__(self) -> None:
        self._left: dict[tuple[Name, str], tuple[Event, float]] = {}
        self._begun: dict[tuple[Name, str], float] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if not event.attrs and not self._left:
            return
        delta = facts.devices.delta(event) if event.attrs else None
        change = sum(delta.values()) if delta else 0.0
        key = (event.rank, event.phase)
        if event.kind == "start":
            self._taken(event)
            if change:
                self._begun[key] = change
            return
        before = self._begun.pop(key, 0.0)
        if event.kind in ("fail", "timeout"):
            for name in ("left_gib", "leaked_gib", "mapped_gib"):
                change += number(event.attrs.get(name)) or 0.0
            if before + change > _NOTICEABLE and event.action != "train":
                self._left[key] = (event, before + change)
        elif change < 0:
            for other, (failed, left) in list(self._left.items()):
                if other[0] == event.rank:
                    if left + change < _NOTICEABLE:
                        del self._left[other]
                    else:
                        self._left[other] = (failed, left + change)

    def _taken(self, event: Event) -> None:
        """Somebody goes on although memory of a failed phase is still there."""
        if event.action not in _TAKES:
            return
        for key, (failed, left) in list(self._left.items()):
            if failed.rank == event.rank or "need_gib" in event.attrs:
                del self._left[key]
                self._found.append(_left_behind(failed, left, event))

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found + [_left_behind(failed, left) for failed, left in self._left.values()]


def _left_behind(failed: Event, left: float, *after: Event) -> Finding:
    return Finding.on(
        "R-ROLLBACK",
        failed,
        f"{failed.phase} failed on rank {failed.rank} and left {left:g} GiB mapped",
        *after,
    )


class Drift:
    """R-DRIFT: what stays held after the same release grows every epoch.

    Sees: at least three epochs with a figure (`held_gib`, else `free_gib`) at the end of one
    release, each noticeably worse than the one before. Cannot see: growth that began before the
    log, or two epochs only. Not drift: noise, and a first use that allocates once. Source: vLLM
    issue 21336.
    """

    rule = "R-DRIFT"
    wants = frozenset({"release"})

    def __init__(self) -> None:
        self._series: dict[tuple[Name, str], list[tuple[int | None, float, Event]]] = {}
        self._found: dict[tuple[Name, str], list[tuple[int | None, float, Event]]] = {}

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "end" or not event.attrs:
            return
        held = number(event.attrs.get("held_gib"))
        if held is None:
            held = number(event.attrs.get("residual_gib", event.attrs.get("used_gib")))
        if held is None:
            free = number(event.attrs.get("free_gib"))
            held = None if free is None else -free
        if held is None:
            return
        key = (event.rank, event.phase)
        series = self._series.setdefault(key, [])
        if series and series[-1][0] == event.epoch:
            series[-1] = (event.epoch, held, event)
        elif series and held - series[-1][1] < max(0.1, 0.01 * abs(series[-1][1])):
            series[:] = [(event.epoch, held, event)]
        else:
            series.append((event.epoch, held, event))
        if len(series) >= 3 and key not in self._found:
            self._found[key] = series[:3]
        del series[:-8]

    def finish(self, facts: Facts) -> list[Finding]:
        found = []
        for (rank, phase), series in self._found.items():
            last = self._series[(rank, phase)]
            if last[-1][1] < series[-1][1] and len(last) < 3:
                continue  # It came down again: not every epoch.
            held = " -> ".join(f"{abs(figure):g}" for _, figure, _ in series)
            word = "free" if series[0][1] < 0 else "held"
            found.append(
                Finding.on(
                    "R-DRIFT",
                    series[1][2],
                    f"after {phase} on rank {rank}, GiB {word}: {held}, worse every epoch",
                    series[0][2],
                    *(event for _, _, event in series[2:]),
                    strength=BROKEN,
                )
            )
        return found
