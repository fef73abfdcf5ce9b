"""What `check` says to people: bounds, product states, the fold, more runs, what lint doubts."""

from dataclasses import replace

from phasesync.bench.check import MODELS
from phasesync.checker import Settings, check
from phasesync.checker.explicit import explore
from phasesync.checker.mutants import without_fence
from phasesync.core.kernel import Faults
from phasesync.core.plan import Defect, resolve
from phasesync.core.verdict import Violated
from phasesync.lint import lint
from phasesync.report import lanes
from phasesync.report.check_show import shown
from phasesync.report.check_text import lint_lines, report_lines
from phasesync.spec import load

FENCE = load(MODELS / "fence_pml.yaml")
QUICK = Settings(any_n=False)


def test_bounds_depth_and_product_states_are_said() -> None:
    whole = Settings(any_n=False, reduction=False, atomic=True)
    report = check(FENCE, ranks=6, faults="none", epochs=1, settings=whole)
    text = report_lines(report)
    assert "1 search: 237 states, which stand for 16,353, 546 transitions, depth 36" in text
    assert "bounds: N = 6: no faults, 1 epoch" in text
    body = report.to_json()["cases"]
    assert isinstance(body, list)
    assert (body[0]["states"], body[0]["product"]) == (237, 5**6 + 3**6 - 1)


def test_sixty_four_ranks_stand_for_more_than_a_word_holds() -> None:
    whole = Settings(any_n=False, atomic=True)
    report = check(FENCE, ranks=64, faults="none", epochs=1, settings=whole)
    body = report.to_json()["cases"]
    assert isinstance(body, list)
    assert body[0]["product"] > 2**64
    assert "e+" not in "".join(report_lines(report))


def test_the_prologue_is_folded_where_it_takes_fewest_words() -> None:
    plan = resolve(load(MODELS / "fence_pml_abort.yaml"), 4)
    plan = replace(plan, defects=frozenset({Defect.ABORT_TAKES}))
    verdict, _ = explore(plan, Faults(most=1, crash=True), 1)
    assert isinstance(verdict, Violated)
    lines = lanes.draw(plan, verdict.path, verdict.violations)
    assert lines[1].startswith("steps 1 to ")
    assert lines[2] == "  rank/0..3: at fence at_fence"
    assert lines[3].startswith("step  ")
    steps = [line.split()[-2:] for line in lines[4:] if line[:1] in " !>"]
    assert len(steps) <= 12


def test_more_ways_to_break_a_rule() -> None:
    basic = load("basic")
    report = check(
        basic, ranks=2, faults="none", mutate=without_fence("memory_released"), settings=QUICK
    )
    lines = list(shown(report, 3, Faults(), 1))
    ways = [line for line in lines if line.startswith("way ")]
    assert len(ways) >= 2
    assert ways[0].startswith("way 1 at N = 2, ")
    said = {line for line in lines if line.startswith("broken: ")}
    assert len(said) >= len(ways)


def test_runs_that_work_are_shown_too() -> None:
    report = check(load("basic"), ranks=2, faults="none", settings=QUICK)
    lines = list(shown(report, 2, Faults(), 1))
    assert [line for line in lines if line.startswith("run ")] == [
        "run 1 at N = 2, 28 steps:",
        "run 2 at N = 2, 28 steps:",
    ]
    assert lines == list(shown(report, 2, Faults(), 1)), "by seed"


def test_what_lint_doubts_is_part_of_the_answer() -> None:
    lines = lint_lines(lint(FENCE))
    assert len(lines) == 3
    assert all(line.startswith("lint: error: ") for line in lines)
    assert lint_lines(lint(load("basic"))) == ()


def test_the_first_run_that_is_shown_is_one_in_which_nothing_fails() -> None:
    report = check(load("basic"), ranks=2, settings=QUICK)
    lines = list(shown(report, 3, Faults(most=1, crash=True), 1))
    first, second, third = "\n".join(lines).split("\n\n")
    assert "run 1 at N = 2, 28 steps:" in first
    assert "crash" not in first
    assert "crash" in second + third


def test_with_figures_each_step_says_what_its_devices_hold() -> None:
    gib = {"params": 30.0, "cache": 25.0, "kv_cache": 40.0}
    report = check(
        load("basic"), ranks=2, faults="none", mutate=without_fence("memory_released"),
        settings=QUICK,
    )  # fmt: skip
    lines = report_lines(report, gib)
    train = next(line for line in lines if line.startswith("    1 start train"))
    assert train.endswith("(device/0 55 GiB)")
    assert "device/1 holds: params unknown, cache unknown, kv_cache unknown; 95 GiB" in lines
    assert not any("GiB" in line for line in report_lines(report))
