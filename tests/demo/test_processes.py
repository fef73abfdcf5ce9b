"""The demo with real processes: memory that refuses, ranks that are killed, nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.demo.demos import Played, journals, played, same_screen, waited

SCRATCH = (Path(tempfile.gettempdir()), Path("/dev/shm"))


def leftovers() -> set[Path]:
    return {path for folder in SCRATCH for path in folder.glob("phasesync-demo-*")}


def commands() -> dict[int, str]:
    """Every process of this machine that is alive, with its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if entry.name.isdigit() and state != "Z":
            found[int(entry.name)] = text
    return found


def descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for pid in commands():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
    found, grown = {root}, True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grown = True
    return found - {root}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No folder, and no process but the two that stay warm: fork server and resource tracker."""
    before = leftovers()
    yield
    assert leftovers() <= before
    warm = [pid for pid in descendants(os.getpid()) if pid in commands()]
    assert len(warm) <= 2, [commands()[pid] for pid in warm if pid in commands()]


def causes(demo: Played) -> dict[str, str]:
    """What each rank's journal ends with."""
    return {f"{line['role']}/{line['rank']}": line["error"] for line in demo.of("rank.exit")}


def test_a_slow_rank_is_waited_for_and_the_epoch_holds(tmp_path: Path) -> None:
    demo = played(tmp_path, slow="1", epochs=1)
    assert demo.code == 0, demo.shown
    assert len(demo.of("phase.progress", phase="serve", outputs=768)) == 4
    assert len({line["pid"] for line in demo.lines}) == 4
    assert waited(demo, "trainer/1").startswith("at memory_released")


@pytest.mark.parametrize("seed", range(3))
def test_without_the_fence_the_other_device_refuses(seed: int, tmp_path: Path) -> None:
    demo = played(tmp_path, break_fence=True, seed=seed)
    assert demo.code == 1
    (refused,) = demo.of("phase.fail", phase="resume_kv")
    assert refused["error_type"] == "DeviceOutOfMemory"
    (mark,) = [line["refused"] for line in demo.lines if "refused" in line]
    assert mark["device"].endswith("/cpu1")
    assert ["trainer/1", "trainer_params", 24 * 2**20] in mark["held"]
    told = " ".join(row.strip() for row in demo.screen)
    assert "violation R-FENCE at resume_kv in epoch 1; guilty: trainer/0" in told
    assert "/cpu1: kv_cache and staging together, held by trainer/1" in told


def test_a_collective_that_orders_the_ranks_by_accident_is_named(tmp_path: Path) -> None:
    demo = played(tmp_path, ranks=2, epochs=1, accident="all_reduce")
    assert demo.code == 0, demo.shown
    told = " ".join(row.strip() for row in demo.screen)
    assert "resume_kv of trainer/0 came after offload of trainer/1 every time" in told
    assert "an accident does, 'dist.all_reduce' on trainer/0" in told


def test_a_killed_rank_is_named_by_all_survivors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = played(Path("runs"), kill="3@offload")
    assert demo.code == 1
    same_screen(demo, "kill")
    last = max(demo.of("phase.start", rank=3), key=lambda line: int(line["seq"]))
    assert last["phase"] == "offload"
    assert not demo.of("rank.exit", rank=3), "it had no time for a word"
    exits = demo.of("rank.exit")
    assert {line["rank"] for line in exits} == {0, 1, 2}
    after_s = (max(line["mono_ns"] for line in exits) - last["mono_ns"]) / 1e9
    assert after_s < 5
    found = {text.partition(": ")[2] for text in causes(demo).values()}
    assert len(found) == 1, "all name the same cause, whoever noticed first"
    assert found.pop().startswith("epoch 2 failed: trainer/3 died")
    stopped = demo.of("fence.break", rank=2)
    assert stopped, "its replica stops at the next fence"
    served = {line["rank"] for line in demo.of("phase.end", phase="serve", epoch=2)}
    assert served == {0, 1}, "the other replica finishes what is legal for it"
    told = " ".join(row.strip() for row in demo.screen)
    assert "trainer/0, trainer/1, trainer/2: epoch failed: trainer/3 died" in told
    assert "failure at offload in epoch 2; guilty: trainer/3" in told


def test_a_killed_engine_fails_its_leader(tmp_path: Path) -> None:
    demo = played(tmp_path, kill="engine/0@load", epochs=1)
    assert demo.code == 1
    (failed,) = demo.of("phase.fail", phase="load")
    assert failed["rank"] == 0
    assert failed["error_type"] == "EngineLost"
    assert all("trainer/0 failed in phase 'load'" in text for text in causes(demo).values())


PROGRAM = """
import signal
import sys
from pathlib import Path
from phasesync.demo import DemoSettings, run_demo
# A shell that started the tests in the background had SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings = DemoSettings(runs=Path(sys.argv[1]), slow="1", epochs=50)
sys.exit(run_demo(settings, audit_run=lambda _: (0, ["ok"])))
"""


def test_ctrl_c_ends_everything_and_says_so(tmp_path: Path) -> None:
    began = time.monotonic()
    heard: list[tuple[float, str]] = []
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        for row in demo.stdout:
            heard.append((time.monotonic() - began, row))
            if "trainer/1 in offload" in row:
                break
        mine = descendants(demo.pid)
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stdout.read()
        errors = demo.stderr.read()
        assert demo.wait(timeout=20) == 130
    assert "interrupted; journals so far: " in rest
    assert errors == ""
    assert heard[0][0] < 2, "it speaks soon"
    gaps = [later[0] - sooner[0] for sooner, later in pairwise(heard)]
    assert max(gaps) < 1.5, "and then at least once a second, on a machine that is not busy"
    assert len(mine) >= 8, "4 trainers, 2 engines, the store's host, the fork server"
    _gone(mine)


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for row in demo.stdout:
            if "trainer/1 in offload" in row:
                break
        mine = descendants(demo.pid)
        demo.kill()
    _gone(mine)
    (folder,) = tmp_path.iterdir()
    assert journals(folder)


def _gone(processes: set[int]) -> None:
    deadline = time.monotonic() + 5
    while (left := processes & commands().keys()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, {pid: commands().get(pid) for pid in left}
