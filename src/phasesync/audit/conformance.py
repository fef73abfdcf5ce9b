"""A run's journals against its protocol: the kernel asked about what was logged.

Each line moves one rank through the kernel's own tables and touches the memory cells that its phase
declares. What a line does that the kernel refuses is a finding, and so is what the properties
forbid. Ranks are ordered by their own lines and by the fences that they passed; where nothing but a
clock orders two of them, the answer says so.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from phasesync.audit.answer import BROKEN, NOTE, Evidence, Finding
from phasesync.core.kernel import (
    Kind,
    Mapped,
    Moment,
    RankState,
    Stage,
    Status,
    advance,
    apply,
    cell,
    next_step,
    program,
    refusal,
)
from phasesync.core.model import Rank, RoleName
from phasesync.core.plan import Act, Plan, Touch, Wait, resolve
from phasesync.core.properties import Violation, raced, together, unmapped, wanted
from phasesync.core.protocol import Protocol, Verb
from phasesync.errors import PlanError

__all__ = ("Conformance",)

_ENDED = frozenset((Status.STOPPED, Status.ABORTED, Status.FINISHED))


@dataclass(slots=True)
class _Seen:
    """What is known of one rank: where it stands, and what it is in."""

    state: RankState
    line: Evidence
    act: Act | None = None
    act_line: Evidence | None = None
    host: str = ""


class Conformance:
    """The replay of one run; `see` is fed its lines in an order that its tickets allow.

    `protocol` gives the declaration by the name that the journal has for it, or None.
    """

    def __init__(self, protocol: Callable[[str], Protocol | None]) -> None:
        self._protocol = protocol
        self._plan: Plan | None = None
        self._index: dict[tuple[str, int], int] = {}
        self._ranks: dict[int, _Seen] = {}
        self._cells: dict[int, int] = {}
        self._held_by: dict[int, tuple[int, int]] = {}
        self._is_past_an_epoch = False
        self._findings: list[Finding] = []
        self._told: set[tuple[Any, ...]] = set()

    @property
    def plan(self) -> Plan | None:
        """The plan that the run agreed on, once its line was seen."""
        return self._plan

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the protocol forbids and the log shows, in the order it was seen."""
        return tuple(self._findings)

    def see(self, at: int, where: Evidence, line: Mapping[str, Any]) -> None:
        """One line of the journal."""
        name = line.get("event")
        if name == "plan":
            self._begin(at, where, line)
            return
        handler = _HANDLERS.get(str(name))
        if handler is None or self._plan is None:
            return
        who = self._index.get((str(line.get("role")), int(line.get("rank", -1))))
        if who is None:
            return
        seen = self._ranks[who]
        seen.line = where
        handler(self, at, who, seen, line)

    # ------------------------------------------------------------------ the plan

    def _begin(self, at: int, where: Evidence, line: Mapping[str, Any]) -> None:
        if self._plan is not None:
            return
        protocol = self._protocol(str(line.get("protocol")))
        if protocol is None:
            self._note(
                at, where, f"protocol {line.get('protocol')!r} is not known here; give its file"
            )
            return
        try:
            plan = _plan_of(protocol, line)
        except (PlanError, LookupError, TypeError, ValueError, AttributeError) as error:
            self._note(at, where, f"the plan line does not fit protocol {protocol.name!r}: {error}")
            return
        if plan.digest != line.get("digest"):
            self._note(
                at,
                where,
                f"the run was made with another {protocol.name!r} than the one it is judged by "
                f"(digests {str(line.get('digest'))[:12]} and {plan.digest[:12]})",
            )
        self.follow(plan, where)

    def follow(self, plan: Plan, where: Evidence) -> None:
        """Judge by `plan` from here on, with all memory as it is at the start of an epoch."""
        self._plan = plan
        self._index = {(rank.role, rank.number): at for at, rank in enumerate(plan.members)}
        self._ranks = {who: _Seen(RankState(), where) for who in range(len(plan.members))}
        self._cells = {
            number: cell(Mapped.YES if start else Mapped.NO, 0 if start and content else -1)
            for number, (start, content) in enumerate(zip(plan.start, plan.content, strict=True))
        }

    def whole_epoch(self) -> None:
        """An epoch of all ranks was as it should be, and its lines are not gone through."""
        self._is_past_an_epoch = True

    # ------------------------------------------------------------------ lines

    def _epoch(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        epoch = int(line.get("epoch", seen.state.epoch))
        incarnation = int(line.get("incarnation", 0))
        seen.state = RankState(epoch=epoch, incarnation=incarnation)
        seen.host = str(line.get("host", ""))

    def _recover(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        seen.state = seen.state._replace(stage=Stage.RECOVER, at=0, status=Status.READY)

    def _start(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        assert self._plan is not None
        phase = str(line.get("phase"))
        act = self._position(at, who, seen, phase, line)
        if act is None:
            return
        seen.state = advance(self._plan, who, seen.state, Kind.START, phase)
        seen.act, seen.act_line = act, seen.line
        rank = self._plan.members[who]
        version = seen.state.epoch
        for violation in wanted(self._plan, rank, act, self._cells, version):
            self._broken(at, who, seen, act, violation)
        for violation in raced(self._plan, rank, act, self._others(who)):
            self._broken(at, who, seen, act, violation)
        self._touch(who, act, Moment.START, version, int(line.get("seq", 0)))
        width = len(self._plan.protocol.resources)
        devices = {touch.cell // width for touch in act.touches}
        if devices:
            maps = self._maps(act)
            for violation in together(self._plan, rank, self._cells, devices):
                if maps.intersection((violation.device, name) for name in violation.resources):
                    self._broken(at, who, seen, act, violation)
            moved = {self._plan.cell_name(touch.cell) for touch in act.touches}
            for violation in unmapped(self._plan, rank, self._cells, devices):
                if (violation.device, violation.resources[0]) in moved:
                    self._broken(at, who, seen, act, violation)

    def _maps(self, act: Act) -> set[tuple[str, str]]:
        """What the action maps: memory that was together before it is not its doing."""
        plan = self._plan
        assert plan is not None
        return {
            plan.cell_name(touch.cell)
            for touch in act.touches
            if touch.verb is Verb.ACQUIRES
            or (touch.verb is Verb.ENSURES and plan.start[touch.cell])
        }

    def _end(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        self._over(who, seen, line, Kind.END, Moment.END)

    def _progress(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        """Inside a phase its rank can say that its device has done all that was enqueued."""
        if line.get("device_complete") is not True or seen.act is None:
            return
        own = (touch.cell for touch in seen.act.touches if touch.verb is Verb.RELEASES)
        self._synchronised(who, {*seen.state.pending, *own}, int(line.get("seq", 0)))
        seen.state = seen.state._replace(pending=())

    def _fail(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        self._over(who, seen, line, Kind.FAIL, Moment.FAIL)

    def _over(
        self, who: int, seen: _Seen, line: Mapping[str, Any], kind: Kind, moment: Moment
    ) -> None:
        plan, act = self._plan, seen.act
        assert plan is not None
        if act is None or act.phase != line.get("phase"):
            return
        seen.act = None
        seq = int(line.get("seq", 0))
        self._touch(who, act, moment, seen.state.epoch, seq)
        if refusal(plan, who, seen.state, kind, act.phase) is None:
            seen.state = advance(plan, who, seen.state, kind, act.phase)
        if kind is Kind.END and line.get("device_complete") is True:
            self._synchronised(who, seen.state.pending, seq)
            seen.state = seen.state._replace(pending=())

    def _synchronised(self, who: int, pending: Iterable[int], seq: int) -> None:
        """What a rank had enqueued has happened."""
        assert self._plan is not None
        for number in pending:
            self._cells[number] = apply(
                self._plan, self._cells[number], Touch(Verb.RELEASES, number), Moment.SYNC, 0
            )
            self._held_by[number] = (who, seq)

    def _break(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        """Whoever is known to be dead acts no more: what comes after does not race with it."""
        if line.get("cause_kind") != "dead":
            return
        for name in line.get("cause_ranks") or ():
            role, _, number = str(name).rpartition("/")
            dead = self._index.get((role, int(number))) if number.isdecimal() else None
            if dead is not None:
                self._ranks[dead].act = None

    def _arrive(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        assert self._plan is not None
        fence = str(line.get("fence"))
        if line.get("status") == "failed":
            if seen.state.status not in _ENDED:
                seen.state = seen.state._replace(status=Status.ABORTED)
            return
        wait = self._fence_ahead(who, seen, fence)
        if wait is None:
            return
        self._pass_over(at, who, seen, wait)
        pending = seen.state.pending
        seen.state = advance(self._plan, who, seen.state, Kind.ARRIVE, fence)
        if "device_synchronised" in wait.established:
            self._synchronised(who, pending, int(line.get("seq", 0)))

    def _pass(self, at: int, who: int, seen: _Seen, line: Mapping[str, Any]) -> None:
        assert self._plan is not None
        fence = str(line.get("fence"))
        if refusal(self._plan, who, seen.state, Kind.PASS, fence) is None:
            seen.state = advance(self._plan, who, seen.state, Kind.PASS, fence)

    # ------------------------------------------------------------------ where a rank stands

    def _position(
        self, at: int, who: int, seen: _Seen, phase: str, line: Mapping[str, Any]
    ) -> Act | None:
        """The declared action that the line starts; fences that were left out are told."""
        plan = self._plan
        assert plan is not None
        steps = program(plan, who, seen.state.stage)
        ahead = range(min(seen.state.at, len(steps)), len(steps))
        target = next(
            (n for n in ahead if isinstance(steps[n], Act) and steps[n][0] == phase), None
        )
        if target is None:
            self._illegal(at, who, seen, Kind.START, phase)
            return None
        skipped = [step for step in steps[seen.state.at : target] if isinstance(step, Wait)]
        if seen.state.status in (Status.READY, Status.WAITING) and target != seen.state.at:
            self._left_out(at, who, seen, phase, skipped)
        seen.state = seen.state._replace(at=target, status=Status.READY)
        act = steps[target]
        assert isinstance(act, Act)
        return act

    def _pass_over(self, at: int, who: int, seen: _Seen, wait: Wait) -> None:
        plan = self._plan
        assert plan is not None
        steps = program(plan, who, seen.state.stage)
        target = steps.index(wait)
        skipped = [step for step in steps[seen.state.at : target] if isinstance(step, Wait)]
        if skipped:
            self._left_out(at, who, seen, wait.fence, skipped)
        seen.state = seen.state._replace(at=target, status=Status.READY)

    def _fence_ahead(self, who: int, seen: _Seen, fence: str) -> Wait | None:
        assert self._plan is not None
        steps = program(self._plan, who, seen.state.stage)[seen.state.at :]
        return next((s for s in steps if isinstance(s, Wait) and s.fence == fence), None)

    def _left_out(self, at: int, who: int, seen: _Seen, name: str, skipped: list[Wait]) -> None:
        if not skipped:
            return
        assert self._plan is not None
        fences = ", ".join(repr(str(wait.fence)) for wait in skipped)
        key = ("left out", who, fences)
        if key in self._told:
            return
        self._told.add(key)
        self._note(
            at,
            seen.line,
            f"{self._plan.members[who]} came to {name!r} without passing fence {fences}; "
            "nothing but luck orders it after its peers",
        )

    def _illegal(self, at: int, who: int, seen: _Seen, kind: Kind, name: str) -> None:
        assert self._plan is not None
        reason = refusal(self._plan, who, seen.state, kind, name)
        rank = str(self._plan.members[who])
        here = next_step(self._plan, who, seen.state)
        started_over = seen.state.at and any(
            isinstance(step, Act) and step.phase == name
            for step in program(self._plan, who, seen.state.stage)[: seen.state.at]
        )
        if not started_over:
            self._note(at, seen.line, reason or f"{rank} is in no phase {name!r} of its protocol")
            return
        self._findings.append(
            Finding(
                rule="R-ONCE",
                strength=BROKEN,
                at=at,
                because=f"{rank} started {name!r} again in the same epoch ({reason or here})",
                epoch=seen.state.epoch,
                phase=name,
                guilty=(rank,),
                evidence=(seen.line,),
            )
        )

    # ------------------------------------------------------------------ memory

    def _touch(self, who: int, act: Act, moment: Moment, version: int, seq: int) -> None:
        assert self._plan is not None
        for touch in act.touches:
            enqueued = act.enqueued and touch.verb is Verb.RELEASES
            if moment is Moment.END and enqueued:
                continue
            self._cells[touch.cell] = apply(
                self._plan, self._cells[touch.cell], touch, moment, version
            )
            self._held_by[touch.cell] = (who, seq)

    def _others(self, who: int) -> list[tuple[Rank, Act]]:
        assert self._plan is not None
        width = len(self._plan.protocol.resources)
        busy = []
        for other in self._near(who):
            act = self._ranks[other].act
            if act is not None and act.touches and width:
                busy.append((self._plan.members[other], act))
        return busy

    def _near(self, who: int) -> list[int]:
        """The ranks that can touch what this one touches: those of its groups."""
        assert self._plan is not None
        near = {
            member
            for _, parts in self._plan.groups
            for part in parts
            if who in part
            for member in part
        }
        return sorted(near - {who})

    def _broken(self, at: int, who: int, seen: _Seen, act: Act, violation: Violation) -> None:
        plan = self._plan
        assert plan is not None
        rule = self._rule(who, act, violation)
        key = (rule, who, seen.state.epoch, act.phase)
        if key in self._told:
            return
        self._told.add(key)
        holders = [rank for rank in self._holders(who, violation) if rank != plan.members[who]]
        lines = [self._line_of(rank) for rank in holders]
        held = f", held by {', '.join(map(str, holders))}" if holders else ""
        hosts = self._hosts(seen, holders)
        self._findings.append(
            Finding(
                rule=rule,
                strength=BROKEN,
                at=at,
                because=(
                    f"{plan.members[who]} started {act.phase!r} on device {violation.device}: "
                    f"{violation.says}{held}"
                ),
                epoch=seen.state.epoch,
                phase=act.phase,
                guilty=(str(plan.members[who]),),
                evidence=(seen.line, *(line for line in lines if line is not None)),
                certainty="possible" if hosts else "in every order",
                hosts=hosts,
            )
        )

    def _rule(self, who: int, act: Act, violation: Violation) -> str:
        if violation.property != "mapped":
            return _RULES[violation.property]
        resource = violation.resources[0]
        for other in self._near(who):
            busy = self._ranks[other].act
            if busy is not None and self._acquires(busy, resource):
                return "R-FENCE-POST"
        return "R-MAPPED" if self._ever(violation) else "R-PREREQ"

    def _acquires(self, act: Act, resource: str) -> bool:
        assert self._plan is not None
        return any(
            touch.verb is Verb.ACQUIRES and self._plan.cell_name(touch.cell)[1] == resource
            for touch in act.touches
        )

    def _ever(self, violation: Violation) -> bool:
        """Whether anybody has touched that memory in this log."""
        assert self._plan is not None
        touched = self._touched_by_all if self._is_past_an_epoch else self._held_by
        cell = (violation.device, violation.resources[0])
        return any(self._plan.cell_name(number) == cell for number in touched)

    @cached_property
    def _touched_by_all(self) -> frozenset[int]:
        """All memory that is touched in an epoch in which every rank keeps to its program."""
        assert self._plan is not None
        acts = (step for steps in self._plan.programs for step in steps if isinstance(step, Act))
        return frozenset(touch.cell for act in acts for touch in act.touches)

    def _holders(self, who: int, violation: Violation) -> list[Rank]:
        """The active ranks behind a violation: whose memory is in the way, or who is busy there."""
        plan = self._plan
        assert plan is not None
        if violation.property == "race":
            return list(violation.holders)
        passive = {role.name for role in plan.protocol.roles if role.passive}
        return [rank for rank in violation.holders if RoleName(rank.role) not in passive]

    def _line_of(self, rank: Rank) -> Evidence | None:
        seen = self._ranks.get(self._index.get((rank.role, rank.number), -1))
        if seen is None:
            return None
        return seen.act_line or seen.line

    def _hosts(self, seen: _Seen, holders: list[Rank]) -> tuple[str, ...]:
        """The hosts whose clocks alone order a rank and its holders; none where they share one."""
        hosts = {self._ranks[self._index[rank.role, rank.number]].host for rank in holders}
        return (seen.host, *sorted(hosts - {seen.host})) if hosts - {seen.host} else ()

    def _note(self, at: int, where: Evidence, because: str) -> None:
        self._findings.append(
            Finding(rule=None, strength=NOTE, at=at, because=because, evidence=(where,))
        )


_RULES = {
    "never": "R-FENCE",
    "race": "R-LIFETIME",
    "once": "R-ONCE",
    "content": "R-CONTENT",
    "always": "R-MAPPED",
    "agree": "R-VERSION",
    "monotone": "R-MONOTONE",
}
_HANDLERS: dict[str, Callable[[Conformance, int, int, _Seen, Mapping[str, Any]], None]] = {
    "epoch.begin": Conformance._epoch,
    "recover.begin": Conformance._recover,
    "phase.start": Conformance._start,
    "phase.end": Conformance._end,
    "phase.progress": Conformance._progress,
    "phase.fail": Conformance._fail,
    "fence.arrive": Conformance._arrive,
    "fence.pass": Conformance._pass,
    "fence.break": Conformance._break,
}


def _plan_of(protocol: Protocol, line: Mapping[str, Any]) -> Plan:
    """The plan that the run agreed on, from its own line."""
    members = [Rank.parse(text) for text in line["members"]]
    counts: dict[str, int] = {}
    for member in members:
        counts[member.role] = counts.get(member.role, 0) + 1
    devices = [line["devices"][at] for at in line["place"]]
    plan = resolve(protocol, counts, line["options"], devices=devices, groups=line["groups"])
    if list(plan.members) != members:
        return replace(plan, members=tuple(members))
    return plan
