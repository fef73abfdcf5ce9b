"""One seeded run of a plan in virtual time, for thousands of ranks.

Each rank's moves are the kernel's (`advance`): what may not happen is refused here as it would be
on a real rank. Fences are counted instead of searched, which is what makes thousands of ranks
cheap; a fence opens when its last member has come, and breaks for the reasons that it breaks for.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phasesync.core.kernel import (
    Kind,
    RankState,
    Stage,
    Status,
    advance,
    fences_left,
    next_step,
)
from phasesync.core.plan import Act, Plan, Wait, resolve
from phasesync.core.protocol import FenceDecl, PhaseDecl, Verb
from phasesync.errors import PlanError
from phasesync.simulator.faults import Fault
from phasesync.simulator.profile import Profile

__all__ = ("Moment", "Simulated", "compare", "simulate")


#: Faults of who does a phase or comes to a fence; others are of a message, or of a plan.
_AT_A_PLACE = frozenset(("crash", "fail", "hang", "slow"))


#: Where a fault strikes, if not at phases and fences.
_PLACES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "fail": ("phase", (PhaseDecl,)),
    "slow": ("phase", (PhaseDecl,)),
    "drop": ("fence", (FenceDecl,)),
}


class Moment(NamedTuple):
    """Something that happened, at a virtual time."""

    at_s: float
    rank: int
    kind: str
    name: str


@dataclass(slots=True, kw_only=True)
class Simulated:
    """What a run cost: seconds in all, in each phase, waited at each fence; peak GiB a device."""

    seed: int
    ranks: int
    total_s: float = 0.0
    epochs_done: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
    waits_s: dict[str, float] = field(default_factory=dict)
    longest_wait_s: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0
    peak_phase: str = ""
    broken: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """Seconds that ranks spent waiting, all together."""
        return sum(self.waits_s.values())

    def to_json(self) -> dict[str, object]:
        return {
            "simulate": 1,
            "seed": self.seed,
            "ranks": self.ranks,
            "total_s": self.total_s,
            "epochs_done": self.epochs_done,
            "phases_s": self.phases_s,
            "waits_s": self.waits_s,
            "longest_wait_s": self.longest_wait_s,
            "waited_s": self.waited_s,
            "peak_gib": self.peak_gib,
            "peak_phase": self.peak_phase,
            "broken": self.broken,
            "waiting": self.waiting,
            "missed": self.missed,
            "notes": self.notes,
        }


class _Fence:
    """One fence instance: how many have come, who waits, since when, and whose arrival is lost."""

    __slots__ = ("arrived", "broken", "lost", "opened", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.lost: set[int] = set()
        self.opened = False
        self.broken = ""
        self.waiting: dict[int, float] = {}


def simulate(
    plan: Plan,
    *,
    profile: Profile | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    epochs: int = 1,
    record: bool = False,
) -> Simulated:
    """One run under one seed; the same seed is the same run.

    Raises:
        PlanError: a fault names a rank or a place that the plan does not have.
    """
    for fault in faults:
        _doubted(plan, fault)
    return _Run(plan, profile or Profile(), faults, seed, epochs, record).run()


def _doubted(plan: Plan, fault: Fault) -> None:
    if fault.rank is not None and fault.rank >= len(plan.members):
        raise PlanError(f"{fault}: there is no rank {fault.rank}; there are {len(plan.members)}")
    steps = [*plan.protocol.steps, *plan.protocol.recover]
    kind, kinds = _PLACES.get(fault.kind, ("phase or fence", (PhaseDecl, FenceDecl)))
    names = dict.fromkeys(str(step.name) for step in steps if isinstance(step, kinds))
    if fault.place and fault.place not in names:
        raise PlanError(f"{fault}: no {kind} {fault.place!r}; it has: {', '.join(names)}")


def _who_does(plan: Plan, place: str) -> str:
    """The ranks that come to a phase or fence."""
    ranks = [
        str(plan.members[at])
        for at, program in enumerate(plan.programs)
        if any(place == (s.fence if isinstance(s, Wait) else s.phase) for s in program)
    ]
    more = ", ..." if len(ranks) > 4 else ""
    return ", ".join(ranks[:4]) + more if ranks else "nobody, under these options"


class _Run:
    """The run in progress: a queue of moments to come, ranks, fences, and memory."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        faults: Sequence[Fault],
        seed: int,
        epochs: int,
        record: bool,
    ) -> None:
        self.plan = plan
        self.profile = profile
        self.faults = faults
        self.epochs = epochs
        self.record = record
        self.chance = random.Random(seed)
        self.found = Simulated(seed=seed, ranks=len(plan.members))
        self.states = [RankState() for _ in plan.members]
        self.fences: dict[tuple[int, Stage, int, str], _Fence] = {}
        self.queue: list[tuple[float, int, int, str]] = []
        self.count = 0
        self.turns: dict[tuple[int, str], int] = {}
        self.struck: set[Fault] = set()
        self.dead: set[int] = set()
        self.gone: set[int] = set()  # The dead that are known to be: they have to be replaced.
        self.through: Counter[int] = Counter()  # How many ranks came to the end of an epoch.
        self.stuck: set[int] = set()
        self.width = len(plan.protocol.resources)
        self.gib = [profile.gib.get(each.name, 0.0) for each in plan.protocol.resources]
        self.mapped = list(plan.start)
        self.held = [
            sum(g for g, on in zip(self.gib, self._device(at), strict=True) if on)
            for at in range(len(plan.devices))
        ]

    def _device(self, device: int) -> list[bool]:
        return self.mapped[device * self.width : (device + 1) * self.width]

    # ------------------------------------------------------------------------------- the loop

    def run(self) -> Simulated:
        if (odd := self._mixed()) is not None:
            self.found.broken.append(odd)
            return self.found
        for rank in range(len(self.plan.members)):
            self._at(0.0, rank, "go")
        while self.queue:
            self.now, _, rank, what = heapq.heappop(self.queue)
            self.found.total_s = max(self.found.total_s, self._worked(what))
            self._DO[what](self, rank)
        self._finish()
        return self.found

    def _worked(self, what: str) -> float:
        """A deadline that came too late to matter is no part of the run."""
        return 0.0 if what == "deadline" else self.now

    def _at(self, when: float, rank: int, what: str) -> None:
        self.count += 1
        heapq.heappush(self.queue, (when, self.count, rank, what))

    def _mixed(self) -> str | None:
        """Ranks with other options hold another plan: the plan fence breaks before epoch 1."""
        for fault in self.faults:
            if fault.kind != "mixed" or fault.rank is None:
                continue
            options = {**dict(self.plan.options), fault.option: fault.value}
            counts: dict[str, int] = {}
            for member in self.plan.members:
                counts[member.role] = counts.get(member.role, 0) + 1
            other = resolve(self.plan.protocol, counts, options)
            if other.digest != self.plan.digest:
                who = self.plan.members[fault.rank]
                return f"plan: {who} holds another plan: {fault.change}"
        return None

    def _go(self, rank: int) -> None:
        """The rank takes its next step, if it is still there to do so."""
        state = self.states[rank]
        if rank in self.dead or rank in self.stuck:
            return
        if state.status is Status.FINISHED:
            if state.stage is Stage.EPOCH:
                self.through[state.epoch] += 1
            if state.epoch < self.epochs and not self.gone:
                self._move(rank, Kind.BEGIN, "")
                self._at(self.now, rank, "go")
            return
        if state.status not in (Status.READY, Status.STOPPED, Status.ABORTED):
            return
        if state.status is not Status.READY:
            if self.plan.recover[rank] and state.stage is Stage.EPOCH:
                self._move(rank, Kind.RECOVER, "")
                self._at(self.now, rank, "go")
            return
        left = fences_left(self.plan, rank, state)
        if left and (len(left) > 1 or state.stage is Stage.RECOVER):
            fence = self._fence(state, left[0])
            if fence.broken:
                self._leave(rank, Kind.ABORT, fence.broken)
                return
        match next_step(self.plan, rank, state):
            case Act() as act:
                self._act(rank, act)
            case Wait() as wait:
                self._arrive(rank, wait)
            case None:
                pass

    # -------------------------------------------------------------------------------- actions

    def _act(self, rank: int, act: Act) -> None:
        self._move(rank, Kind.START, act.phase)
        factor = 1.0
        for fault in self._faults(rank, act.phase):
            match fault.kind:
                case "crash":
                    self._crash(rank)
                    return
                case "hang":
                    self.stuck.add(rank)
                    return
                case "fail":
                    self._at(self.now + self.profile.span(act.phase).mean_s, rank, "fail")
                    return
                case _:
                    factor *= fault.factor
        self._map(rank, act, start=True)
        span = self.profile.span(act.phase).draw(self.chance) * factor
        self.found.phases_s[act.phase] = self.found.phases_s.get(act.phase, 0.0) + span
        self._at(self.now + span, rank, "end")

    def _faults(self, rank: int, place: str) -> list[Fault]:
        turn = self.turns[rank, place] = self.turns.get((rank, place), 0) + 1
        here = (each for each in self.faults if each.kind in _AT_A_PLACE)
        new = (each for each in here if each.kind == "slow" or each not in self.struck)
        hits = [fault for fault in new if fault.hits(rank, place, turn)]
        self.struck.update(hits)
        return hits

    def _end(self, rank: int) -> None:
        state = self.states[rank]
        if rank in self.dead or state.status is not Status.ACTING:
            return
        act = next_step(self.plan, rank, state)
        assert isinstance(act, Act)
        if not act.enqueued:
            self._map(rank, act, start=False)
        self._move(rank, Kind.END, act.phase)
        self._go(rank)

    def _fail(self, rank: int) -> None:
        state = self.states[rank]
        act = next_step(self.plan, rank, state)
        assert isinstance(act, Act)
        self._leave(rank, Kind.FAIL, f"{self.plan.members[rank]} failed in {act.phase}")

    def _map(self, rank: int, act: Act, *, start: bool) -> None:
        """Memory is held from the start of what acquires it to the end of what releases it."""
        for touch in act.touches:
            takes = touch.verb is Verb.ACQUIRES and start
            gives = touch.verb is Verb.RELEASES and not start
            ensures = touch.verb is Verb.ENSURES and not start
            if takes or gives or ensures:
                wanted = takes or (ensures and self.plan.start[touch.cell])
                self._set(touch.cell, wanted, act.phase)

    def _set(self, cell: int, mapped: bool, phase: str) -> None:
        if self.mapped[cell] == mapped:
            return
        self.mapped[cell] = mapped
        device, resource = divmod(cell, self.width)
        self.held[device] += self.gib[resource] * (1 if mapped else -1)
        if self.held[device] > self.found.peak_gib + 1e-9:
            self.found.peak_gib = self.held[device]
            self.found.peak_phase = phase

    # --------------------------------------------------------------------------------- fences

    def _fence(self, state: RankState, wait: Wait) -> _Fence:
        key = (state.epoch, state.stage, wait.scope, wait.fence)
        return self.fences.setdefault(key, _Fence())

    def _arrive(self, rank: int, wait: Wait) -> None:
        state = self.states[rank]
        fence = self._fence(state, wait)
        kinds = {fault.kind for fault in self._faults(rank, wait.fence)}
        if "crash" in kinds:
            self._crash(rank)
            return
        if "hang" in kinds:
            self.stuck.add(rank)
            return
        if "device_synchronised" in wait.established:
            for cell in state.pending:
                self._set(cell, False, wait.fence)
        self._move(rank, Kind.ARRIVE, wait.fence)
        if fence.broken:
            self._leave(rank, Kind.ABORT, fence.broken)
            return
        fence.waiting[rank] = self.now
        self._at(self.now + wait.deadline_s, rank, "deadline")
        if self._dropped(rank, wait.fence):
            fence.lost.add(rank)
            return
        fence.arrived += 1
        if fence.arrived >= self._needed(state, wait):
            self._open(fence, wait)

    def _dropped(self, rank: int, fence: str) -> bool:
        """Whether this arrival gets lost: the first that a fault means does."""
        for fault in self.faults:
            if fault.kind != "drop" or fault in self.struck:
                continue
            if fault.rank in (None, rank) and fault.place in ("", fence):
                self.struck.add(fault)
                return True
        return False

    def _needed(self, state: RankState, wait: Wait) -> int:
        members = self.plan.scopes[wait.scope].members
        if state.stage is Stage.RECOVER:
            return sum(member not in self.dead for member in members)
        return len(members)

    def _open(self, fence: _Fence, wait: Wait) -> None:
        fence.opened = True
        for rank, since in sorted(fence.waiting.items()):
            waited = self.now - since
            self.found.waits_s[wait.fence] = self.found.waits_s.get(wait.fence, 0.0) + waited
            longest = self.found.longest_wait_s.get(wait.fence, 0.0)
            self.found.longest_wait_s[wait.fence] = max(longest, waited)
            self._at(self.now + self.profile.fence_s, rank, "pass")
        fence.waiting.clear()

    def _pass(self, rank: int) -> None:
        state = self.states[rank]
        if rank in self.dead:
            return
        wait = next_step(self.plan, rank, state)
        assert isinstance(wait, Wait)
        self._move(rank, Kind.PASS, wait.fence)
        self._go(rank)

    def _deadline(self, rank: int) -> None:
        """The rank's patience is over, if it still waits where it waited."""
        state = self.states[rank]
        wait = next_step(self.plan, rank, state)
        if state.status is not Status.WAITING or not isinstance(wait, Wait):
            return
        fence = self._fence(state, wait)
        since = fence.waiting.get(rank)
        if since is None or fence.opened or self.now - since < wait.deadline_s:
            return
        self.found.total_s = max(self.found.total_s, self.now)
        members = self.plan.scopes[wait.scope].members
        here = fence.waiting.keys() - fence.lost
        missing = [str(self.plan.members[member]) for member in members if member not in here]
        said = ", ".join(missing[:4]) + ", ..." * (len(missing) > 4)
        self._break(fence, f"fence {wait.fence}: {said} did not come in {wait.deadline_s:g} s")

    def _break(self, fence: _Fence, why: str) -> None:
        if fence.opened or fence.broken:
            return
        fence.broken = why
        if why not in self.found.broken:
            self.found.broken.append(why)
        for rank in sorted(fence.waiting):
            self._leave(rank, Kind.ABORT, why)
        fence.waiting.clear()

    def _leave(self, rank: int, kind: Kind, why: str) -> None:
        """The rank leaves the epoch: it arrives as failed wherever it has not passed."""
        state = self.states[rank]
        step = next_step(self.plan, rank, state)
        left = fences_left(self.plan, rank, state)
        name = step.phase if isinstance(step, Act) else step.fence if step else ""
        self._move(rank, kind, left[0].fence if kind is Kind.ABORT and left else name)
        for wait in left:
            self._break(self._fence(state, wait), why)
        self._at(self.now, rank, "go")

    def _crash(self, rank: int) -> None:
        self.dead.add(rank)
        self.found.moments += [Moment(self.now, rank, "crash", "")] * self.record
        self._at(self.now + self.profile.notice_s, rank, "notice")

    def _notice(self, rank: int) -> None:
        self.gone.add(rank)
        state = self.states[rank]
        why = f"{self.plan.members[rank]} died"
        for wait in fences_left(self.plan, rank, state):
            self._break(self._fence(state, wait), why)

    def _move(self, rank: int, kind: Kind, name: str) -> None:
        self.states[rank] = advance(self.plan, rank, self.states[rank], kind, name)
        if self.record:
            self.found.moments.append(Moment(self.now, rank, str(kind), name))

    def _finish(self) -> None:
        whole = len(self.plan.members)
        self.found.epochs_done = sum(through == whole for through in self.through.values())
        if self.gone and self.found.epochs_done < self.epochs:
            who = ", ".join(str(self.plan.members[rank]) for rank in sorted(self.gone)[:4])
            self.found.notes.append(f"the run ends here, to be started again with another {who}")
        for fault in self.faults:
            if fault not in self.struck and fault.kind != "mixed":
                does = f"; {fault.place} is done by {_who_does(self.plan, fault.place)}"
                self.found.missed.append(f"{fault} never struck{does if fault.place else ''}")
        for rank, state in enumerate(self.states):
            if rank not in self.dead and state.status is Status.WAITING:
                self.found.waiting.append(str(self.plan.members[rank]))

    _DO = {  # noqa: RUF012  A table, read only.
        "go": _go,
        "end": _end,
        "fail": _fail,
        "pass": _pass,
        "deadline": _deadline,
        "notice": _notice,
    }


#: What-ifs name so many fences at which most has changed, if it is a hundredth of all waiting.
_FENCES_SHOWN = 3


def compare(runs: Mapping[str, Simulated]) -> tuple[str, ...]:
    """What-ifs side by side: seconds in all, an epoch and waited, a line a run; below each after
    the first, the fences at which the waiting differs most from the first."""
    width = max(map(len, runs), default=0)
    lines: list[str] = []
    first: Simulated | None = None
    for name, run in runs.items():
        each = run.total_s / run.epochs_done if run.epochs_done else None
        step = "no epoch whole" if each is None else f"{each:.2f} s an epoch"
        lines.append(
            f"{name:<{width}}  {run.total_s:9.2f} s in all, {step}, {run.waited_s:12.2f} s waited"
        )
        if first is not None:
            lines += _differences(first, run)
        first = first or run
    return tuple(lines)


def _differences(before: Simulated, after: Simulated) -> Iterator[str]:
    """The fences at which most has changed."""
    one, two = before.waits_s, after.waits_s
    change = {name: two.get(name, 0.0) - one.get(name, 0.0) for name in {**one, **two}}
    least = 0.01 * max(before.waited_s, after.waited_s, 1e-9)
    for name in sorted(change, key=lambda each: -abs(change[each]))[:_FENCES_SHOWN]:
        if abs(change[name]) >= least:
            was, now = one.get(name, 0.0), two.get(name, 0.0)
            yield f"  fence {name}: {was:.2f} -> {now:.2f} s waited"
