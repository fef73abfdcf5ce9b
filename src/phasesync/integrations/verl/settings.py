"""What a user may choose, and where each choice has its place in the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from phasesync.core import wire
from phasesync.core.model import OptionValue
from phasesync.errors import PlanError

__all__ = ("MODES", "Settings")

MODES = ("off", "observe", "enforce")
_START = ("stop", "stock")
_FUNCTIONS = ("store", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`runs` is where run folders go. `on_start_failure` says what happens when phasesync itself
    cannot start: `stop` the job before memory is touched, or run verl's own body (`stock`).

    `store` and `group` are functions of the worker: a `torch.distributed.Store` to meet at, or a
    process group whose store and ranks are used; without them it is the default group, if there is
    one. Other processes find such a function where a module defines it. `options` are options of
    the protocol that override what verl's configuration says.
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

    def told(self) -> str:
        """What was chosen, as text, for processes that this one starts."""
        usual = type(self)()
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said = {name: value for name, value in said.items() if value != getattr(usual, name)}
        said |= {name: _address(said[name]) for name in _FUNCTIONS if name in said}
        if self.runs is not None:
            said["runs"] = str(Path(self.runs).absolute())
        return wire.encode(said).decode()

    @classmethod
    def as_told(cls, text: str | None) -> tuple[dict[str, Any], list[str]]:
        """The settings that `told` has put into words, and those for which there are none."""
        said: dict[str, Any] = wire.decode(text) if text else {}
        found = {name: _found(said.pop(name)) for name in _FUNCTIONS if name in said}
        known = {name: function for name, function in found.items() if function is not None}
        return {**said, **known}, [name for name in found if name not in known]

    @property
    def spares_the_job(self) -> bool:
        """Whether verl's own body runs where phasesync itself cannot start."""
        return self.mode == "observe" or self.on_start_failure == "stock"

    @property
    def folder(self) -> str:
        """Where run folders go: as chosen, else $PHASESYNC_RUNS, else `runs` beside the job."""
        return self.runs or os.environ.get("PHASESYNC_RUNS") or "runs"


def _address(function: Callable[[Any], Any]) -> str:
    """Where another process finds a function, `module:name`; `?` where it cannot."""
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "<")
    return "?" if module == "__main__" or "<" in name else f"{module}:{name}"


def _found(address: str) -> Callable[[Any], Any] | None:
    module, _, path = address.partition(":")
    if not path:
        return None
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]
