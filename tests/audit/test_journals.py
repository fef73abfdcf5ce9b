"""Journals of real runs in one event loop: faults are named, and luck is not taken for order."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasesync import logs
from phasesync.audit import Answer
from phasesync.audit.replay import audit_journals
from phasesync.audit.rounds import unordered
from phasesync.core.plan import resolve
from phasesync.core.protocol import FenceDecl, PhaseDecl, Protocol
from phasesync.report.audit import as_text, audit_paths
from phasesync.runtime import Turn
from phasesync.spec import load
from tests.audit.accidents import Accident, fenced, unfenced
from tests.runtime.world import World

FENCES = [step.name for step in load("colocated").steps if isinstance(step, FenceDecl)]


def without(protocol: Protocol, fence: str, *, prompt: bool = False) -> Protocol:
    """The protocol with one fence taken away; `prompt` releases are done when their phase ends."""
    steps = []
    for step in protocol.steps:
        if isinstance(step, FenceDecl) and step.name == fence:
            continue
        steps.append(
            replace(step, enqueued=False) if prompt and isinstance(step, PhaseDecl) else step
        )
    return replace(protocol, steps=tuple(steps))


def audited(folder: Path, protocol: Protocol) -> Answer:
    files = logs.sources([folder])
    members = [name for each in files for name in each.members]
    with logs.reading(files) as ranks:
        return audit_journals("run", ranks, members, lambda _name: protocol)


def run(
    tmp_path: Path, protocol: Protocol, late: Mapping[tuple[int, str], float], ranks: int = 2
) -> Answer:
    world = World(ranks, tmp_path, protocol=protocol, epochs=3, late=late, pause_s=0.001)
    asyncio.run(world.go())
    return audited(tmp_path, protocol)


@pytest.mark.parametrize("phase", ["train", "stage", "offload", "resume_kv", "serve"])
def test_a_failed_action_is_the_root(tmp_path: Path, phase: str) -> None:
    world = World(4, tmp_path, epochs=2, fail=(2, phase, 2), pause_s=0.001)
    asyncio.run(world.go())
    answer = audit_paths([tmp_path])[0]
    said = (answer.verdict, answer.rule, answer.guilty, answer.phase, answer.epoch)
    assert said == ("failure", None, ("trainer/2",), phase, 2)


def test_memory_that_ran_out_is_a_failure_where_no_rule_says_more(tmp_path: Path) -> None:
    """Who died of it is known even where nobody's memory is."""
    world = World(2, tmp_path, epochs=2, fail=(1, "offload", 2), pause_s=0.001)
    asyncio.run(world.go())
    for path in tmp_path.rglob("*.jsonl"):
        text = re.sub(r'"error":"[^"]*"', '"error":"CUDA error: out of memory"', path.read_text())
        path.write_text(text)
    answer = audit_paths([tmp_path])[0]
    said = (answer.verdict, answer.rule, answer.guilty, answer.phase, answer.epoch)
    assert said == ("failure", None, ("trainer/1",), "offload", 2)


def test_a_late_rank_without_its_fence_is_a_violation(tmp_path: Path) -> None:
    protocol = without(load("colocated"), "memory_released")
    answer = run(tmp_path, protocol, {(1, "offload"): 0.05})
    assert (answer.verdict, answer.rule) == ("violation", "R-FENCE")
    assert answer.phase == "resume_kv"
    assert "trainer/0" in answer.guilty


def test_order_by_clocks_of_two_hosts_is_only_possible(tmp_path: Path) -> None:
    """The fences that both hosts came to say how far apart their clocks can be."""
    protocol = without(load("colocated"), "memory_released", prompt=True)
    assert run(tmp_path, protocol, {(1, "offload"): 0.05}).certainty == "in every order"
    (path,) = tmp_path.rglob("trainer-1.*.jsonl")
    elsewhere = re.sub(r'"host":"[^"]*"', '"host":"elsewhere"', path.read_text())
    path.write_text(elsewhere)
    answer = audited(tmp_path, protocol)
    assert (answer.verdict, answer.rule) == ("violation", "R-FENCE")
    found = re.match(r"possible within \+-([\d.,]+) ms: only the clocks of", answer.certainty)
    assert found is not None, answer.certainty
    assert 0 < float(found[1].replace(",", "")) < 60_000
    assert "elsewhere" in answer.certainty


@pytest.mark.parametrize("seed", range(5))
def test_luck_is_found_and_named(tmp_path: Path, seed: int) -> None:
    protocol = without(load("colocated"), "memory_released", prompt=True)
    late = {(0, "empty_cache"): 0.05 + seed / 1000}  # A slow call of the leader orders the ranks.
    answer = run(tmp_path, protocol, late)
    assert answer.verdict == "ok"
    lucky = [found["what"] for found in answer.findings if "accident" in found["what"]]
    assert any("resume_kv of trainer/0" in what and "trainer/1" in what for what in lucky)
    assert any("'empty_cache'" in what for what in lucky)


@pytest.mark.parametrize("seed", range(5))
def test_with_the_fence_there_is_no_luck(tmp_path: Path, seed: int) -> None:
    answer = run(tmp_path, load("colocated"), {(0, "empty_cache"): 0.02 + seed / 1000})
    assert answer.verdict == "ok"
    assert not answer.findings


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "call"), [("all_reduce", "dist.all_reduce"), ("slow", "empty_cache")]
)
def test_an_accidental_fence_is_named(tmp_path: Path, kind: str, call: str, seed: int) -> None:
    """The device is synchronised in a phase that says so, and a call orders the ranks."""
    world = Accident(2, tmp_path, protocol=unfenced(), epochs=3, seed=seed, kind=kind)
    asyncio.run(world.go())
    answer = audited(tmp_path, unfenced())
    assert answer.verdict == "ok", answer.because
    lucky = [found["what"] for found in answer.findings if "accident" in found["what"]]
    named = [what for what in lucky if "resume_kv of trainer/0" in what and "trainer/1" in what]
    assert named
    assert all(repr(call) in what for what in named)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["all_reduce", "slow"])
def test_beside_the_real_fence_the_same_call_is_no_accident(
    tmp_path: Path, kind: str, seed: int
) -> None:
    world = Accident(2, tmp_path, protocol=fenced(), epochs=3, seed=seed, kind=kind)
    asyncio.run(world.go())
    answer = audited(tmp_path, fenced())
    assert (answer.verdict, answer.findings) == ("ok", ())


def test_without_a_word_of_the_device_the_releases_have_not_happened(tmp_path: Path) -> None:
    """The same order of calls, and nothing says that what was enqueued is done."""
    protocol = unfenced()
    answer = run(tmp_path, protocol, {(0, "empty_cache"): 0.05})
    assert (answer.verdict, answer.rule) == ("violation", "R-FENCE")


def test_fences_alone_order_the_shipped_protocol() -> None:
    assert not unordered(resolve(load("colocated"), 8, {"replica_size": 4}))


@pytest.mark.parametrize("fence", FENCES)
def test_each_fence_orders_something(fence: str) -> None:
    plan = resolve(without(load("colocated"), fence), 4, {"replica_size": 2})
    assert unordered(plan)


def test_whole_epochs_are_judged_like_their_lines(tmp_path: Path) -> None:
    """A ticket that is not of the list that was judged is found in any epoch."""
    world = World(2, tmp_path, epochs=6, pause_s=0.0)
    asyncio.run(world.go())
    assert audit_paths([tmp_path])[0].verdict == "ok"
    path = tmp_path / "world" / "trainer-1.0.jsonl"
    text = path.read_text().splitlines()
    at = next(
        number
        for number, line in enumerate(text)
        if '"fence.pass"' in line and '"epoch":5' in line and '"hash":"' in line
    )
    start = text[at].index('"hash":"') + 8
    text[at] = text[at][:start] + "0" * 64 + text[at][start + 64 :]
    path.write_text("\n".join(text) + "\n")
    answer = audit_paths([tmp_path])[0]
    assert (answer.verdict, answer.rule, answer.epoch) == ("violation", "R-EPOCH", 5)


@pytest.mark.parametrize("error", ["no space left", "CUDA out of memory"])
def test_what_fails_after_a_recovery_is_news_and_no_consequence(tmp_path: Path, error: str) -> None:
    class Twice(World):
        def _action(self, name: str) -> Callable[[Turn], Any]:
            usual = super()._action(name)

            async def act(turn: Turn) -> None:
                if (turn.rank.number, name, turn.epoch) in {(1, "stage", 1), (2, "offload", 3)}:
                    raise RuntimeError(f"{error} in {name}")
                await usual(turn)

            return act

    asyncio.run(Twice(4, tmp_path, epochs=4, pause_s=0.001).go())
    (answer,) = audit_paths([tmp_path])
    assert (answer.verdict, answer.epoch, answer.phase) == ("failure", 1, "stage")
    assert answer.guilty == ("trainer/1",)
    assert answer.consequences == ()
    (later,) = answer.findings
    assert (later["epoch"], later["ranks"]) == (3, ["trainer/2"])
    assert f"{error} in offload" in later["what"]
    assert any("also in epoch 3: rank trainer/2 failed" in row for row in as_text([answer]))
