"""Errors that peers wait behind, or that never arrived: R-ALLOK, R-MEMBERS, R-REPORT."""

from typing import Final

from phasesync.audit.answer import FAILED, Finding
from phasesync.audit.events import Event, Name, of_epoch
from phasesync.audit.facts import Facts, ranks_in
from phasesync.audit.rules.seen import Seen
from phasesync.audit.vocabulary import is_echo, is_gone_error
from phasesync.audit.waits import STEPS, Meet, Waits, unrecovered, waiters

__all__ = ("gone", "report")

_AWAITS: Final = STEPS | {"wait", "init_group", "destroy_group", "publish", "teardown"}
_TOLD: Final = ("http", "status", "code", "returned", "success", "swallowed", "ignored", "logged")


def gone(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-ALLOK, R-MEMBERS and R-REPORT: somebody waits for a rank that failed or is gone.

    Sees: a wait whose absentee failed, exited or left; where no line says who belongs to it, who
    died on the way there. Cannot see: a rank that died without a line; that is R-DUMPSET.

    R-MEMBERS if it was gone before the epoch of the wait began, else R-ALLOK; R-REPORT instead of
    R-ALLOK where the log shows that the error was at hand and did not reach who waits: it came back
    as a reply, or the wait ended as a timeout. Sources: SkyRL PR 1737, NeMo-RL PR 3591, TRL issue
    6796, Ray issue 64470.
    """
    found = []
    for meet in waits.meets:
        before = [rank for rank, state in meet.absent.items() if state == "gone before"]
        failed = [rank for rank, state in meet.absent.items() if state in ("gone", "failed")]
        if meet.action not in _AWAITS:
            continue
        if not before and not failed:
            known = meet.absent and not _is_joint(meet, waits.facts)
            lost = [] if known else _strangers(meet, waits.facts)
            failed = list(dict.fromkeys(event.rank for event in lost))
        if not before and not failed:
            continue
        ranks = failed or before
        ends = [end for rank in ranks if (end := _end_of(rank, waits.facts)) is not None]
        echoes = all(is_echo(end.attrs.get("error")) for end in ends)
        if echoes and waits.without_lines(meet):
            continue  # They tell of somebody else, and of somebody there is no line.
        explained.update(wait.event.at for wait in meet.waits)
        roots = [event for rank in ranks if (event := _end_of(rank, waits.facts)) is not None]
        if not roots:
            continue
        root = min([*roots, *_earlier(roots, meet, waits.facts)], key=lambda event: event.at)
        guilty = [root.rank, *(each.rank for each in roots if _independent(each, root))]
        rule = "R-MEMBERS" if not failed else _allok(root, meet)
        names = waiters(meet.ranks)
        what = "exited" if root.kind == "exit" else "left" if root.kind == "end" else "failed"
        error = root.attrs.get("error")
        because = (
            f"{names} in {meet.phase}{of_epoch(meet.epoch)} for rank "
            f"{root.rank}, which "
            f"{what} in {root.phase}{of_epoch(root.epoch)}" + (f" ({error})" if error else "")
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
    return found + _sent_to_the_gone(waits, seen, explained)


def _sent_to_the_gone(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """Commands that failed since one of those they went to was gone before their epoch began."""
    found = []
    facts = waits.facts
    for sent, failed in seen.dispatched:
        if failed is None or sent.at in explained or not is_gone_error(failed.attrs.get("error")):
            continue
        target = sent.attrs.get("target", sent.attrs.get("targets"))
        for rank in ranks_in(target, facts.header.ranks) if target is not None else ():
            gone = facts.exits.get(rank)
            if gone is None or gone.at > sent.at or rank in facts.reconciled:
                continue
            if gone.epoch is None or sent.epoch is None or gone.epoch >= sent.epoch:
                continue
            explained.add(sent.at)
            because = (
                f"{sent.phase}{of_epoch(sent.epoch)} went to rank {rank}, which exited in "
                f"{gone.phase}{of_epoch(gone.epoch)}: {failed.attrs.get('error')}"
            )
            found.append(Finding.on("R-MEMBERS", gone, because, sent, failed, strength=FAILED))
    return found


def _earlier(roots: list[Event], meet: Meet, facts: Facts) -> list[Event]:
    """Failures of this epoch that came first, of ranks who belong with those who wait.

    Where no line says who belongs to a meet, a rank that died on its way there is known only by
    its kind; what then befell the others is an echo.
    """
    if any("members" in wait.event.attrs for wait in meet.waits) or meet.group in facts.members:
        return []
    first = min(root.at for root in roots)
    return [event for event in _kin(meet, facts) if event.at < first]


def _kin(meet: Meet, facts: Facts) -> list[Event]:
    """Failures of this epoch by ranks that do what those at the meet do, and are not there."""
    kinds = {facts.header.kind(rank) for rank in meet.ranks}
    return [
        event
        for event in facts.failures
        if event.epoch == meet.epoch
        and event.rank not in meet.ranks
        and facts.header.kind(event.rank) in kinds
        and unrecovered(event, facts) is not None
    ]


def _is_joint(meet: Meet, facts: Facts) -> bool:
    """Whether a broadcast is one among equals: several of one role are in it, on a group that no
    other role ever named.
    """
    if meet.action != "send" or meet.group is None or len(meet.ranks) < 2:
        return False
    kinds = {facts.header.kind(rank) for rank in facts.groups.get(meet.group, ())}
    return len(kinds) == 1 and len({wait.event.phase for wait in meet.waits}) == 1


def _strangers(meet: Meet, facts: Facts) -> list[Event]:
    """Who died before it ever named the group that its kin wait in, nobody else being awaited."""
    if meet.action not in ("fence", "collective") and not _is_joint(meet, facts):
        return []
    if meet.group in facts.members:
        return []
    if any("members" in wait.event.attrs for wait in meet.waits):
        return []
    if any(meet.phase in done for rank in meet.ranks for done in facts.ranks[rank].done.values()):
        return []  # The group has met without it before, so it is none of theirs.
    return [event for event in _kin(meet, facts) if event.at < meet.last.at]


def _allok(root: Event, meet: Meet) -> str:
    told = any(name in root.attrs for name in _TOLD)
    shown_as_timeout = any(wait.cut is not None for wait in meet.waits)
    return "R-REPORT" if told or shown_as_timeout else "R-ALLOK"


def report(waits: Waits, seen: Seen, explained: set[int]) -> list[Finding]:
    """R-REPORT where nobody waits: an error was swallowed, and the next step went on.

    Sees: a failed load, sync or resume after which that rank serves or publishes without having
    done it again, or a caller that ends as a success while its callee failed. Cannot see: an error
    that was swallowed before any line. Sources: NeMo-RL `prepare_for_generation`, TRL PR 6913.
    """
    found = []
    for failed, after, how in seen.swallowed:
        error = failed.attrs.get("error")
        because = (
            f"{failed.phase} failed on rank {failed.rank}"
            + (f" ({error})" if error else "")
            + f", and rank {after.rank} {how.format(after.phase)}"
        )
        found.append(Finding.on("R-REPORT", failed, because, after, strength=FAILED))
    return found


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
