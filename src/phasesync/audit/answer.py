"""What an audit answers: one verdict, its rule, who is guilty, and the lines that prove it.

The ids of the rules and the fields of `Answer.to_json` are the contract with programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from phasesync.audit.events import Event, Name, number

__all__ = (
    "BROKEN",
    "FAILED",
    "MISSING",
    "NOTE",
    "RULES",
    "SUSPECTED",
    "WAITING_RULES",
    "Answer",
    "Evidence",
    "Finding",
    "rank_of",
)

# The ids in the order of DESIGN's table, which is also their precedence on one event.
RULES: Final = (
    "R-FENCE",
    "R-FENCE-POST",
    "R-BUDGET",
    "R-PREREQ",
    "R-MAPPED",
    "R-CONTENT",
    "R-ONCE",
    "R-TAGS",
    "R-ALLOK",
    "R-MEMBERS",
    "R-REPORT",
    "R-EPOCH",
    "R-COVERS",
    "R-LIFETIME",
    "R-SAMEPLAN",
    "R-NOCYCLE",
    "R-EXCL",
    "R-CTRLPLANE",
    "R-HANDSHAKE",
    "R-VERSION",
    "R-MONOTONE",
    "R-KVVERSION",
    "R-QUIET",
    "R-RELEASE",
    "R-CTRL",
    "R-FANOUT",
    "R-ALLRANKS",
    "R-FREED",
    "R-ROLLBACK",
    "R-DRIFT",
    "R-EVIDENCE",
    "R-TERMINAL",
    "R-WINDOW",
    "R-DUMPSET",
    "R-TIMEOUT",
    "R-SCOPE",
)

# Rules whose kind is `hang` when somebody still waits, else `failure`, else `violation`.
WAITING_RULES: Final = frozenset(
    {
        "R-ALLOK",
        "R-MEMBERS",
        "R-REPORT",
        "R-SAMEPLAN",
        "R-NOCYCLE",
        "R-CTRLPLANE",
        "R-HANDSHAKE",
        "R-CTRL",
        "R-TERMINAL",
        "R-RELEASE",
    }
)

# How strong a finding is: the earliest of the first class that has any is the root.
BROKEN: Final = 0  # an event is illegal at the moment it happens
FAILED: Final = 1  # an action failed or a process was lost
MISSING: Final = 2  # an arrival never came
SUSPECTED: Final = 3  # not decidable here; the answer is `inconclusive`
NOTE: Final = 4  # worth knowing, and no part of the verdict


@dataclass(frozen=True, slots=True, order=True)
class Evidence:
    """One line of one file."""

    file: str
    line: int

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule saw. `at` is where in the log it became true; `apart` is how far apart, in
    seconds of their clocks, its closest events of two ranks are, and how coarse those clocks;
    `hosts` are those whose clocks alone put its lines in order.
    """

    rule: str | None
    strength: int
    at: int
    because: str
    epoch: int | None = None
    phase: str | None = None
    fence: str | None = None
    guilty: tuple[Name, ...] = ()
    waiting: tuple[Name, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    record_next: tuple[str, ...] = ()
    certainty: str = "in every order"
    apart: tuple[float, float] | None = None
    hosts: tuple[str, ...] = ()

    def doubted(self, silent: tuple[Name, ...]) -> "Finding":
        """The same, where ranks without any line may have done what it takes for missing."""
        if not silent:
            return self
        who = ", ".join(map(str, silent[:16]))
        return replace(
            self,
            strength=SUSPECTED,
            guilty=(),
            because=f"{self.because}; but of rank {who} there is no line at all",
            record_next=(f"the log of rank {who}",),
        )

    @classmethod
    def on(
        cls,
        rule: str | None,
        event: Event,
        because: str,
        *more: Event,
        strength: int = BROKEN,
        guilty: tuple[Name, ...] | None = None,
        waiting: tuple[Name, ...] = (),
        record_next: tuple[str, ...] = (),
    ) -> "Finding":
        """A finding about `event`; by default its rank is the guilty one."""
        fence = event.phase if event.action == "fence" else None
        return cls(
            rule=rule,
            strength=strength,
            at=event.at,
            because=because,
            epoch=event.epoch,
            phase=None if fence else event.phase,
            fence=fence,
            guilty=(event.rank,) if guilty is None else guilty,
            waiting=waiting,
            evidence=evidence_of(event, *more),
            record_next=record_next,
            apart=_apart(event, *more),
        )


def _apart(*events: Event) -> tuple[float, float] | None:
    """How far apart, by their clocks, the closest two events of different ranks are, and how
    coarse those clocks are; both in seconds.
    """
    timed = [
        (float(at), number(event.attrs.get("clock_within_s")) or 0.0, event.rank)
        for event in events[:64]
        if (at := number(event.attrs.get("clock_s"))) is not None
    ]
    pairs = [
        (abs(one - other), max(near, far))
        for index, (one, near, rank) in enumerate(timed)
        for other, far, peer in timed[:index]
        if peer != rank
    ]
    return min(pairs, key=lambda pair: pair[0] - pair[1], default=None)


def evidence_of(*events: Event) -> tuple[Evidence, ...]:
    """The lines of `events`, each once, in their order."""
    return tuple(dict.fromkeys(Evidence(event.file, event.line) for event in events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The verdict on one run, as `audit --json` prints it."""

    verdict: str
    rule: str | None = None
    epoch: int | None = None
    phase: str | None = None
    fence: str | None = None
    guilty: tuple[Name, ...] = ()
    waiting: tuple[Name, ...] = ()
    because: str = ""
    evidence: tuple[Evidence, ...] = ()
    consequences: tuple[str, ...] = ()
    record_next: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    run: str = ""
    certainty: str = "in every order"
    events: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object of `audit --json`; lists are never null."""
        place = {"fence": self.fence} if self.fence is not None else {"phase": self.phase}
        return {
            "audit": 1,
            "verdict": self.verdict,
            "rule": self.rule,
            "epoch": self.epoch,
            **place,
            "guilty": list(self.guilty),
            "waiting": list(self.waiting),
            "because": self.because,
            "certainty": self.certainty,
            "evidence": [line.to_json() for line in self.evidence],
            "consequences": list(self.consequences),
            "record_next": list(self.record_next),
            "findings": [dict(finding) for finding in self.findings],
            **self.extra,
        }


def rank_of(rank: Name, role: str) -> Name:
    """How a rank is written: `role/number`, or the bare number where no role is known."""
    return f"{role}/{rank}" if role and isinstance(rank, int) else rank
