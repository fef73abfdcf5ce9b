"""Your own coroutines on simulated ranks: one process, virtual time, a schedule that replays.

    def test_update_weights(sim_world):
        async def main(rank):
            await rank.fence("transfer_done")
            await rank.at("offload")          # a place where faults may be planted

        sim_world(4).run(main)

A run that goes wrong raises `SimFailed` with its seed and schedule; the same two replay it.
"""

import asyncio
import contextlib
import contextvars
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from phasesync.core.model import (
    Arrival,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Rank,
    RoleName,
    RootCause,
    Ticket,
    Version,
)
from phasesync.errors import PlanError
from phasesync.fences.inprocess import InProcessEndpoint, InProcessFences
from phasesync.runtime import RankRunner
from phasesync.simulator.faults import Fault, parse_faults
from phasesync.world.loop import RANK, Deadlock, Loop
from phasesync.world.schedule import (
    Pct,
    Replay,
    Scheduler,
    Seeded,
    read_schedule,
    write_schedule,
)

__all__ = ("BlockingCall", "Injected", "Outcome", "SimFailed", "SimRank", "SimWorld")

Main: TypeAlias = Callable[["SimRank"], Awaitable[Any]]
NOTICE_S = 0.05  # Virtual time until a death is known.
SHOWN = 30


class Injected(Exception):
    """A failure that a fault planted."""


class BlockingCall(AssertionError):
    """Code under simulation blocked the event loop, which it would do on a real rank too."""


class SimFailed(AssertionError):
    """A run went wrong; `seed` and `schedule` replay it."""

    def __init__(self, why: str, outcome: "Outcome") -> None:
        super().__init__(why, outcome)
        self.why = why
        self.outcome = outcome

    def __str__(self) -> str:
        return "\n".join((self.why, *self.outcome.lines()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a rank did, at a virtual time."""

    at_s: float
    rank: str
    text: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run came to: what each rank returned or raised, and how to see it again."""

    seed: int
    spread: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    raised: dict[str, BaseException] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    schedule: str = ""
    time_s: float = 0.0
    steps: int = 0
    options: list[tuple[int, int]] = field(default_factory=list, repr=False)
    frozen: list[asyncio.Task[Any]] = field(default_factory=list, repr=False)

    def lines(self) -> Iterator[str]:
        """The end of the run as lanes, and how to replay it."""
        ranks = sorted({event.rank for event in self.events})
        width = max([14, *(len(event.text) + 2 for event in self.events[-SHOWN:])])
        if len(self.events) > SHOWN:
            yield f"({len(self.events) - SHOWN} events before)"
        yield ("    time  " + "".join(rank.ljust(width) for rank in ranks)).rstrip()
        for event in self.events[-SHOWN:]:
            column = " " * (width * ranks.index(event.rank))
            yield f"{event.at_s:8.3f}  {column}{event.text}"
        spread = f", spread={self.spread:g}" if self.spread else ""
        world = f"SimWorld(..., seed={self.seed}{spread})"
        yield f"replay: {world}.run(main, schedule={self.schedule!r})"


class SimRank:
    """One simulated rank, handed to the coroutine under test."""

    def __init__(self, world: "SimWorld", number: int, fences: InProcessFences) -> None:
        self.world = world
        self.number = number
        self.rank = Rank(RoleName(world.role), number)
        self.name = str(self.rank)
        self.fences: InProcessEndpoint = fences.endpoint(self.rank, gate=self._at_fence)
        self._generation = count()
        self._seen: dict[str, int] = {}
        self._came: dict[str, int] = {}

    @property
    def ranks(self) -> int:
        return self.world.ranks

    def record(self, text: str) -> None:
        """Shown in the lanes of a run that goes wrong."""
        self.world.record(self.name, text)

    async def at(self, name: str, takes_s: float = 0.0) -> None:
        """A named place: takes virtual time, and is where faults happen."""
        factor = await self._struck(name)
        turn = self._seen[name]
        await asyncio.sleep(takes_s * factor * self.world.pace(f"{self.name} {name} {turn}"))

    async def _struck(self, name: str) -> float:
        """Come to a place, and to the faults that are planted there; how much slower it is."""
        turn = self._seen[name] = self._seen.get(name, 0) + 1
        self.world.places[name] = None
        factor = 1.0
        for fault in self.world.planted("crash", "fail", "hang", "slow"):
            if not fault.hits(self.number, name, turn):
                continue
            self.world.struck.add(fault)
            if fault.kind == "slow":
                factor *= fault.factor
            elif fault.kind == "fail":
                self.record(f"fails in {name}")
                raise Injected(f"{self.name} fails in {name}")
            else:
                await self._gone(fault, name)
        self.record(name)
        return factor

    async def _gone(self, fault: Fault, name: str) -> None:
        """Nobody comes back from a crash, and from a hang only who is called back."""
        if fault.kind == "crash":
            await self.world.crash(self)
        self.record(f"hangs in {name}")
        self.world.hanging.add(self.name)
        try:
            await asyncio.get_running_loop().create_future()
        finally:  # Somebody's patience was over, and the rank goes on.
            self.world.hanging.discard(self.name)

    async def _at_fence(self, call: FenceCall) -> bool:
        """Come to a fence, and to the faults that are planted there; whether its arrival comes."""
        name = str(call.fence)
        turn = self._came[name] = self._came.get(name, 0) + 1
        self.world.fences[name] = None
        for fault in self.world.planted("crash", "hang"):
            if fault.place and fault.hits(self.number, name, turn):
                self.world.struck.add(fault)
                await self._gone(fault, name)
        for fault in self.world.planted("drop"):
            if fault.rank in (None, self.number) and fault.place in ("", name):
                self.world.struck.add(fault)
                self.record(f"loses its arrival at {name}")
                return False
        return True

    async def fence(
        self, name: str, *, members: Sequence[int] | None = None, deadline_s: float = 300.0
    ) -> Ticket:
        """Arrive at a fence of these ranks (all, if none are named) and pass it.

        Raises:
            FenceBroken: somebody failed, is dead, or never came.
        """
        numbers = tuple(range(self.ranks) if members is None else members)
        generation = next(self._generation)
        call = FenceCall(
            key=FenceKey("sim", 0, ",".join(map(str, numbers)), generation),
            fence=FenceName(name),
            epoch=Epoch(1),
            version=Version(1),
            digest=Digest("sim"),
            members=tuple(Rank(self.rank.role, number) for number in numbers),
            deadline_s=deadline_s,
        )
        self.record(f"arrives at {name}")
        opened = await self.fences.arrive(call, self._arrival(call, generation))
        self.record(f"passes {name}")
        return opened.ticket

    def _arrival(self, call: FenceCall, generation: int) -> Arrival:
        return call.arrival(self.rank, nonce=f"{self.name}@{generation}", seq=generation)

    def runner(self, protocol: str, **settings: Any) -> RankRunner:
        """A real runner of a protocol, on this world's fences and clock.

        Plain functions among `actions` run at once, in place: their own time counts as blocking.
        """
        actions = {
            name: self._planted(name, action) for name, action in settings.pop("actions").items()
        }
        loop = asyncio.get_running_loop()
        return RankRunner(
            protocol,
            rank=self.rank,
            ranks=settings.pop("ranks", self.ranks),
            fences=self.fences,
            actions=actions,
            run=settings.pop("run", "sim"),
            runs=settings.pop("runs", None) or self.world.folder(),
            wall=loop.time,
            mono_ns=lambda: int(loop.time() * 1e9),
            **self._options(settings),
        )

    def _options(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What a runner is given, with the options that a fault gives this rank alone."""
        for fault in self.world.planted("mixed"):
            if fault.rank == self.number:
                self.world.struck.add(fault)
                options = {**(settings.get("options") or {}), fault.option: fault.value}
                settings = {**settings, "options": options}
        return settings

    def _planted(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        takes_turn = _takes_turn(action)

        async def act(turn: Any) -> Any:
            factor = await self._struck(name)
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            began = loop.time()
            found = action(turn) if takes_turn else action()
            result = await found if asyncio.iscoroutine(found) else found
            if factor > 1:  # A slow rank takes so many times as long as the action took.
                await asyncio.sleep((factor - 1) * (loop.time() - began))
            return result

        return act


def _takes_turn(action: Callable[..., Any]) -> bool:
    parameters = inspect.signature(action).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)


class SimWorld:
    """So many simulated ranks under one seed, with faults planted by name.

    `spread` lets each named place take up to so much more or less time (0.5: half to one and a
    half as long), by seed: ranks that are all exactly as fast as each other hide what may happen.
    """

    def __init__(
        self,
        ranks: int = 2,
        *,
        seed: int = 0,
        faults: Sequence[str | Fault] = (),
        role: str = "trainer",
        runs: Path | str | None = None,
        blocking_s: float = 0.2,
        spread: float = 0.0,
    ) -> None:
        self.ranks = ranks
        self.seed = seed
        self.role = role
        self.runs = runs
        self.faults = tuple(
            each
            for fault in faults
            for each in (parse_faults(fault) if isinstance(fault, str) else (fault,))
        )
        if odd := [each for each in self.faults if (each.rank or 0) >= ranks]:
            raise PlanError(f"{odd[0]}: there is no rank {odd[0].rank}; there are {ranks}")
        self.blocking_s = blocking_s
        self.spread = spread
        self.places: dict[str, None] = {}
        self.fences: dict[str, None] = {}
        self.struck: set[Fault] = set()
        self.hanging: set[str] = set()
        self._timeless = False
        self._loop: Loop | None = None
        self._outcome = Outcome(seed=seed)
        self._fences: InProcessFences | None = None

    # ------------------------------------------------------------------------ what ranks ask

    def folder(self) -> Path | str:
        """Where runners of this world write their journals.

        Raises:
            PlanError: the world was given no folder.
        """
        if self.runs is None:
            raise PlanError(
                "a runner writes a journal; give the world a folder: SimWorld(runs=...)"
            )
        return self.runs

    def planted(self, *kinds: str) -> list[Fault]:
        """The faults of these kinds that may still strike: each does once, but for who is slow."""
        return [
            fault
            for fault in self.faults
            if fault.kind in kinds and (fault.kind == "slow" or fault not in self.struck)
        ]

    def pace(self, what: str) -> float:
        """How long something takes, as a factor; the same seed, the same pace."""
        if self._timeless:
            return 0.0
        if not self.spread:
            return 1.0
        return 1 + self.spread * (2 * random.Random(f"{self.seed} {what}").random() - 1)

    def record(self, rank: str, text: str) -> None:
        now = self._loop.time() if self._loop else 0.0
        self._outcome.events.append(Event(at_s=now, rank=rank, text=text))

    async def crash(self, rank: SimRank) -> None:
        """The rank's process is gone: nothing of it runs again, not even its clean-up."""
        assert self._loop is not None
        assert self._fences is not None
        rank.record("crashes")
        self._outcome.crashed.append(rank.name)
        self._loop.gone.add(rank.name)
        cause = RootCause(kind="dead", ranks=(rank.rank,), error="crashed")
        launcher = self._fences.endpoint(Rank(RoleName("launcher"), 0))

        async def notice() -> None:
            await asyncio.sleep(NOTICE_S)
            await launcher.report_lost(cause, incarnation=0)

        context = contextvars.copy_context()
        context.run(RANK.set, "launcher")
        self._notices.append(self._loop.create_task(notice(), context=context))
        self._done[rank.number].set_result(None)
        await self._loop.create_future()

    # ----------------------------------------------------------------------------------- runs

    def run(
        self,
        main: Main,
        *,
        schedule: str | Scheduler | None = None,
        allow: tuple[type[BaseException], ...] = (),
        check: Callable[[Outcome], None] | None = None,
    ) -> Outcome:
        """One run of `main` on every rank. `allow` are exceptions that ranks may end with.

        Raises:
            SimFailed: a rank raised something else, or waits for ever, or `check` objects.
        """
        __tracebackhide__ = True
        scheduler: Scheduler
        match schedule:
            case None:
                scheduler = Seeded(self.seed)
            case str():
                scheduler = Replay(read_schedule(schedule), timeless=schedule.startswith("~"))
            case _:
                scheduler = schedule
        self._timeless = scheduler.timeless
        self.places, self.fences, self.struck, self.hanging = {}, {}, set(), set()
        self._outcome = outcome = Outcome(seed=self.seed, spread=self.spread)
        loop = self._loop = Loop(scheduler, blocking_s=self.blocking_s)
        loop.set_exception_handler(lambda *_: None)
        self._fences = InProcessFences()
        self._notices: list[asyncio.Task[None]] = []
        why: str | None = None
        with _no_sleep():
            try:
                loop.run_until_complete(self._all(main))
            except Deadlock:
                why = self._who_waits()
            finally:
                outcome.schedule = write_schedule(loop.choices, timeless=scheduler.timeless)
                outcome.options = loop.options
                outcome.time_s, outcome.steps = loop.time(), loop.steps
                self._leave(loop)
        why = why or self._wrong(outcome, allow)
        if why is None and check is not None:
            try:
                check(outcome)
            except AssertionError as wrong:
                raise SimFailed(str(wrong) or "the check failed", outcome) from wrong
        if why is not None:
            raised = next((e for e in outcome.raised.values() if not isinstance(e, allow)), None)
            raise SimFailed(why, outcome) from raised
        return outcome

    async def _all(self, main: Main) -> None:
        assert self._loop is not None
        assert self._fences is not None
        self._done = [self._loop.create_future() for _ in range(self.ranks)]
        tasks = []
        for number in range(self.ranks):
            rank = SimRank(self, number, self._fences)
            context = contextvars.copy_context()
            context.run(RANK.set, rank.name)
            tasks.append(self._loop.create_task(self._one(main, rank), context=context))
        self._tasks = tasks
        await asyncio.gather(*self._done)

    async def _one(self, main: Main, rank: SimRank) -> None:
        try:
            self._outcome.results[rank.name] = await main(rank)
        except Exception as error:
            rank.record(f"ends with {type(error).__name__}")
            self._outcome.raised[rank.name] = error
        finally:
            if not self._done[rank.number].done():
                self._done[rank.number].set_result(None)

    def _who_waits(self) -> str | None:
        """Who waits for ever, beside those who hang because a fault says so."""
        left = [
            f"{self.role}/{number}" for number, done in enumerate(self._done) if not done.done()
        ]
        self._outcome.hung = [rank for rank in left if rank in self.hanging]
        waiting = [rank for rank in left if rank not in self.hanging]
        if not waiting:
            return None
        where = {event.rank: event.text for event in self._outcome.events}
        said = (f"{rank} (last: {where.get(rank, 'nothing')})" for rank in waiting)
        return "waits for ever: " + ", ".join(said)

    def _wrong(self, outcome: Outcome, allow: tuple[type[BaseException], ...]) -> str | None:
        assert self._loop is not None
        for rank, error in outcome.raised.items():
            if not isinstance(error, allow):
                return f"{rank} raised {type(error).__name__}: {error}"
        for rank, what, took in self._loop.blocked:
            return f"{rank} blocked the event loop for {took:.2f} s in {what}"
        return None if self.struck else self._misses()

    def _misses(self) -> str | None:
        """Where no fault struck, one that cannot have."""
        for fault in self.faults:
            places = {
                "drop": [*self.fences],
                "mixed": [],
                "fail": [*self.places],
                "slow": [*self.places],
            }.get(fault.kind, [*self.places, *self.fences])
            if fault.kind == "mixed":
                return f"{fault} never struck: no rank {fault.rank} asked for rank.runner(...)"
            if fault.place not in places and (fault.place or not places):
                where = repr(fault.place) if fault.place else "any place where it can"
                came = ", ".join(places) or "none at all"
                return f"{fault} never struck: no rank came to {where}, but to {came}"
        return None

    def _leave(self, loop: Loop) -> None:
        """Nothing that a stuck rank left behind may outlive its world; a crashed one is frozen."""
        frozen = [task for task, rank in loop.tasks if rank in loop.gone and not task.done()]
        for task in frozen:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._outcome.frozen = frozen
        left = [task for task in asyncio.all_tasks(loop) if task not in frozen]
        for task in left:
            task.cancel()

        async def gone() -> None:
            await asyncio.wait(left)

        if left:
            with contextlib.suppress(Deadlock):
                loop.run_until_complete(gone())
        loop.close()

    def explore(
        self,
        main: Main,
        *,
        runs: int | None = None,
        strategy: str = "seed",
        preemptions: int = 2,
        spread: float = 0.5,
        allow: tuple[type[BaseException], ...] = (),
        check: Callable[[Outcome], None] | None = None,
    ) -> int:
        """Many schedules; returns how many runs there were.

        `strategy` is `seed` (each by its own seed), `pct`, or `exhaustive`: every schedule in
        which a rank that could go on is held up at most `preemptions` times, places taking no
        time. Else they take their time, give or take `spread`. Left out, `runs` is 100, and
        without end where all are to be tried: a search that was cut short is no pass.

        Raises:
            SimFailed: one of them goes wrong; it names the seed and schedule that replay it.
        """
        __tracebackhide__ = True
        many = 100 if runs is None else runs
        match strategy:
            case "seed":
                made: Iterator[Scheduler] = (Seeded(self.seed + at) for at in range(many))
            case "pct":
                made = (Pct(self.seed + at) for at in range(many))
            case "exhaustive":
                return self._exhaustive(main, runs, preemptions, allow, check)
            case _:
                raise ValueError(f"strategy {strategy!r}; it is one of: seed, pct, exhaustive")
        done = 0
        first, usual = self.seed, self.spread
        self.spread = self.spread or spread
        try:
            for done, scheduler in enumerate(made, 1):
                self.seed = first + done - 1
                self.run(main, schedule=scheduler, allow=allow, check=check)
        finally:
            self.seed, self.spread = first, usual
        return done

    def _exhaustive(
        self,
        main: Main,
        runs: int | None,
        preemptions: int,
        allow: tuple[type[BaseException], ...],
        check: Callable[[Outcome], None] | None,
    ) -> int:
        """Depth first over choices: each run follows a prefix, then goes on in turn."""
        __tracebackhide__ = True
        todo: list[tuple[tuple[int, ...], int]] = [((), 0)]
        done = 0
        while todo:
            if done == runs:
                left = f"{len(todo)} more to try, up to {preemptions} preemptions"
                why = f"undecided after {runs} runs: {left}; give it more runs, or fewer of these"
                raise SimFailed(why, self._outcome)
            prefix, held = todo.pop()
            outcome = self.run(
                main, schedule=Replay(prefix, timeless=True), allow=allow, check=check
            )
            done += 1
            choices = read_schedule(outcome.schedule)
            for at in range(len(prefix), len(choices)):
                options, last = outcome.options[at]
                cost = held + (last >= 0)
                if cost > preemptions:
                    continue
                for other in range(options):
                    if other != choices[at]:
                        todo.append(((*choices[:at], other), cost))
        return done


@contextlib.contextmanager
def _no_sleep() -> Iterator[None]:
    """`time.sleep` inside a simulated rank is a mistake that real ranks would pay for."""
    real = time.sleep

    def blocked(seconds: float, /) -> None:
        if rank := RANK.get():
            raise BlockingCall(
                f"{rank} called time.sleep({seconds:g}), which blocks the event loop; "
                "await asyncio.sleep, or give the phase a plain function"
            )
        real(seconds)

    time.sleep = blocked  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep = real
