"""Fences under Ray: a named actor per run finds the ranks and outlives them, and a connection
of the coordinator's own carries the arrivals.

An actor call costs milliseconds and queues behind others; Ray gives what is hard to have
otherwise: one place that every node can find, a secret to share, and word of a death.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phasesync.core.model import Arrival, Broken, FenceCall, Opened, Rank, RootCause
from phasesync.errors import StoreLost
from phasesync.fences.driver import Joined, cause_of, in_thread, join
from phasesync.fences.tcp import TcpCoordinator, TcpFences

__all__ = ("NAMESPACE", "RayDriver", "RayFences", "start_coordinator")

T = TypeVar("T")
NAMESPACE = "phasesync"
CONNECT_S = 60.0
LOOK_AGAIN_S = 0.1
IDLE_EXIT_S = 30.0  # A coordinator that nobody is connected to any more ends itself.


class _CoordinatorActor:
    """Holds a `TcpCoordinator` in an actor's event loop, where no user code runs."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._coordinator: TcpCoordinator | None = None
        self._idle: asyncio.Task[None] | None = None

    async def address(self) -> tuple[tuple[str, int], str]:
        """Where to connect, and the token to show."""
        if self._coordinator is None:
            host = ray.util.get_node_ip_address()
            coordinator = TcpCoordinator(token=self._token, host=host)
            await coordinator.start()
            self._coordinator = coordinator
            self._idle = asyncio.get_running_loop().create_task(self._end_when_idle(coordinator))
        return self._coordinator.address, self._token

    async def _end_when_idle(self, coordinator: TcpCoordinator) -> None:
        """A detached actor is nobody's: it has to go by itself."""
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < IDLE_EXIT_S:
            await asyncio.sleep(IDLE_EXIT_S / 10)
            if coordinator.peers:
                idle_since = time.monotonic()
        await coordinator.close()
        ray.actor.exit_actor()


def start_coordinator(run: str, *, attempt: int = 0, detached: bool = True) -> Any:
    """The coordinator actor of a run, near whoever calls first; there is one.

    Detached, it outlives the process that made it: the death of rank 0 is then told to the others
    as what it is. Not detached, it ends with its maker, and they lose the transport.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
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
    return ray.remote(_CoordinatorActor).options(**options).remote()


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
        rank: Rank,
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

    @property
    def boot(self) -> str | None:
        return self._inner.boot if self._inner else None

    async def connect(self) -> None:
        found = in_thread(self._find, name="phasesync.ray.find")
        try:
            async with asyncio.timeout(CONNECT_S):
                address, token = await found
        except (TimeoutError, RayError) as error:
            raise StoreLost(
                f"no coordinator of run {self._run!r} under Ray ({type(error).__name__}: {error}); "
                "rank 0 makes it, or the driver by start_coordinator"
            ) from error
        self._inner = TcpFences(
            address,
            rank=self.rank,
            run=self._run,
            incarnation=self._incarnation,
            attempt=self._attempt,
            token=token,
        )
        await self._inner.connect()

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

    def _find(self) -> tuple[tuple[str, int], str]:
        """Blocking: look the coordinator up, and ask it where it listens."""
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                if self.rank.number == 0:
                    actor = start_coordinator(
                        self._run, attempt=self._attempt, detached=self._detached
                    )
                else:
                    actor = ray.get_actor(_name(self._run, self._attempt), namespace=NAMESPACE)
                where: tuple[tuple[str, int], str] = ray.get(
                    actor.address.remote(), timeout=max(until - time.monotonic(), 0.1)
                )
            except (ValueError, RayActorError, GetTimeoutError):
                # Not there yet, or just ending because nobody came.
                if time.monotonic() > until:
                    raise
                time.sleep(LOOK_AGAIN_S)
            else:
                return where


class RayDriver:
    """The driver's shape: one call to all ranks' actors, and a fence that joins them.

    As a worker group's ONE_TO_ALL dispatch, but all answers are watched together: the first failure
    breaks the fence, and the others are cancelled.
    """

    def __init__(self, actors: Mapping[Rank, Any]) -> None:
        self._actors = dict(actors)

    async def run(self, call: FenceCall, method: str, *arguments: Any, **named: Any) -> Joined[Any]:
        """Call `method` on the actor of every member and join.

        Raises:
            FenceBroken: an actor failed, died, or was not done before the deadline.
        """
        asked = {
            rank: getattr(self._actors[rank], method).remote(*arguments, **named)
            for rank in call.members
        }
        return await join(
            call,
            {rank: _of(answer) for rank, answer in asked.items()},
            cause=_cause,
            cancel=lambda rank: _cancel(asked[rank]),
        )


async def _of(answer: Awaitable[T]) -> T:
    return await answer


def _cancel(answer: Any) -> None:
    ray.cancel(answer, force=False)


def _cause(rank: Rank, error: BaseException) -> RootCause:
    """Dead is what Ray says is dead; unavailable may come back, and is never called dead."""
    if isinstance(error, ActorUnavailableError):
        return RootCause(kind="unavailable", ranks=(rank,), error=_first_line(error))
    if isinstance(error, RayActorError):
        return RootCause(kind="dead", ranks=(rank,), error=_first_line(error))
    inner = getattr(error, "cause", None)
    return cause_of(rank, inner if isinstance(inner, BaseException) else error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
