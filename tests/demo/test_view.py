"""What is shown while a demo runs, from journals as they grow."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from phasesync.demo import view as views
from phasesync.demo.settings import DemoSettings, Script, script_of
from phasesync.demo.tail import Tail
from phasesync.demo.view import View
from phasesync.journal import Journal


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def script(tmp_path: Path) -> Script:
    found = script_of(DemoSettings(ranks=2), run="shown", runs=tmp_path, host="vm")
    found.folder.mkdir()
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(views, "time", clock)
    return clock


def journal_of(script: Script, number: int) -> Journal:
    rank = script.plan.members[number]
    return Journal(script.runs, run=script.run, rank=rank, ranks=2, device=script.devices[number])


def console(*, terminal: bool) -> tuple[Console, Callable[[], str]]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=90), out.getvalue


def test_it_speaks_at_least_once_a_second_when_nothing_happens(
    script: Script, clock: Clock
) -> None:
    where, shown = console(terminal=False)
    with View(script, where) as view:
        for _ in range(50):
            clock.now_s += 0.1
            view.tick()
    times = [float(row.split()[0]) for row in shown().splitlines()]
    assert times[0] <= 0.5
    assert max(b - a for a, b in zip([0.0, *times], times, strict=False)) < 1.0
    assert all(row.endswith("starting") for row in shown().splitlines())


def test_ranks_that_do_the_same_are_told_together(script: Script, clock: Clock) -> None:
    where, shown = console(terminal=False)
    with View(script, where) as view:
        for number, phase in ((0, "load"), (1, "offload")):
            journal = journal_of(script, number)
            journal.bind(epoch=2)
            journal.write("phase.start", phase=phase)
        clock.now_s += 1
        view.tick()
        journal.write("phase.fail", phase="offload", error_type="ValueError", level="error")
        clock.now_s += 1
        view.tick()
        assert view.phase_of("trainer/0") == "load"
        assert view.phase_of("trainer/1") is None
    rows = [row.split("s  ", 1)[1] for row in shown().splitlines()]
    assert rows[0] == "epoch 2 of 3: trainer/0 in load; trainer/1 in offload"
    assert rows[1] == "trainer/1 failed in offload: ValueError"
    assert rows[2] == "epoch 2 of 3: trainer/0 in load; trainer/1 stopped in offload"


def test_a_terminal_gets_a_lane_a_rank(script: Script, clock: Clock) -> None:
    where, shown = console(terminal=True)
    with View(script, where) as view:
        journal = journal_of(script, 1)
        journal.bind(epoch=1)
        journal.write("fence.arrive", fence="memory_released", status="ok", free_bytes=32 * 2**20)
        clock.now_s += 2
        view.tick()
    last = shown()
    assert "trainer/0   epoch 0" in last
    assert "waits at memory_released" in last
    assert "cpu1 ████████░░░░░░░░" in last


def test_a_line_that_is_half_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.0.jsonl"
    tail = Tail(tmp_path)
    assert tail.poll() == []
    path.write_bytes(b'{"mono_ns":1,"event":"a"}\n{"mono_ns":2,"ev')
    assert [line["event"] for line in tail.poll()] == ["a"]
    with path.open("ab") as file:
        file.write(b'ent":"b"}\n')
    assert [line["event"] for line in tail.poll()] == ["b"]
    assert [line["event"] for line in tail.lines] == ["a", "b"]
