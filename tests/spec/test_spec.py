"""Reading protocol files: where they are found, and what they come to mean."""

import pickle
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from phasesync import spec
from phasesync.core.condition import Name, Not
from phasesync.core.options import assignments
from phasesync.core.plan import resolve
from phasesync.core.protocol import (
    DEVICE,
    Effect,
    Evidence,
    FenceDecl,
    PhaseDecl,
    Place,
    Protocol,
    Retry,
    Verb,
)
from phasesync.declare import SECTIONS
from phasesync.declare.steps import ESTABLISHED, FENCE_KEYS, MEASURED, PHASE_KEYS
from phasesync.declare.table import ROW_KEYS
from phasesync.errors import ProtocolError
from phasesync.lint import lint

TABLE = """
phasesync: 1
protocol: basic
options: {replica_size: {type: int, default: 2, min: 1}}
groups:  {replica: {of: trainer, size: replica_size}}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  params:   {owner: trainer}
  cache:    {owner: trainer}
  kv_cache: {owner: engine}
never:
  - {together: [kv_cache, params]}
  - {together: [kv_cache, cache]}
phases:
  resume_kv:   {by: leader, acquires: {kv_cache: replica}}
  rollout:     {by: leader, releases: {kv_cache: replica}, outside: true}
  train:       {acquires: [params, cache], outside: true}
  sync:        {uses: params}
  offload:     {releases: params, enqueued: true}
  empty_cache: {releases: cache, enqueued: true}
fences:
  memory_released: {scope: replica, deadline_s: 300, requires: [device_synchronised]}
  rollout_over:    {deadline_s: 7200, joined: outside}
transitions:
  - {role: trainer, from: idle,    on: train, to: trained}
  - {role: trainer, from: trained, on: sync, to: synced}
  - {role: trainer, from: offloaded, on: empty_cache, to: empty}
  - {role: trainer, from: synced,  on: offload, to: offloaded}
  - {role: trainer, from: empty,   on: resume_kv, to: serving, fence: memory_released}
  - {role: trainer, from: serving, on: rollout, to: over}
  - {role: trainer, from: over,    to: idle, fence: rollout_over}
"""


@pytest.mark.parametrize("name", spec.shipped())
def test_a_shipped_protocol_is_without_doubt_and_makes_a_plan_for_all_options(name: str) -> None:
    protocol = spec.load(name)
    assert protocol.name == name
    assert protocol.summary
    assert lint(protocol) == ()
    digests = {resolve(protocol, 4, options).digest for options in assignments(protocol)}
    assert len(digests) == len(assignments(protocol)) > 1


def test_colocated_reads_as_it_is_written() -> None:
    protocol = spec.load("colocated")
    assert [fence.name for fence in protocol.fences] == [
        "ready_for_weights", "staged", "transfer_done", "memory_released", "ready_to_serve",
        "rollout_over", "asleep",
    ]  # fmt: skip
    steps = {step.name: step for step in (*protocol.steps, *protocol.recover)}
    offload, load, reclaim = steps["offload"], steps["load"], steps["reclaim"]  # type: ignore[index]
    assert isinstance(offload, PhaseDecl)
    assert offload.effects == (Effect(Verb.RELEASES, protocol.resources[0].name, DEVICE),)
    assert offload.when == Name("param_offload")
    assert offload.enqueued
    assert isinstance(load, PhaseDecl)
    assert load.by == "leader"
    assert [(effect.verb, effect.reach) for effect in load.effects] == [
        ("uses", "replica"), ("writes", "replica"),
    ]  # fmt: skip
    assert isinstance(reclaim, PhaseDecl)
    assert reclaim.retry is Retry.AFTER_QUERY
    assert protocol.resources[3].content
    assert protocol.resources[3].start == Not(Name("free_cache_engine"))
    released = steps["memory_released"]  # type: ignore[index]
    assert isinstance(released, FenceDecl)
    assert (released.scope, released.deadline_s) == ("fence_scope", 300)
    assert released.established == ("device_synchronised",)


def test_basic_is_small() -> None:
    lines = [line for line in spec.find("basic").read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= 25
    names = [step.name for step in spec.load("basic").steps]
    assert names[1:6] == ["sync", "offload", "empty_cache", "memory_released", "resume_kv"]


def test_a_transition_table_says_what_a_list_says() -> None:
    listed, table = spec.load("basic"), spec.loads(TABLE)
    assert [step.name for step in table.steps] == [step.name for step in listed.steps]
    assert table.resources == tuple(  # the same but for their places in the file
        type(each)(name=each.name, owner=each.owner, place=table.resources[at].place)
        for at, each in enumerate(listed.resources)
    )
    assert lint(table) == ()
    one, two = resolve(listed, 4), resolve(table, 4)
    assert one.programs == two.programs
    assert one.digest == two.digest


def test_a_fence_may_wait_longer_in_the_first_epoch() -> None:
    text = (Path(__file__).parents[2] / "protocols" / "basic.yaml").read_text()
    protocol = spec.loads(
        text.replace("deadline_s: 300", "deadline_s: 300, first_deadline_s: 1800")
    )
    fence = protocol.fences[0]
    assert (fence.deadline_s, fence.first_deadline_s) == (300, 1800)
    assert lint(protocol) == ()
    assert spec.loads(spec.dumps(protocol)).fences[0].first_deadline_s == 1800


def test_phases_for_each_of_several_roles() -> None:
    protocol = spec.loads(
        """
phasesync: 1
protocol: pair
roles: {trainer: {place: one per device}, judge: {place: one per device}}
resources: {params: {owner: trainer}}
phases:
  trainer:
    - load_back: {acquires: params}
    - {fence: loaded, deadline_s: 60}
    - {fence: looked, deadline_s: 60}
    - offload: {releases: params}
    - {fence: over, deadline_s: 60}
  judge:
    - {fence: loaded, deadline_s: 60}
    - look: {needs: params}
    - {fence: looked, deadline_s: 60}
    - {fence: over, deadline_s: 60}
"""
    )
    assert protocol.active_roles == ("trainer", "judge")
    assert lint(protocol) == ()
    plan = resolve(protocol, {"trainer": 2, "judge": 2})
    assert [len(program) for program in plan.programs] == [5, 5, 4, 4]


def test_evidence_is_measured_in_bytes() -> None:
    text = spec.find("basic").read_text("utf-8")
    text = text.replace("[device_synchronised]", "[free_bytes >= 20 GiB, device_synchronised]")
    fence = spec.loads(text).fences[0]
    assert fence.established == ("device_synchronised",)
    assert fence.evidence == (Evidence("free_bytes", ">=", 20 * 2**30),)


def test_words_stay_words() -> None:
    text = (
        spec.find("basic")
        .read_text("utf-8")
        .replace(" sync: ", " on: ")
        .replace("- train:", "- no:")
    )
    assert [step.name for step in spec.loads(text).steps][:2] == ["no", "on"]


def test_an_anchor_may_be_used_twice() -> None:
    text = spec.find("basic").read_text("utf-8")
    text = text.replace("params:   {owner: trainer}", "params:   &ours {owner: trainer}")
    text = text.replace("cache:    {owner: trainer}", "cache:    *ours")
    assert lint(spec.loads(text)) == ()


def test_a_declaration_knows_its_place() -> None:
    text = spec.find("basic").read_text("utf-8")
    protocol = spec.loads(text)
    for step in protocol.steps:
        line = text.splitlines()[step.place.line - 1]
        assert line[step.place.column - 1 :].startswith(step.name)
    assert protocol.options[0].place == Place(4, 11)


def test_a_path_is_taken_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "basic"
    mine.write_text(TABLE.replace("protocol: basic", "protocol: mine"), "utf-8")
    assert spec.load(mine).name == "mine"
    monkeypatch.chdir(tmp_path)
    assert spec.load("basic").name == "mine"
    mine.unlink()
    assert spec.load("basic").name == "basic"
    assert spec.load("basic").file == "basic.yaml"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("basik", "basik:1:1: no such file or shipped protocol; give a file, or one of: "),
        ("/nowhere/x.yaml", "/nowhere/x.yaml:1:1: no such file or shipped protocol; "),
        ("/", "/:1:1: is a folder; give a file in it"),
        ("\0", "\0:1:1: no such file or shipped protocol; give a file"),
        ("x" * 5000, "x:1:1: cannot be read: File name too long; give a file that can be read"),
    ],
)
def test_no_such_file(name: str, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        spec.load(name)
    assert message in str(caught.value)


def test_all_mistakes_come_at_once_and_survive_pickling() -> None:
    text = TABLE.replace("owner: engine", "owner: engin").replace("deadline_s: 300", "deadline: 3")
    with pytest.raises(ProtocolError) as caught:
        spec.loads(text, file="mine.yaml")
    first = caught.value
    assert [error.line for error in (first, *first.others)] == [12, 24, 24]
    assert first.file == "mine.yaml"
    assert str(pickle.loads(pickle.dumps(first))) == str(first)


def _anywhere(protocol: Protocol) -> object:
    """A protocol but for its places in a file, as a value to compare."""
    return _placeless(replace(protocol, file=""))


def _placeless(value: object) -> object:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_placeless, value))
    if is_dataclass(value):
        return type(value).__name__, {
            each.name: _placeless(getattr(value, each.name))
            for each in fields(value)
            if each.name != "place"
        }
    return value


@pytest.mark.parametrize("name", spec.shipped())
def test_what_is_written_out_reads_back(name: str) -> None:
    protocol = spec.load(name)
    again = spec.loads(spec.dumps(protocol))
    assert _anywhere(again) == _anywhere(protocol)
    assert resolve(again, 4).digest == resolve(protocol, 4).digest


def test_odd_things_are_written_out_too() -> None:
    protocol = spec.loads(
        """
phasesync: 1
protocol: odd
summary: "It's: {a} #1"
options: {n: {type: int, default: 3, min: 1, max: 9}, how: {type: enum, of: [a, b], default: b}}
groups: {all_of_it: {of: trainer, size: n}}
roles: {trainer: {place: one per device}, judge: {place: one per device}}
resources: {params: {owner: trainer, start: {mapped: false}}}
never: [{together: [params, spare], when: "how in [a, b] or n > 2"}]
phases:
  trainer:
    - x: {acquires: params, when: "not how not in ['a']", deadline_s: 0.5}
    - {fence: seen, scope: all_of_it, deadline_s: 1.25, requires: [free_bytes >= 1KiB]}
  judge:
    - on: {needs: {params: all}, retry: safe}
""".replace("resources: {", "resources: {spare: {owner: judge}, ")
    )
    assert _anywhere(spec.loads(spec.dumps(protocol))) == _anywhere(protocol)


def test_the_language_page_speaks_of_every_key() -> None:
    page = spec.find("basic").parent.joinpath("README.md")  # type: ignore[attr-defined]
    words = set(re.findall(r"[a-z_]+", page.read_text("utf-8")))
    keys = {"phasesync", "protocol", "summary", *SECTIONS, *PHASE_KEYS, *FENCE_KEYS, *ROW_KEYS}
    keys |= {*ESTABLISHED, *MEASURED, "type", "default", "min", "max", "of", "size", "leader"}
    keys |= {"place", "driven_by", "owner", "content", "start", "mapped", "together", "on"}
    assert keys - words == set()
