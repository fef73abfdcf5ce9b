"""verl: its weight sync as a declared, fenced, journalled protocol.

    from phasesync.integrations import verl
    verl.install()

`install` puts a body of the same signature in the place of `ActorRolloutRefWorker.update_weights`;
`uninstall` puts verl's own back. Nothing else of verl changes. What must survive edits: rollout and
training engine get the calls that verl's own body makes, in its order, on its thread.

Worker processes need it too. Name `phasesync.integrations.verl.auto`, a module that installs when
it is imported, in `VERL_USE_EXTERNAL_MODULES` or in
`actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module`. `PHASESYNC=off|observe|enforce`
overrides the mode.
"""

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from phasesync.errors import PlanError
from phasesync.integrations.verl.arrival import when_imported
from phasesync.integrations.verl.manager import manager_body
from phasesync.integrations.verl.probe import MANAGER, WORKERS, manager_class, worker_class
from phasesync.integrations.verl.settings import MODES, Settings
from phasesync.integrations.verl.worker import worker_body

__all__ = ("Settings", "install", "installed", "uninstall")

_AUTO = "phasesync.integrations.verl.auto"
_EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
_PLACES = {WORKERS: (worker_class, worker_body), MANAGER: (manager_class, manager_body)}
_stock: dict[type, Any] = {}
_mode = "off"


def install(mode: str = "enforce", *, lazily: bool = False, **settings: Any) -> str:
    """Replace verl's bodies in this process, and in those that it starts; the mode in force.

    `settings` are the fields of `Settings`. `lazily` waits until verl imports its own modules.

    Raises:
        PlanError: this verl has no body that phasesync could replace, or a setting is wrong.
    """
    global _mode  # noqa: PLW0603
    wanted = os.environ.get("PHASESYNC") or mode
    if wanted not in MODES:
        raise PlanError(f"mode is {wanted!r}; it must be one of: {', '.join(MODES)}")
    chosen = Settings.make(mode=wanted, **settings)
    uninstall()
    _mode = wanted
    if wanted == "off":
        return wanted
    for name in _PLACES:
        if name in sys.modules or not lazily:
            _replace(name, chosen)
        else:
            when_imported(name, partial(_replace, name, chosen))
    _hand_on()
    return wanted


def uninstall() -> None:
    """Put verl's own bodies back, in this process."""
    global _mode  # noqa: PLW0603
    _mode = "off"
    while _stock:
        cls, stock = _stock.popitem()
        cls.update_weights = stock  # type: ignore[attr-defined]


def installed() -> str:
    """The mode in force in this process; `off` where verl's own bodies are in place."""
    return _mode


def _replace(name: str, settings: Settings) -> None:
    if _mode == "off":
        return
    find, body = _PLACES[name]
    module = import_module(name)
    cls = find(module)
    stock = cls.update_weights
    cls.update_weights = body(stock, module, settings)
    _stock[cls] = stock


def _hand_on() -> None:
    """Processes that inherit this environment install too, when they import verl."""
    have = [name for name in os.environ.get(_EXTERNAL, "").split(",") if name]
    if _AUTO not in have:
        os.environ[_EXTERNAL] = ",".join((*have, _AUTO))
