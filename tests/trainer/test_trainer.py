"""Offload, device names, and the check that a release freed what it said; the GPU figures are in
tests/data/gpu, measured once."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from phasesync.errors import EngineError
from phasesync.trainer import (
    Freed,
    ModuleOffloader,
    TorchDevice,
    device_name,
    offload_optimizer,
    onload_optimizer,
)


class CountedDevice(TorchDevice):
    """The host, with a counter where an accelerator has a driver, and a record of the order."""

    def __init__(self, free: int) -> None:
        super().__init__("cpu")
        self.free = free
        self.order: list[str] = []

    def free_bytes(self) -> int | None:
        return self.free

    def allocated_bytes(self) -> int | None:
        return 123

    def synchronise(self) -> None:
        self.order.append("synchronise")

    def collect_ipc(self) -> None:
        self.order.append("collect_ipc")


def test_a_device_is_named_by_host_and_never_by_ordinal_alone() -> None:
    assert device_name("cpu") == f"{socket.gethostname()}/cpu0"
    assert TorchDevice(torch.device("cpu", 0)).name == device_name("cpu")


def test_the_host_frees_nothing_and_says_that_it_cannot_tell() -> None:
    device = TorchDevice("cpu")
    assert (device.blocks, device.free_bytes(), device.allocated_bytes()) == (False, None, None)
    device.synchronise()
    device.collect_ipc()
    device.release()
    assert device.check_freed(None, at_least=10**12).freed_bytes is None


def test_a_release_synchronises_before_it_collects() -> None:
    device = CountedDevice(100)
    device.release()
    assert device.order == ["synchronise", "collect_ipc", "collect_ipc"]


def test_a_release_that_freed_too_little_is_an_error_that_says_who_holds_what() -> None:
    device = CountedDevice(100)
    assert device.check_freed(40, at_least=60) == Freed(
        before_bytes=40, after_bytes=100, moved_bytes=60
    )
    with pytest.raises(EngineError, match=r"to free 61 bytes on .* freed 60; live .* hold 123 and"):
        device.check_freed(40, at_least=61)


def test_offload_and_onload_keep_every_parameter_the_same_object_with_the_same_values() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = {name: (id(value), value.clone()) for name, value in module.named_parameters()}
    module(torch.ones(2, 4)).sum().backward()
    offloader = ModuleOffloader(module, TorchDevice("cpu"))
    offloader.offload()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert offloader.held_bytes == 0
    offloader.onload()
    for name, value in module.named_parameters():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])


def test_a_module_that_stays_on_its_device_is_found_out() -> None:
    class Stuck(ModuleOffloader):
        @property
        def held_bytes(self) -> int:
            return 1000

    with pytest.raises(EngineError, match=r"offload moved 1000 bytes off .* 0 less than before"):
        Stuck(torch.nn.Linear(2, 2), CountedDevice(0)).offload()


def test_parameters_that_are_views_of_one_buffer_are_not_parted() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    )
    flat = torch.zeros(8)
    for number, layer in enumerate(module):
        layer.weight.data = flat[4 * number : 4 * number + 4].view(2, 2)

    class Accelerator(ModuleOffloader):
        @property
        def held_bytes(self) -> int:
            return 32

    with pytest.raises(EngineError, match="are views of one buffer"):
        Accelerator(module, CountedDevice(0)).offload()


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp_moves_by_its_own_handles(original: bool, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu")
        )
        answer = module(torch.ones(2, 4))
        offloader = ModuleOffloader(module, TorchDevice("cpu"))
        assert offloader._handles
        offloader._move(torch.device("cpu"))
        assert torch.equal(module(torch.ones(2, 4)), answer)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_state_moves_and_steps_on() -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    device = TorchDevice("cpu")
    assert offload_optimizer(optimizer, device) == 0, "it is on the host already"
    onload_optimizer(optimizer, device)
    optimizer.step()


class Nowhere(TorchDevice):
    """The meta device, to which a tensor moves without an accelerator."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch_device = torch.device("meta")

    def synchronise(self) -> None:
        """Nothing is ever enqueued."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_all_that_an_optimizer_keeps_moves_wherever_it_keeps_it(kind: Any) -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    optimizer = kind(module.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = module(torch.ones(2, 4)).square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(2):
        loss()
        optimizer.step(loss)
    assert onload_optimizer(optimizer, Nowhere()) >= 2 * 16 * 4
    (state,) = optimizer.state.values()
    held = [
        each for value in state.values() for each in (value if type(value) is list else [value])
    ]
    stayed = [each for each in held if isinstance(each, torch.Tensor) and each.dim()]
    assert stayed
    assert {each.device.type for each in stayed} == {"meta"}


def test_a_sharded_module_and_its_optimizer_go_on_after_a_turn() -> None:
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(module.parameters())
        offloader, device = ModuleOffloader(module, TorchDevice("cpu")), TorchDevice("cpu")
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            offloader.offload()
            offload_optimizer(optimizer, device)
            onload_optimizer(optimizer, device)
            offloader.onload()
        assert offloader._is_sharded
    finally:
        dist.destroy_process_group()


def test_tied_weights_stay_tied_and_what_is_on_meta_is_left_there() -> None:
    module = torch.nn.Module()
    module.one = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    module.two = torch.nn.Linear(4, 4, bias=False)
    module.two.weight = module.one.weight
    module.absent = torch.nn.Sequential(
        torch.nn.Linear(4, 4, device="meta"), torch.nn.Linear(4, 4, device="meta")
    )

    class Accelerator(ModuleOffloader):
        """Has something to move, as on a device, so that every step is taken."""

        @property
        def held_bytes(self) -> int:
            return 64

    offloader = Accelerator(module, TorchDevice("cpu"))
    offloader.offload(check=False)
    offloader.onload()
    assert module.one.weight is module.two.weight
    assert not module.one.weight.requires_grad
    assert {each.device.type for each in module.absent.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pin", [True, False])
def test_on_a_gpu_offload_frees_what_it_moved(pin: bool) -> None:
    device = TorchDevice()
    module: Any = torch.nn.Linear(8192, 8192, bias=False).to(device.torch_device)
    offloader = ModuleOffloader(module, device, pin=pin)
    held = offloader.held_bytes
    assert held == 8192 * 8192 * 4
    freed = offloader.offload()
    assert freed.freed_bytes is not None
    assert freed.freed_bytes >= held
    assert offloader.onload() == held
