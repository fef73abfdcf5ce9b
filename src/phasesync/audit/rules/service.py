"""Requests, commands and tools: who may be admitted, who must get a command, who may watch.

Each of these steps is legal alone and fatal beside another: a request after a pause, a command on
some of the ranks, two profilers on one device, a limit below healthy work.
"""

from typing import Final

from phasesync.audit.answer import FAILED, SUSPECTED, Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import WAITING, Facts, Open, group_of, is_timeout, ranks_in
from phasesync.audit.vocabulary import (
    is_idle_error,
    is_memory_error,
    is_requests_error,
    is_unroutable_error,
)
from phasesync.audit.waits import unrecovered

__all__ = ("AllRanks", "FanOut", "Quiet", "Timeouts", "Windows")

_KEPT: Final = 512
_NEEDS_IDLE: Final = ("drain", "flush", "release")


class Quiet:
    """R-QUIET: requests were admitted, running or queued where a step needs the engine idle.

    Sees: an admission after a pause, a closed gate or a finished drain on that rank; requests that
    a pause put back into the queue; serving that goes on; each followed by a drain, flush or
    release there that fails, times out or never ends; serving that a release of its memory
    overtook, and that then died; such a step that fails and says itself that requests were
    there. Admissions that are parked or rejected, or
    that nothing needs idle for, are legal. Cannot see: a gate that no line tells. Sources: verl PR
    7511, SGLang PR 32153, vLLM RFC 51476.
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
            case "serve", "end":
                self._queued.pop(rank, None)
            case "acquire", "end":
                self._shut.pop(rank, None)  # Some engines go on by themselves once they are awake.
            case "write", "start" if rank in self._shut:
                self._updated(event, facts)
            case (("drain" | "flush" | "release"), "start"):
                self._step(event, facts)
            case (("drain" | "flush" | "release"), ("fail" | "timeout" | "exit")):
                self._failed(event, start)
            case _:
                pass

    def _updated(self, event: Event, facts: Facts) -> None:
        """Weights change under a request that began after the pause."""
        shut = self._shut[event.rank]
        for each in facts.ranks[event.rank].opened("serve"):
            if each.event.at > shut.at and len(self._found) < _KEPT:
                why = f"rank {event.rank} began {each.event.phase} after {shut.phase}, and"
                self._found.append(
                    Finding.on(
                        "R-QUIET", each.event, f"{why} {event.phase} runs under it", event, shut
                    )
                )
                return

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


class FanOut:
    """R-FANOUT: a command was sent to a rank that has no path for it.

    Sees: a dispatch whose target is no rank of the run, or whose target fails because it does not
    know the command (no handler, no route, not implemented). Without a logged dispatch the failing
    rank is named. Cannot see: commands that are dropped in silence; that is R-CTRL. Sources:
    TensorRT-LLM PR 14636, SGLang multi-node `release_memory_occupation`.
    """

    rule = "R-FANOUT"
    wants = None

    def __init__(self) -> None:
        self._sent: dict[tuple[Name, str], Event] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "start":
            target = event.attrs.get("target", event.attrs.get("targets")) if event.attrs else None
            if target is None:
                return
            known = set(map(str, facts.header.ranks))
            for rank in ranks_in(target, facts.header.ranks):
                if len(self._sent) < 4096:
                    self._sent[(rank, event.phase)] = event
                if known and str(rank) not in known and len(self._found) < _KEPT:
                    why = f"{event.phase} was sent to rank {rank}, which is not in this run"
                    self._found.append(Finding.on("R-FANOUT", event, why))
        elif event.kind in ("fail", "exit") and is_unroutable_error(event.attrs.get("error")):
            if event.action in ("poll", "admit", "load_model"):
                return
            sent = self._sent.get((event.rank, event.phase))
            why = f"rank {event.rank} has no path for {event.phase}: {event.attrs.get('error')}"
            if len(self._found) < _KEPT:
                self._found.append(Finding.on("R-FANOUT", sent or event, why, event))

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found


class AllRanks:
    """R-ALLRANKS: a command ran on some of the ranks that it must run on.

    Sees: a state change of the engine that some ranks of a role did and others did not, although
    all did it in another epoch or the log shows harm on the others; or a dispatch to several
    targets that ended although some never ran it. If the others have no lines at all it is
    `inconclusive`: they may have done it unseen. Cannot see: a leader that acts for its peers,
    unless it names the devices. Source: TensorRT-LLM PR 14636.
    """

    rule = "R-ALLRANKS"
    wants = frozenset(
        {"release", "acquire", "pause", "resume_gen", "flush", "write", "train", "serve", "begin"}
    )

    _NEXT: Final = {
        "release": "train",
        "acquire": "serve",
        "write": "serve",
        "pause": "write",
        "flush": "serve",
        "resume_gen": "serve",
        "begin": "write",
    }

    def __init__(self) -> None:
        self._ran: dict[tuple[int | None, str], dict[Name, Event]] = {}
        self._all: dict[str, frozenset[Name]] = {}
        self._next: dict[tuple[int | None, str], Event] = {}
        self._sent: list[tuple[Event, Event, tuple[Name, ...]]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "start":
            if event.action in ("train", "serve", "write"):
                self._next.setdefault((event.epoch, event.action), event)
                if len(self._next) > 64:
                    self._next.pop(next(iter(self._next)))
            if event.action in self._NEXT:
                if len(self._ran) > 96:
                    self._forget(next(iter(self._ran)))
                self._ran.setdefault((event.epoch, event.phase), {})[event.rank] = event
        elif event.kind == "end" and start is not None:
            target = start.event.attrs.get("targets", start.event.attrs.get("target"))
            if isinstance(target, list | tuple) and len(self._sent) < _KEPT:
                ranks = tuple(ranks_in(target, facts.header.ranks))
                self._sent.append((start.event, event, ranks))

    def _forget(self, key: tuple[int | None, str]) -> None:
        ran = self._ran.pop(key)
        self._all[key[1]] = self._all.get(key[1], frozenset()) | ran.keys()

    def finish(self, facts: Facts) -> list[Finding]:
        found = [finding for sent in self._sent if (finding := self._dispatched(*sent, facts))]
        usual: dict[str, frozenset[Name]] = dict(self._all)
        for (_, phase), ran in self._ran.items():
            usual[phase] = usual.get(phase, frozenset()) | ran.keys()
        for (epoch, phase), ran in self._ran.items():
            finding = self._partial(epoch, phase, ran, usual[phase], facts)
            if finding is not None:
                found.append(finding)
        return found

    def _dispatched(
        self, start: Event, end: Event, targets: tuple[Name, ...], facts: Facts
    ) -> Finding | None:
        ran = self._ran.get((start.epoch, start.phase), {})
        some = [rank for rank in targets if rank in ran]
        never = tuple(
            rank
            for rank in targets
            if rank not in ran and (known := facts.ranks.get(rank)) and known.exit is None
        )
        if not some or not never:
            return None
        silent = all(facts.ranks[rank].first is None for rank in never)
        return Finding.on(
            "R-ALLRANKS",
            end,
            f"{start.phase} ended, but never ran on {', '.join(map(str, never))}",
            start,
            guilty=() if silent else never,
            strength=SUSPECTED if silent else 0,
        )

    def _partial(
        self,
        epoch: int | None,
        phase: str,
        ran: dict[Name, Event],
        usual: frozenset[Name],
        facts: Facts,
    ) -> Finding | None:
        first = next(iter(ran.values()))
        went_on = self._next.get((epoch, self._NEXT[first.action]))
        if went_on is None or any(event.attrs.get("target") is not None for event in ran.values()):
            return None
        ended = facts.ranks[first.rank].finished(epoch).get(phase)
        if ended is None or went_on.at < ended.at or "gpus" in first.attrs or "gpus" in ended.attrs:
            return None
        if first.action == "release" and not facts.tags.concerns(first):
            return None
        peers = facts.header.peers(first.rank, facts.ranks)
        missing = [
            rank
            for rank in peers
            if rank not in ran
            and ((gone := facts.ranks[rank].exit) is None or gone.at > went_on.at)
        ]
        if not missing:
            return None
        silent = [rank for rank in missing if facts.ranks[rank].first is None]
        went = f"rank {went_on.rank} entered {went_on.phase}"
        who = ", ".join(map(str, missing))
        because = f"{phase} ran on {', '.join(map(str, ran))} and not on {who}, yet {went}"
        if len(silent) == len(missing):
            if facts.header.kind(first.rank) == "engine" or first.action != "release":
                return None
            return Finding.on(
                "R-ALLRANKS",
                ended,
                f"{because}; those ranks have no lines at all",
                went_on,
                strength=SUSPECTED,
                guilty=(),
                record_next=(f"the logs of ranks {who}",),
            )
        harmed = [
            failure
            for failure in facts.failures
            if failure.rank in missing
            and failure.at > ended.at
            and (is_memory_error(failure.attrs.get("error")) or failure.action == "serve")
        ]
        habit = [rank for rank in missing if rank in usual and rank not in silent]
        unaware = [rank for rank in habit if self._went_on(rank, first, ended, facts)]
        if not harmed and not unaware and not (habit and facts.failures_after(ended.at)):
            return None
        guilty = tuple(rank for rank in missing if rank not in silent)
        return Finding.on("R-ALLRANKS", ended, because, went_on, *harmed[:2], guilty=guilty)

    def _went_on(self, rank: Name, first: Event, ended: Event, facts: Facts) -> bool:
        """Whether a rank that always did this step wrote its weights in this epoch without it.

        Whoever does not write at all may have its turn later.
        """
        wrote = [
            event
            for event in facts.ranks[rank].started(first.epoch).values()
            if event.action == "write"
        ]
        if first.action in ("pause", "begin"):
            return any(event.at > ended.at for event in wrote)
        served = facts.ranks[rank].started(first.epoch).values()
        return (
            first.action == "flush"
            and bool(wrote)
            and any(event.action == "serve" and event.at > ended.at for event in served)
        )


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
