"""The trainer's side of a sync: parameters off the device and back, and proof that memory is free.

Order must survive edits: synchronise, then collect IPC handles, then empty the cache, then measure.
A copy that is still enqueued keeps its source, a handle that a reader holds keeps its block, and a
cache that was emptied before either has nothing to give back.
"""

import gc
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from phasesync.errors import EngineError

__all__ = (
    "Freed",
    "ModuleOffloader",
    "TorchDevice",
    "device_name",
    "empty_cache",
    "offload_optimizer",
    "onload_optimizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What a release gave back: free bytes on the device before and after, and what was moved."""

    before_bytes: int | None
    after_bytes: int | None
    moved_bytes: int

    @property
    def freed_bytes(self) -> int | None:
        """None where nobody can tell, as on a CPU."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes


class TorchDevice:
    """One accelerator, or the host, as the runtime sees it: its name, and what fences require.

    Waiting for the device may take long. Asking the driver what is free does not: microseconds,
    where a hop to a thread and back takes a tenth of a millisecond or more.
    """

    measures_at_once = True

    def __init__(self, device: "torch.device | str | int | None" = None) -> None:
        self.torch_device = _torch_device(device)
        self.name = device_name(self.torch_device)
        self.blocks = self.torch_device.type != "cpu"

    def synchronise(self) -> None:
        """Return once everything enqueued on the device has happened."""
        if self.torch_device.type != "cpu":
            _backend(self.torch_device).synchronize(self.torch_device)

    def collect_ipc(self) -> None:
        """Give back memory whose IPC handles nobody holds any more."""
        if self.torch_device.type == "cuda":
            with torch.cuda.device(self.torch_device):
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int | None:
        """Bytes that another process could map now, by the driver; None on a CPU."""
        backend = _backend(self.torch_device)
        measure = getattr(backend, "mem_get_info", None)
        if self.torch_device.type == "cpu" or measure is None:
            return None
        return int(measure(self.torch_device)[0])

    def allocated_bytes(self) -> int | None:
        """Bytes that live tensors of this process hold; None on a CPU."""
        measure = getattr(_backend(self.torch_device), "memory_allocated", None)
        if self.torch_device.type == "cpu" or measure is None:
            return None
        return int(measure(self.torch_device))

    def release(self) -> None:
        """Give back all that this process can: in order, and twice where a handle needs it."""
        self.synchronise()
        gc.collect()
        self.collect_ipc()
        empty_cache(self.torch_device)
        self.collect_ipc()

    def shared_bytes(self) -> int:
        """Bytes that the allocator cannot give back: live tensors lie in the same blocks."""
        backend = _backend(self.torch_device)
        if self.torch_device.type == "cpu" or not hasattr(backend, "memory_reserved"):
            return 0
        reserved = int(backend.memory_reserved(self.torch_device))
        return reserved - int(backend.memory_allocated(self.torch_device))

    def check_freed(
        self, before_bytes: int | None, *, at_least: int, what: str = "the release"
    ) -> Freed:
        """That `at_least` bytes more are free than `before_bytes`, or only the allocator has them.

        Raises:
            EngineError: they are not; it says who holds what.
        """
        after, shared = self.free_bytes(), self.shared_bytes()
        freed = Freed(before_bytes=before_bytes, after_bytes=after, moved_bytes=at_least)
        if freed.freed_bytes is not None and freed.freed_bytes + shared < at_least:
            raise EngineError(
                f"{what} was to free {at_least} bytes on {self.name} and freed "
                f"{freed.freed_bytes}; live tensors of this process hold {self.allocated_bytes()} "
                f"and keep {shared} more from being given back. Something still refers to what "
                "was released: an optimizer state, a graph, a view or an exported handle"
            )
        return freed


@dataclass(slots=True)
class ModuleOffloader:
    """Moves a module's parameters, gradients and buffers to the host and back, FSDP or plain.

    Parameters keep their identity: an optimizer that holds them goes on holding the same ones.
    Pinned host memory is kept between turns, since pinning it costs more than the copy.
    """

    module: torch.nn.Module
    device: TorchDevice
    pin: bool = True
    _host: dict[int, torch.Tensor] = field(default_factory=dict)

    def offload(self, *, check: bool = True) -> Freed:
        """Copy to the host, wait for the copies, let go, and measure. Gradients are dropped.

        Raises:
            EngineError: the memory did not come free.
        """
        before, live = self.device.free_bytes(), self.device.allocated_bytes()
        moved = self.held_bytes
        self.module.zero_grad(set_to_none=True)
        if moved:
            self._leave()
        self.device.release()
        if check and live is not None:
            self._check_let_go(moved, live)
        # Blocks that were cached before do not come free again, so a tenth may be missing.
        return self.device.check_freed(
            before, at_least=int(moved * 0.9) if check else 0, what="offload"
        )

    def onload(self) -> int:
        """Copy back to the device and wait; the bytes moved."""
        held = self.held_bytes
        target = self.device.torch_device
        if self._is_sharded or self._handles:
            self._move(target)
        else:
            for tensor in self._tensors():
                # A meta tensor has nothing to bring; who made the module has yet to fill it.
                if tensor.device.type not in (target.type, "meta"):
                    tensor.data = tensor.data.to(target, non_blocking=True)
        self.device.synchronise()
        return self.held_bytes - held

    @property
    def held_bytes(self) -> int:
        """What parameters and buffers hold on the device now; nothing where that is the host."""
        here = self.device.torch_device.type
        if here == "cpu":
            return 0
        return sum(_nbytes(tensor) for tensor in self._tensors() if tensor.device.type == here)

    def _check_let_go(self, moved: int, live_before: int) -> None:
        live = self.device.allocated_bytes() or 0
        if live_before - live < moved:
            raise EngineError(
                f"offload moved {moved} bytes off {self.device.name}, and live tensors of this "
                f"process still hold {live}, {live_before - live} less than before. Something "
                "refers to the old parameters: an optimizer state, a graph, a view or a handle"
            )

    @property
    def _is_sharded(self) -> bool:
        """FSDP2 keeps its parameters as sharded tensors, and follows only the module's `to`."""
        return any(hasattr(tensor, "_local_tensor") for tensor in self.module.parameters())

    @property
    def _handles(self) -> list[Any]:
        """FSDP1 keeps its parameters flat, and views of them, behind handles of its own."""
        found = (getattr(module, "_handle", None) for module in self.module.modules())
        return [handle for handle in found if hasattr(handle, "flat_param_to")]

    def _leave(self) -> None:
        if self._is_sharded or self._handles:
            self._move(torch.device("cpu"))
            return
        parts = len({id(each) for each in (*self.module.parameters(), *self.module.buffers())})
        if len(list(self._tensors())) < parts - self._empty:
            raise EngineError(
                "parameters of this module are views of one buffer, and moving them one by one "
                "would part them; use the offload of the framework that made the buffer"
            )
        self._park()

    @property
    def _empty(self) -> int:
        return sum(
            not _nbytes(each) for each in (*self.module.parameters(), *self.module.buffers())
        )

    def _move(self, target: torch.device) -> None:
        """Move what FSDP keeps, by its own means."""
        handles = self._handles
        if not handles:
            self.module.to(target)
        for handle in handles:
            handle.flat_param_to(target)
            flat = handle.flat_param
            flat._local_shard = flat.data
            if not handle.uses_sharded_strategy:
                # A flat parameter that is never sharded is used through views of its memory.
                handle._use_unsharded_views(as_params=handle._use_orig_params)
                held = getattr(flat, "_tensors", None) or []
                held[:] = [None] * len(held)
        for buffer in self.module.buffers() if handles else ():
            buffer.data = buffer.data.to(target)

    def _park(self) -> None:
        here = self.device.torch_device.type
        moving = [tensor for tensor in self._tensors() if tensor.device.type == here]
        for tensor in moving:
            self._host_copy(tensor).copy_(tensor.detach(), non_blocking=True)
        # The copies are only enqueued; what they read must live until they have happened.
        self.device.synchronise()
        for tensor in moving:
            tensor.data = self._host[id(tensor)]

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._host.get(id(tensor))
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            pinned = self.pin and self.device.torch_device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host[id(tensor)] = host
        return host

    def _tensors(self) -> Iterator[torch.Tensor]:
        """One tensor for each piece of memory that parameters and buffers hold."""
        seen: set[tuple[torch.device, int]] = set()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            memory = getattr(tensor, "_local_tensor", tensor)
            # What has no memory, as on the meta device, shares none.
            where = (memory.device, memory.untyped_storage().data_ptr() or id(tensor))
            if where not in seen and _nbytes(tensor):
                seen.add(where)
                yield tensor


def offload_optimizer(optimizer: torch.optim.Optimizer, device: TorchDevice) -> int:
    """Move the optimizer's state to the host and wait; the bytes moved."""
    return _move_state(optimizer, device, torch.device("cpu"))


def onload_optimizer(optimizer: torch.optim.Optimizer, device: TorchDevice) -> int:
    """Move the optimizer's state back to the device and wait; the bytes moved."""
    return _move_state(optimizer, device, device.torch_device)


def _move_state(optimizer: torch.optim.Optimizer, device: TorchDevice, target: torch.device) -> int:
    moved = sum(_move_held(state, target) for state in optimizer.state.values())
    device.synchronise()
    return moved


def _move_held(held: "dict[Any, Any] | list[Any]", target: torch.device) -> int:
    """Move the tensors in `held`, and in the lists and mappings that some optimizers keep there."""
    moved = 0
    for at, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(value, dict | list):
            moved += _move_held(value, target)
        elif isinstance(value, torch.Tensor) and value.dim() and value.device != target:
            moved += _nbytes(value)
            held[at] = value.to(target, non_blocking=True)
    return moved


def empty_cache(device: torch.device) -> None:
    """Give the allocator's free blocks back to the driver; the device must be synchronised."""
    if device.type != "cpu":
        _backend(device).empty_cache()


def device_name(device: "torch.device | str | int | None" = None) -> str:
    """`host/GPU-UUID`, the same from every process, or `host/cpuN`; never an ordinal."""
    chosen = _torch_device(device)
    host = socket.gethostname()
    if chosen.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(chosen), "uuid", None)
        if uuid is None:
            raise EngineError("this torch does not tell the UUID of a GPU; use torch 2.4 or newer")
        return f"{host}/GPU-{uuid}"
    return f"{host}/{chosen.type}{chosen.index or 0}"


def _torch_device(device: "torch.device | str | int | None") -> torch.device:
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _backend(device: torch.device) -> Any:
    return getattr(torch, device.type, torch.cpu)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes())
