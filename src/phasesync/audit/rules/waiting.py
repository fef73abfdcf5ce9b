"""Hangs and lost errors: who is absent, why, and whether anybody was told.

All of them read one graph of waits at the end of the log. The absentee is the root, never who
waits.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

from phasesync.audit.answer import BROKEN, FAILED, MISSING, SUSPECTED, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import WAITING, Facts, Open, RankFacts, group_of, is_timeout, ranks_in
from phasesync.audit.waits import Meet, Wait, Waits, strongly_connected, unrecovered, version_of

__all__ = ("Hangs",)

_KEPT: Final = 512
_STEPS: Final = frozenset({"fence", "collective", "send", "receive"})
_TOLD: Final = ("http", "status", "code", "returned", "success", "swallowed", "ignored", "logged")
_PAYLOAD: Final = frozenset({"send", "receive", "collective", "write"})
_CHOICES: Final = ("plan", "digest", "choice", "branch", "decision", "config", "config_hash")


class Hangs:
    """The family of R-ALLOK, R-MEMBERS, R-REPORT, R-SAMEPLAN, R-NOCYCLE, R-CTRLPLANE, R-HANDSHAKE,
    R-CTRL, R-RELEASE, R-TERMINAL and R-DUMPSET.

    One pass collects what only the order tells (waits that a limit cut, choices, locks, polls,
    dispatches); the rest is read from the graph of waits once the log is over. Each method is one
    rule, with its own page. They share a class because they share that graph, and because the
    first that explains a wait leaves nothing for the others.
    """

    rule = "R-ALLOK"
    wants = None

    def __init__(self) -> None:
        self._cut: list[Wait] = []
        self._choices: dict[tuple[int | None, str], dict[Name, tuple[str, Event]]] = {}
        self._held: dict[tuple[Name, str], Event] = {}
        self._polls: dict[Name, Event] = {}
        self._swallowed: list[tuple[Event, Event, str]] = []
        self._dispatched: list[tuple[Event, Event | None]] = []

    # -- one pass ----------------------------------------------------------------------------

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        match event.kind:
            case "start":
                self._began(event, facts)
            case "end":
                self._ended(event, start, facts)
            case "fail" | "timeout":
                if event.action in WAITING and is_timeout(event) and len(self._cut) < _KEPT:
                    self._cut.append(Wait(start.event if start else event, event))
                if event.action == "poll" or event.attrs.get("terminal") is False:
                    self._polls.setdefault(event.rank, event)
                self._end_dispatch(event, start)
            case _:
                pass
        if event.attrs:
            self._choose(event)

    def _began(self, event: Event, facts: Facts) -> None:
        aimed = "target" in event.attrs or "targets" in event.attrs
        command = aimed and event.action not in ("poll", "life", "window")
        if (command or event.attrs.get("dispatch") is True) and len(self._dispatched) < 4096:
            self._dispatched.append((event, None))
        if event.action not in ("lock", "unlock"):
            for each in facts.ranks[event.rank].opened("lock"):
                self._held.setdefault((event.rank, _lock(each.event)), each.event)
        if event.action == "unlock":
            self._held.pop((event.rank, _lock(event)), None)
        elif event.action in ("open", "resume_gen"):
            self._held.pop((event.rank, "gate"), None)
        failed = unrecovered(facts.ranks[event.rank].failed, facts)
        if (
            failed is not None
            and failed.action in ("write", "receive", "acquire", "load_model")
            and event.action in ("serve", "publish")
            and failed.epoch == event.epoch
            and len(self._swallowed) < _KEPT
        ):
            self._swallowed.append((failed, event, "went on to"))
        elif event.action == "publish" and facts.failures:
            self._published(event, facts)

    def _published(self, event: Event, facts: Facts) -> None:
        """A version is announced although a rank failed to take it in this epoch."""
        for failure in facts.failures[-8:]:
            if (
                failure.rank != event.rank
                and failure.epoch == event.epoch
                and failure.kind == "fail"
                and failure.action in ("write", "receive", "load_model", "finish")
                and unrecovered(failure, facts) is not None
                and len(self._swallowed) < _KEPT
            ):
                self._swallowed.append((failure, event, "went on to"))
                return

    def _ended(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.action == "lock":
            # Work between its start and its end shows that the lock was held, and is given back.
            name = _lock(start.event if start is not None else event)
            if self._held.pop((event.rank, name), None) is None:
                self._held[(event.rank, name)] = event
        elif event.action in ("pause", "close"):
            self._held[(event.rank, "gate")] = event
        if event.attrs.get("terminal") is False:
            self._polls.setdefault(event.rank, event)
        self._end_dispatch(event, start)
        if start is None or facts.header.kind(event.rank) == "engine":
            return
        if event.action not in ("write", "send", "acquire") and not start.event.attrs.get(
            "dispatch"
        ):
            return
        target = start.event.attrs.get("target", start.event.attrs.get("targets"))
        wanted = set(ranks_in(target, facts.header.ranks)) if target is not None else None
        for failure in facts.failures[-8:]:
            if failure.at < start.event.at or failure.rank == event.rank:
                continue
            if wanted is not None and failure.rank not in wanted:
                continue
            if facts.header.kind(failure.rank) == facts.header.kind(event.rank):
                continue
            if unrecovered(failure, facts) is not None and len(self._swallowed) < _KEPT:
                self._swallowed.append((failure, event, "ended as a success:"))

    def _end_dispatch(self, event: Event, start: Open | None) -> None:
        if start is None:
            return
        for index, (sent, _) in enumerate(self._dispatched):
            if sent is start.event:
                if event.kind == "end":
                    del self._dispatched[index]
                else:
                    self._dispatched[index] = (sent, event)
                return

    def _choose(self, event: Event) -> None:
        for name in _CHOICES:
            if name in event.attrs:
                value = event.attrs[name]
                if isinstance(value, bool | int | str | float):
                    if len(self._choices) > 64:
                        self._choices.pop(next(iter(self._choices)))
                    phase = event.phase if event.action == "decide" else ""
                    key = (event.epoch, f"{name} {phase}".strip())
                    self._choices.setdefault(key, {})[event.rank] = (str(value), event)

    # -- the end of the log ------------------------------------------------------------------

    def finish(self, facts: Facts) -> list[Finding]:
        waits = Waits(facts, self._cut)
        found: list[Finding] = []
        explained: set[int] = set()
        for judge in (self._terminal, self._ctrl, self._release):
            found += judge(waits, explained)
        found += self._gone(waits, explained)
        found += self._report(waits)
        found += self._nocycle(waits, explained)
        found += self._ctrlplane(waits, explained)
        found += self._handshake(waits, explained)
        found += self._sameplan(waits, explained)
        found += self._plans(waits)
        found += self._left_over(waits, explained)
        return found

    def _terminal(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-TERMINAL: a transfer whose state never became final.

        Sees: a transfer that never ended on a rank whose poll of it failed or whose abort was not
        final, or which waits in teardown for it. Source: Mooncake PR 3964.
        """
        found = []
        for rank in waits.facts.ranks.values():
            transfers = rank.opened("send", "receive", "write")
            if not transfers or rank.exit is not None:
                continue
            poll = self._polls.get(rank.name)
            teardown = rank.opened("teardown")
            if poll is None or poll.at < transfers[0].event.at:
                if not teardown or teardown[-1].event.at < transfers[0].event.at:
                    continue
                poll = teardown[-1].event
            transfer = transfers[0].event
            explained.update(each.event.at for each in rank.open)
            found.append(
                Finding.on(
                    "R-TERMINAL",
                    poll,
                    f"{transfer.phase} on rank {rank.name} never reached a final state: "
                    f"{poll.phase} "
                    "could not tell, and nothing made it final",
                    transfer,
                    *(each.event for each in teardown),
                    strength=FAILED,
                    waiting=(rank.name,),
                )
            )
        return found

    def _ctrl(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-CTRL: a command was dispatched and never started.

        Sees: a dispatch that still waits (or was cut) whose target, alive and with lines of its
        own, has no start of that phase since. Source: verl issue 7990.
        """
        found = []
        for sent, cut in self._dispatched:
            target = sent.attrs.get("target", sent.attrs.get("targets"))
            if target is None:
                continue
            never: list[Name] = []
            silent: list[Name] = []
            for rank in ranks_in(target, waits.facts.header.ranks):
                known = waits.facts.ranks.get(rank)
                if rank == sent.rank or known is None:
                    continue
                if known.first is None:
                    silent.append(rank)
                elif known.exit is None and not _began_since(known, sent):
                    never.append(rank)
            if not never and not silent:
                continue
            explained.add(sent.at)
            who = never or silent
            opened = [each.event for rank in never for each in waits.facts.ranks[rank].open[:1]]
            busy = "".join(f"; rank {each.rank} is in {each.phase}" for each in opened[:3])
            names = ", ".join(map(str, who))
            found.append(
                Finding.on(
                    "R-CTRL" if never else "R-DUMPSET",
                    sent,
                    f"{sent.phase} was dispatched to {names} and never started there{busy}",
                    *opened[:4],
                    *([cut] if cut is not None else []),
                    strength=SUSPECTED if not never else FAILED if cut is not None else MISSING,
                    guilty=tuple(never),
                    waiting=(sent.rank,) if cut is None else (),
                    record_next=() if never else (f"the log of rank {names}",),
                )
            )
        return found

    def _release(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-RELEASE: a lock or gate taken in a failed epoch was never given back.

        Sees: a lock that a rank holds, or a gate or pause that it closed, with a failure in that
        epoch and no release after it, and somebody who waits for the lock, or a later epoch that
        waits at the gate. Sources: NeMo-RL PR 3612, SkyRL PR 2031.
        """
        found = []
        facts = waits.facts
        for (holder, name), taken in self._held.items():
            failure = next(
                (
                    each
                    for each in facts.failures
                    if each.at > taken.at
                    and each.epoch == taken.epoch
                    and (each.rank == holder or name == "gate")
                    and not (is_timeout(each) and each.action in ("lock", "admit"))
                ),
                None,
            )
            if failure is None:
                continue
            blocked = [
                wait
                for wait in self._blocked(waits, holder, name)
                if wait.event.at > failure.at
                and (wait.rank != holder or name == "gate" or wait.event.epoch != taken.epoch)
            ]
            if not blocked:
                continue
            explained.update(wait.event.at for wait in blocked)
            found.append(
                Finding.on(
                    "R-RELEASE",
                    taken,
                    f"rank {holder} took {taken.phase} in epoch {taken.epoch}, {failure.phase} "
                    "failed in "
                    f"that epoch, and it was never given back; {blocked[0].event.phase} on rank "
                    f"{blocked[0].rank} waits for it",
                    failure,
                    *(wait.event for wait in blocked[:4]),
                    strength=FAILED,
                    waiting=tuple(wait.rank for wait in blocked if wait.cut is None),
                )
            )
        return found

    @staticmethod
    def _blocked(waits: Waits, holder: Name, name: str) -> Iterable[Wait]:
        if name != "gate":
            return [
                wait
                for wait in waits.waits
                if wait.event.action == "lock" and _lock(wait.event) == name
            ]
        rank = waits.facts.ranks[holder]
        return [Wait(each.event) for each in rank.opened("admit", "serve", "lock")] + [
            wait
            for wait in waits.waits
            if wait.rank == holder
            and wait.cut is not None
            and wait.event.action in ("admit", "wait")
        ]

    def _gone(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-ALLOK, R-MEMBERS and R-REPORT: somebody waits for a rank that failed or is gone.

        R-MEMBERS if it was gone before the epoch of the wait began, else R-ALLOK; R-REPORT instead
        of R-ALLOK where the log shows that the error was at hand and did not reach who waits: it
        came back as a reply, or the wait ended as a timeout. Sources: SkyRL PR 1737, NeMo-RL PR
        3591, TRL issue 6796, Ray issue 64470.
        """
        found = []
        for meet in waits.meets:
            before = [rank for rank, state in meet.absent.items() if state == "gone before"]
            failed = [rank for rank, state in meet.absent.items() if state in ("gone", "failed")]
            if meet.action not in _STEPS | {"wait", "init_group", "publish", "teardown"}:
                continue
            if not before and not failed:
                continue
            explained.update(wait.event.at for wait in meet.waits)
            ranks = failed or before
            roots = [event for rank in ranks if (event := _end_of(rank, waits.facts)) is not None]
            if not roots:
                continue
            root = min(roots, key=lambda event: event.at)
            guilty = [event.rank for event in roots if _independent(event, root)]
            rule = "R-MEMBERS" if not failed else self._allok(root, meet)
            names = ", ".join(map(str, meet.ranks))
            what = "exited" if root.kind == "exit" else "left" if root.kind == "end" else "failed"
            error = root.attrs.get("error")
            because = (
                f"ranks {names} wait in {meet.phase} of epoch {meet.epoch} for rank "
                f"{root.rank}, which "
                f"{what} in {root.phase} of epoch {root.epoch}" + (f" ({error})" if error else "")
            )
            found.append(
                Finding.on(
                    rule,
                    root,
                    because,
                    *(wait.event for wait in meet.waits[:8]),
                    strength=FAILED,
                    guilty=tuple(dict.fromkeys(guilty)),
                    waiting=tuple(wait.rank for wait in meet.waits if wait.cut is None),
                )
            )
        return found

    @staticmethod
    def _allok(root: Event, meet: Meet) -> str:
        told = any(name in root.attrs for name in _TOLD)
        shown_as_timeout = any(wait.cut is not None for wait in meet.waits)
        return "R-REPORT" if told or shown_as_timeout else "R-ALLOK"

    def _report(self, waits: Waits) -> list[Finding]:
        """R-REPORT where nobody waits: an error was swallowed, and the next step went on.

        Sees: a failed load, sync or resume after which that rank serves or publishes without
        having done it again, or a caller that ends as a success while its callee failed. Sources:
        NeMo-RL `prepare_for_generation`, TRL PR 6913.
        """
        found = []
        for failed, after, how in self._swallowed:
            error = failed.attrs.get("error")
            because = (
                f"{failed.phase} failed on rank {failed.rank}"
                + (f" ({error})" if error else "")
                + f", and rank {after.rank} {how} {after.phase}"
            )
            found.append(Finding.on("R-REPORT", failed, because, after, strength=FAILED))
        return found

    def _nocycle(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-NOCYCLE: a wait-for cycle over groups, threads or locks.

        Sees: a phase queued behind another of the same rank while peers wait for it; phases that
        name what they wait for and form a ring; groups that are joined in different orders.
        Sources: TRL issue 6797, slime PR 2331, verl PR 7846.
        """
        found = self._queued(waits, explained) + self._named_ring(waits, explained)
        if found:
            return found
        live = [meet for meet in waits.meets if meet.action in _STEPS | {"init_group", "lock"}]
        edges: dict[Name, set[Name]] = {}
        at: dict[Name, list[Meet]] = {}
        for meet in live:
            for wait in meet.waits:
                at.setdefault(wait.rank, []).append(meet)
                edges.setdefault(wait.rank, set()).update(
                    rank for rank, state in meet.absent.items() if state == "waiting"
                )
        for ring in strongly_connected(edges):
            meets = {id(meet): meet for rank in ring for meet in at.get(rank, ())}
            groups = {meet.group for meet in meets.values()}
            if len(meets) < 2 or None in groups or len(groups) < 2:
                continue
            guilty = self._closers(ring, list(meets.values()))
            events = [wait.event for meet in meets.values() for wait in meet.waits]
            explained.update(event.at for event in events)
            steps = "; ".join(
                f"{meet.phase} on group {meet.group} has {', '.join(map(str, meet.ranks))} and "
                "waits for "
                f"{', '.join(map(str, meet.absent))}"
                for meet in meets.values()
            )
            found.append(
                Finding.on(
                    "R-NOCYCLE",
                    max((e for e in events if e.rank in guilty), key=lambda e: e.at),
                    f"a cycle of waits: {steps}",
                    *events[:8],
                    strength=MISSING,
                    guilty=tuple(guilty),
                    waiting=waits.facts.waiting(),
                )
            )
        return found

    @staticmethod
    def _closers(ring: list[Name], meets: list[Meet]) -> list[Name]:
        """Of a ring, those who chose against the majority; all of it where there is none."""
        sides = sorted(([rank for rank in meet.ranks if rank in ring] for meet in meets), key=len)
        sides = [side for side in sides if side]
        if len(sides) == 2 and len(sides[0]) < len(sides[1]) and len({m.phase for m in meets}) > 1:
            return sorted(sides[0], key=str)
        return sorted(ring, key=lambda rank: (str(type(rank)), rank))

    @staticmethod
    def _queued(waits: Waits, explained: set[int]) -> list[Finding]:
        found = []
        for wait in waits.waits:
            event = wait.event
            if event.attrs.get("queued_behind") is None:
                continue
            others = [
                other.event
                for other in waits.waits
                if other.rank != event.rank
                and other.event.phase == event.phase
                and group_of(other.event) == group_of(event)
            ]
            own = [
                each.event
                for each in waits.facts.ranks[event.rank].open
                if each.event is not event and group_of(each.event) != group_of(event)
            ]
            if not others or not own:
                continue
            explained.update(each.event.at for each in waits.waits)
            ahead = own[-1]
            found.append(
                Finding.on(
                    "R-NOCYCLE",
                    event,
                    f"rank {event.rank} queued {event.phase} behind "
                    f"{event.attrs['queued_behind']}; "
                    f"{', '.join(str(other.rank) for other in others)} wait for it in "
                    f"{event.phase}, and "
                    "the order of the two groups differs between ranks",
                    ahead,
                    *others[:6],
                    strength=MISSING,
                    waiting=waits.facts.waiting(),
                )
            )
        return found

    def _named_ring(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """A ring of open phases that say what they wait for."""
        nodes = [
            each.event
            for rank in waits.facts.ranks.values()
            if rank.exit is None
            for each in rank.open
        ][:4096]
        edges: dict[Name, set[Name]] = {}
        for index, node in enumerate(nodes):
            named = node.attrs.get("waiting_for", node.attrs.get("waits_for"))
            if named is not None:
                edges[index] = set(self._named(node, named, nodes, waits.facts))
        found = []
        for ring in strongly_connected(edges) + [
            [node] for node, after in edges.items() if node in after
        ]:
            events = sorted((nodes[int(node)] for node in ring), key=lambda event: event.at)
            explained.update(event.at for event in events)
            steps = " -> ".join(
                f"rank {each.rank} in {each.phase} waits for {each.attrs.get('waiting_for')}"
                for each in events
            )
            found.append(
                Finding.on(
                    "R-NOCYCLE",
                    events[-1],
                    f"a cycle of waits: {steps}",
                    *events[:-1],
                    strength=MISSING,
                    waiting=waits.facts.waiting(),
                )
            )
        return found

    def _named(self, node: Event, named: object, nodes: list[Event], facts: Facts) -> Iterable[int]:
        items = named if isinstance(named, list | tuple) else [named]
        for item in items:
            text = str(item)
            ranks = set(ranks_in(item, facts.header.ranks)) & set(facts.ranks)
            words = set(text.lower().replace(":", " ").replace("/", " ").split())
            ranks |= {rank for rank in facts.ranks if "rank" in words and str(rank) in words}
            holders = {
                rank
                for (rank, lock) in self._held
                if lock != "gate" and (lock == text or lock in words)
            }
            for index, other in enumerate(nodes):
                if other is node:
                    continue
                if (
                    other.rank in ranks
                    or (other.rank in holders and "waiting_for" in other.attrs)
                    or other.phase == text
                    or (other.phase in words and (other.rank in ranks or not ranks))
                    or (text and group_of(other) == text and other.rank != node.rank)
                    or (text and str(other.attrs.get("holds", "")) == text)
                ):
                    yield index

    @staticmethod
    def _ctrlplane(waits: Waits, explained: set[int]) -> list[Finding]:
        """R-CTRLPLANE: a fence or control phase waits on a group that carries payload.

        Sees: ranks in a fence on a group on which other ranks move payload, where those in the
        fence did no such payload in this epoch: they are not behind it, they block it. Sources:
        AReaL PR 1596, issue 1439.
        """
        found = []
        for fence in waits.meets:
            if fence.action not in ("fence", "wait") or fence.group is None:
                continue
            payload = [
                wait
                for wait in waits.waits
                if wait.event.action in _PAYLOAD
                and group_of(wait.event) == fence.group
                and wait.rank not in fence.ranks
                and wait.event.epoch == fence.epoch
            ]
            did = [
                rank
                for rank in fence.ranks
                if any(
                    event.action in _PAYLOAD
                    for event in waits.facts.ranks[rank].finished(fence.epoch).values()
                )
            ]
            if not payload or did:
                continue
            explained.update(wait.event.at for wait in fence.waits)
            explained.update(wait.event.at for wait in payload)
            moving = ", ".join(str(wait.rank) for wait in payload)
            found.append(
                Finding.on(
                    "R-CTRLPLANE",
                    fence.first,
                    f"ranks {', '.join(map(str, fence.ranks))} wait in {fence.phase} on group "
                    f"{fence.group}, on which {moving} move payload",
                    *(wait.event for wait in fence.waits[1:4]),
                    *(wait.event for wait in payload[:4]),
                    strength=MISSING,
                    guilty=fence.ranks,
                    waiting=waits.facts.waiting(),
                )
            )
        return found

    @staticmethod
    def _handshake(waits: Waits, explained: set[int]) -> list[Finding]:
        """R-HANDSHAKE: two sides wait for different versions, or one never entered.

        Sees: open waits of two roles that name different versions; the side that skipped one (its
        epochs have a gap), else the counterpart of the earliest wait, is guilty. Or a send with no
        receiver that ever came although it is alive and idle. Sources: prime-rl PR 1667.
        """
        facts = waits.facts
        found = []
        sides = [
            wait
            for wait in waits.waits
            if wait.event.at not in explained
            and wait.event.action in ("wait", "publish", "send", "receive", "write", "poll")
        ]
        for wait in sides:
            version = version_of(wait.event)
            if version is None:
                continue
            for other in sides:
                theirs = version_of(other.event)
                if other.rank == wait.rank or theirs is None or theirs == version:
                    continue
                if other.event.at < wait.event.at or other.event.at in explained:
                    continue
                if facts.header.roles and facts.header.kind(other.rank) == facts.header.kind(
                    wait.rank
                ):
                    continue
                guilty = _skipper(wait.event, other.event, facts)
                explained.update((wait.event.at, other.event.at))
                found.append(
                    Finding.on(
                        "R-HANDSHAKE",
                        other.event,
                        f"rank {wait.rank} waits in {wait.event.phase} for version {version:g}, "
                        "rank "
                        f"{other.rank} in {other.event.phase} for version {theirs:g}",
                        wait.event,
                        strength=MISSING,
                        guilty=guilty,
                        waiting=facts.waiting(),
                    )
                )
                return found
        for meet in waits.meets:
            if meet.action not in ("send", "receive", "publish", "wait") or len(meet.ranks) != 1:
                continue
            if any(wait.event.at in explained for wait in meet.waits) or not meet.absent:
                continue
            lazy = [
                rank
                for rank, state in meet.absent.items()
                if state == "idle" or (state == "working" and _only_serves(facts.ranks[rank]))
            ]
            kinds = {facts.header.kind(rank) for rank in meet.ranks}
            lazy = [rank for rank in lazy if facts.header.kind(rank) not in kinds]
            if not lazy or len(lazy) < len(meet.absent):
                continue
            if len(facts.ranks) == len(meet.ranks):
                continue
            explained.update(wait.event.at for wait in meet.waits)
            last = facts.ranks[lazy[0]].last
            found.append(
                Finding.on(
                    "R-HANDSHAKE",
                    meet.first,
                    f"rank {meet.ranks[0]} waits in {meet.phase}, and "
                    f"{', '.join(map(str, lazy))} never "
                    "entered its side of it",
                    *([last] if last is not None else []),
                    strength=MISSING,
                    guilty=tuple(lazy),
                    waiting=facts.waiting(),
                )
            )
        return found

    def _sameplan(self, waits: Waits, explained: set[int]) -> list[Finding]:
        """R-SAMEPLAN: ranks took different branches.

        Sees: ranks of one role that wait in different steps, each for the others, or for a rank
        that went past the step and did what comes after it. The minority that took the other
        branch is guilty, unless it is the one that waits at a fence. Sources: TensorRT-LLM PR
        13564, verl PR 7851 (mixed configuration).
        """
        facts = waits.facts
        found = []
        live = [
            meet
            for meet in waits.meets
            if meet.action in _STEPS and not any(wait.event.at in explained for wait in meet.waits)
        ]
        fences = [meet for meet in live if meet.action == "fence"] or live
        for meet in fences:
            elsewhere: dict[Name, Event] = {}
            for rank, state in meet.absent.items():
                known = facts.rank(rank)
                if state == "waiting":
                    opened = [each.event for each in known.open if each.event.action in _STEPS]
                    if opened and all(_other_step(each, meet) for each in opened):
                        elsewhere[rank] = opened[-1]
                elif state in ("working", "idle"):
                    past = _went_past(known.started(meet.epoch), meet, facts)
                    if past is not None:
                        elsewhere[rank] = past
            if not elsewhere:
                continue
            others = [other for other in meet.absent if other not in elsewhere]
            if any(meet.absent[other] in ("working", "silent") for other in others):
                continue
            explained.update(wait.event.at for wait in meet.waits)
            explained.update(event.at for event in elsewhere.values())
            minority = len(elsewhere) < len(meet.ranks)
            skipped = sorted(elsewhere.values(), key=lambda event: event.at)
            found.append(
                Finding.on(
                    "R-SAMEPLAN",
                    skipped[0],
                    f"ranks {', '.join(map(str, meet.ranks))} wait in {meet.phase}, while "
                    + ", ".join(
                        f"rank {rank} is in {event.phase}" for rank, event in elsewhere.items()
                    ),
                    *(wait.event for wait in meet.waits[:6]),
                    *skipped[1:4],
                    strength=MISSING,
                    guilty=tuple(sorted(elsewhere, key=str)) if minority else (),
                    waiting=facts.waiting(),
                )
            )
            break
        return found

    def _plans(self, waits: Waits) -> list[Finding]:
        """R-SAMEPLAN: ranks hold different plans, whether or not anything came of it yet.

        Only `plan`, `digest` and `config` must agree; a `choice` of its own is a rank's right
        until somebody waits for the others' branch.
        """
        facts = waits.facts
        found = []
        for (_, name), chosen in self._choices.items():
            if name.split()[0] in ("choice", "branch", "decision"):
                continue
            for kind in {facts.header.kind(rank) for rank in chosen}:
                mine = {r: c for r, c in chosen.items() if facts.header.kind(r) == kind}
                groups: dict[str, list[Name]] = {}
                for rank, (value, _) in mine.items():
                    groups.setdefault(value, []).append(rank)
                if len(groups) < 2:
                    continue
                sizes = sorted(groups.values(), key=len)
                guilty = sizes[0] if len(sizes) == 2 and len(sizes[0]) < len(sizes[1]) else []
                events = [event for _, event in mine.values()]
                first = mine[guilty[0]][1] if guilty else events[-1]
                found.append(
                    Finding.on(
                        "R-SAMEPLAN",
                        first,
                        f"ranks hold different values of {name}: "
                        + "; ".join(f"{value} on {ranks}" for value, ranks in groups.items()),
                        *events[:8],
                        strength=BROKEN,
                        guilty=tuple(guilty),
                        waiting=facts.waiting(),
                    )
                )
        return found

    @staticmethod
    def _left_over(waits: Waits, explained: set[int]) -> list[Finding]:
        """R-DUMPSET, or a wait that nothing in the log explains: both are `inconclusive`.

        Sources: PyTorch issue 196968, PyTorch PR 150652.
        """
        found = []
        for meet in waits.meets:
            if any(wait.event.at in explained for wait in meet.waits) or meet.action == "drain":
                continue
            if meet.action in ("publish", "teardown") and not meet.absent:
                continue
            rule: str | None
            silent = [rank for rank, state in meet.absent.items() if state == "silent"]
            rest = [rank for rank, state in meet.absent.items() if state in ("working", "idle")]
            names = ", ".join(map(str, meet.ranks))
            where = f"ranks {names} wait in {meet.phase} of epoch {meet.epoch}"
            if silent:
                who = ", ".join(map(str, silent))
                because = f"{where} for {who}, of which there is no line at all"
                rule, more = "R-DUMPSET", f"the log or dump of rank {who}"
            elif rest:
                who = ", ".join(map(str, rest))
                because = (
                    f"{where}; {who} did not come, and no line says whether slow, stuck or gone"
                )
                idle = all(meet.absent[rank] == "idle" for rank in rest)
                rule = "R-DUMPSET" if idle else None  # Then its last lines are what is missing.
                more = f"progress marks or a stack of rank {who}"
            elif lost := waits.without_lines(meet):
                who = ", ".join(map(str, lost))
                because = f"{where}, and of rank {who} there is no line at all"
                rule, more = "R-DUMPSET", f"the log or dump of rank {who}"
            else:
                because = f"{where}, and everybody known to belong there is there"
                rule, more = None, "the members of each group, and who is inside it"
            found.append(
                Finding.on(
                    rule,
                    meet.first,
                    because,
                    *(wait.event for wait in meet.waits[1:4]),
                    strength=SUSPECTED,
                    guilty=(),
                    waiting=meet.ranks,
                    record_next=(more,),
                )
            )
        return found


def _began_since(rank: RankFacts, sent: Event) -> bool:
    """Whether a target took a command up: it began, is in it, or failed since."""
    event = rank.started(sent.epoch).get(sent.phase)
    if event is not None and event.at > sent.at:
        return True
    if rank.failed is not None and rank.failed.at > sent.at:
        return True
    return any(each.event.phase == sent.phase for each in rank.open)


def _only_serves(rank: RankFacts) -> bool:
    """Whether a rank does nothing but answer requests, which is no part of any handshake."""
    return all(each.event.action in ("serve", "life", "window") for each in rank.open)


def _lock(event: Event) -> str:
    for name in ("lock", "name", "key", "resource", "holds"):
        value: Any = event.attrs.get(name)
        if isinstance(value, str):
            return value
    return "lock"


def _end_of(rank: Name, facts: Facts) -> Event | None:
    """The line that says how `rank` ended: its failure, exit or leave."""
    known = facts.ranks[rank]
    candidates = [unrecovered(known.failed, facts), known.exit, known.left]
    ends = [each for each in candidates if each is not None]
    return min(ends, key=lambda event: event.at) if ends else None


def _independent(event: Event, root: Event) -> bool:
    """Whether a failure is a cause of its own, not an echo of the earlier one."""
    if event is root:
        return True
    return event.phase == root.phase and event.attrs.get("error") == root.attrs.get("error")


def _other_step(event: Event, meet: Meet) -> bool:
    return event.phase != meet.phase or group_of(event) != meet.group


def _went_past(started: dict[str, Event], meet: Meet, facts: Facts) -> Event | None:
    """The phase that an absent rank entered although, elsewhere, it lies behind this step."""
    later = [
        event
        for event in started.values()
        if event.at > meet.first.at and event.action not in ("release", "synchronize", "window")
    ]
    done = {
        phase
        for rank in meet.ranks
        for phase in facts.ranks[rank].started(meet.epoch)
        if phase != meet.phase
    }
    new = [event for event in later if event.phase not in done and event.phase != meet.phase]
    return min(new, key=lambda event: event.at) if new else None


def _skipper(one: Event, other: Event, facts: Facts) -> tuple[Name, ...]:
    """Who of two sides skipped a version: whose own epochs have a gap, else who is not there
    first.
    """
    gaps = []
    for event in (one, other):
        epochs = sorted(facts.ranks[event.rank].epochs)
        if any(after - before > 1 for before, after in pairwise(epochs)):
            gaps.append(event.rank)
    if len(gaps) == 1:
        return (gaps[0],)
    named = version_of(one) is not None and version_of(other) is not None
    return (other.rank,) if named else ()
