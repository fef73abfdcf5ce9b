"""Every mistake planted in every shipped protocol: each shows, or is said not to be one."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from phasesync.bench.check import MODELS
from phasesync.checker.explicit import explore
from phasesync.checker.mutants import Mutation, mutations, survey
from phasesync.checker.search import Budget
from phasesync.core.kernel import Faults, enabled, initial, step
from phasesync.core.plan import Defect, Plan, resolve
from phasesync.core.properties import violations
from phasesync.core.verdict import Violated
from phasesync.report.check_text import survey_lines
from phasesync.spec import load, shipped

DATA = Path(__file__).parents[1] / "data/protocols"
CRASH = Faults(most=1, crash=True)


def dropped(mutation: Mutation) -> bool:
    return mutation.name.endswith(" dropped")


@pytest.mark.parametrize("name", shipped())
def test_each_shipped_fence_removed_is_refuted_under_options_that_are_named(name: str) -> None:
    protocol = load(name)
    found = survey(protocol, only=dropped)
    assert len(found.mutants) == len({fence.name for fence in protocol.fences})
    for mutant in found.mutants:
        assert mutant.refuted is not None, mutant.mutation
        assert isinstance(mutant.refuted.verdict, Violated)
        assert dict(mutant.refuted.options).keys() >= {decl.name for decl in protocol.options}


@pytest.mark.parametrize("name", ["basic", "colocated_controller"])
def test_no_mutant_of_a_shipped_protocol_survives(name: str) -> None:
    found = survey(load(name))
    assert ([m.mutation for m in found.survivors], found.undecided) == ([], ())
    assert all(not idle for _, _, idle in found.carries)
    assert survey_lines(found)[-1] == "no survivor"


@pytest.mark.parametrize(
    ("mutation", "says"),
    [
        ("load_state swallowed", "once after 7 steps, N = 2, optimizer_offload=true"),
        ("abort releases memory", "race after 47 steps, N = 3, replica_size=3"),
    ],
)
def test_what_it_takes_to_show_is_named(mutation: str, says: str) -> None:
    """An option that is off by default, or a third rank in the replica."""
    found = survey(load("colocated_each"), only=lambda each: each.name == mutation)
    assert says in "\n".join(survey_lines(found))


def test_what_is_no_mistake_is_not_planted() -> None:
    """Nobody reads what an aborting rank of `basic` has, so that it may let go of it."""
    names = {name: {m.name for m in mutations(load(name))} for name in ("basic", "colocated")}
    assert "abort releases memory" not in names["basic"]
    assert "abort takes memory back" in names["basic"]
    assert {each.value for each in Defect} <= names["colocated"]
    each = {m.name for m in mutations(load("colocated_each"))}
    assert not [name for name in each if name.endswith("without device_synchronised")]


DECORATION = """
phasesync: 1
protocol: decorated
summary: The second fence waits for nothing that matters.
options: {replica_size: {type: int, default: 2, min: 1}}
groups:  {replica: {of: trainer, size: replica_size}}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  params:   {owner: trainer}
  kv_cache: {owner: engine}
never:
  - {together: [kv_cache, params]}
phases:
  - train:     {acquires: params}
  - offload:   {releases: params}
  - {fence: released, scope: replica, deadline_s: 300}
  - {fence: idle, scope: replica, deadline_s: 300}
  - resume_kv: {by: leader, acquires: {kv_cache: replica}}
  - rollout:   {by: leader, releases: {kv_cache: replica}}
  - {fence: over, deadline_s: 7200}
"""


def test_decoration_is_told_from_what_carries_a_guarantee(tmp_path: Path) -> None:
    file = tmp_path / "decorated.yaml"
    file.write_text(DECORATION)
    chosen = {"fence idle dropped", "fence idle without trainer/0", "fence over without trainer/1"}
    found = survey(load(file), only=lambda mutation: mutation.name in chosen)
    assert [mutant.mutation for mutant in found.survivors] == sorted(chosen)[:2]
    assert found.carries == (("idle", (), ("trainer/0",)), ("over", ("trainer/1",), ()))
    text = "\n".join(survey_lines(found))
    assert "fence idle dropped" in text
    assert "arrivals that carry over: all" in text
    assert "it does without trainer/0" in text


def test_time_that_ran_out_is_no_survivor() -> None:
    clock = itertools.count(0.0, 0.01)
    found = survey(
        load("colocated"),
        only=dropped,
        budget=lambda: Budget(now=lambda: next(clock), until_s=0.0),
    )
    assert found.survivors == ()
    assert {mutant.bound for mutant in found.undecided} == {"time"}
    body = found.to_json()
    assert (body["survivors"], len(body["undecided"])) == ([], 7)  # type: ignore[arg-type]


# --- The abort that takes weights back -------------------------------------------------------


def rollback(ranks: int) -> Plan:
    plan = resolve(load(MODELS / "fence_pml_abort.yaml"), ranks)
    return replace(plan, defects=frozenset({Defect.ABORT_TAKES}))


def test_the_rollback_takes_two_ranks_where_engine_and_trainer_share_a_device() -> None:
    plan = replace(resolve(load("basic"), 2), defects=frozenset({Defect.ABORT_TAKES}))
    verdict, _ = explore(plan, CRASH, 1)
    assert isinstance(verdict, Violated)
    assert (verdict.property, verdict.path[-1].kind) == ("never", "abort")


def test_the_rollback_takes_three_where_death_gives_kv_back() -> None:
    """And random runs miss it: 1,500 in which every step is as likely as any other."""
    assert not isinstance(explore(rollback(2), CRASH, 1)[0], Violated)
    plan = rollback(3)
    verdict, found = explore(plan, CRASH, 1)
    assert isinstance(verdict, Violated)
    assert (len(verdict.path), found.states) == (27, 686)
    chance = random.Random(1)
    assert not any(goes_wrong(plan, chance) for _ in range(1500))


def goes_wrong(plan: Plan, chance: random.Random) -> bool:
    system = initial(plan)
    while events := list(enabled(plan, system, CRASH, 1)):
        event = chance.choice(events)
        after = step(plan, system, event)
        if violations(plan, system, event, after):
            return True
        system = after
    return False
