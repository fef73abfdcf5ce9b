"""User code as actions: sync or async callables, bound to phase names."""

import asyncio
import concurrent.futures
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from phasesync.core.model import Phase, Rank, Ticket
from phasesync.core.plan import Plan
from phasesync.errors import PlanError
from phasesync.journal import Journal
from phasesync.runtime.calls import GRACE_S, BlockingCalls, waited

__all__ = (
    "Action",
    "Bound",
    "Turn",
    "at_once",
    "bind",
    "check_names",
    "is_to_come",
    "settled",
)

Action: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Action)
_AT_ONCE = "__phasesync_at_once__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an action is told: who, when, and the ticket of the fence that it stands behind.

    `retry` is 0 on the first try. An action that the protocol calls `retry: safe` is tried once
    more when it raises; one that is `after_query` too, and must then ask first how things stand.
    """

    rank: Rank
    phase: Phase
    epoch: int
    version: int
    ticket: Ticket | None
    plan: Plan
    journal: Journal
    retry: int = 0
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def absent(self) -> int:
        """How many members of the ticket's scope did not arrive.

        A recovery does not wait for the dead. What such a rank held may take a while to come
        free, and nobody says when it has.
        """
        if self.ticket is None:
            return 0
        members = {scope.name: len(scope.members) for scope in self.plan.scopes}
        return members[self.ticket.key.scope] - self.ticket.count

    def progress(self, **marks: Any) -> None:
        """Write a mark to the journal, with whatever figures it is given: `bytes`, `bucket`...

        `call="dist.all_reduce"` names a call at which ranks wait for each other: where no fence
        orders two phases, an audit says which call did.
        """
        self.journal.write("phase.progress", phase=self.phase, **marks)

    def synchronised(self) -> None:
        """Say that everything that this rank had enqueued on its device is done, all of this
        action's own included.

        A fence that requires `device_synchronised` sees to that itself. An action that has called
        the device's `synchronise` says so here: from now on what it and the phases before it were
        to release is free, and the journal shows it.
        """
        self.done["device_complete"] = True
        self.progress(device_complete=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An action as a rank performs it: on the loop's thread, as a coroutine, or in a thread."""

    action: Action
    takes_turn: bool
    is_async: bool
    at_once: bool
    blocking: BlockingCalls

    def call_at_once(self, turn: Turn | None) -> Any:
        """The action's answer, or what there is to wait for, made here and now."""
        return self.action(turn) if self.takes_turn else self.action()


def at_once(action: F) -> F:
    """Mark a plain function that is over in microseconds, or must run on the event loop's thread.

    It is called there, with nobody watching over it: no hop to a thread and back, which costs a
    tenth of a millisecond or more, but also no deadline and no cutting off. One that only enqueues
    work on a device is such a function; one that waits for the device is not.
    """
    setattr(action, _AT_ONCE, True)
    return action


def bind(
    phases: Mapping[str, bool], actions: Mapping[str, Action], blocking: BlockingCalls
) -> dict[str, Bound]:
    """The actions by phase.

    `phases` are the rank's phases, with whether each is outside.

    Raises:
        PlanError: an action is bound to no phase, a phase lacks one, or it is not callable.
    """
    for name, action in actions.items():
        if not callable(action):
            raise PlanError(f"the action of phase {name!r} is {action!r}; it must be callable")
    calls = {name: _bound(actions[name], blocking) for name in phases if name in actions}
    for name, outside in phases.items():
        if name not in calls and not outside:
            raise PlanError(
                f"phase {name!r} has no action; bind one with actions={{{name!r}: ...}}"
            )
    return calls


def check_names(known: frozenset[str], actions: Mapping[str, Action]) -> None:
    """Refuse actions of phases that no rank has.

    Raises:
        PlanError: the protocol has no such phase.
    """
    for name in actions:
        if name not in known:
            have = ", ".join(sorted(known))
            raise PlanError(f"no phase {name!r} to bind an action to; phases are: {have}")


def _bound(action: Action, blocking: BlockingCalls) -> Bound:
    return Bound(
        action=action,
        takes_turn=_takes_argument(action),
        is_async=inspect.iscoroutinefunction(action)
        or inspect.iscoroutinefunction(getattr(action, "__call__", None)),  # noqa: B004
        at_once=getattr(action, _AT_ONCE, False),
        blocking=blocking,
    )


def is_to_come(found: Any) -> bool:
    """Whether an action's answer is one that has to be waited for."""
    if found is None:
        return False
    return (
        inspect.isawaitable(found)
        or isinstance(found, concurrent.futures.Future)
        or _is_of_ray(found)
    )


async def settled(found: Any) -> Any:
    """What an action's answer comes to, where that is not there yet.

    It may be an awaitable, a future of an executor, or what a call of a Ray actor gives.
    """
    while is_to_come(found):
        if _is_of_ray(found):
            found = await import_module("phasesync.fences.ray").answer(found, grace_s=GRACE_S)
        elif isinstance(found, concurrent.futures.Future):
            found = await waited(asyncio.wrap_future(found), tell=found.cancel)
        else:
            found = await found
    return found


def _is_of_ray(found: Any) -> bool:
    ray = sys.modules.get("ray")  # Who has an answer of Ray's has imported it.
    return ray is not None and isinstance(found, ray.ObjectRef)


def _takes_argument(action: Action) -> bool:
    try:
        parameters = inspect.signature(action).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
