"""What the runtime asks of a device before it arrives at a fence."""

import operator
import sys
import typing
from collections.abc import Callable
from typing import NamedTuple

from phasesync.core.plan import Plan, Wait
from phasesync.core.protocol import Evidence
from phasesync.errors import PlanError, RankLost

__all__ = (
    "DevicePort",
    "HostDevice",
    "Proof",
    "allocator_figures",
    "check_established",
    "prove",
)


class DevicePort(typing.Protocol):
    """One rank's device: its name, and the preconditions that a fence may require.

    `name` is `host/GPU-UUID` or `host/cpuN`, the same string from every process. `blocks` says
    that calls may take long, and so need a thread beside the event loop; a device that also has
    `measures_at_once` set is asked for its free bytes without one.
    """

    name: str
    blocks: bool

    def synchronise(self) -> None:
        """Return once everything enqueued on the device has happened."""

    def collect_ipc(self) -> None:
        """Give back memory whose IPC handles nobody holds any more."""

    def free_bytes(self) -> int | None:
        """Bytes that another process could map now; None where nobody can tell."""


class HostDevice:
    """Host memory: nothing is ever enqueued, and nobody counts what is free."""

    blocks = False

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronise(self) -> None:
        """Host code has run when it returns."""

    def collect_ipc(self) -> None:
        """Host memory has no IPC handles."""

    def free_bytes(self) -> int | None:
        return None


class Proof(NamedTuple):
    """What a rank can show at a fence; `error` says what it cannot, `kind` as a cause does."""

    free_bytes: int | None
    error: str | None = None
    error_type: str | None = None
    kind: str = "evidence"


_ESTABLISHED: dict[str, Callable[[DevicePort], None]] = {
    "device_synchronised": lambda device: device.synchronise(),
    "ipc_collected": lambda device: device.collect_ipc(),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


def allocator_figures(device: DevicePort | None) -> dict[str, int]:
    """What this process's allocator holds on the device, without a call to the driver: it may
    be the driver that hangs. Nothing where there is no such allocator, or it was never used."""
    torch = sys.modules.get("torch")  # Who has memory of torch's has imported it.
    where = getattr(device, "torch_device", None)
    if torch is None or where is None or where.type != "cuda" or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_bytes": int(torch.cuda.memory_allocated(where)),
        "reserved_bytes": int(torch.cuda.memory_reserved(where)),
    }


def check_established(plan: Plan) -> None:
    """Refuse a plan whose fences require what the runtime cannot establish.

    Raises:
        PlanError: it names the fence and what can be required.
    """
    waits = {step for program in plan.programs for step in program if isinstance(step, Wait)}
    for wait in waits:
        for name in wait.established:
            if name not in _ESTABLISHED:
                have = ", ".join(_ESTABLISHED)
                raise PlanError(
                    f"fence {wait.fence!r} requires {name!r}, which nobody establishes; "
                    f"a fence may require: {have}"
                )


def prove(device: DevicePort, wait: Wait) -> Proof:
    """Do what the fence requires, then measure what it asks to see. It never raises."""
    try:
        for name in wait.established:
            _ESTABLISHED[name](device)
        free = device.free_bytes()
    except RankLost as error:
        return Proof(None, str(error), type(error.__cause__ or error).__name__, error.kind)
    except Exception as error:
        return Proof(None, str(error) or repr(error), type(error).__name__, "failed")
    for evidence in wait.evidence:
        if (unmet := _unmet(device, evidence, free)) is not None:
            return Proof(free, unmet)
    return Proof(free)


def _unmet(device: DevicePort, evidence: Evidence, free: int | None) -> str | None:
    wanted = f"{evidence.name} {evidence.op} {evidence.value}"
    found = free if evidence.name == "free_bytes" else None
    if found is None:
        return f"{wanted} is required, and device {device.name} cannot measure it"
    if not _COMPARE[evidence.op](found, evidence.value):
        return f"{wanted} is required, and it is {found} on device {device.name}"
    return None
