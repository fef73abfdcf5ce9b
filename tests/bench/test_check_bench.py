"""The checker beside other checkers in one run: the same counts, and faster.

`phasesync bench check` prints the table; TLC and minicheck take minutes where eight ranks may
crash, so that they are asked there alone (`make bench`), and here where all are quick.
"""

import os
import resource

import pytest

from phasesync.bench.check import OURS, Row, bench_check, missing, ratios, table
from phasesync.errors import InputError


def asked(name: str, *tools: str, ranks: int | None = None) -> dict[str, Row]:
    """The answers of these tools, beside ours; one that is not here fails in CI."""
    for tool in tools:
        if lack := missing(tool):
            if os.environ.get("CI"):
                pytest.fail(f"{tool}: {lack}")
            pytest.skip(f"{tool}: {lack}")
    rows = bench_check([name], ranks=ranks, tools=(OURS, *tools), limit_s=250)
    print(table(rows))
    return {row.tool: row for row in rows}


@pytest.mark.parametrize("tool", ["spin", "tlc", "minicheck"])
def test_the_others_count_the_states_that_we_count(tool: str) -> None:
    found = asked("product", tool, ranks=4)
    assert {row.states for row in found.values()} == {5**4 + 3**4 - 1}
    assert {row.verdict for row in found.values()} == {"holds"}


def test_a_crash_is_decided_before_spin_has_compiled() -> None:
    """At eight ranks ten times as fast: `phasesync bench check` says it in the table."""
    found = asked("crash", "spin", ranks=5)
    times = ratios(found.values())
    assert {row.verdict for row in found.values()} == {"holds"}
    assert times["one crash and abort, N = 5", "spin"] > 1


@pytest.mark.parametrize(
    ("name", "seconds"), [("steps", 4), ("uniform", 5), ("groups", 10), ("any", 2)]
)
def test_what_the_others_cannot_be_asked(name: str, seconds: float) -> None:
    """Processor time, interpreter and imports included: tests beside this one take none of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = asked(name)[OURS]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert row.verdict == "holds"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds


def test_a_tool_that_is_missing_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nosuch")
    rows = bench_check(["product"], ranks=2, tools=("spin", "tlc"))
    assert [row.seconds for row in rows] == [None, None]
    assert "no spin: apt-get install spin gcc" in table(rows)
    assert ratios(rows) == {}


def test_a_question_or_a_tool_that_is_none() -> None:
    with pytest.raises(InputError, match="no tool 'alloy'; tools are: phasesync, spin, tlc"):
        bench_check(["product"], tools=("alloy",))
    with pytest.raises(
        InputError, match="questions are: product, crash, steps, apart, uniform, groups, any"
    ):
        bench_check(["speed"])
