"""What `check` writes for other programs: SARIF, JUnit, pytest, HTML, and Promela against Spin."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasesync.bench.check import MODELS
from phasesync.checker import Report, Settings, check
from phasesync.checker.mutants import without_fence
from phasesync.checker.planted import Planted, planted_from_json
from phasesync.checker.search import search
from phasesync.checker.space import Space
from phasesync.core.kernel import Faults
from phasesync.core.model import Device
from phasesync.core.plan import Plan, resolve
from phasesync.errors import PlanError
from phasesync.report.check_files import junit, sarif, written_test
from phasesync.report.check_html import html
from phasesync.report.check_promela import promela
from phasesync.spec import find, load

QUICK = Settings(any_n=False)
COLOCATED = load("colocated")


@pytest.fixture(scope="module")
def broken() -> Report:
    return check(COLOCATED, ranks=2, mutate=without_fence("staged"), settings=QUICK)


def test_sarif_has_the_run_as_a_code_flow(broken: Report) -> None:
    body = sarif(broken, COLOCATED)
    text = json.loads(json.dumps(body))
    result = text["runs"][0]["results"][0]
    assert (result["ruleId"], result["level"]) == ("mapped", "error")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "colocated.yaml"
    lines = find("colocated").read_text(encoding="utf-8").splitlines()
    assert "- load:" in lines[place["region"]["startLine"] - 1]
    flow = result["codeFlows"][0]["threadFlows"][0]["locations"]
    assert len(flow) == 22
    assert flow[-1]["location"]["message"]["text"] == "22: trainer/0 start load"


def test_junit_counts_undecided_as_an_error(broken: Report) -> None:
    tree = ElementTree.fromstring(junit(broken))
    assert (tree.get("failures"), tree.get("errors")) == ("2", "0")
    few = check(COLOCATED, ranks=4, settings=Settings(any_n=False, states_max=500))
    tree = ElementTree.fromstring(junit(few))
    assert (tree.get("failures"), tree.get("errors")) == ("0", "2")


def test_html_is_one_page_with_the_run_in_it(broken: Report) -> None:
    page = html(broken)
    assert "<h1>colocated: violated</h1>" in page
    assert '"text":"start load","bad":true' in page
    assert "http:" not in page
    assert "https:" not in page
    assert "const run = null;" in html(check(load("basic"), ranks=2, settings=QUICK))


def test_a_hostile_name_stays_text(broken: Report) -> None:
    """Names in files are plain words, but devices are called what hosts call them."""
    case = broken.counterexample
    assert case is not None
    assert case.plan is not None
    hostile = "</script><img src=x onerror=alert(1)>`${run}"
    plan = replace(case.plan, devices=(Device(hostile), *case.plan.devices[1:]))
    page = html(replace(broken, cases=(replace(case, plan=plan),)))
    assert "<img" not in page
    assert page.count("</script>") == 1
    assert "Content-Security-Policy" in page
    written = re.findall(r"`[^`]*<t[hd]>\$\{([^}]*)\}", page)
    assert written
    numbers = {"n + 1", "heads", 'r === s.rank ? esc(s.text) : ""'}
    assert all(each.startswith("esc(") or each in numbers for each in written), written


def outcomes(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_written_tests_fail_until_the_protocol_is_mended(broken: Report, tmp_path: Path) -> None:
    """What was planted is planted again; without it the same run is refused, or goes on."""
    source = find("colocated").read_text(encoding="utf-8")
    loose = re.sub(r"  - fence: staged.*?deadline_s: 300\n", "", source, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(source)
    (tmp_path / "loose.yaml").write_text(loose)
    scope = Planted("rescoped", ("asleep", "replica"))
    waits = check(COLOCATED, ranks=2, options={"replica_size": 1}, mutate=scope.mutate,
                  faults="fail", epochs=1, settings=QUICK)  # fmt: skip
    unfenced = check(load(tmp_path / "loose.yaml"), ranks=2, faults="none", settings=QUICK)
    written = {
        "fence": (broken, "./mine.yaml", Planted("without_fence", ("staged",))),
        "waits": (waits, "./mine.yaml", scope),
        "loose": (unfenced, "./loose.yaml", None),
    }
    for name, (report, protocol, planted) in written.items():
        case = report.counterexample
        assert case is not None, name
        text = written_test(case, protocol, planted=planted)
        mended = re.sub(r"(?m)^PLANTED: .*$", "PLANTED = None", text)
        mended = mended.replace("loose.yaml", "mine.yaml")
        (tmp_path / f"test_{name}.py").write_text(text)
        (tmp_path / f"test_{name}_mended.py").write_text(mended)
    code, text = outcomes(tmp_path)
    assert code == 1
    assert "3 failed, 3 passed" in text, text
    assert "waits for ever: trainer/1" in text or "waits for ever: trainer/0" in text
    assert "mapped: " in text


@pytest.mark.parametrize("body", [3, {"how": "melted", "names": []}, {"how": "swapped"}])
def test_a_mistake_that_is_none(body: object) -> None:
    with pytest.raises(PlanError, match="is no mistake; mistakes are: without_fence"):
        planted_from_json(body)


def spin(model: str, folder: Path) -> tuple[int, int]:
    """States and errors that Spin finds in a model."""
    missing = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]
    if missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing[0]} is not installed: apt-get install spin gcc")
        pytest.skip(f"{missing[0]} is not installed")
    (folder / "model.pml").write_text(model)
    for command in (
        ["spin", "-a", "model.pml"],
        ["cc", "-O1", "-w", "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    done = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True
    )
    states = re.search(r"(\d+) states, stored", done.stdout)
    errors = re.search(r"errors: (\d+)", done.stdout)
    assert states is not None
    assert errors is not None
    return int(states[1]), int(errors[1])


def explicit(plan: Plan) -> int:
    return search(Space(plan, Faults(), 2, symmetry=False, reduction=False)).states


@pytest.mark.parametrize("name", ["basic", "colocated"])
def test_spin_counts_the_same_states(name: str, tmp_path: Path) -> None:
    plan = resolve(load(name), 2)
    states, errors = spin(promela(plan), tmp_path)
    assert errors == 0
    assert states - explicit(plan) in range(4), "Spin also counts the start of the processes"


def test_spin_looks_elsewhere_too(tmp_path: Path) -> None:
    plan = resolve(load(MODELS / "fence_pml.yaml"), 2)
    states, errors = spin(promela(plan, 1), tmp_path)
    counted = search(Space(plan, Faults(), 1, symmetry=False, reduction=False)).states
    assert errors == 0
    assert states - counted in range(4)
    _, errors = spin(promela(without_fence("at_fence")(plan), 1), tmp_path)
    assert errors == 1


@pytest.mark.parametrize("fence", ["staged", "memory_released"])
def test_spin_refutes_what_we_refute(fence: str, tmp_path: Path) -> None:
    plan = without_fence(fence)(resolve(COLOCATED, 2))
    _, errors = spin(promela(plan), tmp_path)
    assert errors == 1
