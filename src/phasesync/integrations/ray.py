"""A driver over the actors of a Ray job: one actor a rank, one method a phase.

Every method is called on the actors of all ranks that have the phase, as a worker group does it
with ONE_TO_ALL; all answers are watched together. An actor that is dead is named as dead, whether
it was at work or idle; one that Ray calls unavailable never is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError

from phasesync.core.model import OptionValue, Rank, Ticket
from phasesync.core.plan import resolve
from phasesync.core.protocol import PhaseDecl, Protocol
from phasesync.errors import PlanError, RankLost
from phasesync.fences.ray import answer, lost_in, watch_actors
from phasesync.runtime.actions import Action, Turn
from phasesync.runtime.calls import GRACE_S
from phasesync.runtime.device import DevicePort
from phasesync.runtime.driver import Driver
from phasesync.spec import load

__all__ = ("Errand", "RayDriver")

ASK_DEVICE_S = 60.0


class Errand(NamedTuple):
    """What an actor is told when it is called for a phase; it travels, where a Turn cannot."""

    rank: Rank
    phase: str
    epoch: int
    version: int
    ticket: Ticket | None


class RayDriver(Driver):
    """Runs a protocol over one actor for each rank, in the order of the ranks.

        with RayDriver("colocated", workers, options={"replica_size": 2}).blocking() as driver:
            driver.run_epoch()

    A phase is the actors' method of that name, called with an `Errand`; `actions` binds phases to
    something else. Outside phases are the caller's, unless they are bound. Actors that have
    `device_name`, `synchronise`, `collect_ipc` and `free_bytes` are asked about their devices;
    otherwise each counts as a device of its own, and a method returns when its work on the device
    is done. The rest is as for a `Driver`.

    Raises:
        PlanError: there are not as many actors as ranks, or a phase has neither method nor action.
    """

    def __init__(
        self,
        protocol: Protocol | str,
        actors: Sequence[Any],
        *,
        ranks: int | Mapping[str, int] | None = None,
        actions: Mapping[str, Action] | None = None,
        options: Mapping[str, OptionValue] | None = None,
        devices: Sequence[DevicePort | str] | None = None,
        **settings: Any,
    ) -> None:
        protocol = load(protocol) if isinstance(protocol, str) else protocol
        ranks = len(actors) if ranks is None else ranks
        plan = resolve(protocol, ranks, options, groups=settings.get("groups"))
        if len(plan.members) != len(actors):
            raise PlanError(
                f"there are {len(actors)} actors for {len(plan.members)} ranks; give one for each, "
                "in the order of the ranks"
            )
        self.actors = dict(zip(plan.members, actors, strict=True))
        self._under_way: Counter[Rank] = Counter()
        self._told: set[Rank] = set()
        super().__init__(
            protocol,
            ranks=ranks,
            actions={**self._methods(protocol), **(actions or {})},
            options=options,
            devices=devices or [_device(actor) for actor in actors],
            watch=lambda _: self._watch_all(),
            **settings,
        )

    def call(self, method: str) -> Action:
        """The action that calls `method` on the rank's actor."""

        async def action(turn: Turn) -> Any:
            errand = Errand(turn.rank, turn.phase, turn.epoch, turn.version, turn.ticket)
            self._under_way[turn.rank] += 1
            try:
                asked = getattr(self.actors[turn.rank], method).remote(errand)
                return await answer(asked, grace_s=GRACE_S)
            except RayActorError as error:
                if (lost := lost_in(error)) is None:
                    raise
                self._told.add(turn.rank)
                raise lost from error
            finally:
                self._under_way[turn.rank] -= 1

        return action

    def _methods(self, protocol: Protocol) -> dict[str, Action]:
        actors = self.actors.values()
        return {
            name: self.call(name)
            for name in _own_phases(protocol)
            if any(hasattr(actor, name) for actor in actors)
        }

    async def _watch_all(self) -> None:
        await watch_actors(self.actors, self._lost)

    async def _lost(self, rank: Rank, lost: RankLost) -> None:
        # A call that is or was under way tells of it by itself, and names the phase.
        if not self._under_way[rank] and rank not in self._told:
            await self.report_lost(rank, str(lost))


class _ActorDevice:
    """The device of an actor that is a `DevicePort` itself, asked from afar."""

    blocks = True

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.name: str = self._ask("device_name")

    def synchronise(self) -> None:
        self._ask("synchronise")

    def collect_ipc(self) -> None:
        self._ask("collect_ipc")

    def free_bytes(self) -> int | None:
        found: int | None = self._ask("free_bytes")
        return found

    def _ask(self, method: str) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=ASK_DEVICE_S)
        except RayActorError as error:
            if (lost := lost_in(error)) is None:
                raise
            raise lost from error


_ASKED = ("device_name", "synchronise", "collect_ipc", "free_bytes")


def _device(actor: Any) -> DevicePort | str:
    if all(hasattr(actor, name) for name in _ASKED):
        return _ActorDevice(actor)
    return f"actor-{actor._actor_id.hex()}/cpu0"


def _own_phases(protocol: Protocol) -> Iterable[str]:
    steps = (*protocol.steps, *protocol.recover)
    return (step.name for step in steps if isinstance(step, PhaseDecl) and not step.outside)
