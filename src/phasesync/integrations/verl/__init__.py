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

Processes that this one starts get the same settings with its environment, and verl's own bodies
after `uninstall`. A Ray cluster that was there before starts processes with another environment.
"""

import os
import sys
import warnings
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
_TOLD = "PHASESYNC_VERL"  # The settings, for the processes that this one starts.
_PLACES = {WORKERS: (worker_class, worker_body), MANAGER: (manager_class, manager_body)}
_stock: dict[type, Any] = {}
_chosen: Settings | None = None
_names_auto = False  # Whether it was this module that put `_AUTO` into the environment.


def install(mode: str = "enforce", *, lazily: bool = False, **settings: Any) -> str:
    """Replace verl's bodies in this process, and in those that it starts; the mode in force.

    `settings` are the fields of `Settings`. `lazily` waits until verl imports its own modules.
    Under `observe`, and with `on_start_failure="stock"`, a verl that does not fit gets a warning.

    Raises:
        PlanError: this verl has no body that phasesync could replace, or a setting is wrong.
    """
    global _chosen  # noqa: PLW0603
    overrides = os.environ.get("PHASESYNC")
    wanted = overrides or mode
    if wanted not in MODES:
        said = f"$PHASESYNC is {overrides!r}" if overrides else f"mode is {mode!r}"
        raise PlanError(f"{said}; it must be one of: {', '.join(MODES)}")
    chosen = Settings.make(mode=wanted, **settings)
    uninstall()
    os.environ[_TOLD] = chosen.told()
    if wanted == "off":
        return wanted
    _chosen = chosen
    try:
        for name in _PLACES:
            if name in sys.modules or not lazily:
                _replace(name)
            else:
                when_imported(name, partial(_replace, name))
    except BaseException:
        uninstall()
        raise
    _hand_on()
    return wanted


def uninstall() -> None:
    """Put verl's own bodies back, in this process and in those that it starts from now on."""
    global _chosen, _names_auto  # noqa: PLW0603
    _chosen = None
    while _stock:
        cls, stock = _stock.popitem()
        cls.update_weights = stock  # type: ignore[attr-defined]
    os.environ.pop(_TOLD, None)
    if _names_auto:
        _names_auto = False
        os.environ[_EXTERNAL] = ",".join(name for name in _named() if name != _AUTO)


def installed() -> str:
    """The mode in force in this process; `off` where verl's own bodies are in place."""
    return _chosen.mode if _chosen is not None else "off"


def _install_as_told() -> str:
    """As the process says that started this one, if any does; in full where nobody does.

    What verl does not import is not waited for, and verl's modules are not pulled in.
    """
    told, lost = Settings.as_told(os.environ.get(_TOLD))
    if lost:
        what = " and ".join(f"{name}=" for name in lost)
        why = (
            f"install({what}...) of the process that started this one does not reach it; give "
            "functions that a module defines, or call install() here too"
        )
        warnings.warn(why, RuntimeWarning, stacklevel=3)
    return install(lazily=True, **told)


def _replace(name: str) -> None:
    settings = _chosen
    if settings is None:
        return
    find, body = _PLACES[name]
    try:
        module = _module(name)
        cls = find(module)
    except PlanError as error:
        if not settings.spares_the_job:
            raise
        why = f"phasesync does not start ({error}); verl's own update_weights runs instead"
        warnings.warn(why, RuntimeWarning, stacklevel=3)
        return
    if cls in _stock:
        return  # Importing it has told who waited for that.
    if _is_ray_ahead(cls):
        why = (
            "phasesync comes too late to this actor: Ray has taken its methods by now, and its "
            "colocated syncs run verl's own body; name phasesync.integrations.verl.auto in "
            f"${_EXTERNAL}, in the job's runtime_env"
        )
        warnings.warn(why, RuntimeWarning, stacklevel=3)
    stock = cls.update_weights
    cls.update_weights = body(stock, module, settings)
    _stock[cls] = stock


def _is_ray_ahead(cls: type) -> bool:
    """Whether this process is an actor of that class itself: Ray calls the methods that it found
    when it loaded the class. An actor that holds such workers asks them anew at each call."""
    ray = sys.modules.get("ray")
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    actors = getattr(worker, "actors", None) or {}
    return any(isinstance(actor, cls) for actor in actors.values())


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "verl":
            raise PlanError("verl is not installed here; pip install verl") from error
        if error.name is None or not name.startswith(error.name):
            raise
        raise PlanError(f"this verl has no {name}; phasesync fits verl 0.8.0 and newer") from error


def _named() -> list[str]:
    return [name for name in os.environ.get(_EXTERNAL, "").split(",") if name]


def _hand_on() -> None:
    """Processes that inherit this environment install too, when they import verl."""
    global _names_auto  # noqa: PLW0603
    if _AUTO not in _named():
        _names_auto = True
        os.environ[_EXTERNAL] = ",".join((*_named(), _AUTO))
