"""What any engine port must do, whatever is behind it: give it yours and call it in a test."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from phasesync.core.model import Epoch, FenceKey, FenceName, Opened, Ticket, Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, EnginePort, Floor, InFlight
from phasesync.engines.tickets import TicketRules, VerdictTable
from phasesync.errors import EngineRefused

__all__ = ("Rig", "check_engine_port")

Rig: TypeAlias = Callable[[TicketRules], Awaitable[EnginePort]]

_RUN = "conformance"
_SCOPE = "replica/0"


class _Fences:
    """Fences that have opened, as many as asked for, and the tickets that they gave."""

    def __init__(self) -> None:
        self.verdicts = VerdictTable()
        self._generation = 0

    def ticket(self, fence: str, epoch: int, *, attempt: int = 0, scope: str = _SCOPE) -> Ticket:
        self._generation += 1
        ticket = Ticket(
            key=FenceKey(_RUN, attempt, scope, self._generation),
            fence=FenceName(fence),
            epoch=Epoch(epoch),
            count=1,
            hash=f"{self._generation:064x}",
        )
        self.verdicts.record(Opened(ticket=ticket))
        return ticket


async def check_engine_port(
    make: Rig, buckets: Callable[[int], Any], *, in_flight: InFlight = "abort"
) -> None:
    """Drive the port that `make` builds through refusals and two epochs.

    `make` is given the rules that the port must hold, and returns a port over a fresh, serving
    engine of version 0 with the tags `weights` and `kv_cache`; `buckets(version)` gives one bucket
    that makes up that version. `in_flight` is a policy that the engine knows.

    Raises:
        AssertionError: a promise is broken; the message says which.
    """
    fences = _Fences()
    rules = TicketRules(run=_RUN, scope=_SCOPE, verdicts=fences.verdicts)
    port = await make(rules)
    try:
        await _refuses_while_serving(port)
        old = await _epoch(port, fences, 0, buckets, in_flight)
        await _epoch(port, fences, 1, buckets, in_flight, late=old)
    finally:
        await port.close()


async def _refused(
    port: EnginePort, what: str, call: Coroutine[Any, Any, object], *said: str
) -> None:
    before = await port.status()
    reason = await _reason(what, call)
    assert reason is not None, f"{what} was not refused"
    for word in said:
        assert word in reason, f"the refusal of {what} does not say {word!r}: {reason}"
    assert await port.status() == before, f"the refusal of {what} changed what is known"


async def _refuses_while_serving(port: EnginePort) -> None:
    await _refused(port, "a release while serving", port.release((KV_CACHE,)), "pause")
    await _refused(port, "an update while serving", port.begin(Version(1)), "pause")
    await _refused(port, "a bucket without a session", port.load(None), "begin")
    await _refused(port, "a commit without a session", port.finish(Version(1)), "begin")
    await _refused(port, "a flush while serving", port.flush(), "pause")


async def _reason(what: str, call: Coroutine[Any, Any, object]) -> str | None:
    try:
        await call
    except EngineRefused as refused:
        return str(refused)
    except Exception as error:
        raise AssertionError(
            f"{what} raised {type(error).__name__}: {error}; it is to be refused with "
            "EngineRefused, before the engine hears of it"
        ) from error
    return None


async def _epoch(
    port: EnginePort,
    fences: _Fences,
    epoch: int,
    buckets: Callable[[int], Any],
    in_flight: InFlight,
    *,
    late: Ticket | None = None,
) -> Ticket:
    version = Version(epoch + 1)
    await port.pause(in_flight)
    await _refused(port, "an empty release", port.release(()), "name the tags")
    await port.release((WEIGHTS, KV_CACHE))
    assert (await port.status()).asleep == {WEIGHTS, KV_CACHE}
    await _refused(port, "a second release", port.release((WEIGHTS, KV_CACHE)), "released")
    await _refused(port, "an update into nothing", port.begin(version), "resident")
    await _refused(port, "serving without memory", port.resume_generation(), "released")
    released = fences.ticket("memory_released", epoch)
    await _refused(port, "KV before weights", port.resume(KV_CACHE, released), "first")
    await _refused(port, "weights without a ticket", port.resume(WEIGHTS, None), "ticket")
    await port.resume(WEIGHTS, fences.ticket("ready_for_weights", epoch))
    await _refused(port, "weights twice", port.resume(WEIGHTS, released), "not released")

    await port.begin(version)
    await _refused(port, "a second session", port.begin(version), "open")
    await _refused(port, "an empty commit", port.finish(version), "nothing was loaded")
    await port.load(buckets(version))
    await _refused(port, "KV in mid-update", port.resume(KV_CACHE, released), "loading")
    evidence = await port.finish(version)
    assert set(evidence.versions) == {str(version)}, f"the ranks hold {evidence.versions}"
    await _refused(port, "the same version again", port.begin(version), "rise")

    await _refuses_tickets(port, fences, epoch)
    if late is not None:
        await _refused(
            port, "KV of a leader who woke too late", port.resume(KV_CACHE, late), "floor"
        )
    ticket = fences.ticket("memory_released", epoch)
    await port.resume(KV_CACHE, ticket)
    await _refused(port, "serving without a ticket", port.resume_generation(), "ticket")
    await port.resume_generation(fences.ticket("ready_to_serve", epoch))
    status = await port.status()
    assert (status.gate, status.asleep, status.version) == ("open", frozenset(), version)
    await port.raise_floor(Floor(0, epoch + 1))
    return ticket


async def _refuses_tickets(port: EnginePort, fences: _Fences, epoch: int) -> None:
    for what, ticket, said in (
        ("no ticket", None, "none was given"),
        ("another fence's ticket", fences.ticket("ready_for_weights", epoch), "memory_released"),
        (
            "another replica's ticket",
            fences.ticket("memory_released", epoch, scope="replica/1"),
            "scope",
        ),
        ("an invented ticket", _invented(epoch), "no verdict"),
        ("a ticket below the floor", fences.ticket("memory_released", epoch - 1), "floor"),
    ):
        await _refused(port, f"KV with {what}", port.resume(KV_CACHE, ticket), said)


def _invented(epoch: int) -> Ticket:
    return Ticket(
        key=FenceKey(_RUN, 0, _SCOPE, 1_000_000),
        fence=FenceName("memory_released"),
        epoch=Epoch(epoch),
        count=1,
        hash="0" * 64,
    )
