"""The colocated protocol run in one event loop, with everything that goes wrong in the field."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from phasesync.audit.answer import BROKEN, Evidence
from phasesync.audit.conformance import Conformance
from phasesync.core.model import Rank, RoleName
from phasesync.core.protocol import FenceDecl, Protocol
from phasesync.errors import EpochFailed
from phasesync.report.audit import audit_paths
from phasesync.spec import load
from tests.runtime.world import World

PHASES = (
    "load_back", "train", "trim_cache", "resume_weights", "stage", "load", "offload",
    "empty_cache", "resume_kv", "serve", "sleep",
)  # fmt: skip
LED = frozenset(("resume_weights", "load", "resume_kv", "sleep"))


def lines(folder: Path) -> Iterator[tuple[Evidence, dict[str, object]]]:
    """All lines of a run on one host, by that host's monotonic clock."""
    found = [
        (Evidence(file.name, number), orjson.loads(text))
        for file in sorted(folder.iterdir())
        for number, text in enumerate(file.read_bytes().splitlines(), 1)
    ]
    found.sort(key=lambda item: (item[1]["mono_ns"], item[0]))
    yield from found


def broken(folder: Path) -> list[tuple[str | None, tuple[object, ...]]]:
    """What the kernel says of a run's journals: rule and guilty of everything illegal."""
    replay = Conformance(load)
    for at, (where, line) in enumerate(lines(folder)):
        replay.see(at, where, line)
    return [(f.rule, f.guilty) for f in replay.findings if f.strength == BROKEN]


def audited(folder: Path) -> tuple[str, tuple[object, ...], str | None, int | None]:
    """The auditor's answer on a run: verdict, guilty, phase and epoch."""
    (answer,) = audit_paths([folder])
    return answer.verdict, answer.guilty, answer.phase, answer.epoch


def without(protocol: Protocol, fence: str) -> Protocol:
    """The protocol with one fence taken away."""
    steps = tuple(s for s in protocol.steps if not (isinstance(s, FenceDecl) and s.name == fence))
    return replace(protocol, steps=steps)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("param_offload", [True, False])
@pytest.mark.parametrize("free_cache_engine", [True, False])
def test_epochs_follow_each_other(
    tmp_path: Path, ranks: int, param_offload: bool, free_cache_engine: bool
) -> None:
    options = {"param_offload": param_offload, "free_cache_engine": free_cache_engine}
    capacity = 80 if param_offload and free_cache_engine else 120
    world = World(ranks, tmp_path, epochs=3, options=options, capacity=capacity)
    assert asyncio.run(world.go()) == [[None, None, None]] * ranks
    assert broken(tmp_path / "world") == []
    left = {what for _, what in world.devices.held}
    assert left == {
        *(() if param_offload else ("params",)),
        *(() if free_cache_engine else ("kv", "weights")),
    }


def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    world = World(4, tmp_path, epochs=1, late={(1, "offload"): 0.2})
    assert asyncio.run(world.go()) == [[None]] * 4
    order = world.log
    assert order.index("trainer/1 offload 1") < order.index("trainer/0 resume_kv 1")
    # The other replica did not wait: a replica fence opens on its own.
    assert order.index("trainer/2 resume_kv 1") < order.index("trainer/1 offload 1")


LATE = {
    # For each fence, who must be late in what for its absence to be seen.
    "ready_for_weights": (1, "trim_cache"),
    "staged": (1, "stage"),
    "transfer_done": (0, "load"),
    "memory_released": (1, "offload"),
    "ready_to_serve": (0, "resume_kv"),
    "rollout_over": (1, "serve"),
    "asleep": (0, "sleep"),
}


def test_every_fence_has_its_late_rank() -> None:
    assert set(LATE) == {fence.name for fence in load("colocated").fences}


@pytest.mark.parametrize("fence", LATE)
def test_no_fence_is_decoration(tmp_path: Path, fence: str) -> None:
    """Take it away and watch it fail."""
    protocol = without(load("colocated"), fence)
    world = World(2, tmp_path, protocol=protocol, late={LATE[fence]: 0.15}, epochs=2)
    asyncio.run(world.go())
    assert broken(tmp_path / "world"), f"without {fence} nothing went wrong"


def test_without_the_fence_the_leader_is_guilty_and_the_device_named(tmp_path: Path) -> None:
    protocol = without(load("colocated"), "memory_released")
    world = World(4, tmp_path, protocol=protocol, late={(1, "offload"): 0.15}, epochs=1)
    said = asyncio.run(world.go())
    assert all(isinstance(answers[0], EpochFailed) for answers in said)  # type: ignore[index]
    assert ("R-FENCE", ("trainer/0",)) in broken(tmp_path / "world")


def test_two_hundred_seeds_of_trouble(tmp_path: Path) -> None:
    """Random delays, failures and cancellations: nobody hangs, nobody resumes early, all agree."""
    seen = {"ok": 0, "failed": 0, "cancelled": 0}
    for seed in range(200):
        chance = random.Random(seed)
        phase = chance.choice(PHASES)
        number = chance.randrange(4)
        if phase in LED:
            number -= number % 2
        epoch = chance.choice([1, 2])
        trouble = chance.choice(["ok", "failed", "cancelled"])
        world = World(
            4,
            tmp_path,
            seed=seed,
            epochs=2,
            late={(chance.randrange(4), chance.choice(PHASES)): 0.01},
            fail=(number, phase, epoch) if trouble == "failed" else None,
            cancel=(number, phase, epoch) if trouble == "cancelled" else None,
            pause_s=0.001,
            run=f"seed-{seed}",
        )
        said = asyncio.run(world.go())
        seen[trouble] += 1
        where = f"seed {seed}: {trouble} {number} {phase} {epoch}"
        assert broken(tmp_path / world.run) == [], where
        injected = ("failure", (f"trainer/{number}",), phase, epoch)
        expected = ("ok", (), None, None) if trouble == "ok" else injected
        assert audited(tmp_path / world.run) == expected, where
        failures = [
            failed for answers in said if isinstance(answers, list) for failed in answers if failed
        ]
        match trouble:
            case "ok":
                assert said == [[None, None]] * 4, where
            case "failed":
                assert len(failures) == 4, where
                assert {f.cause for f in failures} == {failures[0].cause}, where
                assert failures[0].cause.ranks[0].number == number, where
                assert failures[0].cause.phase == phase, where
                assert all(f.can_retry for f in failures), where
                assert all(len(answers) == 2 for answers in said), where  # type: ignore[arg-type]
            case _:
                assert isinstance(said[number], asyncio.CancelledError), where
                assert len(failures) == 3, where
                assert {f.cause.kind for f in failures} == {"cancelled"}, where
                assert {f.cause.ranks[0].number for f in failures} == {number}, where
    assert min(seen.values()) > 40


def test_who_dies_after_a_recovery_is_missed_in_the_next_epoch_and_at_its_recovery_no_more(
    tmp_path: Path,
) -> None:
    """Nobody could know of it before: all begin, none waits at `stopped` for one who is gone."""
    world = World(4, tmp_path, epochs=3, fail=(0, "train", 1), gone=3)
    said = asyncio.run(world.go())
    for number, answers in enumerate(said):
        assert isinstance(answers, list)
        first, *later = answers
        assert first is not None
        assert first.can_retry
        if number == 3:
            assert later == []
            continue
        (second,) = later
        assert second is not None
        assert (second.cause.kind, second.replace) == ("dead", (Rank(RoleName("trainer"), 3),))
        assert not second.can_retry
        assert second.poisoned == ()  # the recovery went on without it
    assert broken(tmp_path / world.run) == []
