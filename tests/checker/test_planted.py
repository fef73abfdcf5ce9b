"""Bugs that people have met, planted in a protocol or in the fence's own steps, and found.

The classes are those of public reports about order and fences. Each test says where it plants the
bug, that the checker finds it, and which property it names; and that the sound one passes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phasesync.checker.explicit import explore
from phasesync.checker.messages import Explored, Note, Process, View, explore_messages
from phasesync.checker.mutants import without_fence
from phasesync.checker.search import Budget
from phasesync.core.fence import Waiting, judge
from phasesync.core.fence_hub import Hub, Instance
from phasesync.core.fence_keys import Add, Append, CompareSet, Put, Wait
from phasesync.core.fence_steps import Passed, arriving, connecting, failing
from phasesync.core.kernel import NO_FAULTS, Faults
from phasesync.core.model import Arrival, FenceCall, RootCause
from phasesync.core.plan import Defect, Plan, Step, resolve
from phasesync.core.plan import Wait as AtFence
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load

from .lives import (
    SPACE,
    Arriving,
    Life,
    arrival,
    call,
    cast,
    deadline,
    hub_life,
    life,
    ranks,
    watcher,
)

DATA = Path(__file__).parents[1] / "data/protocols"
BASIC = load("basic")
FAIL = Faults(most=1, fail=True)


def broken(plan: Plan, faults: Faults = NO_FAULTS, epochs: int = 1) -> Violated:
    verdict, _ = explore(plan, faults, epochs)
    assert isinstance(verdict, Violated)
    return verdict


def holds(plan: Plan, faults: Faults = NO_FAULTS, epochs: int = 1) -> bool:
    return isinstance(explore(plan, faults, epochs)[0], Holds)


def defective(defect: Defect) -> Plan:
    return replace(resolve(BASIC, 2), defects=frozenset({defect}))


def one_rank(plan: Plan, rank: int, change: Callable[[list[Step]], list[Step]]) -> Plan:
    """The plan with one rank's program changed, behind the others' backs."""
    programs = list(plan.programs)
    programs[rank] = tuple(change(list(programs[rank])))
    return replace(plan, programs=tuple(programs))


def found(players: object) -> Explored:
    return explore_messages(players, Budget(states_max=400_000))  # type: ignore[arg-type]


# --- A key that is used again (checkpoint-engine 106) ------------------------------------------


def test_a_reused_key_in_a_protocol() -> None:
    """The second epoch finds its fence open: a rank trains while its peer still serves."""
    assert holds(resolve(BASIC, 2), epochs=2)
    verdict = broken(defective(Defect.KEY_REUSED), epochs=2)
    assert verdict.property == "never"
    assert verdict.path[-1].name == "train"


def _counting(space: object, asked: object, own: object, **_: object) -> Life:
    """A fence that only counts, at one key: whoever comes when the count is full opens it."""
    at, key = SPACE.at("world", 0), asked.key  # type: ignore[attr-defined]
    yield Append(SPACE.at("world", key.generation).log, b"x\n")
    order = yield Add(at.counter, 1)
    if order >= len(asked.members):  # type: ignore[attr-defined]
        yield CompareSet(at.verdict, b"open")
    text = yield Wait(at.verdict)
    yield Note(("open", key.generation, text))
    return Passed(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("epochs", "wrong"), [(1, None), (2, "generation 1 opened before all arrived")]
)
def test_a_reused_key_in_the_fence(epochs: int, wrong: str | None) -> None:
    assert found(cast(2, epochs, life=_lives(_counting))).wrong == wrong


def _lives(arrive: Arriving) -> Callable[..., Callable[[], Life]]:
    return lambda size, rank, generations: life(size, rank, generations, arrive=arrive)


# --- A failure that has no status (SkyRL 1737, ray 64470) ---------------------------------------


def test_a_missing_failure_status_in_a_protocol() -> None:
    """Whoever fails tells nobody: verl's own world barrier with one rank that raises."""
    assert holds(resolve(BASIC, 2), FAIL)
    verdict = broken(defective(Defect.NO_ABORT), FAIL)
    assert verdict.property == "deadlock"
    assert "waits for ever at fence" in verdict.says


def test_a_missing_failure_status_in_the_fence() -> None:
    """The one that failed arrives like the others, so that the fence opens."""
    first, second = ranks(2)
    cause = RootCause(kind="failed", ranks=(second,), phase="offload", error="no room")
    sick = replace(arrival(second, 0), cause=cause)

    def nobody_passes(view: View) -> str | None:
        passed = [n for n in view.notes.get(str(first), ()) if n[0] == "open"]
        return "passed beside a failure" if passed else None

    def fails() -> Life:
        yield from connecting(SPACE, second, 0, nonce="sick")
        yield from failing(SPACE, call(2, 0), sick)

    def keeps_quiet() -> Life:
        yield from arriving(
            SPACE,
            call(2, 0),
            replace(sick, cause=None),
            register=True,
            opened_before=None,
            wait=False,
        )

    for tells, wrong in ((fails, None), (keeps_quiet, "passed beside a failure")):
        more = (Process("t/1", tells),)
        players = replace(cast(2, 1, more=more), always=nobody_passes)
        players = replace(players, processes=(players.processes[0], *more))
        assert found(players).wrong == wrong


# --- A branch that only some ranks take (TensorRT-LLM 13564) ------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_divergent_branch(rank: int) -> None:
    """A fence under a condition of the rank's own: one passes it by, the others wait for it."""

    def skips(steps: list[Step]) -> list[Step]:
        return [s for s in steps if not (isinstance(s, AtFence) and s.fence == "memory_released")]

    verdict = broken(one_rank(resolve(BASIC, 2), rank, skips))
    assert verdict.property in {"deadlock", "never"}
    whole = broken(one_rank(resolve(BASIC, 2), 1, skips))
    assert "trainer/0 waits for ever at fence 'memory_released'" in whole.says


# --- Two groups, met in another order (trl 6797, slime 2331) ------------------------------------


def test_two_groups() -> None:
    """Two ranks meet their columns before their rows: a cycle that four ranks close."""
    crossing = {"row": ((0, 1), (2, 3)), "column": ((0, 2), (1, 3))}
    plan = resolve(load(DATA / "rows_and_columns.yaml"), 4, groups=crossing)
    assert holds(plan, FAIL)

    def other_way_round(steps: list[Step]) -> list[Step]:
        return [steps[0], steps[2], steps[1], *steps[3:]]

    crossed = one_rank(one_rank(plan, 1, other_way_round), 2, other_way_round)
    verdict = broken(crossed)
    assert verdict.property == "deadlock"
    assert verdict.says.count("waits for ever") == 4
    everybody = plan
    for rank in range(4):
        everybody = one_rank(everybody, rank, other_way_round)
    assert holds(everybody), "all in the other order is as good an order"


# --- The fence stands outside the loop (slime 1348) ---------------------------------------------


def test_a_fence_outside_the_loop() -> None:
    """Only the last bucket is acknowledged: the first one's buffer goes while it is read."""
    plan = resolve(load(DATA / "buckets.yaml"), 2)
    assert holds(plan, FAIL)
    verdict = broken(without_fence("loaded_1")(plan))
    assert verdict.property == "race"
    assert (str(verdict.path[-1].kind), verdict.path[-1].name) == ("start", "free_1")


# --- Fences that have no name -------------------------------------------------------------------


def _passes_together(view: View) -> str | None:
    """Nobody passes a fence while its peer is at another one."""
    opened = [name for name, notes in view.notes.items() if any(n[0] == "open" for n in notes)]
    return f"{opened[0]} passed with its peer at another fence" if opened else None


@pytest.mark.parametrize("at", ["store", "hub"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "anonymous"])
def test_anonymous_fences(at: str, named: bool) -> None:
    """Two ranks come to two fences; without a name in the arrival each counts for the other."""

    def lives(size: int, rank: object, generations: range) -> Callable[[], Life]:
        own = life if at == "store" else hub_life
        where = {"t/0": "offloaded", "t/1": "resumed"}[str(rank)] if named else "any"
        return own(size, rank, generations, fence=where)  # type: ignore[arg-type]

    result = found(cast(2, 1, at=at, life=lives, always=_passes_together))
    if named:
        assert (result.wrong, result.bound) == (None, None)
    else:
        assert result.wrong is not None
        assert "passed with its peer at another fence" in result.wrong


# --- The fence's own core, with one thing wrong -------------------------------------------------


def test_a_verdict_that_may_be_written_over() -> None:
    """Put in place of compare-and-set: a deadline and the closer both decide."""

    def careless(steps: Life) -> Life:
        reply = None
        while True:
            try:
                asked = steps.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(asked, CompareSet) and asked.key.endswith("/v"):
                yield Put(asked.key, asked.value)
                reply = asked.value
            else:
                reply = yield asked

    def arrives(*words: object, **more: object) -> Life:
        return careless(arriving(*words, **more))  # type: ignore[arg-type]

    more = (deadline(2, ranks(2)[0], 0),)
    assert found(cast(2, 1, more=more)).wrong is None
    result = found(cast(2, 1, life=_lives(arrives), more=more))
    assert result.wrong is not None
    assert "two verdicts" in result.wrong


def test_a_hub_that_decides_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    more = (deadline(2, ranks(2)[0], 0, "hub"), watcher(ranks(2)[1], "hub", wrongly=True))
    assert found(cast(2, 1, at="hub", more=more)).wrong is None

    def again(hub: Hub, asked: FenceCall, own: Arrival) -> Instance:
        instance = hub.instance(asked)
        instance.take(own)
        if not isinstance(ruling := judge(asked, instance.arrivals), Waiting):
            instance.verdict = ruling
        return instance

    monkeypatch.setattr(Hub, "arrive", again)
    result = found(cast(2, 1, at="hub", more=more))
    assert result.wrong is not None
    assert "two verdicts" in result.wrong


# --- The bug that verl has fixed twice -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "size"),
    [(4, 2), (4, 4)],
    ids=["verl 7851, replicas of two", "verl 5208, one of four"],
)
def test_the_leader_resumes_kv_while_a_peer_still_holds(ranks: int, size: int) -> None:
    sound = resolve(load("colocated"), ranks, {"replica_size": size})
    verdict = broken(without_fence("memory_released")(sound))
    last = verdict.path[-1]
    assert (verdict.property, str(last.kind), last.name) == ("never", "start", "resume_kv")
    peers = {str(holder) for each in verdict.violations for holder in each.holders} - {"engine/0"}
    leader = str(sound.members[last.rank])
    assert peers
    assert leader not in peers
    assert {name for each in verdict.violations for name in each.resources} <= {
        "kv_cache",
        "staging",
        "trainer_params",
        "train_cache",
    }


@pytest.mark.parametrize("name", ["verl_stock", "colocated_each"])
def test_verls_own_barrier_with_one_rank_that_raises(name: str) -> None:
    """Deadlines are off, as they are there: the others wait for it for ever."""
    plan = replace(resolve(load(name), 2), defects=frozenset({Defect.NO_ABORT}))
    verdict = broken(plan, FAIL)
    assert verdict.property == "deadlock"
    assert not any(str(event.kind) == "deadline" for event in verdict.path)
    raised = [event for event in verdict.path if str(event.kind) == "fail"]
    assert len(raised) == 1
    other = plan.members[1 - raised[0].rank]
    assert f"{other} waits for ever at fence" in verdict.says
