"""The last screen always fits, whatever happened to however many ranks."""

from pathlib import Path
from typing import Any

import pytest

from phasesync.core.model import Rank
from phasesync.core.plan import Act
from phasesync.demo.ending import Ending, RankEnd
from phasesync.demo.screen import screen_of
from phasesync.demo.settings import DemoSettings, Script, script_of
from tests.demo.demos import Played, fits, masked

LONG = "trainer/0 failed in phase 'resume_kv': DeviceOutOfMemory: " + "someone holds a lot, " * 30


def lines_of(script: Script) -> list[dict[str, Any]]:
    """A run in which every rank does every phase of its own and waits at a fence after each."""
    lines: list[dict[str, Any]] = []
    for at, rank in enumerate(script.plan.members):
        common = {"role": rank.role, "rank": rank.number, "host": "vm", "epoch": 1}
        common["device"] = script.devices[at]
        told: list[dict[str, Any]] = [{"event": "epoch.begin"}]
        for step in script.plan.programs[at]:
            if isinstance(step, Act):
                told.append({"event": "phase.start", "phase": step.phase})
                told.append({"event": "phase.end", "phase": step.phase, "free_bytes": at * 2**20})
            else:
                key = {"fence": step.fence, "scope": "world", "generation": len(told)}
                told.append({"event": "fence.arrive", "status": "ok", **key})
                told.append({"event": "fence.pass", **key})
        for seq, line in enumerate(told):
            lines.append({**common, **line, "seq": seq, "mono_ns": (seq * 16 + at) * 10**8})
    return lines


@pytest.mark.parametrize("ranks", [2, 4, 8, 10, 16])
@pytest.mark.parametrize("cause", ["", LONG])
def test_any_number_of_ranks_fits(ranks: int, cause: str, tmp_path: Path) -> None:
    settings = DemoSettings(ranks=ranks)
    script = script_of(settings, run="wide", runs=Path("runs"), host="a-host-with-a-name")
    ends = [RankEnd(rank, "failed", cause) for rank in script.plan.members[:-1]]
    ends.append(RankEnd(script.plan.members[-1], "died", "killed by SIGKILL"))
    verdict = ["violation R-FENCE; guilty: trainer/0", *(f"  see line {n}" for n in range(50))]
    ending = Ending(ranks=tuple(ends), survived_s=1.0)
    screen = [row.plain for row in screen_of(script, ending, lines_of(script), verdict)]
    fits(screen)
    assert "violation R-FENCE; guilty: trainer/0" in screen
    assert screen[-1] == "audit it:  phasesync audit runs/wide"
    assert any("more ranks" in row for row in screen) == (ranks > 8)


def test_a_path_is_never_broken(tmp_path: Path) -> None:
    deep = tmp_path / ("with a space " * 8)
    script = script_of(DemoSettings(ranks=2), run="deep", runs=deep, host="vm")
    done = Ending(ranks=tuple(RankEnd(rank, "done") for rank in script.plan.members))
    screen = screen_of(script, done, lines_of(script), ["ok"])
    assert screen[-1].plain == f"audit it:  phasesync audit '{deep}/deep'"
    assert Rank.parse("1") == script.plan.members[1]


@pytest.mark.parametrize("row", ["! cut off  † dies", "p sleep  ! cut off", "✗ fails  ! cut off"])
def test_a_break_between_two_phases_is_the_same_screen(row: str) -> None:
    demo = Played(1, ["  1.0 s  over", row], Path("runs/demo"), [])
    assert masked(demo) in ("† dies\n", "p sleep\n", "✗ fails\n")
