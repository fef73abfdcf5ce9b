"""One rank of a job as verl starts it: its worker class in a Ray actor, in verl's own worker group.

Engine, rollout and device are those of `tests.verl.rank`; memory is shared through a file.
"""

import fcntl
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import verl.workers.engine_workers as ew
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs

from tests.verl.ledger import Ledger
from tests.verl.rank import Job, Run, modules_with_device

__all__ = ("RayRank", "ledger_at")


class _FileArray:
    """An array of small integers in a file, for processes that nobody forked."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)

    def __getitem__(self, at: int) -> int:
        return (os.pread(self._fd, 1, at) or b"\0")[0]

    def __setitem__(self, at: int, value: int) -> None:
        os.pwrite(self._fd, bytes((value,)), at)

    @contextmanager
    def get_lock(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def ledger_at(path: Path) -> Ledger:
    """The memory of all devices of a job, in a file."""
    return Ledger.of(_FileArray(path))


class RayRank(ew.ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker; nothing of its weight sync is overridden."""

    def __init__(self, job: Job, memory: str) -> None:
        logging.disable(logging.WARNING)
        Worker.__init__(self)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self.run = Run(job, self.rank, ledger_at(Path(memory)))
        self.run.failed_at = SimpleNamespace(value=0.0)
        for module in list(modules_with_device()):
            module.get_torch_device = lambda: self.run.device
        ew.set_expandable_segments = self.run.expandable
        for name, value in vars(self.run.worker).items():
            if name not in ("rank", "world_size"):
                setattr(self, name, value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def begin(self, step: int) -> None:
        """As after a training step; a rank that is late is so in step 1 alone."""
        self.run.epoch = step - 1
        self.run.begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def sleep(self) -> list[str]:
        """As verl's driver makes the engine sleep; the calls of this step."""
        self.rollout.sleep()
        return list(self.run.calls)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def reconfigure(self, **rollout: Any) -> None:
        """Change the rollout's configuration between two syncs."""
        for name, value in rollout.items():
            self.config.rollout[name] = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def import_late(self) -> list[str]:
        """As verl's configuration does with `custom_backend_module`; what is warned of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import_external_libs("phasesync.integrations.verl.auto")
        return [str(each.message) for each in caught]
