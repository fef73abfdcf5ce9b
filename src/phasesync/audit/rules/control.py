"""Commands, locks and transfers that never came to an end: R-CTRL, R-RELEASE, R-TERMINAL.

Each reads the graph of waits, and what was seen on the way to it.
"""

from collections.abc import Iterable

from phasesync.audit.answer import FAILED, MISSING, SUSPECTED, Finding
from phasesync.audit.events import Event, Name, of_epoch
from phasesync.audit.facts import RankFacts, is_timeout, of_later_epoch, ranks_in
from phasesync.audit.rules.seen import Seen, lock_of
from phasesync.audit.waits import Wait, Waits

__all__ = ("ctrl", "release", "terminal")


def terminal(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-TERMINAL: a transfer whose state never became final.

    Sees: a transfer that never ended on a rank whose poll of it failed or whose abort was not
    final, or which waits in teardown for it. Cannot see: a transfer that nobody asks after. Source:
    Mooncake PR 3964.
    """
    found = []
    for rank in waits.facts.ranks.values():
        transfers = rank.opened("send", "receive", "write")
        if not transfers or rank.exit is not None:
            continue
        poll = seen.polls.get(rank.name)
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


def ctrl(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-CTRL: a command was dispatched and never started.

    Sees: a dispatch that still waits (or was cut) whose target, alive and with lines of its own,
    has no start of that phase since; a request that a gate of an epoch before keeps out is
    R-RELEASE. Cannot see: a command that has another name where it is
    carried out, or a target without a line. Source: verl issue 7990.
    """
    found = []
    for sent, cut in seen.dispatched:
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
                if _is_at_work(known, sent) or sent.phase in seen.unnamed:
                    continue
                never.append(rank)
        if not never and not silent:
            continue
        explained.add(sent.at)
        who = never or silent
        opened = [each.event for rank in never for each in waits.facts.ranks[rank].open[:1]]
        busy = "".join(f"; rank {each.rank} is in {each.phase}" for each in opened[:3])
        shut = [gate for rank in never if (gate := seen.held.get((rank, "gate"))) is not None]
        busy += "".join(
            f"; {gate.phase} of rank {gate.rank}{of_epoch(gate.epoch, 'in')} was never undone"
            for gate in shut[:3]
        )
        names = ", ".join(map(str, who))
        left = never and len(shut) == len(never) and not opened and _is_request(sent, shut)
        found.append(
            Finding.on(
                "R-RELEASE" if left else "R-CTRL" if never else "R-DUMPSET",
                sent,
                f"{sent.phase} was dispatched to {names} and never started there{busy}",
                *opened[:4],
                *shut[:2],
                *([cut] if cut is not None else []),
                strength=SUSPECTED if not never else FAILED if cut is not None else MISSING,
                guilty=tuple(never),
                waiting=(sent.rank,) if cut is None else (),
                record_next=() if never else (f"the log of rank {names}",),
            )
        )
    return found


def release(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-RELEASE: a lock or gate taken in a failed epoch was never given back.

    Sees: a lock that a rank holds, or a gate or pause that it closed, with a failure in that epoch
    and no release after it, and somebody who waits for the lock, or a later epoch that waits at the
    gate; without a failure, a request that was sent to an engine whose pause of an epoch before
    was never undone (`ctrl` sees it). Cannot see: a lock that no line names. Sources: NeMo-RL PR
    3612, SkyRL PR 2031, AReaL PR 1181.
    """
    found = []
    facts = waits.facts
    for (holder, name), taken in seen.held.items():
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
            for wait in _blocked(waits, holder, name)
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
                f"rank {holder} took {taken.phase}{of_epoch(taken.epoch, 'in')}, {failure.phase} "
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


def _blocked(waits: Waits, holder: Name, name: str) -> Iterable[Wait]:
    if name != "gate":
        return [
            wait
            for wait in waits.waits
            if wait.event.action == "lock" and lock_of(wait.event) == name
        ]
    rank = waits.facts.ranks[holder]
    return [Wait(each.event) for each in rank.opened("admit", "serve", "lock")] + [
        wait
        for wait in waits.waits
        if wait.rank == holder and wait.cut is not None and wait.event.action in ("admit", "wait")
    ]


def _is_request(sent: Event, shut: list[Event]) -> bool:
    """Whether what was sent is work that a gate of an epoch before keeps out."""
    return sent.action in ("admit", "serve") and all(of_later_epoch(sent, gate) for gate in shut)


def _is_at_work(rank: RankFacts, sent: Event) -> bool:
    """Whether a target has begun anything but requests since: what it was told may have another
    name there.
    """
    return any(
        event.at > sent.at and event.action not in ("serve", "admit", "life", "window", "poll")
        for event in rank.started(sent.epoch).values()
    )


def _began_since(rank: RankFacts, sent: Event) -> bool:
    """Whether a target took a command up: it began, is in it, or failed since."""
    event = rank.started(sent.epoch).get(sent.phase)
    if event is not None and event.at > sent.at:
        return True
    if rank.failed is not None and rank.failed.at > sent.at:
        return True
    return any(each.event.phase == sent.phase for each in rank.open)
