"""Weight syncs between RL trainers and rollout engines, declared, fenced and auditable.

    from phasesync import RankRunner, load

`import phasesync` is light: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasesync.core.model import Rank, RootCause, Ticket
    from phasesync.core.plan import resolve
    from phasesync.core.protocol import Protocol
    from phasesync.errors import EpochFailed, FenceBroken, PhasesyncError, ProtocolError
    from phasesync.fences.inprocess import InProcessFences
    from phasesync.fences.ray import RayFences
    from phasesync.fences.store import StoreFences
    from phasesync.integrations.generic import phase, protocol
    from phasesync.integrations.ray import RayDriver
    from phasesync.runtime import DevicePort, Driver, EpochReport, HostDevice, RankRunner, Turn
    from phasesync.spec import load, loads

__version__ = "0.1.0"

__all__ = (
    "DevicePort",
    "Driver",
    "EpochFailed",
    "EpochReport",
    "FenceBroken",
    "HostDevice",
    "InProcessFences",
    "PhasesyncError",
    "Protocol",
    "ProtocolError",
    "Rank",
    "RankRunner",
    "RayDriver",
    "RayFences",
    "RootCause",
    "StoreFences",
    "Ticket",
    "Turn",
    "load",
    "loads",
    "phase",
    "protocol",
    "resolve",
)

_HOMES = {
    "DevicePort": "phasesync.runtime",
    "Driver": "phasesync.runtime",
    "EpochFailed": "phasesync.errors",
    "EpochReport": "phasesync.runtime",
    "FenceBroken": "phasesync.errors",
    "HostDevice": "phasesync.runtime",
    "InProcessFences": "phasesync.fences.inprocess",
    "PhasesyncError": "phasesync.errors",
    "Protocol": "phasesync.core.protocol",
    "ProtocolError": "phasesync.errors",
    "Rank": "phasesync.core.model",
    "RankRunner": "phasesync.runtime",
    "RayDriver": "phasesync.integrations.ray",
    "RayFences": "phasesync.fences.ray",
    "RootCause": "phasesync.core.model",
    "StoreFences": "phasesync.fences.store",
    "Ticket": "phasesync.core.model",
    "Turn": "phasesync.runtime",
    "load": "phasesync.spec",
    "loads": "phasesync.spec",
    "phase": "phasesync.integrations.generic",
    "protocol": "phasesync.integrations.generic",
    "resolve": "phasesync.core.plan",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'phasesync' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if (needs := error.name) in ("ray", "torch"):
            raise ModuleNotFoundError(
                f"phasesync.{name} needs {needs}: pip install 'phasesync[{needs}]'", name=needs
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
