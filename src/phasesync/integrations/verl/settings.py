"""What a user may choose, and where each choice has its place in the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from phasesync.core.model import OptionValue
from phasesync.errors import PlanError

__all__ = ("MODES", "Settings")

MODES = ("off", "observe", "enforce")
_START = ("stop", "stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`runs` is where run folders go. `on_start_failure` says what happens when phasesync itself
    cannot start: `stop` the job before memory is touched, or run verl's own body (`stock`).

    `store` and `group` are functions of the worker: a `torch.distributed.Store` to meet at, or a
    process group whose store and ranks are used; without them it is the default group, if there is
    one. `options` are options of the protocol that override what verl's configuration says.
    """

    mode: str = "enforce"
    runs: str | None = None
    run: str | None = None
    on_start_failure: str = "stop"
    plan_deadline_s: float = 600.0
    fsync: str = "none"
    store: Callable[[Any], Any] | None = None
    group: Callable[[Any], Any] | None = None
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    @classmethod
    def make(cls, **chosen: Any) -> Self:
        """The settings, checked.

        Raises:
            PlanError: there is no such setting, or it cannot have that value.
        """
        known = [each.name for each in fields(cls)]
        for name in chosen:
            if name not in known:
                raise PlanError(f"no setting {name!r}; settings are: {', '.join(known)}")
        made = cls(**{"on_start_failure": os.environ.get("PHASESYNC_START", "stop"), **chosen})
        if made.on_start_failure not in _START:
            raise PlanError(
                f"on_start_failure is {made.on_start_failure!r}; it must be one of: "
                f"{', '.join(_START)}"
            )
        return made

    @property
    def folder(self) -> str:
        """Where run folders go: as chosen, else $PHASESYNC_RUNS, else `runs` beside the job."""
        return self.runs or os.environ.get("PHASESYNC_RUNS") or "runs"
