"""What must hold whatever happened: each broken promise as a sentence, none if all were kept."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from phasesync.core.model import RootCause
from tests.fences.faults.ranks import Report, entered

__all__ = ("GRACE_S", "broken_promises")

GRACE_S = 1.0  # A rank that waits knows by its deadline and this.
SLACK_S = 0.5  # What a process may need to be woken and to say so.


def broken_promises(
    reports: Sequence[Report],
    *,
    culprits: Iterable[int] = (),
    host_lost: bool = False,
) -> list[str]:
    """What the survivors' reports show to be wrong.

    `culprits` are the numbers of the ranks that misbehaved. `host_lost` says that what carries the
    fences was taken away, so that a fence may also have been lost.
    """
    guilty = set(culprits)
    survivors = [r for r in reports if r.life.number not in guilty]
    return [
        *_split(reports),
        *_early(reports),
        *_hung(survivors),
        *_strange(survivors, host_lost),
        *_unnamed(survivors, guilty),
        *_leaks(survivors),
    ]


def _split(reports: Sequence[Report]) -> Iterator[str]:
    verdicts: dict[int, set[Any]] = defaultdict(set)
    for report in reports:
        for record in report.records:
            if record.verdict is not None:
                verdicts[record.generation].add(record.verdict)
    for generation, seen in verdicts.items():
        if len(seen) > 1:
            yield f"fence {generation} has {len(seen)} verdicts: {seen}"


def _early(reports: Sequence[Report]) -> Iterator[str]:
    for report in reports:
        for record in report.records:
            if record.kind == "open":
                life = report.life
                last = max(entered(life.board, record.generation, life.size))
                if last > record.ended_at:
                    yield f"{life.rank} passed fence {record.generation} before all had entered"


def _hung(survivors: Sequence[Report]) -> Iterator[str]:
    for report in survivors:
        lag_s = report.ending.lag_s if report.ending else 0.0
        limit_s = report.life.deadline_s + GRACE_S + SLACK_S + 2 * lag_s
        for record in report.records:
            if record.kind == "hung" or record.waited_s > limit_s:
                yield f"{report.life.rank} waited {record.waited_s:.1f} s of {limit_s:.1f} s"
        if report.ending is None:
            yield f"{report.life.rank} did not end: {report.records[-2:]}"


def _strange(survivors: Sequence[Report], host_lost: bool) -> Iterator[str]:
    fine = {"open", "broken", "told broken", *(("lost", "told lost") if host_lost else ())}
    for report in survivors:
        for record in report.records:
            if record.kind not in fine:
                yield f"{report.life.rank} got {record.kind!r}: {record.said}"


def _unnamed(survivors: Sequence[Report], guilty: set[int]) -> Iterator[str]:
    causes = {report.cause for report in survivors if report.cause is not None}
    if len(causes) > 1:
        yield f"the survivors name {len(causes)} root causes: {causes}"
    for cause in causes:
        if not named(cause) <= guilty or not (named(cause) or _names_both_sides(cause)):
            yield f"not the culprits {sorted(guilty)} are named but {cause}"


def named(cause: RootCause) -> set[int]:
    """The numbers of the ranks that a cause blames."""
    return {rank.number for rank in (*cause.ranks, *cause.missing)}


def _names_both_sides(cause: RootCause) -> bool:
    """Without a majority nobody is blamed, but the text says who held what."""
    return cause.kind in ("digest", "disagreement") and "trainer/" in (cause.error or "")


def _leaks(survivors: Sequence[Report]) -> Iterator[str]:
    for report in survivors:
        if report.ending is not None and report.ending.leaks:
            yield f"{report.life.rank} left behind: {report.ending.leaks}"
