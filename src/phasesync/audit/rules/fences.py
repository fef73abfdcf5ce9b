"""What a fence covers, and what must wait for the fence after a resume.

A fence that ends over work it should cover is broken at the moment it ends, long before anything
fails.
"""

from typing import Final

from phasesync.audit.answer import Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import Facts, Open, group_of, ranks_in
from phasesync.audit.vocabulary import is_bad_output

__all__ = ("Covers", "FencePost")

_KEPT: Final = 512
_MOVES: Final = ("send", "receive", "collective", "write", "release")


class Covers:
    """R-COVERS: a fence or phase ended over work that it should cover.

    Sees: a phase that says `device_complete: false`, followed by a fence or by somebody who takes
    the memory, with no synchronisation between; a rank that passes a fence with its own transfer
    still under way, after which that transfer never ends and everybody waits; a release of an
    engine's memory over its own transfer, which then dies; a dispatch that ended while its target
    still runs. Cannot see: asynchronous work that no line tells. Sources:
    RLinf PR 1540, OpenRLHF `offload_deepspeed_states`, verl PR 7347, ROLL `add_lora`.
    """

    rule = "R-COVERS"
    wants = None

    def __init__(self) -> None:
        self._pending: dict[Name, Event] = {}
        self._over: list[tuple[Event, Event]] = []
        self._took: list[tuple[Event, Event, str]] = []
        self._under: list[tuple[Event, Event]] = []
        self._spoilt: dict[Name, int] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        complete = event.attrs.get("device_complete") if event.attrs else None
        if event.kind == "end" and event.attrs and is_bad_output(event.attrs.get("output")):
            self._spoilt[event.rank] = event.at
        if complete is False and event.kind == "end":
            if event.action == "fence":
                self._add(event, event, "it ended with the device not drained")
            else:
                self._pending[event.rank] = event
            return
        if event.kind == "start":
            if event.action in ("acquire", "free", "serve", "write") and self._pending:
                self._taken(event, facts)
            return
        if event.kind != "end":
            return
        if event.action == "release" and start is not None and facts.tags.concerns(start.event):
            for each in facts.ranks[event.rank].opened(*_MOVES):
                if each.event.at < start.event.at and len(self._under) < _KEPT:
                    self._under.append((event, each.event))
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
            if facts.failures_after(taker.at) or self._spoilt.get(taker.rank, -1) > taker.at:
                self._add(pending, taker, why)
        for release, work in self._under:
            if facts.outcome(work) == "bad":
                why = f"{release.phase} ended while {work.phase} of that rank was still under way"
                lost = facts.failures_after(release.at, [work.rank])
                self._found.append(Finding.on("R-COVERS", release, why, work, *lost[:1]))
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
    (or still has to do the resume that this rank did), and that then fails, or never ends although
    the peer's resume did not fail (a collective: where anything failed). Ranks are peers if they
    share a role, and a replica where roles tell one. Cannot see: coupling between engines that work
    alone. Sources: vLLM PR 45612, slime `continue_generation`.
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
            if outcome == "open" and event.action == "collective" and not facts.failures:
                continue  # Who is early in a collective waits there; nothing came of it so far.
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
