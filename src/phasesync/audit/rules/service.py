"""Requests, limits and tools: who may be admitted, who is waited for, who may watch.

Each of these steps is legal alone and fatal beside another: a request after a pause, two profilers
on one device, a limit below healthy work.
"""

from typing import Final

from phasesync.audit.answer import FAILED, Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import WAITING, Facts, Open, group_of, is_timeout, ranks_in
from phasesync.audit.vocabulary import (
    is_bad_output,
    is_idle_error,
    is_requests_error,
)
from phasesync.audit.waits import unrecovered

__all__ = ("Quiet", "Timeouts", "Windows")

_KEPT: Final = 512
_NEEDS_IDLE: Final = ("drain", "flush", "release")


class Quiet:
    """R-QUIET: requests were admitted, running or queued where a step needs the engine idle.

    Sees: an admission after a pause, a closed gate or a finished drain on that rank; requests that
    a pause put back into the queue; serving that goes on; each followed by a drain, flush or
    release there that fails, times out or never ends; serving that a release of its memory
    overtook, and that then died; such a step that fails and says itself that requests were
    there; a paused rank that steps on the group in which a peer takes its weights. Admissions that
    are parked or rejected, or that nothing needs idle for, are legal. Cannot see: a gate that no
    line tells. Sources: verl PR 7511, SGLang PR 32153, vLLM RFC 51476, vLLM PR 38009.
    """

    rule = "R-QUIET"
    wants = frozenset(
        {
            "pause",
            "close",
            "open",
            "resume_gen",
            "admit",
            "drain",
            "flush",
            "release",
            "serve",
            "acquire",
            "write",
        }
    )

    def __init__(self) -> None:
        self._shut: dict[Name, Event] = {}
        self._admitted: dict[Name, Event] = {}
        self._queued: dict[Name, Event] = {}
        self._blocked: list[tuple[Event, Event, str]] = []
        self._said: list[tuple[Event, Event]] = []
        self._stepped: dict[int, Event] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        rank = event.rank
        match event.action, event.kind:
            case (("pause" | "close" | "drain"), "end"):
                if event.action != "drain" or rank not in self._admitted:
                    self._shut.setdefault(rank, event)
                if any(
                    (number(event.attrs.get(name)) or 0) > 0
                    for name in ("requeued", "queued", "retracted", "pending", "waiting", "running")
                ):
                    self._queued[rank] = event
            case (("open" | "resume_gen"), ("start" | "end")):
                self._shut.pop(rank, None)
                self._admitted.pop(rank, None)
                self._queued.pop(rank, None)
            case "admit", "start" if rank in self._shut:
                self._admitted.setdefault(rank, event)
            case "admit", ("end" | "fail"):
                if _turned_away(event):
                    self._admitted.pop(rank, None)
            case "serve", "start" if rank in self._shut:
                self._beside(event, facts)
            case "serve", "end":
                self._queued.pop(rank, None)
                if self._stepped:
                    self._spoilt(event, start)
            case "acquire", "end":
                self._shut.pop(rank, None)  # Some engines go on by themselves once they are awake.
            case "write", "start":
                if self._shut:
                    self._updated(event, facts)
                if event.rank not in self._shut:
                    self._under(event, facts)
            case (("drain" | "flush" | "release"), "start"):
                self._step(event, facts)
            case (("drain" | "flush" | "release"), ("fail" | "timeout" | "exit")):
                self._failed(event, start)
            case _:
                pass

    def _updated(self, event: Event, facts: Facts) -> None:
        """Weights change under a request that began after the pause."""
        target = event.attrs.get("targets", event.attrs.get("target"))
        reached = [event.rank] if target is None else ranks_in(target, facts.header.ranks)
        for rank in reached:
            shut, known = self._shut.get(rank), facts.ranks.get(rank)
            for each in known.opened("serve") if shut is not None and known is not None else ():
                if shut is None or shut.attrs.get("mode") == "keep":
                    continue  # What comes meanwhile is frozen until it goes on.
                if each.event.at > shut.at and len(self._found) < _KEPT:
                    why = f"rank {rank} began {each.event.phase} after {shut.phase}, and"
                    self._found.append(
                        Finding.on(
                            "R-QUIET", each.event, f"{why} {event.phase} runs under it", event, shut
                        )
                    )
                    return

    def _beside(self, event: Event, facts: Facts) -> None:
        """A paused rank steps on the group in which a peer of it takes its weights."""
        group, shut = group_of(event), self._shut[event.rank]
        if group is None or shut.attrs.get("mode") == "keep" or len(self._found) >= _KEPT:
            return
        for peer in facts.header.peers(event.rank, facts.ranks):
            for each in facts.ranks[peer].opened("write") if peer != event.rank else ():
                if group_of(each.event) == group:
                    why = (
                        f"rank {event.rank} began {event.phase} after {shut.phase}, on the group "
                        f"in which rank {peer} is in {each.event.phase}"
                    )
                    self._found.append(Finding.on("R-QUIET", event, why, each.event, shut))
                    return

    def _under(self, event: Event, facts: Facts) -> None:
        """Weights change while one pass through the model is under way."""
        for each in facts.ranks[event.rank].opened("serve"):
            if each.event.means.step and len(self._stepped) < _KEPT:
                self._stepped.setdefault(each.event.at, event)

    def _spoilt(self, event: Event, start: Open | None) -> None:
        """A pass under which the weights changed is over, and its output is bad."""
        update = self._stepped.pop(start.event.at, None) if start is not None else None
        if update is None or start is None or not is_bad_output(event.attrs.get("output")):
            return
        why = (
            f"{update.phase} of rank {event.rank} ran under its {event.phase}, whose output is bad"
        )
        self._found.append(Finding.on("R-QUIET", update, why, start.event, event))

    def _step(self, event: Event, facts: Facts) -> None:
        if len(self._blocked) >= _KEPT:
            return
        cause = self._admitted.get(event.rank) or self._queued.get(event.rank)
        if cause is not None:
            self._blocked.append((event, cause, "known"))
            return
        serving = facts.ranks[event.rank].opened("serve")
        if serving:
            self._blocked.append((event, serving[-1].event, "running"))

    def _failed(self, event: Event, start: Open | None) -> None:
        cause = self._admitted.get(event.rank)
        began = start.event if start is not None else event
        if cause is not None and start is not None and cause.at > start.event.at:
            self._blocked.append((start.event, cause, "known"))
        elif is_requests_error(event.attrs.get("error")) and not any(
            step is began for step, _, _ in self._blocked
        ):
            self._said.append((began, event))

    def finish(self, facts: Facts) -> list[Finding]:
        found = list(self._found)
        for step, failed in self._said[:_KEPT]:
            if unrecovered(failed, facts) is None:
                continue  # It was tried again, and went well.
            why = f"{step.phase} needs the engine idle, and it was not: {failed.attrs.get('error')}"
            found.append(Finding.on("R-QUIET", step, why, failed))
        for step, cause, how in self._blocked:
            outcome = facts.outcome(step)
            if how == "running" and _died_under(cause, step, facts):
                why = f"{step.phase} took the memory of {cause.phase}, which was still running"
                lost = facts.failures_after(step.at, [step.rank])
                found.append(Finding.on("R-QUIET", step, why, cause, *lost[:1]))
                continue
            if outcome == "good" or (outcome == "open" and step.action != "drain"):
                continue
            failures = facts.failures_after(step.at, [step.rank])
            error = failures[0].attrs.get("error") if failures else None
            if step.action == "release" and not is_idle_error(error):
                continue
            if how == "running" and not is_idle_error(error) and outcome != "open":
                continue
            at = cause if cause.action == "admit" else step
            why = {
                "admit": f"rank {cause.rank} admitted a request after it was paused",
                "pause": f"{cause.phase} put requests back into the queue",
            }.get(cause.action, f"{cause.phase} on rank {cause.rank} goes on")
            found.append(
                Finding.on(
                    "R-QUIET",
                    at,
                    f"{why}, so {step.phase} can never find it idle",
                    step,
                    cause,
                    *failures[:1],
                )
            )
        return found


def _died_under(serving: Event, release: Event, facts: Facts) -> bool:
    """Whether a release of the engine's memory went well, and what was running there died of it."""
    if release.action != "release" or not facts.tags.concerns(release):
        return False
    released = facts.ranks[release.rank].finished(release.epoch).get(release.phase)
    if released is None or released.at < release.at:
        return False
    lost = facts.failures_after(released.at, [serving.rank])
    return bool(lost) and lost[0].phase == serving.phase


def _turned_away(event: Event) -> bool:
    attrs = event.attrs
    if attrs.get("rejected") or attrs.get("parked") or attrs.get("accepted") is False:
        return True
    status = str(attrs.get("status", "")).lower()
    return event.kind == "fail" or status in ("rejected", "parked", "503", "429", "retry")


class Windows:
    """R-WINDOW: exclusive windows overlap on a device.

    Sees: a profiler (or a phase marked `exclusive`) that starts on a device where another window
    is open, the device being named or the rank's own. Cannot see: tools that log nothing. Source:
    verl PR 7722.
    """

    rule = "R-WINDOW"
    wants = None

    def __init__(self) -> None:
        self._open: dict[str, list[Event]] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        began = event if start is None else start.event
        if event.action != "window" and began.attrs.get("exclusive") is not True:
            return
        if event.kind == "start":
            for device in facts.devices.touched(event):
                there = self._open.setdefault(device, [])
                if there and len(self._found) < _KEPT:
                    other = there[-1]
                    why = (
                        f"{event.phase} began on device {device} while {other.phase} is open there"
                    )
                    self._found.append(Finding.on("R-WINDOW", event, why, other))
                there.append(event)
                del there[:-64]
        elif start is not None and event.kind != "progress":
            for there in self._open.values():
                if start.event in there:
                    there.remove(start.event)

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found


class Timeouts:
    """R-TIMEOUT: a deadline shorter than healthy, visible progress.

    Sees: a wait that was cut by its limit while the rank it waited for showed progress, before or
    after, and had not failed. Nobody is guilty: the limit is. Cannot see: slow from stuck where no
    progress is logged; that stays `inconclusive`. Sources: DeepGEMM PR 57, torchtitan issue 2899.
    """

    rule = "R-TIMEOUT"
    wants = None

    def __init__(self) -> None:
        self._cut: list[tuple[Event, Event | None, list[tuple[Name, Event, Event | None]]]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind not in ("timeout", "fail") or not is_timeout(event):
            return
        if len(self._cut) >= _KEPT:
            return
        if start is not None and start.progress is not None:
            self._cut.append((event, start.event, [(event.rank, start.event, start.progress)]))
            return
        if event.action not in WAITING and not (
            event.attrs.get("target") is not None or event.kind == "timeout"
        ):
            return
        busy = []
        target = event.attrs.get("target", start.event.attrs.get("target") if start else None)
        wanted = _awaited(event, target, facts)
        for rank in wanted:
            other = facts.ranks.get(rank)
            if other is None or rank == event.rank or other.exit is not None:
                continue
            for each in other.open:
                if each.event.action not in WAITING | {"window", "life"} and (
                    target is not None or each.event.action != "serve"
                ):
                    busy.append((rank, each.event, each.progress))
        self._cut.append((event, start.event if start else None, busy))

    def finish(self, facts: Facts) -> list[Finding]:
        found = []
        for cut, start, busy in self._cut:
            healthy = [
                (rank, work, progress)
                for rank, work, progress in busy
                if self._healthy(cut, work, progress, facts)
            ]
            if not healthy:
                continue
            if cut.action == "poll" and unrecovered(cut, facts) is None:
                continue  # It asked again, and nobody was cut off.
            if any(failure.at < cut.at and failure.rank != cut.rank for failure in facts.failures):
                continue
            rank, work, progress = healthy[0]
            limit = (start.attrs if start else {}).get("timeout_s", cut.attrs.get("timeout_s"))
            of = f" of {limit} s" if limit is not None else ""
            because = (
                f"the limit{of} on {cut.phase} cut rank {cut.rank} off while rank {rank} made "
                "visible "
                f"progress in {work.phase}"
            )
            found.append(
                Finding.on(
                    "R-TIMEOUT",
                    cut,
                    because,
                    work,
                    *([progress] if progress is not None else []),
                    strength=FAILED,
                    guilty=(),
                )
            )
        return found

    @staticmethod
    def _healthy(cut: Event, work: Event, progress: Event | None, facts: Facts) -> bool:
        rank = facts.ranks[work.rank]
        if progress is not None:
            return True
        now = next((each.progress for each in rank.open if each.event is work), None)
        if now is not None and now.at > cut.at:
            return True
        ended = rank.finished(work.epoch).get(work.phase)
        return (
            ended is not None
            and ended.at > cut.at
            and facts.outcome(work) == "good"
            and work.rank != cut.rank
        )


def _awaited(event: Event, target: object, facts: Facts) -> list[Name]:
    """The ranks that a wait which was cut can have been waiting for."""
    if target is not None:
        return ranks_in(target, facts.header.ranks)
    group = group_of(event)
    if group is not None and group in facts.members:
        return list(facts.members[group])
    if event.action in ("fence", "collective"):
        return list(facts.header.peers(event.rank, facts.ranks))
    return list(facts.ranks)
