"""The journals of one run as events for the rules, lines for the kernel, and facts of their own.

What a journal says is believed; what it lacks is a finding. A rank whose log is missing or torn is
never covered by an `ok`, and is the first suspect of whatever it was needed for.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from phasesync.audit.answer import (
    BROKEN,
    FAILED,
    NOTE,
    SUSPECTED,
    Answer,
    Evidence,
    Finding,
)
from phasesync.audit.auditor import Audit
from phasesync.audit.clocks import Clocks
from phasesync.audit.conformance import Conformance
from phasesync.audit.events import EMPTY, Event, Header, text_of
from phasesync.audit.gist import Block, Gist
from phasesync.audit.luck import Luck
from phasesync.audit.merge import instance_of
from phasesync.audit.rules.base import Rule
from phasesync.audit.rules.payload import Exclusive, Lifetime
from phasesync.audit.rules.residue import Drift
from phasesync.audit.rules.service import Timeouts, Windows
from phasesync.audit.rules.versions import Evidenced, Monotone, Scope, Versions
from phasesync.audit.rules.waiting import Hangs
from phasesync.audit.traces import RawLine
from phasesync.audit.vocabulary import Meaning
from phasesync.core.protocol import Protocol
from phasesync.core.wire import sha256

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
_ROOTS: Final = frozenset({"failed", "dead", "evidence", "cancelled", "deadline", "store_lost"})
_NOBODY: Final = frozenset({"store_lost", "restarted", "duplicate"})


class _Cause(NamedTuple):
    """Why a fence broke, as a `fence.break` line says it."""

    kind: str
    ranks: tuple[str, ...]
    phase: str | None
    epoch: int


class _Rank:
    """What one rank's journals tell of themselves."""

    __slots__ = (
        "boots",
        "cut",
        "epoch",
        "exit",
        "failed",
        "first",
        "incarnation",
        "last",
        "phase",
        "seq",
        "status",
        "stopped",
        "waits",
    )

    def __init__(self) -> None:
        self.seq = -1
        self.incarnation = -1
        self.first: Evidence | None = None
        self.last: Evidence | None = None
        self.exit: str | None = None
        self.epoch: int | None = None
        self.phase: str | None = None
        self.failed: tuple[Evidence, str | None, str] | None = None
        self.stopped = False
        self.cut: str | None = None
        self.waits: tuple[object, ...] | None = None
        self.status = ""
        self.boots: set[object] = set()


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
        self._ranks: dict[str, _Rank] = {}
        self._counts: dict[str, int] = {}
        self._causes: dict[_Cause, tuple[Evidence, Mapping[str, Any], int]] = {}
        self._missed: dict[_Cause, dict[str, str | None]] = {}
        self._judged: dict[tuple[object, ...], tuple[Evidence, Any]] = {}
        self._arrived: dict[tuple[object, ...], dict[str, tuple[Evidence, list[Any]]]] = {}
        self._hashes: dict[tuple[object, ...], tuple[str, str, Evidence]] = {}
        self._scopes: dict[str, tuple[str, ...]] = {}
        self._digests: dict[object, dict[str, Evidence]] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._planned = False
        self._incomplete: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._begins: dict[str, tuple[int, Evidence]] = {}
        self._kept: dict[str, int] = {}
        self._luck: Luck | None = None

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
        self._ranks.setdefault(name, _Rank())
        return name

    def _sequence(self, name: str, rank: _Rank, line: Mapping[str, Any], where: Evidence) -> None:
        """A line that does not follow the last one of its rank: lost lines, or another start."""
        incarnation = line.get("incarnation", 0)
        seq = line.get("seq")
        if incarnation != rank.incarnation:
            if rank.incarnation >= 0 and type(incarnation) is int:
                self._note(f"{name} was started again (incarnation {incarnation})", where)
            rank.incarnation = incarnation if type(incarnation) is int else 0
            rank.exit, rank.first = None, rank.first or where
            if line.get("event") == "journal.part" and type(seq) is int:
                self._begins.setdefault(name, (seq, where))
            elif seq not in (0, None):
                self._incomplete.add(name)
                self._note(f"{name}: its first line is number {seq}", where, SUSPECTED)
            return
        self._incomplete.add(name)
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
        rank = self._ranks.setdefault(name, _Rank())
        rank.seq, rank.incarnation = gist.seq + gist.count - 1, gist.incarnation
        rank.epoch = gist.epoch
        rank.last = Evidence(block.file, block.last)
        rank.status, rank.phase, rank.stopped = "ended", None, False
        self.at += gist.count
        self.audit.events += gist.count

    def position(self, name: str) -> tuple[int, int]:
        """The incarnation of a rank's last line, and its number."""
        rank = self._ranks.setdefault(name, _Rank())
        return rank.incarnation, rank.seq

    def omit(self, name: str, block: Block) -> None:
        """Leave out a block of a rank, but for where it ends."""
        rank = self._ranks.setdefault(name, _Rank())
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
            rank = trial._ranks[name] = _Rank()
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
            + len(self._causes)
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
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
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
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        self.clocks.arrive(instance, line)
        if line.get("caller") != "outside":
            if len(self._arrived) > 4096:
                self._arrived.pop(next(iter(self._arrived)))
            status = "failed" if line.get("status") == "failed" else "ok"
            row = [
                name,
                line.get("incarnation", 0),
                status,
                line.get("seq"),
                line.get("free_bytes"),
            ]
            self._arrived.setdefault(instance, {})[name] = (where, row)
        digest = line.get("digest")
        if line.get("fence") == "plan" and isinstance(digest, str):
            self._digests.setdefault(instance, {})[name] = where
        if line.get("status") == "failed":
            return
        rank.waits = instance
        scope = str(line.get("scope"))
        attrs: dict[str, Any] = {"group": scope, "call": line.get("generation")}
        self._event(at, where, name, line, "start", str(line.get("fence")), attrs, _FENCE)

    def _pass(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        rank.waits = None
        self.clocks.passed(instance, line)
        ticket = line.get("ticket")
        if isinstance(ticket, dict):
            self._ticket(at, where, name, instance, ticket, line)
        attrs = {"group": str(line.get("scope")), "call": line.get("generation")}
        self._event(at, where, name, line, "end", str(line.get("fence")), attrs, _FENCE)

    def _ticket(
        self,
        at: int,
        where: Evidence,
        name: str,
        instance: tuple[object, ...],
        ticket: Mapping[str, Any],
        line: Mapping[str, Any],
    ) -> None:
        """One instance has one verdict: all tickets of it carry one hash."""
        found = str(ticket.get("hash"))
        known = self._hashes.get(instance)
        if known is None:
            if len(self._hashes) > 4096:
                self._hashes.pop(next(iter(self._hashes)))
            self._hashes[instance] = (found, name, where)
        elif known[0] != found:
            self.audit.add(
                self._split(
                    at, line, f"{name} and {known[1]} hold different tickets", where, known[2]
                )
            )

    def _split(self, at: int, line: Mapping[str, Any], what: str, *lines: Evidence) -> Finding:
        fence = str(line.get("fence"))
        return Finding(
            rule="R-EPOCH",
            strength=BROKEN,
            at=at,
            because=(
                f"fence {fence!r} ({text_of(line.get('scope'), 60)}, generation "
                f"{text_of(line.get('generation'), 20)}): {what}"
            ),
            epoch=line.get("epoch") if type(line.get("epoch")) is int else None,
            fence=fence,
            evidence=lines,
        )

    def _decide(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        """The list that was judged, against each rank's own line and against the tickets."""
        judged = line.get("judged")
        if not isinstance(judged, list):
            return
        instance = instance_of(line)
        arrived = self._arrived.get(instance, {})
        for row in judged:
            if not isinstance(row, list) or len(row) < 4:
                self._note("a judged list that is none", where, SUSPECTED)
                return
            own = arrived.get(str(row[0]))
            if own is not None and row[2] == "ok" and own[1][1 : len(row)] != row[1:]:
                what = f"it judged {row[0]} by an arrival that is not in that rank's journal"
                self.audit.add(self._split(at, line, what, where, own[0]))
        known = self._hashes.get(instance)
        if line.get("verdict") == "open" and known is not None and known[0] != sha256(judged):
            what = f"the ticket of {known[1]} is not of the list that was judged"
            self.audit.add(self._split(at, line, what, where, known[2]))
        elif line.get("verdict") == "open":
            self._hashes.setdefault(instance, (sha256(judged), name, where))

    def _break(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        instance = instance_of(line)
        rank.stopped = True
        if instance in self._hashes:
            known = self._hashes[instance]
            self.audit.add(
                self._split(at, line, f"open for {known[1]}, broken for {name}", where, known[2])
            )
        kind = str(line.get("cause_kind"))
        ranks = tuple(map(str, line.get("cause_ranks") or ()))
        phase, epoch = line.get("cause_phase"), line.get("epoch")
        cause = _Cause(
            kind, ranks, str(phase) if phase else None, epoch if type(epoch) is int else 0
        )
        if cause not in self._causes and len(self._causes) < 1024:
            self._causes[cause] = (where, line, at)
            if kind == "deadline":
                told = ranks or tuple(map(str, line.get("missing") or ()))
                self._missed[cause] = self._absentees(instance, told)
        attrs = {"group": str(line.get("scope")), "call": line.get("generation")}
        self._event(at, where, name, line, "abort", str(line.get("fence")), attrs, _FENCE)

    def _begin(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
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
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        rank.phase = None
        rank.status = "failed" if line.get("error") else "ended"

    def _exit(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        rank.exit = "bad" if line.get("error_type") else "good"

    def _plan(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
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
        devices, place = line.get("devices"), line.get("place")
        if isinstance(devices, list) and isinstance(place, list):
            for each, on in zip(names, place, strict=False):
                if type(on) is int and 0 <= on < len(devices):
                    self._hosts[each] = str(devices[on]).rpartition("/")[0]

    def _start(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        boot = line.get("boot")
        if boot is not None:
            rank.boots.add(str(boot))

    def _part(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        """A new file of the same journal says from which line on older ones were kept."""
        kept = line.get("kept_seq")
        if type(kept) is int:
            self._kept[name] = max(kept, self._kept.get(name, 0))

    def _cut_off(self) -> list[Finding]:
        """Journals that begin later than their rotation left them."""
        late = {
            name: begin
            for name, begin in self._begins.items()
            if begin[0] > self._kept.get(name, 0)
        }
        self._incomplete.update(late)
        return [
            Finding(
                rule="R-DUMPSET",
                strength=SUSPECTED,
                at=-1,
                because=(
                    f"the journal of {name} begins at line number {seq}, and its rotation kept all "
                    f"from {self._kept.get(name, 0)} on: a file of it is missing"
                ),
                evidence=(where,),
                record_next=(f"every file of the journal of {name}",),
            )
            for name, (seq, where) in late.items()
        ]

    def _other(
        self, at: int, where: Evidence, name: str, rank: _Rank, line: Mapping[str, Any]
    ) -> None:
        return

    # ------------------------------------------------------------------ the end

    def answer(self) -> Answer:
        """The verdict on the run."""
        lacking = [*self._lacking(), *self._cut_off()]
        if self.conformance is not None:
            for finding in self.conformance.findings:
                self.audit.add(self._believed(finding))
        lucky = self._luck.findings() if self._luck else []
        for finding in (*self._from_causes(), *lacking, *lucky):
            self.audit.add(finding)
        for finding in self.clocks.findings():
            self.audit.add(finding)
        self.audit.facts.skews = self.clocks.skews()
        answer = self.audit.answer(run=self.run)
        skews = [each.to_json() for each in self.clocks.skews()]
        return replace(answer, extra={"clocks": skews}) if skews else answer

    def _believed(self, finding: Finding) -> Finding:
        """What the kernel found, unless a line that it needed may be missing."""
        if finding.strength != BROKEN or not self._incomplete:
            return finding
        near = set(map(str, finding.guilty))
        for scope, members in self.audit.facts.members.items():
            if scope != "world" and near & set(map(str, members)):
                near |= set(map(str, members))
        if not near & self._incomplete:
            return finding
        who = ", ".join(sorted(near & self._incomplete))
        return replace(
            finding,
            strength=SUSPECTED,
            guilty=(),
            because=f"{finding.because}; but lines of {who} are missing",
            record_next=(f"every line of the journal of {who}",),
        )

    def _from_causes(self) -> list[Finding]:
        """Why fences broke, as all ranks were told: who failed, died, or never came."""
        found = []
        for cause, (where, line, at) in self._causes.items():
            told = [self._ranks[name].failed for name in cause.ranks if name in self._ranks]
            if cause.kind == "failed" and cause.ranks and all(told):
                continue  # That rank's own journal says it, and earlier.
            found.append(self._cause(cause, where, line, at))
        return found

    def _cause(self, cause: _Cause, where: Evidence, line: Mapping[str, Any], at: int) -> Finding:
        """Who is to blame for a broken fence, and in which phase."""
        kind, ranks, phase = cause.kind, cause.ranks, cause.phase
        error = text_of(line.get("error") or "", 300)
        fence = str(line.get("fence"))
        missing = tuple(map(str, line.get("missing") or ()))
        guilty = ranks or missing if kind not in _NOBODY else ()
        if cause in self._missed:
            guilty = tuple(self._missed[cause])
        rule: str | None = None
        strength = FAILED
        lines = [where]
        place = phase
        for name in guilty:
            rank = self._ranks.get(name)
            if rank is not None and rank.last is not None:
                lines.append(rank.last)
                place = place or self._missed.get(cause, {}).get(name) or rank.phase
        who = ", ".join(guilty) or "nobody"
        if kind == "deadline":
            because = f"{who} did not come to fence {fence!r} before its deadline"
            if place:
                because += f"; its journal ends in {place}"
        elif kind == "dead":
            because = f"{who} died" + (f" in {place}" if place else "")
        elif kind == "digest":
            rule, strength = "R-SAMEPLAN", BROKEN
            guilty = self._minority(ranks)
            because = f"ranks hold different plans: {error}"
        elif kind == "evidence":
            rule = "R-FREED" if "free" in error else None
            strength = BROKEN if rule else FAILED
            because = f"{who} could not show what fence {fence!r} requires"
        elif kind == "store_lost":
            strength = SUSPECTED
            because = f"the fence transport was lost at {fence!r}; what it decided is not known"
        else:
            because = f"{who}: {kind}" + (f" in {place}" if place else "")
        if error and kind not in ("digest",):
            because += f": {error}"
        epoch = line.get("epoch")
        return Finding(
            rule=rule,
            strength=strength,
            at=self._since(guilty, at),
            because=because,
            epoch=epoch if type(epoch) is int else None,
            phase=place,
            fence=None if place else fence,
            guilty=guilty,
            evidence=tuple(dict.fromkeys(lines)),
            record_next=("progress marks in long phases",) if kind == "deadline" else (),
        )

    def _absentees(
        self, fence: tuple[object, ...], missing: tuple[str, ...]
    ) -> dict[str, str | None]:
        """Who a fence waited for when it broke, and in which phase each was: in place of a rank
        that itself waited at another one, who was missing there.
        """
        found: dict[str, str | None] = {}
        left = list(missing)
        seen = {fence}
        while left:
            name = left.pop(0)
            rank = self._ranks.get(name)
            at = rank.waits if rank is not None else None
            if at is None:
                found[name] = (rank.phase or rank.cut) if rank is not None else None
            elif at not in seen:
                seen.add(at)
                came = self._arrived.get(at, {})
                members = map(str, self.audit.facts.members.get(str(at[1]), ()))
                left += [member for member in members if member not in came]
        return found or dict.fromkeys(missing)

    def _since(self, guilty: tuple[str, ...], at: int) -> int:
        """When a cause began: at the last line of who is gone, not when peers were told."""
        facts = self.audit.facts
        ends = [
            known.last.at
            for name in guilty
            if (known := facts.ranks.get(name)) is not None and known.last is not None
        ]
        return min([*ends, at])

    def _minority(self, ranks: tuple[str, ...]) -> tuple[str, ...]:
        world = self.audit.facts.header.ranks
        return ranks if ranks and 2 * len(ranks) < len(world) else ()

    def _lacking(self) -> list[Finding]:
        """Members without a journal, and journals that stop where others went on."""
        facts = self.audit.facts
        found = []
        expected = set(facts.header.ranks) | set(facts.members.get("world", ()))
        blamed = {name for cause in self._causes for name in cause.ranks}
        for _, line, _ in self._causes.values():
            blamed |= set(map(str, line.get("missing") or ()))
        names = sorted(str(each) for each in expected)
        known = {name: self._ranks.get(name) for name in names}
        lost = [name for name, rank in known.items() if rank is None or rank.last is None]
        self._incomplete.update(lost)
        found += self._lost(lost)
        for name, rank in known.items():
            if rank is None or rank.last is None:
                continue
            if rank.exit is not None or name in blamed:
                continue
            ahead = max((other.epoch or 0 for other in self._ranks.values()), default=0)
            others_left = any(other.exit for other in self._ranks.values())
            if (rank.epoch or 0) < ahead or others_left:
                found.append(self._cut_short(name, rank))
        return found

    def _lost(self, names: Sequence[str]) -> list[Finding]:
        """Journals that are not here, those of a whole host together."""
        every = Counter(self._hosts.values())
        here = Counter(self._hosts[name] for name in names if name in self._hosts)
        whole = {host for host, count in here.items() if host and count == every[host]}
        what = {
            f"every journal of host {text_of(host, 80)} is missing": tuple(
                name for name in names if self._hosts.get(name) == host
            )
            for host in sorted(whole)
        }
        what |= {
            f"the journal of {name} is missing": (name,)
            for name in names
            if self._hosts.get(name) not in whole
        }
        return [
            Finding(
                rule="R-DUMPSET",
                strength=SUSPECTED,
                at=-1,
                because=because + (f" ({', '.join(ranks[:8])})" if len(ranks) > 1 else ""),
                record_next=tuple(f"the journal of {name}" for name in ranks[:8]),
            )
            for because, ranks in what.items()
        ]

    def _cut_short(self, name: str, rank: _Rank) -> Finding:
        where = f" in {rank.phase}" if rank.phase else ""
        return Finding(
            rule="R-DUMPSET",
            strength=SUSPECTED,
            at=(1 << 59) + 1,
            because=(
                f"the journal of {name} stops{where} in epoch {rank.epoch}, while others went "
                "on: it "
                "died, or its last lines are missing"
            ),
            phase=rank.phase,
            epoch=rank.epoch,
            evidence=(rank.last,) if rank.last else (),
            record_next=(f"the whole journal of {name}",),
        )


_KINDS: Final = {
    "phase.start": "start",
    "phase.end": "end",
    "phase.fail": "fail",
    "phase.progress": "progress",
    "phase.dispatch": "progress",
}
_Taker = Callable[[JournalAudit, int, Evidence, str, _Rank, Mapping[str, Any]], None]
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
    "recover.end": JournalAudit._other,
    "rank.stacks": JournalAudit._other,
    "rank.start": JournalAudit._start,
    "rank.exit": JournalAudit._exit,
    "plan": JournalAudit._plan,
    "journal.part": JournalAudit._part,
}
