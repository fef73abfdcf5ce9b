"""What a runner refuses, what it hands to the caller, and what it tells about a failure."""

import asyncio
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from phasesync.core.model import Rank, RoleName, RootCause
from phasesync.core.protocol import Evidence, FenceDecl, PhaseDecl, Protocol, Retry, StepDecl
from phasesync.errors import EpochFailed, EpochOrderError, PlanError, ProtocolError
from phasesync.fences.inprocess import InProcessFences
from phasesync.runtime import HostDevice, RankRunner, Turn
from phasesync.spec import load

BASIC = ("sync", "offload", "empty_cache", "resume_kv")
COLOCATED = load("colocated")


def nothing() -> None:
    """An action that has nothing to do."""


def basic(**actions: Any) -> dict[str, Callable[..., Any]]:
    return {**dict.fromkeys(BASIC, nothing), **actions}


def runner(tmp_path: Path, **more: Any) -> RankRunner:
    given: dict[str, Any] = {
        "rank": 0,
        "ranks": 1,
        "options": {"replica_size": 1},
        "actions": basic(),
        "caller_joins": True,
        "runs": tmp_path,
    }
    return RankRunner("basic", **{**given, **more})


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"run-*/trainer-{rank}.0.jsonl")
    text = path.read_bytes()
    return [orjson.loads(line) for line in text.splitlines()]


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with runner(tmp_path) as one:
            for epoch in (1, 2, 3):
                report = await one.run_epoch()
                assert report.epoch == epoch
                assert set(report.phases_s) == {"train", *BASIC}

    asyncio.run(main())
    phases = [
        (line["event"], line.get("phase") or line.get("fence"), line.get("caller"))
        for line in lines(tmp_path)
        if line.get("epoch") == 1 and line["event"] in ("phase.start", "fence.pass")
    ]
    assert phases == [
        ("phase.start", "train", "outside"),
        ("phase.start", "sync", None),
        ("phase.start", "offload", None),
        ("phase.start", "empty_cache", None),
        ("fence.pass", "memory_released", None),
        ("phase.start", "resume_kv", None),
        ("phase.start", "rollout", "outside"),
        ("fence.pass", "rollout_over", "outside"),
    ]


def test_lines_have_no_gaps_and_behind_a_fence_a_ticket(tmp_path: Path) -> None:
    async def main() -> None:
        async with runner(tmp_path) as one:
            await one.run_epoch()

    asyncio.run(main())
    found = lines(tmp_path)
    assert [line["seq"] for line in found] == list(range(len(found)))
    resume = next(line for line in found if line.get("phase") == "resume_kv")
    assert resume["ticket"]["fence"] == "memory_released"
    decided = next(
        line for line in found if line["event"] == "fence.decide" and line["fence"] != "plan"
    )
    assert decided["judged"] == [["trainer/0", 0, "ok", decided["judged"][0][3], None]]
    assert found[decided["judged"][0][3]]["event"] == "fence.arrive"


def test_a_blocking_action_does_not_block_the_loop(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    seen: list[str] = []
    ticks = 0

    def slow() -> None:
        """Blocks until the loop has gone round: for ever, if it were the loop that it blocks."""
        seen.append(threading.current_thread().name)
        until = time.monotonic() + 20
        while ticks < 5 and time.monotonic() < until:
            time.sleep(0.01)

    async def main() -> None:
        nonlocal ticks
        async with runner(tmp_path, actions=basic(offload=slow)) as one:
            running = asyncio.create_task(one.run_epoch())
            while not running.done():
                await asyncio.sleep(0.005)
                ticks += bool(seen)
            await running

    asyncio.run(main())
    assert ticks >= 5
    assert seen == ["phasesync trainer/0"]
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]


def test_an_action_may_take_its_turn(tmp_path: Path) -> None:
    turns: list[Turn] = []

    async def sync(turn: Turn) -> None:
        turn.progress(bytes=7, bucket=1)
        turns.append(turn)

    async def main() -> None:
        async with runner(tmp_path, actions=basic(sync=sync)) as one:
            await one.run_epoch()

    asyncio.run(main())
    assert (turns[0].rank, turns[0].phase, turns[0].version) == (("trainer", 0), "sync", 1)
    mark = next(line for line in lines(tmp_path) if line["event"] == "phase.progress")
    assert (mark["phase"], mark["bytes"], mark["bucket"]) == ("sync", 7, 1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"actions": {**basic(), "ofload": nothing}}, "no phase 'ofload'"),
        ({"actions": {"sync": nothing}}, "phase 'offload' has no action"),
        ({"actions": basic(sync=7)}, "must be callable"),
        ({"rank": 3}, "trainer/3 is no member"),
        ({"rank": "trainer/x"}, "'trainer/x' is no rank"),
        ({"ranks": 3, "options": {"replica_size": 2}}, "give a multiple of 2"),
        ({"options": {"replica_sise": 1}}, "no option 'replica_sise'"),
        ({"options": {"replica_size": 0}}, "at least 1"),
        ({"options": {"replica_size": "two"}}, "must be of type int"),
        ({"fsync": "always"}, "must be one of: none, epoch, line"),
        ({"run": "a/b"}, "cannot name a folder"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        runner(tmp_path, **more)
    assert "\n" not in str(caught.value)


def test_epochs_are_neither_re_entered_nor_skipped(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with runner(tmp_path, actions=basic(offload=gate.wait)) as one:
            with pytest.raises(EpochOrderError, match="comes to epoch 1 next, not 2"):
                await one.run_epoch(2)
            running = asyncio.create_task(one.run_epoch(1))
            await asyncio.sleep(0.05)
            with pytest.raises(EpochOrderError, match="is in epoch 1; await it first"):
                await one.run_epoch()
            with pytest.raises(EpochOrderError, match="has a runner in this process already"):
                await runner(tmp_path).start()
            gate.set()
            await running
            with pytest.raises(EpochOrderError, match="comes to epoch 2 next, not 1"):
                await one.run_epoch(1)
            await one.run_epoch(2)
        with pytest.raises(EpochOrderError, match="not started"):
            await one.run_epoch()

    asyncio.run(main())


def test_the_version_is_the_callers_own_and_never_falls(tmp_path: Path) -> None:
    seen: list[int] = []

    async def main() -> None:
        async with runner(
            tmp_path, actions=basic(sync=lambda turn: seen.append(turn.version))
        ) as one:
            assert (await one.run_epoch(version=100)).version == 100
            with pytest.raises(EpochOrderError, match="had weight version 100; 99 is older"):
                await one.run_epoch(version=99)
            await one.run_epoch(version=100)  # The same step again, after a failure elsewhere.

    asyncio.run(main())
    assert seen == [100, 100]
    assert {line["version"] for line in lines(tmp_path) if line.get("epoch", 0) > 0} == {100}


def test_mixed_options_are_named_at_the_first_fence(tmp_path: Path) -> None:
    async def rank(number: int, hub: InProcessFences) -> None:
        one = RankRunner(
            COLOCATED,
            rank=number,
            ranks=4,
            actions={
                step.name: nothing
                for step in (*COLOCATED.phases, *COLOCATED.recover)
                if isinstance(step, PhaseDecl)
            },
            fences=hub.endpoint(Rank(RoleName("trainer"), number)),
            options={"param_offload": number != 2},
            runs=tmp_path,
        )
        async with one:
            raise AssertionError("it must not start")

    async def main() -> list[BaseException | None]:
        hub = InProcessFences()
        return await asyncio.gather(*(rank(n, hub) for n in range(4)), return_exceptions=True)

    said = asyncio.run(main())
    assert all(isinstance(failed, EpochFailed) for failed in said)
    for failed in said:
        assert isinstance(failed, EpochFailed)
        assert failed.epoch == 0
        assert failed.cause.kind == "digest"
        assert failed.cause.ranks == (("trainer", 2),)
        assert "param_offload: false on trainer/2, true on the others" in str(failed)


def test_ranks_with_two_texts_of_one_protocol_are_told_so(tmp_path: Path) -> None:
    """With two ranks everything that is a rank's own differs too; that is not what is wrong."""
    own = load("basic")
    other = replace(
        own,
        steps=tuple(
            replace(step, deadline_s=7.0) if isinstance(step, FenceDecl) else step
            for step in own.steps
        ),
    )

    async def rank(number: int, protocol: Protocol, hub: InProcessFences) -> None:
        async with RankRunner(
            protocol,
            rank=number,
            ranks=2,
            actions=basic(),
            fences=hub.endpoint(Rank(RoleName("trainer"), number)),
            caller_joins=True,
            device=f"host/cpu{number}",
            runs=tmp_path,
        ):
            raise AssertionError("it must not start")

    async def main() -> list[BaseException | None]:
        hub = InProcessFences()
        both = (rank(n, text, hub) for n, text in enumerate((own, other)))
        return await asyncio.gather(*both, return_exceptions=True)

    for failed in asyncio.run(main()):
        assert isinstance(failed, EpochFailed)
        assert failed.cause.kind == "digest"
        assert "what the protocol says: " in str(failed)
        assert "device" not in str(failed)


def test_evidence_that_is_missing_breaks_the_fence(tmp_path: Path) -> None:
    class Full(HostDevice):
        def free_bytes(self) -> int | None:
            return 100

    protocol = load("basic")
    steps = tuple(
        replace(step, evidence=(Evidence("free_bytes", ">=", 1000),))
        if isinstance(step, FenceDecl) and step.name == "memory_released"
        else step
        for step in protocol.steps
    )

    async def main() -> None:
        one = RankRunner(
            replace(protocol, steps=steps),
            rank=0,
            ranks=1,
            actions=basic(),
            options={"replica_size": 1},
            device=Full("here/cpu0"),
            runs=tmp_path,
            caller_joins=True,
        )
        async with one:
            await one.run_epoch()

    with pytest.raises(EpochFailed, match="it is 100 on device here/cpu0") as caught:
        asyncio.run(main())
    assert caught.value.cause.kind == "evidence"
    assert not any(line.get("phase") == "resume_kv" for line in lines(tmp_path))


@pytest.mark.parametrize("caller_joins", [True, False])
def test_a_failure_says_whether_memory_is_back_or_will_be(
    tmp_path: Path, caller_joins: bool
) -> None:
    sick = [True]

    def offload() -> None:
        if sick.pop():
            raise RuntimeError("no room on the host")

    protocol = load("colocated")
    steps = (*protocol.steps, *protocol.recover)
    names = [step.name for step in steps if isinstance(step, PhaseDecl)]

    async def main() -> list[str]:
        async with RankRunner(
            protocol,
            rank=0,
            ranks=1,
            actions={**dict.fromkeys(names, lambda: None), "offload": offload},
            options={"replica_size": 1},
            runs=tmp_path,
            caller_joins=caller_joins,
        ) as one:
            with pytest.raises(EpochFailed) as caught:
                await one.run_epoch()
            failed = pickle.loads(pickle.dumps(caught.value))
            assert (failed.can_retry, failed.recovers_next) == (True, caller_joins)
            assert ("the next call recovers first" in str(failed)) == caller_joins
            by_then = [line["event"] for line in lines(tmp_path)]
            sick.append(False)
            await one.run_epoch()
            return by_then

    by_then = asyncio.run(main())
    assert ("recover.end" in by_then) != caller_joins
    assert "recover.end" in [line["event"] for line in lines(tmp_path)]


def test_a_phase_deadline_is_a_failure(tmp_path: Path) -> None:
    protocol = load("basic")
    steps = tuple(
        replace(step, deadline_s=0.05) if step.name == "offload" else step
        for step in protocol.steps
    )

    async def stuck() -> None:
        await asyncio.sleep(30)

    async def main() -> None:
        one = RankRunner(
            replace(protocol, steps=steps),
            rank=0,
            ranks=1,
            actions=basic(offload=stuck),
            options={"replica_size": 1},
            runs=tmp_path,
        )
        async with one:
            await one.run_epoch()

    with pytest.raises(EpochFailed, match=r"longer than its deadline of 0.05 s"):
        asyncio.run(main())


def test_a_safe_action_is_tried_once_more_and_no_other(tmp_path: Path) -> None:
    protocol = load("basic")
    tries: list[tuple[str, int]] = []

    def declared(retry: Retry) -> Protocol:
        steps: list[StepDecl] = []
        for step in protocol.steps:
            of_it = isinstance(step, PhaseDecl) and step.name == "offload"
            steps.append(replace(step, retry=retry) if of_it else step)  # type: ignore[arg-type]
        return replace(protocol, steps=tuple(steps))

    def flaky(turn: Turn) -> None:
        tries.append((turn.phase, turn.retry))
        if not turn.retry:
            raise RuntimeError("not yet")

    async def main(retry: Retry) -> None:
        one = RankRunner(
            declared(retry),
            rank=0,
            ranks=1,
            actions=basic(offload=flaky),
            options={"replica_size": 1},
            runs=tmp_path / retry,
            caller_joins=True,
        )
        async with one:
            await one.run_epoch()

    with pytest.raises(EpochFailed, match="not yet"):
        asyncio.run(main(Retry.NEVER))
    assert tries == [("offload", 0)]
    for retry in (Retry.SAFE, Retry.AFTER_QUERY):
        tries.clear()
        asyncio.run(main(retry))
        assert tries == [("offload", 0), ("offload", 1)]


def test_a_protocol_that_lint_refuses_is_not_run(tmp_path: Path) -> None:
    protocol = load("basic")
    steps = tuple(step for step in protocol.steps if step.name != "memory_released")
    more: dict[str, Any] = {"rank": 0, "ranks": 2, "actions": basic(), "runs": tmp_path}
    with pytest.raises(ProtocolError, match="resume_kv"):
        RankRunner(replace(protocol, steps=steps), **more)
    RankRunner(replace(protocol, steps=steps), unchecked=True, **more)


FAILED = EpochFailed(
    Rank(RoleName("trainer"), 1),
    7,
    RootCause(kind="dead", ranks=(Rank(RoleName("trainer"), 3),), phase="offload", error="SIGKILL"),
    (Rank(RoleName("trainer"), 3),),
    weights="intact",
    kv="unknown",
    poisoned=("replica/1",),
)


def test_epoch_failed_crosses_processes_unchanged() -> None:
    for copy in (pickle.loads(pickle.dumps(FAILED)), _through_a_process()):
        assert isinstance(copy, EpochFailed)
        assert str(copy) == str(FAILED)
        assert copy.cause == FAILED.cause
        assert (copy.replace, copy.weights, copy.kv) == (FAILED.replace, "intact", "unknown")
        assert (copy.poisoned, copy.can_retry) == (("replica/1",), False)


def test_where_plans_differ_and_there_is_no_majority_nobody_is_blamed() -> None:
    cause = RootCause(kind="digest", ranks=(), error="replica_size: 2 on trainer/0, 1 on trainer/1")
    assert str(replace(FAILED, cause=cause, replace=(), poisoned=())) == (
        "trainer/1: epoch 7 failed: ranks hold different plans: replica_size: 2 on trainer/0, "
        "1 on trainer/1 (give every rank the same protocol and options, and start again)"
    )


def _through_a_process() -> object:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply(_raise_it)
        except EpochFailed as failed:
            return failed
    return None


def _raise_it() -> None:
    raise FAILED


def test_where_the_caller_joins_recovery_waits_until_all_are_called_again(tmp_path: Path) -> None:
    """As a driver does: all ranks are called, one raises, all are called again."""
    outside = {step.name for step in COLOCATED.phases if step.outside}
    inside: dict[str, Callable[..., Any]] = {
        str(step.name): nothing
        for step in (*COLOCATED.phases, *COLOCATED.recover)
        if isinstance(step, PhaseDecl) and step.name not in outside
    }
    calls = 0

    def boom() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("boom")

    async def main() -> list[list[str]]:
        hub = InProcessFences()
        runners = [
            RankRunner(
                COLOCATED,
                rank=number,
                ranks=4,
                actions={**inside, **({"offload": boom} if number == 3 else {})},
                fences=hub.endpoint(Rank(RoleName("trainer"), number)),
                runs=tmp_path,
                caller_joins=True,
            )
            for number in range(4)
        ]
        await asyncio.gather(*(one.start() for one in runners))
        said = [
            await asyncio.gather(*(one.run_epoch() for one in runners), return_exceptions=True)
            for _ in range(4)
        ]
        await asyncio.gather(*(one.close() for one in runners))
        return [[type(answer).__name__ for answer in answers] for answers in said]

    good, bad = "EpochReport", "EpochFailed"
    assert asyncio.run(asyncio.wait_for(main(), 20)) == [
        [good] * 4,
        [good, good, bad, bad],
        [good] * 4,
        [good] * 4,
    ]
    for rank in range(4):
        events = [line["event"] for line in lines(tmp_path, rank)]
        assert events.count("recover.begin") == 1
        assert events.count("epoch.begin") == 4
