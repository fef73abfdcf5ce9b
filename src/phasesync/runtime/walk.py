"""One rank's way through the steps of an epoch: its phases, its fences, and its caller's part.

Order inside a rank, which must survive edits: pass the fence (ticket), write the start line,
perform, write the end line, announce. Log first, then tell: after a crash the journal says at least
as much as any peer can have seen.
"""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from phasesync.core.kernel import Kind, Stage, Status, fences_left, lost_leaders, next_step
from phasesync.core.model import Broken, FenceCall, Rank, RootCause
from phasesync.core.plan import Act, Plan, Step, Wait
from phasesync.core.protocol import Retry, Verb
from phasesync.errors import RankLost
from phasesync.journal import Journal, line_cut
from phasesync.machine import RankMachine
from phasesync.runtime.actions import Bound, Turn
from phasesync.runtime.alarm import Alarm
from phasesync.runtime.calls import BlockingCalls
from phasesync.runtime.device import DevicePort, Proof, prove
from phasesync.runtime.fencing import RankFences
from phasesync.runtime.performing import CutOff, Done, Late, Performer, Raised

__all__ = ("STOPPED", "Halt", "Walk")

STOPPED = frozenset((Status.STOPPED, Status.ABORTED))
_POISONED = "its part of the recovery can never be done; the replica is poisoned"
_MOVES_MEMORY = frozenset((Verb.ACQUIRES, Verb.RELEASES, Verb.ENSURES))


class Halt(Exception):
    """This rank leaves the epoch: its own failure, or somebody else's that it learned of."""

    def __init__(self, cause: RootCause) -> None:
        super().__init__(cause)
        self.cause = cause


class Walk:
    """Where one rank stands, and what it has to hand to go on."""

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        *,
        actions: Mapping[str, Bound],
        blocking: BlockingCalls,
        fences: RankFences,
        journal: Journal,
        device: DevicePort,
        caller_joins: bool,
        mono_ns: Callable[[], int],
    ) -> None:
        self.rank = rank
        self.fences = fences
        self.journal = journal
        self.caller_joins = caller_joins
        self.phases_s: dict[str, float] = {}
        self.alarm = Alarm(fences.transport, f"{rank} heeds", fences.probe.asked)
        self._performer = Performer(self.alarm)
        self._actions = actions
        self._blocking = blocking
        self._device = device
        self._mono_ns = mono_ns
        self._free: int | None = None
        # Figures are read without a hop to a thread and back where that costs more than they do.
        self._reads_here = not device.blocks or getattr(device, "measures_at_once", False)
        self.take(plan)

    def take(self, plan: Plan) -> None:
        """Stand at the beginning of this plan."""
        self.plan = plan
        self._reads: dict[tuple[Stage, int], bool] = {}
        self.index = plan.index(self.rank)
        self.machine = RankMachine(plan, self.index)
        self._outside_from = self._where_outside_begins()
        self._met = self._have_met()

    @property
    def epoch(self) -> int:
        return self.machine.state.epoch

    def here(self) -> Step | None:
        """The step that the rank stands before or in."""
        return next_step(self.plan, self.index, self.machine.state)

    def fences_left(self) -> tuple[Wait, ...]:
        """The fences of this stage that the rank has not passed."""
        return fences_left(self.plan, self.index, self.machine.state)

    def is_fresh(self) -> bool:
        """Whether an epoch has been entered, and nothing of it done."""
        state = self.machine.state
        return state.at == 0 and state.status is Status.READY and state.stage is Stage.EPOCH

    async def on(self) -> None:
        """All steps of this stage, up to where the caller takes over.

        Raises:
            Halt: this rank leaves the epoch.
        """
        while (here := self.here()) is not None:
            if self.rest_is_outside() and not self.is_fresh():
                break
            match here:
                case Act():
                    await self._act(here)
                case Wait(joined=True) if self.caller_joins:
                    self._joined(here)
                case Wait():
                    await self._wait(here)
        in_epoch = self.machine.state.stage is Stage.EPOCH
        self.journal.write("epoch.end" if in_epoch else "recover.end")

    # ------------------------------------------------------------------ phases

    async def _act(self, act: Act) -> None:
        bound = self._actions.get(act.phase)
        if (broken := self.alarm.broken) is not None:
            self.fences.heard(broken)
            self.machine.fire(Kind.ABORT)
            raise Halt(broken.cause)
        self.machine.fire(Kind.START, act.phase)
        ticket = self.fences.plain_ticket()
        if bound is None:
            self.journal.hold("phase.start", phase=act.phase, ticket=ticket, caller="outside")
            self.phases_s[act.phase] = 0.0
            self.journal.hold("phase.end", phase=act.phase, duration_s=0.0, caller="outside")
        else:
            self.journal.write("phase.start", phase=act.phase, ticket=ticket)
            await self._do(act, bound)
        self.machine.fire(Kind.END, act.phase)

    async def _do(self, act: Act, bound: Bound) -> None:
        """The action, from its first moment to the line that says how long it took."""
        began = self._mono_ns()
        done: dict[str, Any] = {}
        await self._perform(act, bound, done)
        took = (self._mono_ns() - began) / 1e9
        self.phases_s[act.phase] = took
        if act.touches:  # A figure holds until something touches memory again.
            self._free = await self._read(act) if self._reads_after(act) else None
            done["free_bytes"] = self._free
        self.journal.hold("phase.end", phase=act.phase, duration_s=round(took, 6), **done)

    async def _perform(self, act: Act, bound: Bound, done: dict[str, Any]) -> None:
        """Run the action; one that may be tried again is, once. `done` is what it says of its
        end.
        """
        tries = 1 if act.retry is Retry.NEVER else 2
        for retry in range(tries):
            turn = self._turn(act, retry, done) if bound.takes_turn else None
            match await self._performer.once(bound, turn, act.deadline_s, self._next_call):
                case Done():
                    return
                case CutOff(broken=broken):
                    raise Halt(self._cut_off(act, broken))
                case Late(after_s=after_s):
                    late = f"it took longer than its deadline of {after_s:g} s"
                    raise Halt(self.own_failure(act, TimeoutError(late)))
                case Raised(error=error) if retry + 1 == tries:
                    raise Halt(self.own_failure(act, error)) from error
                case Raised(error=error):
                    self.journal.write(
                        "phase.progress",
                        level="warning",
                        phase=act.phase,
                        retry=retry + 1,
                        error_type=type(error).__name__,
                        error=str(error),
                    )

    def _turn(self, act: Act, retry: int, done: dict[str, Any]) -> Turn:
        return Turn(
            rank=self.rank,
            phase=act.phase,
            epoch=self.epoch,
            version=self.fences.version,
            ticket=self.fences.ticket,
            plan=self.plan,
            journal=self.journal,
            retry=retry,
            done=done,
        )

    def own_failure(self, act: Act, error: Exception) -> RootCause:
        """The action raised: what it acquires or releases is unknown, what it writes partial."""
        said = error.__cause__ if isinstance(error, RankLost) and error.__cause__ else error
        name, text = type(said).__name__, line_cut(str(error) or repr(error))
        self.journal.write(
            "phase.fail",
            level="error",
            phase=act.phase,
            error_type=name,
            error=text,
            where=_innermost(error),
        )
        self.machine.fire(Kind.FAIL, act.phase)
        return RootCause(
            kind=error.kind if isinstance(error, RankLost) else "failed",
            ranks=(self.rank,),
            phase=act.phase,
            error_type=name,
            error=text,
        )

    def _next_call(self) -> FenceCall | None:
        """The fence to heed while an action runs, if any.

        The break of the epoch's last fence is learned there and not before.
        """
        state = self.machine.state
        left = fences_left(self.plan, self.index, state)
        if len(left) < 2 or (left[0].joined and self.caller_joins):
            return None
        return self.fences.call(self.plan, state, left[0])

    def _cut_off(self, act: Act, broken: Broken) -> RootCause:
        """The action was cancelled because a peer failed: half done, and not this rank's fault."""
        self.fences.heard(broken)
        self.journal.write(
            "phase.fail",
            level="warning",
            phase=act.phase,
            error_type="Cancelled",
            error=f"fence {broken.fence!r} broke while the phase ran",
        )
        self.machine.fire(Kind.FAIL, act.phase)
        return broken.cause

    def _reads_after(self, act: Act) -> bool:
        """Whether free bytes are read after this step: it moves memory, and the fence behind it
        does not measure anyway."""
        state = self.machine.state
        where = state.stage, state.at
        known = self._reads.get(where)
        if known is None:
            steps = self.plan.programs if state.stage is Stage.EPOCH else self.plan.recover
            following = steps[self.index][state.at + 1 : state.at + 2]
            moves = any(touch.verb in _MOVES_MEMORY for touch in act.touches)
            known = self._reads[where] = moves and not any(map(_measures, following))
        return known

    async def _read(self, act: Act) -> int | None:
        if self._reads_here:
            return self._device.free_bytes()
        try:
            found: int | None = await self._blocking.run(self._device.free_bytes)
        except RankLost as error:
            raise Halt(self.own_failure(act, error)) from error
        return found

    # ------------------------------------------------------------------ fences

    async def _wait(self, wait: Wait) -> None:
        if self.alarm.is_on or _measures(wait):
            self.journal.push()
        call = self.fences.call(self.plan, self.machine.state, wait)
        proof = await self._prove(wait)
        if proof.error is not None:
            cause = RootCause(
                kind=proof.kind,
                ranks=(self.rank,),
                fence=wait.fence,
                error_type=proof.error_type,
                error=proof.error,
            )
            self.machine.fire(Kind.REFUSE, wait.fence)
            raise Halt(cause)
        if self.alarm.is_on:
            await self.alarm.off()
        self.fences.announce(call, free_bytes=proof.free_bytes)
        self.machine.fire(Kind.ARRIVE, wait.fence)
        if self.machine.state.stage is Stage.RECOVER and (lost := self._lost_leaders(wait)):
            self.machine.fire(Kind.ABORT)
            raise Halt(RootCause(kind="dead", ranks=lost, fence=wait.fence, error=_POISONED))
        answer = await self.fences.arrive(call, free_bytes=proof.free_bytes)
        if isinstance(answer, RootCause):
            self.machine.fire(Kind.ABORT)
            raise Halt(answer)
        self.fences.use_up((wait,))
        ticket = self.fences.opened(call, answer)
        self.machine.fire(Kind.PASS, wait.fence, ticket)

    def _lost_leaders(self, wait: Wait) -> tuple[Rank, ...]:
        """Dead leaders whose part of the recovery nobody can do: the replica is poisoned."""
        gone = [self.plan.index(rank) for rank in self.fences.gone if rank in self.plan.members]
        return tuple(self.plan.members[at] for at in lost_leaders(self.plan, wait, gone))

    async def _prove(self, wait: Wait) -> Proof:
        """Do what the fence requires, and measure; where it requires nothing, what is known."""
        if not _measures(wait):
            return Proof(self._free)
        if self._device.blocks and not (self._reads_here and not wait.established):
            proof: Proof = await self._blocking.run(lambda: prove(self._device, wait))
        else:
            proof = prove(self._device, wait)
        self._free = proof.free_bytes
        return proof

    def _joined(self, wait: Wait) -> None:
        call = self.fences.call(self.plan, self.machine.state, wait)
        self.machine.fire(Kind.ARRIVE, wait.fence)
        word = self.fences.joined(call)
        self.fences.use_up((wait,))
        self.machine.fire(Kind.PASS, wait.fence, word)

    # ------------------------------------------------------------------ outside the runtime

    def rest_is_outside(self) -> bool:
        """Whether all that is left of the epoch is the caller's own."""
        state = self.machine.state
        return (
            state.at >= self._outside_from
            and state.stage is Stage.EPOCH
            and state.status not in STOPPED
        )

    def _where_outside_begins(self) -> int:
        """From which step on an epoch is the caller's own; past the last one where none is."""
        steps = self.plan.programs[self.index]
        at = len(steps) if self.caller_joins else len(steps) + 1
        while 0 < at <= len(steps) and self._is_outside(steps[at - 1]):
            at -= 1
        return at

    def _is_outside(self, step: Step) -> bool:
        return step.joined if isinstance(step, Wait) else step.phase not in self._actions

    async def record_rest(self) -> RootCause | None:
        """The caller has done the rest of the epoch, or would not be here: record its word, and
        say why the epoch failed elsewhere if it did.

        A failure elsewhere in the epoch is learned at its last fence, as by everybody; there is no
        elsewhere where all its members met at a fence behind which they had nothing to do.
        """
        while (here := self.here()) is not None:
            if isinstance(here, Act):
                await self._act(here)
                continue
            last = len(self.fences_left()) == 1
            if last and not self._met and (broken := await self._broken_at(here)) is not None:
                self.fences.heard(broken)
                self.fences.use_up((here,))
                self.machine.fire(Kind.ARRIVE, here.fence)
                self.machine.fire(Kind.ABORT)
                return broken.cause
            self._joined(here)
        return None

    def _have_met(self) -> bool:
        """Whether all members of the last fence were at the last one before the caller took over,
        with nothing to do for any of them behind it."""
        steps = self.plan.programs[self.index]
        if not self.caller_joins or not self._outside_from:
            return False
        last, before = steps[-1], steps[self._outside_from - 1]
        if not isinstance(last, Wait) or not isinstance(before, Wait):
            return False
        met = self.plan.scopes[before.scope].members
        programs = [self.plan.programs[rank] for rank in met]
        return set(self.plan.scopes[last.scope].members) <= set(met) and all(
            isinstance(step, Wait) or step.outside
            for program in programs
            for step in program[program.index(before) :]
        )

    async def _broken_at(self, wait: Wait) -> Broken | None:
        call = self.fences.call(self.plan, self.machine.state, wait)
        verdict = await self.fences.transport.peek(call)
        return verdict if isinstance(verdict, Broken) else None


def _measures(step: Step) -> bool:
    return isinstance(step, Wait) and bool(step.established or step.evidence)


def _innermost(error: BaseException) -> str | None:
    """The last frame of the user's code: where to look first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/phasesync/" not in frame.filename] or list(frames)
    if not own:
        return None
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
