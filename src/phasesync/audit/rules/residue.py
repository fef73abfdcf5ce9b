"""What was not given back: releases that freed nothing, failures that left memory, slow growth.

All of it follows from figures; without them an out-of-memory error is not decidable, and says what
to record.
"""

from statistics import median
from typing import Final

from phasesync.audit.answer import BROKEN, SUSPECTED, Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import Facts, Open
from phasesync.audit.rules.memory import TAKES
from phasesync.audit.vocabulary import is_memory_error
from phasesync.audit.waits import unrecovered

__all__ = ("Drift", "Freed", "Rollback")

_NOTICEABLE: Final = 0.5  # GiB


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
        said = {**start.event.attrs, **event.attrs} if start is not None else event.attrs
        expected = next(
            (
                figure
                for name in ("expected_freed_gib", "expected_gib", "expect_gib", "should_free_gib")
                if (figure := number(said.get(name))) is not None
            ),
            None,
        )
        if expected is not None and freed is not None and freed < 0.5 * expected:
            why = f"{event.phase} freed {freed:g} of the {expected:g} GiB that it should"
            self._found.append((event, why, True))
            return
        wanted = number(said.get("expected_free_gib"))
        if wanted is not None and free is not None and free + _NOTICEABLE < 0.9 * wanted:
            why = f"{event.phase} left {free:g} GiB free where {wanted:g} were expected"
            self._found.append((event, why, True))
            return
        held = number(said.get("held_gib"))
        emptied = event.attrs.get("freed_gib") is not None and freed is not None and freed < 0.01
        if emptied and held is not None and held > _NOTICEABLE and facts.tags.concerns(event):
            state = facts.tags.of.get(event.rank)
            asked = number(said.get("level")) != 0  # Level 0 only pauses.
            if asked and (state is None or state.released_at <= state.acquired_at):
                why = f"{event.phase} freed nothing on rank {event.rank}, {held:g} GiB are held"
                self._found.append((event, why, True))
                return
        if (expected is not None and freed is not None) or (
            wanted is not None and free is not None
        ):
            return  # It said what it should free, and did: peers may be of another size.
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
            if not is_memory_error(failure.attrs.get("error")):
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
        if event.action not in TAKES:
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
    wants = frozenset({"release", "train", "write", "compute"})

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
            held = number(event.attrs.get("reserved_gib"))
        if held is None and event.action == "release":
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

    @staticmethod
    def _fatal(
        last: tuple[int | None, float, Event],
        series: list[tuple[int | None, float, Event]],
        facts: Facts,
    ) -> bool:
        """Whether most of what grew stayed, and the rank then ran out of memory."""
        grown = series[-1][1] - series[0][1]
        stayed = last[1] - series[0][1] > 0.5 * grown
        return stayed and any(
            is_memory_error(failure.attrs.get("error"))
            for failure in facts.failures_after(last[2].at, [last[2].rank])
        )

    def finish(self, facts: Facts) -> list[Finding]:
        found = []
        for (rank, phase), series in self._found.items():
            last = self._series[(rank, phase)]
            came_down = last[-1][1] < series[-1][1] and len(last) < 3
            # What a step holds that gives nothing back is its own business, until it is too much.
            own = series[-1][2].action != "release"
            if (came_down or own) and not self._fatal(last[-1], series, facts):
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
