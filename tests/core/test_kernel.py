"""The kernel told as stories: commands at the margin, refusals and changes of memory indented."""

from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesync.core import instances, kernel, memory
from phasesync.core.kernel import (
    Event,
    Faults,
    Kind,
    Mapped,
    Moment,
    RankState,
    Stage,
    Status,
    System,
    Verdict,
    enabled,
    initial,
    mapped_of,
    step,
)
from phasesync.core.plan import Plan, Wait, resolve
from phasesync.core.properties import violations
from phasesync.core.protocol import Verb
from phasesync.errors import Refused
from phasesync.spec import load

COLOCATED = resolve(load("colocated"), 2)
BASIC = resolve(load("basic"), 2)
ONE = Faults(most=1, crash=True, fail=True, hang=True, deadlines=True)


def tell(plan: Plan, script: str) -> str:
    """Plays `RANK KIND [NAME]` lines, and tells what came of each."""
    system = initial(plan)
    told: list[str] = []
    for line in script.split("\n"):
        if not (words := line.split()) or line.startswith(" "):
            continue
        told.append(line.strip())
        rank, kind, name = int(words[0]), Kind(words[1]), " ".join(words[2:])
        event = Event(kind, rank, name)
        try:
            after = step(plan, system, event)
        except Refused as refused:
            told.append(f"  ! {refused}")
            continue
        told += [f"  {change}" for change in _changes(plan, system, after)]
        told += [
            f"  ! {each.property}: {each.says}" for each in violations(plan, system, event, after)
        ]
        system = after
    return "\n".join(told)


def _changes(plan: Plan, before: System, after: System) -> list[str]:
    found = []
    for number, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if mapped_of(old) is not mapped_of(new):
            device, resource = plan.cell_name(number)
            found.append(f"{device} {resource} {mapped_of(new).name.lower()}")
    for entry in after.fences:
        known = {each[:4]: each.verdict for each in before.fences}
        if entry.verdict is not Verdict.SHUT and known.get(entry[:4]) is not entry.verdict:
            found.append(f"fence {entry.fence} {entry.verdict.name.lower()}")
    return found


STORIES = {
    "the leader waits for its peer": """
0 start train
  device/0 params unknown
  device/0 cache unknown
0 end train
  device/0 params yes
  device/0 cache yes
0 start offload
  ! trainer/0 cannot start 'offload' yet; next is phase 'sync'
0 start sync
0 end sync
0 start offload
  device/0 params unknown
0 end offload
0 start empty_cache
  device/0 cache unknown
0 end empty_cache
0 arrive memory_released
  device/0 params no
  device/0 cache no
0 pass memory_released
  ! trainer/0 cannot pass 'memory_released': the fence is not open
1 start train
  device/1 params unknown
  device/1 cache unknown
1 fail train
  fence rollout_over broken
  fence memory_released broken
0 abort memory_released
1 pass memory_released
  ! trainer/1 cannot pass 'memory_released': it is stopped at phase 'train'
""",
    "who dies loses its memory, and a notice breaks its fences": """
1 start train
  device/1 params unknown
  device/1 cache unknown
1 end train
  device/1 params yes
  device/1 cache yes
1 crash
  device/1 params lost
  device/1 cache lost
1 notice
  fence rollout_over broken
  fence memory_released broken
1 start sync
  ! trainer/1 cannot start 'sync': it is dead at phase 'sync'
0 abort memory_released
""",
}


@pytest.mark.parametrize("name", STORIES)
def test_stories(name: str) -> None:
    assert tell(BASIC, STORIES[name]) == STORIES[name].strip("\n")


def walk(plan: Plan, faults: Faults, choices: list[int]) -> list[tuple[System, Event, System]]:
    system, taken = initial(plan), []
    for choice in choices:
        events = list(enabled(plan, system, faults, 2))
        if not events:
            break
        event = events[choice % len(events)]
        after = step(plan, system, event)
        taken.append((system, event, after))
        system = after
    return taken


CHOICES = st.lists(st.integers(0, 63), max_size=160)


@settings(max_examples=60, deadline=None)
@given(choices=CHOICES)
def test_a_decided_fence_stays_and_a_dead_rank_stays_dead(choices: list[int]) -> None:
    for before, event, after in walk(COLOCATED, ONE, choices):
        decided = {e[:4]: e.verdict for e in before.fences if e.verdict is not Verdict.SHUT}
        for entry in after.fences:
            assert decided.get(entry[:4], entry.verdict) is entry.verdict
        for old, new in zip(before.ranks, after.ranks, strict=True):
            gone = (Status.DEAD, Status.DEAD_ACTING)
            assert old.status not in gone or new.status in gone
        changed = [
            n for n, (o, a) in enumerate(zip(before.ranks, after.ranks, strict=True)) if o != a
        ]
        assert set(changed) <= {event.rank}


@settings(max_examples=60, deadline=None)
@given(choices=CHOICES)
def test_nobody_passes_unless_all_came(choices: list[int]) -> None:
    for before, event, _ in walk(COLOCATED, ONE, choices):
        if event.kind is not Kind.PASS:
            continue
        state = before.ranks[event.rank]
        wait = kernel.next_step(COLOCATED, event.rank, state)
        assert isinstance(wait, Wait)
        for member in COLOCATED.scopes[wait.scope].members:
            other = before.ranks[member]
            if state.stage is kernel.Stage.EPOCH:
                here = (state.epoch, state.stage, state.at)
                assert (other.epoch, other.stage, other.at) >= here or other.status is Status.DEAD


@settings(max_examples=60, deadline=None)
@given(choices=CHOICES)
def test_an_abort_leaves_memory_alone_and_nothing_is_broken(choices: list[int]) -> None:
    for before, event, after in walk(COLOCATED, ONE, choices):
        if event.kind is Kind.ABORT:
            assert after.cells == before.cells
        assert violations(COLOCATED, before, event, after) == ()


def count(plan: Plan, faults: Faults) -> tuple[int, int]:
    """All systems that the kernel reaches, and how many steps break a rule."""
    seen, level, broken = {initial(plan)}, [initial(plan)], 0
    while level:
        following = []
        for system in level:
            for event in enabled(plan, system, faults, 1):
                after = step(plan, system, event)
                broken += bool(violations(plan, system, event, after))
                if after not in seen:
                    seen.add(after)
                    following.append(after)
        level = following
    return len(seen), broken


FAULT = Faults(most=1, crash=True, fail=True)
SOUND = (659, 0)


def test_the_exact_number_of_worlds() -> None:
    assert count(BASIC, Faults()) == (123, 0)
    assert count(BASIC, FAULT) == SOUND


def _opens_with_one(found: object, *_: object) -> Verdict:
    return Verdict.OPEN


def _no_effect(plan: Plan, value: int, touch: object, moment: object, version: int) -> int:
    return kernel.cell(Mapped.NO)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (instances, "decided", _opens_with_one),
        (memory, "apply", _no_effect),
        (kernel, "fail_rest", lambda plan, fences, rank, state: fences),
        (kernel, "synchronised", lambda plan, cells, pending: cells),
    ],
    ids=["opens too early", "no effects", "failure not passed on", "release never happens"],
)
def test_a_bug_in_the_kernel_changes_the_count(
    where: ModuleType, name: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    assert count(BASIC, FAULT) != SOUND


def test_enqueued_releases_wait_for_the_device() -> None:
    loose = replace(
        BASIC,
        programs=tuple(
            tuple(i._replace(established=()) if isinstance(i, Wait) else i for i in program)
            for program in BASIC.programs
        ),
    )
    assert count(BASIC, Faults())[1] == 0
    assert count(loose, Faults())[1] > 0


def test_every_verb_has_effects_or_leaves_the_cell() -> None:
    touched = {verb for verb, _ in memory._EFFECTS}
    assert touched | {Verb.NEEDS, Verb.USES, Verb.ENSURES, Verb.HOLDS, Verb.AGREES} == set(Verb)
    assert {moment for _, moment in memory._EFFECTS} == set(Moment)


def test_after_a_recovery_all_begin_unless_it_went_on_without_somebody() -> None:
    """Of one who died after it nobody can know; whoever was missed in it has to be replaced."""
    plan = resolve(load("disagg_broadcast"), 3)
    end = len(plan.recover[0])
    rests = RankState(Status.FINISHED, 1, Stage.RECOVER, end)

    def may_begin(dead: RankState) -> set[int]:
        system = initial(plan)._replace(ranks=(rests, rests, dead))
        return {event.rank for event in enabled(plan, system) if event.kind is Kind.BEGIN}

    assert may_begin(rests) == {0, 1, 2}
    assert may_begin(RankState(Status.DEAD, 1, Stage.RECOVER, end)) == {0, 1}
    assert may_begin(RankState(Status.DEAD, 2, Stage.EPOCH, 0)) == {0, 1}
    assert may_begin(RankState(Status.DEAD, 1, Stage.RECOVER, end - 1)) == set()
    assert may_begin(RankState(Status.DEAD, 1, Stage.EPOCH, 0)) == set()
