"""A device's budget: it refuses, names holders, and outlives whoever is killed in it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phasesync.demo.budget import MIB, SLOTS, DeviceBudget
from phasesync.errors import DeviceOutOfMemory, Refused


@pytest.fixture
def device(tmp_path: Path) -> DeviceBudget:
    return DeviceBudget.create(tmp_path / "device", name="vm/cpu1", capacity=64 * MIB)


def test_refusal_names_device_asker_and_holders(device: DeviceBudget) -> None:
    device.take("trainer/1", "trainer_params", 24 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.take("engine/0", "kv_cache", 44 * MIB)
    assert str(caught.value) == (
        "device vm/cpu1 is out of memory: engine/0 asks for kv_cache 44.0 MiB, 40.0 MiB of "
        "64.0 MiB are free; held: trainer/1 trainer_params 24.0 MiB"
    )
    assert caught.value.held == (("trainer/1", "trainer_params", 24 * MIB),)
    assert device.free_bytes() == 40 * MIB, "what was refused holds nothing"


def test_given_back_memory_is_there_for_others(device: DeviceBudget) -> None:
    device.take("trainer/1", "trainer_params", 24 * MIB)
    assert device.give("trainer/1", "trainer_params") == 24 * MIB
    device.take("engine/0", "kv_cache", 64 * MIB)
    assert device.give("engine/0") == 64 * MIB
    assert device.held() == ()


def test_the_same_thing_twice_is_refused(device: DeviceBudget) -> None:
    device.take("trainer/1", "staging", MIB)
    with pytest.raises(Refused, match="trainer/1 holds staging on vm/cpu1 already"):
        device.take("trainer/1", "staging", MIB)


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, b'[["half a li', {slot})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_holder_killed_while_it_writes_leaves_the_table_that_was(
    tmp_path: Path, device: DeviceBudget
) -> None:
    device.take("trainer/1", "staging", MIB)
    path = tmp_path / "device"
    spare = SLOTS[1 - path.read_bytes()[0]]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(slot=spare), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGKILL)
    assert [each.what for each in device.held()] == ["staging"]
    device.take("engine/0", "kv_cache", MIB)
    assert device.free_bytes() == 62 * MIB


TAKER = """
import sys
from pathlib import Path
from phasesync.demo.budget import DeviceBudget
from phasesync.errors import DeviceOutOfMemory
device, taken = DeviceBudget(Path(sys.argv[1])), 0
for number in range(200):
    try:
        device.take(sys.argv[2], str(number), 2**20)
        taken += 1
    except DeviceOutOfMemory:
        pass
print(taken)
"""


def test_processes_at_once_never_hold_more_than_there_is(
    tmp_path: Path, device: DeviceBudget
) -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(tmp_path / "device"), f"trainer/{number}"],
            stdout=subprocess.PIPE,
        )
        for number in range(3)
    ]
    taken = [int(taker.communicate(timeout=60)[0]) for taker in takers]
    assert sum(taken) == 64
    assert device.free_bytes() == 0
