"""The engine's side of a colocated epoch, one action a phase, ready to be bound by a leader.

Each takes the turn that the runtime hands it: its ticket is the one of the fence just passed, and
goes to the engine with the call. A sleep raises the floor before anybody is told that it is over,
so that a leader which wakes up later finds its ticket too old.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from phasesync.core.model import Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, EnginePort, EngineStatus, Floor, InFlight, Tag
from phasesync.errors import EngineError

__all__ = ("Buckets", "engine_actions", "quiesce", "reclaim")

Buckets: TypeAlias = Callable[[Any], Iterable[object] | AsyncIterable[object]]
_Action: TypeAlias = Callable[[Any], Awaitable[None]]


def engine_actions(
    port: EnginePort,
    *,
    buckets: Buckets,
    serve: Callable[[Any], Awaitable[object]] | None = None,
    in_flight: InFlight = "abort",
    tags: tuple[Tag, ...] = (WEIGHTS, KV_CACHE),
) -> dict[str, _Action]:
    """The leader's actions for the phases of the shipped protocol `colocated`, by phase.

    `buckets(turn)` gives what `load` hands to the engine, in order; `serve(turn)` runs while the
    engine serves, and without it the phase only opens the engine.
    """

    async def resume_weights(turn: Any) -> None:
        await port.resume(WEIGHTS, turn.ticket)

    async def load(turn: Any) -> None:
        version = Version(turn.version)
        await port.begin(version)
        async for bucket in _each(buckets(turn)):
            await port.load(bucket)
        evidence = await port.finish(version)
        turn.progress(
            version=version,
            checksum=evidence.checksums[0][1] if evidence.checksums else None,
            params=len(evidence.checksums) or None,
        )

    async def flush(_turn: Any) -> None:
        await port.flush()

    async def resume_kv(turn: Any) -> None:
        for tag in tags:
            if tag != WEIGHTS:
                await port.resume(tag, turn.ticket)

    async def serving(turn: Any) -> None:
        await port.resume_generation(turn.ticket)
        if serve is not None:
            await serve(turn)

    async def sleep(turn: Any) -> None:
        await port.pause(in_flight)
        await port.release(tags)
        await port.raise_floor(_after(turn))

    async def stop(_turn: Any) -> None:
        await quiesce(port, in_flight=in_flight)

    async def mend(turn: Any) -> None:
        await reclaim(port, turn, tags=tags, in_flight=in_flight)

    return {
        "resume_weights": resume_weights,
        "load": load,
        "flush": flush,
        "resume_kv": resume_kv,
        "serve": serving,
        "sleep": sleep,
        "quiesce": stop,
        "reclaim": mend,
    }


async def quiesce(port: EnginePort, *, in_flight: InFlight = "abort") -> None:
    """See to it that the engine reads no bucket and runs no request any more.

    Raises:
        EngineError: what the engine does is not known, so that only a new one helps.
    """
    status = await port.status()
    if status.health != "usable" or status.doubtful:
        raise EngineError(
            f"the engine cannot be reclaimed, it is {status.health}: {status.because}; replace it"
        )
    await port.pause(in_flight)
    if status.session is not None:
        await port.abandon()


async def reclaim(
    port: EnginePort, turn: Any, *, tags: tuple[Tag, ...], in_flight: InFlight = "abort"
) -> None:
    """Put the engine back to where an epoch begins, all of `tags` released, or say that it cannot.

    Raises:
        EngineError: what the engine holds is not known, so that only a new one helps.
    """
    await quiesce(port, in_flight=in_flight)
    status = await port.status()
    if held := _held(status, tags):
        # A rank that died may still hold memory that the engine would need to map the rest.
        await port.release(held, None if turn.absent else turn.ticket)
    await port.raise_floor(Floor(turn.ticket.key.attempt if turn.ticket else 0, turn.epoch))
    if turn.ticket is not None:
        await port.spend(turn.ticket)


def _held(status: EngineStatus, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
    return tuple(tag for tag in tags if tag not in status.asleep)


def _after(turn: Any) -> Floor:
    """The floor once the epoch of `turn` is over."""
    attempt = turn.ticket.key.attempt if turn.ticket is not None else 0
    return Floor(attempt, turn.epoch + 1)


async def _each(given: Iterable[object] | AsyncIterable[object]) -> AsyncIterable[object]:
    if isinstance(given, AsyncIterable):
        async for bucket in given:
            yield bucket
    else:
        for bucket in given:
            yield bucket
