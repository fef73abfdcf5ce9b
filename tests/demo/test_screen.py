"""The last screen: it fits, and it is the stored one but for times. REWRITE=1 writes it anew."""

import os
import re
from pathlib import Path

import pytest

from phasesync.demo.screen import HEIGHT, WIDTH
from tests.demo.demos import Played, played

STORED = Path(__file__).parent / "screens"

CASES: dict[str, dict[str, object]] = {
    "colocated": {},
    "break-fence": {"break_fence": True},
    "basic": {"protocol": "basic", "ranks": 2, "epochs": 2},
    "kill": {"kill": "3@offload", "backend": "torch"},
}


def masked(demo: Played) -> str:
    """The screen with what differs from run to run masked: times, lanes, bars, names of folders.

    Lines are joined again where they were broken, since that depends on what is masked.
    """
    rows: list[str] = []
    for row in demo.screen:
        if row.startswith(VARY):
            continue
        if row.startswith("  ") and not row.startswith(NEW) and "|epoch" not in row:
            rows[-1] += row[1:]
        else:
            rows.append(row)
    text = "\n".join(rows)
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.replace(demo.folder.name, "<run>") + "\n"


#: Whom a busy machine made late, and whether two noticed a death in their own words.
VARY = ("waited for: ", "  also trainer/3 died")
NEW = ("  because", "  see", "  also", "  waiting", "  record", "  possible")
MASKS = (
    (r"^(trainer/\d+|cpu\d+)  +.*(?<!: done)$", r"\1 <over time>"),
    (r"\|epoch (\d+) *", r"|epoch \1 "),
    (r"\d+\.\d s", "#.# s"),
    (r"\b[\w.-]+(?=/cpu\d)", "<host>"),
    (r"(jsonl):\d+", r"\1:#"),
    (r"(?<=trainer/3 died).*", " <as noticed first>"),
    (r" *! cut off", ""),  # Whether a break finds a rank in a phase or between two.
    (r" +$", ""),
)


def fits(screen: list[str]) -> None:
    assert len(screen) <= HEIGHT
    assert max(map(len, screen)) <= WIDTH


@pytest.mark.parametrize("name", CASES)
def test_the_last_screen_is_the_stored_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, object] = {"backend": "inprocess", **CASES[name]}
    demo = played(Path("runs"), **settings)
    fits(demo.screen)
    stored = STORED / f"{name}.txt"
    if os.environ.get("REWRITE"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(masked(demo))
    assert masked(demo) == stored.read_text()


def test_many_ranks_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = played(Path("runs"), backend="inprocess", ranks=10, epochs=1, break_fence=True)
    fits(demo.screen)
    assert "... and 2 more ranks" in demo.screen
    assert any(row.startswith("violation R-FENCE at resume_kv") for row in demo.screen)
