"""From findings to one verdict: the earliest illegal event, else the earliest failure, else who is
missing.

What follows from the root is a consequence, and a rank that waits is not guilty of it. Where the
log cannot decide, the verdict is `inconclusive` and says what to record.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from phasesync.audit.answer import (
    FAILED,
    MISSING,
    NOTE,
    RULES,
    SUSPECTED,
    WAITING_RULES,
    Answer,
    Evidence,
    Finding,
    rank_of,
)
from phasesync.audit.events import Name, text_of
from phasesync.audit.facts import WAITING, Facts, is_timeout, ranks_in
from phasesync.audit.vocabulary import is_echo, is_ended_error, is_gone_error, is_memory_error
from phasesync.audit.waits import unrecovered

__all__ = ("judge",)

_ORDER: Final = {rule: index for index, rule in enumerate(RULES)}
_SHOWN: Final = 12
_LEAVES: Final = ("R-FENCE", "R-COVERS", "R-FREED", "R-ROLLBACK", "R-DRIFT")

_NO_EVENT: Final = Finding(
    rule=None,
    strength=SUSPECTED,
    at=0,
    because="the log has no event, so that nothing can be said of what it is about",
    record_next=("phases as they start, end and fail, on every rank",),
)


def judge(findings: Iterable[Finding], facts: Facts, *, run: str = "", events: int = 0) -> Answer:
    """The one answer that `findings` amount to."""
    every = [*findings, *_plain_failures(facts)]
    root = _root(every)
    if (root is None or _is_plain(root)) and (unexplained := [*_out_of_memory(facts)]):
        # No rule had anything to say of it, and still it failed.
        every += unexplained
        root = _root(every)
    if root is None and facts.header.errors:
        every.append(_of_nobody(facts))
        root = _root(every)
    if root is None and not events:
        every.append(_NO_EVENT)
        root = _NO_EVENT
    if root is None:
        return Answer(
            verdict="ok",
            because="nothing in the log breaks a rule, and nothing failed",
            findings=_shown(every, None, facts),
            run=run,
            events=events,
        )
    every += _anew(root, every, facts)
    every += [*_untold_before(root, every, facts)]
    alike = [each for each in every if _same_fault(each, root)]
    guilty = _names(alike, root)
    verdict = _kind(root, facts)
    waiting = _waiting(root, facts) if verdict != "ok" else ()
    return Answer(
        verdict=verdict,
        rule=root.rule,
        epoch=root.epoch,
        phase=root.phase,
        fence=root.fence,
        guilty=tuple(_written(rank, facts) for rank in guilty),
        waiting=tuple(_written(rank, facts) for rank in waiting),
        because=text_of(root.because, 1000),
        evidence=_evidence(alike),
        consequences=_consequences(root, alike, facts) if verdict != "ok" else (),
        record_next=_record_next(verdict, alike, facts),
        findings=_shown(every, alike, facts),
        run=run,
        certainty=_certainty(root, facts),
        events=events,
    )


def _certainty(finding: Finding, facts: Facts) -> str:
    """Whether any other order of the lines could have come to another answer.

    What one rank says is in its order. Where only clocks order two ranks, it depends on how far
    apart their lines are, and on how well the clocks are known.
    """
    if finding.hosts:
        return _by_clocks_of(finding.hosts, facts)
    if not facts.header.by_clock or finding.apart is None:
        return finding.certainty
    gap, within = (seconds * 1000 for seconds in finding.apart)
    if facts.header.hosts > 1:
        return (
            f"possible: only the clocks of {facts.header.hosts} hosts order the lines that matter, "
            f"which are {gap:,.0f} ms apart"
        )
    if gap > within:
        return f"in every order that clocks within +-{max(within, 1):,.0f} ms allow"
    return f"possible within +-{within:,.0f} ms: the lines that matter are {gap:,.0f} ms apart"


def _by_clocks_of(hosts: tuple[str, ...], facts: Facts) -> str:
    """How sure an order is that only the clocks of two hosts give: fences bound how far apart those
    can be.
    """
    only = f"only the clocks of {' and '.join(hosts[:4])} order the lines that matter"
    bounds = [
        max(abs(least), abs(most))
        for ahead, behind, least, most in facts.skews
        if ahead in hosts and behind in hosts
    ]
    if not bounds:
        return f"possible: {only}, and no fence bounds how far apart they are"
    return f"possible within +-{max(bounds):,.1f} ms: {only}; fences bound them to that"


def _record_next(verdict: str, alike: list[Finding], facts: Facts) -> tuple[str, ...]:
    more = [each for finding in alike for each in finding.record_next]
    if verdict == "inconclusive":
        more = [*facts.header.record_next, *more]
    return tuple(dict.fromkeys(more))


def _root(findings: Iterable[Finding]) -> Finding | None:
    counted = [each for each in findings if each.strength != NOTE]
    if not counted:
        return None
    return min(
        counted,
        key=lambda each: (each.strength, each.at, _ORDER.get(each.rule or "", len(_ORDER))),
    )


def _plain_failures(facts: Facts) -> list[Finding]:
    """Failures that no rule explains: the action failed, and order and waits are clean."""
    found = []
    for event in facts.failures:
        if unrecovered(event, facts) is None:
            continue  # Of an exit: another process has taken its place, and done it.
        watched = event.kind == "timeout" and event.action in ("poll", "life")
        if watched or (is_timeout(event) and event.action in WAITING):
            found.append(_cut_wait(event))
            continue
        if is_memory_error(event.attrs.get("error")):
            continue  # R-FREED says what it can: without figures it is not decidable.
        if event.kind == "exit" and event.action == "life" and "error" not in event.attrs:
            if (needed := _needed(event, facts)) is not None:
                found.append(needed)
            continue  # A process that ended is no failure unless somebody needed it.
        if event.kind == "exit" and facts.is_over(event):
            continue  # The job had been shut down, and nobody was at anything any more.
        if event.kind == "exit" and event.rank in facts.reconciled:
            continue  # The others were told, and went on without it.
        if is_ended_error(event.attrs.get("error")):
            found.append(_ended(event))
            continue
        silent = _unheard(event, facts)
        found.append(_without_a_log(event, silent) if silent else _failed(event))
    return found


def _needed(exit_: Any, facts: Facts) -> Finding | None:
    """A process that ended by itself, out of a step that its peers were still in, and who then lost
    the connection.
    """
    left = facts.ranks[exit_.rank].finished(exit_.epoch)
    for failure in facts.failures:
        began = facts.ranks[failure.rank].started(failure.epoch).get(failure.phase)
        if (
            failure.rank != exit_.rank
            and failure.at > exit_.at
            and began is not None
            and began.at < exit_.at
            and failure.phase in left
            and is_gone_error(failure.attrs.get("error"))
            and unrecovered(failure, facts) is not None
        ):
            why = (
                f"rank {exit_.rank} exited in {exit_.phase} while rank {failure.rank} was still in "
                f"{failure.phase}, which then failed: {failure.attrs.get('error')}"
            )
            return Finding.on(None, exit_, why, failure, strength=FAILED)
    return None


def _unheard(event: Any, facts: Facts) -> tuple[Name, ...]:
    """The ranks without any line to which a failure points: those it names, or, where it is an
    echo of somebody else's, all of them.
    """
    silent = facts.silent() if not facts.header.journal else ()
    if not silent:
        return ()
    began = facts.ranks[event.rank].started(event.epoch).get(event.phase)
    said = {**(began.attrs if began is not None else {}), **event.attrs}
    named = [
        rank
        for name in ("target", "targets", "handles", "sources", "waiting_for")
        if name in said
        for rank in ranks_in(said[name], facts.header.ranks)
    ]
    pointed = tuple(rank for rank in silent if rank in named)
    error = event.attrs.get("error")
    return pointed or (silent if is_echo(error) or is_timeout(event) else ())


def _without_a_log(event: Any, silent: tuple[Name, ...]) -> Finding:
    who = ", ".join(map(str, silent[:16]))
    error = event.attrs.get("error")
    return Finding.on(
        "R-DUMPSET",
        event,
        f"rank {event.rank} failed in {event.phase}"
        + (f": {error}" if error else "")
        + f"; of rank {who}, on which it depends, there is no line at all",
        strength=SUSPECTED,
        guilty=(),
        record_next=(f"the log of rank {who}",),
    )


def _is_plain(root: Finding) -> bool:
    return root.rule is None and root.strength == FAILED


def _out_of_memory(facts: Facts) -> Iterator[Finding]:
    for event in facts.failures:
        if is_memory_error(event.attrs.get("error")) and unrecovered(event, facts) is not None:
            yield _failed(event)


def _of_nobody(facts: Facts) -> Finding:
    """Errors that no line gives to a rank: something failed, and that is all that is known."""
    errors = facts.header.errors
    return Finding(
        rule=None,
        strength=SUSPECTED,
        at=0,
        because=f"the log has an error that no line gives to a rank: {errors[0][2]}",
        evidence=tuple(Evidence(file, line) for file, line, _ in errors),
        record_next=("each process's own log, with its rank or pid before every line",),
    )


def _anew(root: Finding, every: list[Finding], facts: Facts) -> list[Finding]:
    """Failures since all had recovered from the root, where no finding tells them yet."""
    told = {line for each in every for line in each.evidence}
    return [
        _failed(event)
        for event in facts.failures
        if event.at > root.at
        and facts.is_anew(event, root.at, root.epoch)
        and Evidence(event.file, event.line) not in told
    ]


def _untold_before(root: Finding, every: list[Finding], facts: Facts) -> Iterator[Finding]:
    """Out-of-memory failures that came before the root, so that it cannot explain them."""
    told = {line for each in every for line in each.evidence}
    for event in facts.failures:
        memory = is_memory_error(event.attrs.get("error"))
        new = Evidence(event.file, event.line) not in told
        if memory and new and event.at < root.at and unrecovered(event, facts) is not None:
            yield _failed(event)


def _failed(event: Any) -> Finding:
    error = event.attrs.get("error")
    what = "exited" if event.kind == "exit" else "failed"
    because = f"rank {event.rank} {what} in {event.phase}" + (f": {error}" if error else "")
    return Finding.on(None, event, because, strength=FAILED)


def _cut_wait(event: Any) -> Finding:
    return Finding.on(
        None,
        event,
        f"a limit cut rank {event.rank} off in {event.phase}, and no line says what it waited for",
        strength=SUSPECTED,
        guilty=(),
        record_next=("progress marks of every rank, and who belongs to the wait",),
    )


def _ended(event: Any) -> Finding:
    return Finding.on(
        "R-DUMPSET",
        event,
        f"rank {event.rank} was ended in {event.phase} by somebody else "
        f"({event.attrs.get('error')}), and no line says why",
        strength=SUSPECTED,
        guilty=(),
        record_next=("the log of who ended it, and the first error before that",),
    )


def _same_fault(finding: Finding, root: Finding) -> bool:
    """Whether a finding is the same fault as the root, by another rank, not its consequence."""
    if finding is root:
        return True
    return (
        finding.rule == root.rule
        and root.rule is not None
        and finding.strength == root.strength
        and finding.epoch == root.epoch
        and (finding.phase, finding.fence) == (root.phase, root.fence)
    )


def _names(alike: list[Finding], root: Finding) -> tuple[Name, ...]:
    if root.strength == FAILED and root.rule in (None, "R-ALLOK", "R-MEMBERS", "R-REPORT"):
        return root.guilty
    return tuple(
        sorted(
            {rank for each in alike for rank in each.guilty},
            key=lambda rank: (isinstance(rank, str), rank),
        )
    )


def _kind(root: Finding, facts: Facts) -> str:
    if root.rule == "R-SCOPE":
        return "ok"
    if root.strength == SUSPECTED or root.rule == "R-DUMPSET":
        return "inconclusive"
    if root.rule == "R-TIMEOUT":
        return "false_alarm"
    if root.rule is None:
        return "failure" if root.strength == FAILED else "hang"
    if root.rule in WAITING_RULES:
        if root.waiting or facts.waiting():
            return "hang"
        return "failure" if facts.failures else "violation"
    return "violation"


def _waiting(root: Finding, facts: Facts) -> tuple[Name, ...]:
    if root.waiting:
        return tuple(dict.fromkeys(root.waiting))
    return facts.waiting()


def _written(rank: Name, facts: Facts) -> Name:
    return rank_of(rank, facts.header.kind(rank))


def _evidence(alike: list[Finding]) -> tuple[Evidence, ...]:
    lines = dict.fromkeys(line for each in alike for line in each.evidence)
    return tuple(lines)[:_SHOWN]


def _consequences(root: Finding, alike: list[Finding], facts: Facts) -> tuple[str, ...]:
    said = []
    known = {line for each in alike for line in each.evidence[:1]}
    for event in facts.failures:
        if event.at <= root.at or Evidence(event.file, event.line) in known:
            continue
        if facts.is_anew(event, root.at, root.epoch):
            continue  # The root was recovered from: what failed since is news of its own.
        error = event.attrs.get("error")
        what = {"exit": "exited", "timeout": "timed out"}.get(event.kind, "failed")
        text = f"rank {event.rank} {what} in {event.phase}" + (f": {error}" if error else "")
        said.append(f"{text} ({event.file}:{event.line})")
    for rank in facts.waiting():
        for each in facts.waits_of(facts.ranks[rank])[:1]:
            where = f"{each.event.file}:{each.event.line}"
            said.append(f"rank {rank} waits in {each.event.phase} ({where})")
    return tuple(text_of(each, 400) for each in said[:_SHOWN])


def _follows(finding: Finding, root: Finding) -> bool:
    """Whether a finding is no news beside the root: what could not be told alone, who waits since,
    and a device that is too full since somebody did not let go of it.
    """
    known = root.rule == "R-TIMEOUT" or set(finding.waiting) <= set(root.waiting)
    if finding.strength == MISSING and root.strength < MISSING and known:
        return True  # The root says already why they wait.
    if finding.at < root.at:
        return False
    if finding.strength in (MISSING, SUSPECTED):
        return finding.strength > root.strength
    return finding.rule == "R-BUDGET" and root.rule in _LEAVES


def _shown(
    every: list[Finding], alike: list[Finding] | None, facts: Facts
) -> tuple[dict[str, Any], ...]:
    root = {id(each) for each in alike or ()}
    shown = []
    decided = next((each for each in alike or () if each.strength < SUSPECTED), None)
    for each in sorted(every, key=lambda finding: (finding.strength, finding.at)):
        if id(each) in root or each.rule == "R-SCOPE":
            continue
        if decided is not None and _follows(each, decided):
            continue
        shown.append(
            {
                "rule": each.rule,
                "epoch": each.epoch,
                "what": text_of(each.because, 400),
                "ranks": [_written(rank, facts) for rank in each.guilty],
                "evidence": [line.to_json() for line in each.evidence[:4]],
                "certainty": _certainty(each, facts),
            }
        )
    return tuple(shown[:64])
