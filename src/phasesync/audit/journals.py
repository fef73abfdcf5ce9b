"""The journals of one run as events for the rules, lines for the kernel, and facts of their own.

What a journal says is believed; what it lacks is a finding. A rank whose log is missing or torn is
never covered by an `ok`, and is the first suspect of whatever it was needed for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from phasesync.audit.answer import (
    NOTE,
    SUSPECTED,
    Answer,
    Evidence,
    Finding,
)
from phasesync.audit.auditor import Audit
from phasesync.audit.breaks import Breaks
from phasesync.audit.clocks import Clocks
from phasesync.audit.conformance import Conformance
from phasesync.audit.events import EMPTY, Event, Header, text_of
from phasesync.audit.gist import Block, Gist
from phasesync.audit.lacking import Lacking
from phasesync.audit.luck import Luck
from phasesync.audit.merge import instance_of
from phasesync.audit.rules.base import Rule
from phasesync.audit.rules.payload import Exclusive, Lifetime
from phasesync.audit.rules.residue import Drift
from phasesync.audit.rules.service import Timeouts, Windows
from phasesync.audit.rules.versions import Evidenced, Monotone, Scope, Versions
from phasesync.audit.rules.waiting import Hangs
from phasesync.audit.tickets import Tickets
from phasesync.audit.told import Told
from phasesync.audit.traces import RawLine
from phasesync.audit.vocabulary import Meaning
from phasesync.core.protocol import Protocol

__all__ = ("DECLARED", "FORMAT", "JournalAudit")

FORMAT: Final = 1
_FENCE: Final = Meaning("fence")

# Where the protocol is known the kernel judges memory, tags, order and fences; the rest is theirs.
DECLARED: Final[tuple[Callable[[], Rule], ...]] = (
    Hangs,
    Lifetime,
    Exclusive,
    Versions,
    Monotone,
    Drift,
    Evidenced,
    Windows,
    Timeouts,
    Scope,
)
_KEPT: Final = (
    "bucket",
    "bytes",
    "checksum",
    "device_complete",
    "exclusive",
    "expected_bytes",
    "expected_checksum",
    "expected_params",
    "group",
    "kv_version",
    "output",
    "params",
    "received_bytes",
    "slot",
    "tags",
)


class JournalAudit:
    """One run: feed it lines in causal order, then ask for the answer.

    `protocol` finds a declaration by its name; without one the rules for foreign logs judge alone.
    """

    def __init__(
        self,
        run: str,
        members: Iterable[str],
        protocol: Callable[[str], Protocol | None],
        *,
        declared: bool = True,
    ) -> None:
        names = tuple(sorted(set(members)))
        header = Header(name=run, ranks=names, roles={n: n.rpartition("/")[0] for n in names})
        self.run = run
        self._run: object = None
        self.conformance = Conformance(protocol) if declared else None
        self.audit = Audit(header, DECLARED) if declared else Audit(header)
        self.clocks = Clocks()
        self.at = 0
        self._ranks: dict[str, Told] = {}
        self._counts: dict[str, int] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._planned = False
        self._luck: Luck | None = None
        self._tickets = Tickets()
        self._breaks = Breaks(self._ranks, self.audit.facts, self._tickets.arrived)
        self._lacking = Lacking(self._ranks, self.audit.facts)

    # ------------------------------------------------------------------ lines

    def feed(self, file: str, number: int, line: dict[str, Any]) -> None:
        """Take in the next line."""
        at = self.at = self.at + 1
        role, number_ = line.get("role"), line.get("rank")
        if type(role) is not str or type(number_) is not int:
            self._note("no role or rank", Evidence(file, number), SUSPECTED)
            return
        name = self._names.get((role, number_)) or self._name((role, number_))
        where = Evidence(file, number)
        if (run := line.get("run")) != self._run and not self._is_of_it(run, name, where):
            return
        event = line.get("event")
        rank = self._ranks[name]
        seq = line.get("seq")
        if seq != rank.seq + 1 or line.get("incarnation", 0) != rank.incarnation:
            self._sequence(name, rank, line, where)
        rank.seq = seq if type(seq) is int else rank.seq + 1
        rank.last = where
        take = _TAKERS.get(event) if type(event) is str else None
        if take is None:
            self._note(f"unknown event {text_of(event, 40)}", where)
            return
        try:
            take(self, at, where, name, rank, line)
            if self.conformance is not None:
                self.conformance.see(at, where, line)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            self._note(f"a field of the line is not what it should be ({error})", where, SUSPECTED)

    def _is_of_it(self, run: object, name: str, where: Evidence) -> bool:
        """Whether a line belongs to this run; the first one says what it is called."""
        if self._run is None:
            self._run = run
        if run == self._run or run is None:
            return True
        self._note(f"lines of run {text_of(run, 80)!r} in the journal of {name}", where, SUSPECTED)
        return False

    def _name(self, key: tuple[str, int]) -> str:
        name = self._names[key] = f"{text_of(key[0], 60)}/{key[1]}"
        self._ranks.setdefault(name, Told())
        return name

    def _sequence(self, name: str, rank: Told, line: Mapping[str, Any], where: Evidence) -> None:
        """A line that does not follow the last one of its rank: lost lines, or another start."""
        incarnation = line.get("incarnation", 0)
        seq = line.get("seq")
        if incarnation != rank.incarnation:
            if rank.incarnation >= 0 and type(incarnation) is int:
                self._note(f"{name} was started again (incarnation {incarnation})", where)
            rank.incarnation = incarnation if type(incarnation) is int else 0
            rank.exit, rank.first = None, rank.first or where
            if line.get("event") == "journal.part" and type(seq) is int:
                self._lacking.begins(name, seq, where)
            elif seq not in (0, None):
                self._lacking.incomplete.add(name)
                self._note(f"{name}: its first line is number {seq}", where, SUSPECTED)
            return
        self._lacking.incomplete.add(name)
        if type(seq) is not int:
            self._note(f"{name}: a line without its number", where, SUSPECTED)
        elif seq > rank.seq + 1:
            self._note(f"{name}: lines {rank.seq + 1} to {seq - 1} are missing", where, SUSPECTED)
        else:
            self._note(f"{name}: line {seq} again; the same journal twice?", where, SUSPECTED)

    def skip(self, name: str, block: Block) -> None:
        """Take in an epoch of a rank that was judged as a whole."""
        gist = block.gist
        assert gist is not None
        rank = self._ranks.setdefault(name, Told())
        rank.seq, rank.incarnation = gist.seq + gist.length - 1, gist.incarnation
        rank.epoch = gist.epoch
        rank.last = Evidence(block.file, block.last)
        rank.status, rank.phase, rank.stopped = "ended", None, False
        if self.conformance is not None:
            self.conformance.whole_epoch()
        self.at += gist.length
        self.audit.events += gist.length

    def position(self, name: str) -> tuple[int, int]:
        """The incarnation of a rank's last line, and its number."""
        rank = self._ranks.setdefault(name, Told())
        return rank.incarnation, rank.seq

    def omit(self, name: str, block: Block) -> None:
        """Leave out a block of a rank, but for where it ends."""
        rank = self._ranks.setdefault(name, Told())
        for raw in block.lines():
            if raw.data is None:
                self.bad(block.file, raw)
                continue
            where = Evidence(block.file, raw.number)
            seq = raw.data.get("seq")
            if seq != rank.seq + 1 or raw.data.get("incarnation", 0) != rank.incarnation:
                self._sequence(name, rank, raw.data, where)
            rank.seq = seq if type(seq) is int else rank.seq + 1
            rank.last = where
            if raw.data.get("event") == "journal.part":
                self._part(0, where, name, rank, raw.data)

    def rotated(self, epoch: int) -> None:
        """Say that epochs up to `epoch` are not judged: some ranks do not have them any more."""
        self.audit.add(
            Finding(
                rule=None,
                strength=NOTE,
                at=1 << 60,
                because=(
                    f"the epochs up to {epoch} were rotated away (keep_epochs, max_bytes); what "
                    "is left begins behind them"
                ),
            )
        )

    def trial(self, sample: Iterable[tuple[str, Gist]]) -> "JournalAudit":
        """An audit of some ranks apart, under the same plan, from where their epoch begins."""
        assert self.conformance is not None
        assert self.conformance.plan is not None
        ranks = dict(sample)
        trial = JournalAudit(self.run, ranks, lambda _name: None)
        assert trial.conformance is not None
        trial.conformance.follow(self.conformance.plan, Evidence(self.run, 0))
        trial._planned = True
        trial.audit.facts.members.update(self.audit.facts.members)
        for name, gist in ranks.items():
            rank = trial._ranks[name] = Told()
            rank.seq, rank.incarnation = gist.seq - 1, gist.incarnation
        return trial

    def is_clean(self) -> bool:
        """Whether nothing at all was found so far."""
        facts = self.audit.facts
        return not self.oddities() and not any(rule.finish(facts) for rule in self.audit.rules)

    def oddities(self) -> int:
        """How much there is to say so far; an epoch that adds nothing to it was as it should be."""
        found = len(self.conformance.findings) if self.conformance is not None else 0
        return (
            found
            + len(self.audit.findings)
            + len(self.audit.facts.failures)
            + len(self._breaks)
            + len(self._counts)
        )

    def bad(self, file: str, raw: RawLine) -> None:
        """A line that could not be read."""
        torn = raw.problem == "torn off"
        self._note(
            f"{file}:{raw.number}: {raw.problem}",
            Evidence(file, raw.number),
            NOTE if torn else SUSPECTED,
        )

    def _note(self, what: str, where: Evidence, strength: int = NOTE) -> None:
        count = self._counts[what] = self._counts.get(what, 0) + 1
        if count > 1 or len(self._counts) > 256:
            return
        self.audit.add(
            Finding(
                rule=None,
                strength=strength,
                at=self.at if strength == SUSPECTED else 1 << 60,
                because=what,
                evidence=(where,),
                record_next=("every line of every journal",) if strength == SUSPECTED else (),
            )
        )

    def _event(
        self,
        at: int,
        where: Evidence,
        name: str,
        line: Mapping[str, Any],
        kind: str,
        phase: str,
        attrs: Mapping[str, Any],
        means: Meaning,
    ) -> None:
        epoch = line.get("epoch")
        self.audit.feed(
            Event(
                at,
                where.file,
                where.line,
                name,
                epoch if type(epoch) is int else None,
                phase,
                kind,
                attrs,
                means,
            )
        )

    def _phase(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        event = line["event"]
        phase = str(line.get("phase"))
        kind = _KINDS[event]
        rank.phase = phase if kind in ("start", "progress") else None
        if self._luck:
            if kind == "start":
                self._luck.started(name, phase, where)
            elif kind == "end":
                self._luck.ended(name, phase, where)
            elif kind == "progress" and isinstance(line.get("call"), str):
                self._luck.called(name, line["call"][:80])
        attrs: dict[str, Any] | Mapping[str, Any] = EMPTY
        if kind != "progress":
            attrs = {key: line[key] for key in _KEPT if key in line}
            version = line.get("version")
            if (
                kind == "end"
                and version is not None
                and self.audit.facts.header.means(phase).action
            ):
                attrs["version"] = version
        if kind == "fail":
            attrs = {**attrs, "error": line.get("error"), "error_type": line.get("error_type")}
            if line.get("level") == "warning" or line.get("error_type") == "Cancelled":
                kind, rank.cut = "abort", phase
            elif rank.failed is None:
                rank.failed = (where, phase, text_of(line.get("error", "")))
        self._event(at, where, name, line, kind, phase, attrs, self.audit.facts.header.means(phase))

    def _arrive(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        self.clocks.arrive(instance, line)
        if line.get("caller") != "outside":
            self._tickets.arrive(where, name, instance, line)
        if line.get("status") == "failed":
            return
        rank.waits = instance
        scope = str(line.get("scope"))
        attrs: dict[str, Any] = {"group": scope, "call": line.get("generation")}
        self._event(at, where, name, line, "start", str(line.get("fence")), attrs, _FENCE)

    def _pass(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        rank.waits = None
        self.clocks.passed(instance, line)
        for finding in self._tickets.passed(at, where, name, instance, line):
            self.audit.add(finding)
        attrs = {"group": str(line.get("scope")), "call": line.get("generation")}
        self._event(at, where, name, line, "end", str(line.get("fence")), attrs, _FENCE)

    def _decide(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        for finding in self._tickets.decided(at, where, name, instance_of(line), line):
            self.audit.add(finding)

    def _break(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        rank.stopped = True
        for finding in self._tickets.broken(at, where, name, instance, line):
            self.audit.add(finding)
        self._breaks.note(at, where, instance, line)
        attrs = {"group": str(line.get("scope")), "call": line.get("generation")}
        self._event(at, where, name, line, "abort", str(line.get("fence")), attrs, _FENCE)

    def _begin(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        epoch = line.get("epoch")
        rank.epoch = epoch if type(epoch) is int else rank.epoch
        rank.stopped = False
        rank.cut = rank.waits = None
        rank.status = "in epoch"
        if (
            self._luck is None
            and self.conformance is not None
            and self.conformance.plan is not None
        ):
            self._luck = Luck(self.conformance.plan)
        if self._luck:
            self._luck.begin(name)

    def _end(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        rank.phase = None
        rank.status = "failed" if line.get("error") else "ended"

    def _recovered(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        if not line.get("error"):
            facts = self.audit.facts
            facts.recover(facts.rank(name), at)

    def _exit(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        rank.exit = "bad" if line.get("error_type") else "good"

    def _plan(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        """Who belongs to which scope, from the plan that the run agreed on."""
        members = line.get("members")
        if self._planned or not isinstance(members, list):
            return
        self._planned = True
        names = tuple(map(str, members))
        facts = self.audit.facts
        facts.members["world"] = names
        groups = line.get("groups")
        for group, parts in groups.items() if isinstance(groups, dict) else ():
            for index, part in enumerate(parts if isinstance(parts, list) else ()):
                inside = tuple(names[i] for i in part if type(i) is int and 0 <= i < len(names))
                facts.members[f"{group}/{index}"] = inside
        for each in names:
            facts.rank(each)
        self._lacking.planned(names, line)

    def _start(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        boot = line.get("boot")
        if boot is not None:
            rank.boots.add(str(boot))

    def _part(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        self._lacking.part(name, line)

    def _other(
        self, at: int, where: Evidence, name: str, rank: Told, line: Mapping[str, Any]
    ) -> None:
        return

    # ------------------------------------------------------------------ the end

    def answer(self) -> Answer:
        """The verdict on the run."""
        lacking = self._lacking.findings(self._breaks.blamed)
        if self.conformance is not None:
            for finding in self.conformance.findings:
                self.audit.add(self._lacking.believed(finding))
        lucky = self._luck.findings() if self._luck else []
        for finding in (*self._breaks.findings(), *lacking, *lucky):
            self.audit.add(finding)
        for finding in self.clocks.findings():
            self.audit.add(finding)
        self.audit.facts.skews = self.clocks.skews()
        answer = self.audit.answer(run=self.run)
        skews = [each.to_json() for each in self.clocks.skews()]
        return replace(answer, extra={"clocks": skews}) if skews else answer


_KINDS: Final = {
    "phase.start": "start",
    "phase.end": "end",
    "phase.fail": "fail",
    "phase.progress": "progress",
    "phase.dispatch": "progress",
}
_Taker = Callable[[JournalAudit, int, Evidence, str, Told, Mapping[str, Any]], None]
_TAKERS: Final[dict[str, _Taker]] = {
    "phase.start": JournalAudit._phase,
    "phase.end": JournalAudit._phase,
    "phase.fail": JournalAudit._phase,
    "phase.progress": JournalAudit._phase,
    "phase.dispatch": JournalAudit._phase,
    "fence.arrive": JournalAudit._arrive,
    "fence.pass": JournalAudit._pass,
    "fence.break": JournalAudit._break,
    "fence.decide": JournalAudit._decide,
    "epoch.begin": JournalAudit._begin,
    "epoch.end": JournalAudit._end,
    "recover.begin": JournalAudit._other,
    "recover.end": JournalAudit._recovered,
    "rank.stacks": JournalAudit._other,
    "rank.start": JournalAudit._start,
    "rank.exit": JournalAudit._exit,
    "plan": JournalAudit._plan,
    "journal.part": JournalAudit._part,
}
