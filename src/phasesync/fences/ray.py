"""Fences under Ray: a named actor per run finds the ranks and outlives them, and a connection
of the coordinator's own carries the arrivals.

An actor call costs milliseconds and queues behind others; Ray gives what is hard to have
otherwise: one place that every node can find, a secret to share, and word of a death.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phasesync.core.model import Arrival, Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import PlanError, RankLost, StoreLost
from phasesync.fences.base import Probe, connected_already
from phasesync.fences.driver import CANCEL_S, Joined, cause_of, in_thread, join
from phasesync.fences.tcp import TcpCoordinator, TcpFences

__all__ = (
    "NAMESPACE",
    "RayFences",
    "answer",
    "join_actors",
    "lost_in",
    "report_deaths",
    "start_coordinator",
    "watch_actors",
)

NAMESPACE = "phasesync"
CONNECT_S = 60.0
LOOK_AGAIN_S = 0.1
LOOK_S = 0.25  # An idle actor is looked at so often; one at work is watched all the time.
LOOKS_PER_S = 400  # However many actors there are.
IDLE_EXIT_S = 30.0  # A coordinator that nobody is connected to any more ends itself.


class _CoordinatorActor:
    """Holds a `TcpCoordinator` in an actor's event loop, where no user code runs."""

    def __init__(self, idle_exit_s: float) -> None:
        self._idle_exit_s = idle_exit_s
        self._token = secrets.token_hex(16)
        self._coordinator = TcpCoordinator(token=self._token, host=ray.util.get_node_ip_address())
        self._starting: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None

    async def address(self) -> tuple[tuple[str, int], str]:
        """Where to connect, and the token to show."""
        if self._starting is None:  # All ranks ask at once: there must be one start.
            loop = asyncio.get_running_loop()
            self._starting = loop.create_task(self._coordinator.start())
            self._idle = loop.create_task(self._end_when_idle(self._coordinator))
        await asyncio.shield(self._starting)
        return self._coordinator.address, self._token

    async def _end_when_idle(self, coordinator: TcpCoordinator) -> None:
        """A detached actor is nobody's: it has to go by itself."""
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < self._idle_exit_s:
            await asyncio.sleep(self._idle_exit_s / 10)
            if coordinator.peers:
                idle_since = time.monotonic()
        await coordinator.close()
        ray.kill(ray.get_runtime_context().current_actor)


def start_coordinator(
    run: str, *, attempt: int = 0, detached: bool = True, idle_exit_s: float = IDLE_EXIT_S
) -> Any:
    """The coordinator actor of a run, near whoever calls first; there is one.

    Detached, it outlives the process that made it: the death of rank 0 is then told to the others
    as what it is. Not detached, it ends with its maker, and they lose the transport. Either way it
    ends itself when nobody has been connected for `idle_exit_s`.
    """
    # Not soft: that does not bind an actor that needs no resources, and this node is alive.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "name": _name(run, attempt),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": here,
    }
    if detached:
        options["lifetime"] = "detached"
    return ray.remote(_CoordinatorActor).options(**options).remote(idle_exit_s)


def _name(run: str, attempt: int) -> str:
    return f"phasesync.{run}.{attempt}"


class RayFences:
    """A rank's fences under Ray (see `fences.base.FenceTransport`).

    Rank number 0 makes the coordinator on its own node, unless a driver has called
    `start_coordinator`; the others wait until it is there.
    """

    def __init__(
        self,
        *,
        rank: Rank | None,
        run: str,
        incarnation: int = 0,
        attempt: int = 0,
        detached: bool = True,
    ) -> None:
        self.rank = rank
        self._run = run
        self._incarnation = incarnation
        self._attempt = attempt
        self._detached = detached
        self._inner: TcpFences | None = None
        self._probe: Probe | None = None

    @classmethod
    def observer(cls, *, run: str, attempt: int = 0) -> "RayFences":
        """The endpoint of who watches actors and is no rank: it may only `report_lost`."""
        return cls(rank=None, run=run, attempt=attempt)

    @property
    def boot(self) -> str | None:
        return self._inner.boot if self._inner else None

    async def connect(self) -> None:
        if self._inner is not None:
            raise connected_already(self.rank)
        try:
            async with asyncio.timeout(CONNECT_S):
                address, token = await self._find()
        except TimeoutError as error:
            raise StoreLost(
                f"no coordinator of run {self._run!r} under Ray within {CONNECT_S:g} s; "
                "rank 0 makes it, or the driver by start_coordinator"
            ) from error
        except RayError as error:
            raise StoreLost(
                f"the coordinator of run {self._run!r} does not start under Ray ({_why(error)}); "
                "it runs in a worker of its own, which needs phasesync as well: install it on "
                "every node, or name it in the runtime_env of ray.init"
            ) from error
        self._inner = TcpFences(
            address,
            rank=self.rank,
            run=self._run,
            incarnation=self._incarnation,
            attempt=self._attempt,
            token=token,
        )
        if self._probe is not None:
            self._inner.heed(self._probe)
        await self._inner.connect()

    def heed(self, probe: Probe) -> None:
        """As `fences.base.Heartbeats`."""
        self._probe = probe

    async def arrive(self, call: FenceCall, arrival: Arrival) -> Opened:
        return await self._connected().arrive(call, arrival)

    async def fail(self, call: FenceCall, arrival: Arrival) -> Broken | Opened:
        return await self._connected().fail(call, arrival)

    async def watch(self, call: FenceCall) -> Broken | Opened:
        return await self._connected().watch(call)

    async def peek(self, call: FenceCall) -> Broken | Opened | None:
        return await self._connected().peek(call)

    async def missing(self, call: FenceCall) -> tuple[Rank, ...]:
        return await self._connected().missing(call)

    async def report_lost(self, cause: RootCause, *, incarnation: int) -> None:
        await self._connected().report_lost(cause, incarnation=incarnation)

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()

    def _connected(self) -> TcpFences:
        if self._inner is None:
            raise StoreLost("connect() was not called")
        return self._inner

    async def _find(self) -> tuple[tuple[str, int], str]:
        """Look the coordinator up, and ask it where it listens."""
        while True:
            try:
                actor = await in_thread(self._look_up, name="phasesync.ray.find")
                where: tuple[tuple[str, int], str]
                where = await answer(actor.address.remote(), grace_s=0)
            except (ValueError, RayActorError) as error:
                if getattr(error, "actor_init_failed", False):
                    raise
                # Not there yet, or just ending because nobody came.
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                return where

    def _look_up(self) -> Any:
        if self.rank is None or self.rank.number == 0:
            return start_coordinator(self._run, attempt=self._attempt, detached=self._detached)
        return ray.get_actor(_name(self._run, self._attempt), namespace=NAMESPACE)


async def answer(call: Any, *, grace_s: float) -> Any:
    """What the `call` of an actor's method gives, or the error that the method raised.

    A wait that is cancelled cancels the call too, and lasts until that is over, `grace_s` at most:
    Ray cancels what is queued and what is async, but a plain method that runs ends by itself.

    Raises:
        RayActorError: the actor is dead or out of reach.
    """
    future: asyncio.Future[Any] = asyncio.wrap_future(call.future())
    try:
        return await asyncio.shield(future)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, BaseException) else error) from error
    except asyncio.CancelledError:
        if not future.done():
            ray.cancel(call)
            await asyncio.wait((future,), timeout=grace_s)
        future.add_done_callback(_forget)
        raise


def _forget(future: asyncio.Future[Any]) -> None:
    """What it raised, or will raise, is nobody's any more."""
    if not future.cancelled():
        future.exception()


def lost_in(error: BaseException) -> RankLost | None:
    """What an error of `answer` says about the actor that was called: gone, or nothing.

    Dead is what Ray says is dead; unavailable may come back, and is never called dead. An actor
    that the method itself had called is somebody else.
    """
    if not isinstance(error, RayActorError) or isinstance(error.__cause__, RayTaskError):
        return None
    kind = "unavailable" if isinstance(error, ActorUnavailableError) else "dead"
    return RankLost(_why(error), kind=kind)


async def report_deaths(
    run: str, actors: Mapping[Rank, Any], *, attempt: int = 0, incarnation: int = 0
) -> None:
    """Break the fences that wait for a dead actor's rank, until this is cancelled.

    For whoever starts the actors: a rank that dies before it has connected is seen by nobody else.
    """
    observer = RayFences.observer(run=run, attempt=attempt)
    actors = dict(actors)  # As they are now: it may take a while to connect.

    async def tell(rank: Rank, lost: RankLost) -> None:
        cause = RootCause(kind=lost.kind, ranks=(rank,), error=str(lost))
        await observer.report_lost(cause, incarnation=incarnation)

    await observer.connect()
    try:
        await watch_actors(actors, tell)
    finally:
        await observer.close()


async def watch_actors(
    actors: Mapping[Rank, Any], tell: Callable[[Rank, RankLost], Awaitable[None]]
) -> None:
    """Tell of each actor that dies, until this is cancelled or all are dead.

    One at work is known at once, an idle one when it is next looked at. It needs no method of
    theirs.
    """
    pause_s = max(LOOK_S, len(actors) / LOOKS_PER_S)
    async with asyncio.TaskGroup() as group:
        for rank, actor in actors.items():
            group.create_task(_watch(rank, actor, tell, pause_s), name=f"watches {rank}")


async def _watch(
    rank: Rank, actor: Any, tell: Callable[[Rank, RankLost], Awaitable[None]], pause_s: float
) -> None:
    while True:
        try:
            await answer(actor.__ray_ready__.remote(), grace_s=0)
        except ActorUnavailableError:
            pass  # It may come back. Who needs it meanwhile is told.
        except RayActorError as error:
            await tell(rank, RankLost(_why(error)))
            return
        await asyncio.sleep(pause_s)


async def join_actors(
    call: FenceCall, actors: Mapping[Rank, Any], method: str, *arguments: Any, **named: Any
) -> Joined[Any]:
    """Call `method` on the actor of every member, and join: one fence of a driver's own.

    All answers are watched together: the first failure breaks the fence, and the others are
    cancelled.

    Raises:
        FenceBroken: an actor failed, died, or was not done before the deadline.
        PlanError: a member has no actor.
    """
    lacking = [str(rank) for rank in call.members if rank not in actors]
    if lacking:
        raise PlanError(f"fence {call.fence!r} has members without an actor: {', '.join(lacking)}")
    asked = {
        rank: getattr(actors[rank], method).remote(*arguments, **named) for rank in call.members
    }
    return await join(
        call,
        {rank: answer(each, grace_s=CANCEL_S) for rank, each in asked.items()},
        cause=_cause,
    )


def _cause(rank: Rank, error: BaseException) -> RootCause:
    lost = lost_in(error)
    if lost is not None:
        return RootCause(kind=lost.kind, ranks=(rank,), error=str(lost))
    return cause_of(rank, error)


def _why(error: RayError) -> str:
    """The first sentences of Ray's notice that say why; lines before them say who."""
    lines = [line.strip() for line in str(error).splitlines() if line and line[0] != "\t"]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__
