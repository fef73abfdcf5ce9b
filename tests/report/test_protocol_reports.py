"""Protocols as pictures, as promises and as differences. REWRITE=1 stores what is shown anew."""

import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from phasesync import spec
from phasesync.core import wire
from phasesync.core.protocol import FenceDecl, PhaseDecl, Protocol
from phasesync.report import compare, graph, protocols

EXPECTED = Path(__file__).parent / "expected"
RIGHT = Path(__file__).parents[1] / "spec" / "right"
SHOWN = {path.stem: spec.load(path) for path in RIGHT.glob("*.yaml")}
ENDINGS = {"mermaid": "mmd", "dot": "dot", "text": "txt", "svg": "svg"}


def stored(name: str, now: str) -> str:
    path = EXPECTED / name
    if os.environ.get("REWRITE"):
        path.write_text(now, "utf-8")
    return path.read_text("utf-8")


@pytest.mark.parametrize("form", sorted(graph.FORMATS))
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_picture(name: str, form: str) -> None:
    now = graph.draw(SHOWN[name], form)
    assert now == stored(f"{name}.{ENDINGS[form]}", now)
    for step in SHOWN[name].steps:
        assert step.name in now


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_the_svg_is_xml_and_stays_in_its_frame(name: str) -> None:
    root = ET.fromstring(graph.draw(SHOWN[name], "svg"))
    wide, high = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(boxes) == 1 + len(SHOWN[name].steps)
    for box in boxes:
        assert float(box.get("x", 0)) + float(box["width"]) <= wide
        assert float(box.get("y", 0)) + float(box["height"]) <= high


PAIR = """
phasesync: 1
protocol: graph
roles: {trainer: {place: one per device}, judge: {place: one per device}}
options: {fast: {type: bool, default: true}}
resources: {params: {owner: trainer}}
phases:
  trainer:
    - node: {acquires: params, when: not (fast == false)}
    - end: {releases: params}
    - {fence: over, deadline_s: 60}
  judge:
    - {fence: over, deadline_s: 60}
"""


def test_names_that_mean_something_to_a_drawing_program() -> None:
    protocol = spec.loads(PAIR)
    assert graph.draw(protocol, "dot").startswith('digraph "graph" {')
    assert "\n    trainer_end[" in graph.draw(protocol, "mermaid")


def test_a_fence_of_the_world_is_drawn_once_for_all_roles() -> None:
    protocol = spec.loads(PAIR)
    assert graph.draw(protocol, "mermaid").count("<b>over</b>") == 1
    assert graph.draw(protocol, "dot").count('label="over') == 1
    ys = {
        each.attrib["y"]
        for each in ET.fromstring(graph.draw(protocol, "svg")).iter()
        if each.text == "over"
    }
    assert len(ys) == 1


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_what_is_promised(name: str) -> None:
    found = protocols.overview(SHOWN[name])
    now = protocols.as_text(found)
    assert now == stored(f"{name}.show.txt", now)
    assert max(map(len, now.splitlines())) <= 80
    assert all(fence.apart for fence in found.fences)
    plain = wire.decode(wire.encode(protocols.as_json(found)))
    assert plain["name"] == name
    assert set(plain["run"]) | set(plain["outside"]) == {p.name for p in SHOWN[name].phases}


def test_the_listing() -> None:
    lines = protocols.listing(tuple(SHOWN.values())).splitlines()
    assert [line.split()[0] for line in lines] == list(SHOWN)


def edited(protocol: Protocol) -> Protocol:
    """One of each: added, removed, changed, moved."""
    steps = list(protocol.steps)
    at = next(n for n, step in enumerate(steps) if step.name == "staged")
    steps.insert(at - 1, steps.pop(at))
    steps = [step for step in steps if step.name != "flush"]
    steps = [
        replace(step, deadline_s=60.0) if isinstance(step, FenceDecl) and step.joined else step
        for step in steps
    ]
    first = steps[0]
    assert isinstance(first, PhaseDecl)
    steps.append(replace(first, name="again", outside=False, by="leader"))  # type: ignore[arg-type]
    options = (replace(protocol.options[0], default=4, most=8), *protocol.options[1:])
    return replace(
        protocol, steps=tuple(steps), options=options, invariants=protocol.invariants[:-1],
        recover=(),
    )  # fmt: skip


def test_what_differs() -> None:
    protocol = SHOWN["colocated"]
    changes = compare.compare(protocol, edited(protocol))
    now = compare.as_text(changes)
    assert now == stored("diff.txt", now)
    back = compare.compare(edited(protocol), protocol)
    assert len(back) == len(changes)
    swap = {"added": "removed", "removed": "added"}
    there = sorted((each.kind, each.what, each.name) for each in changes)
    home = sorted((swap.get(each.kind, each.kind), each.what, each.name) for each in back)
    assert [each for each in there if each[0] != "moved"] == [e for e in home if e[0] != "moved"]
    assert wire.decode(wire.encode(compare.as_json(changes)))[0]["kind"] == "changed"


def test_another_form_of_writing_makes_no_difference() -> None:
    text = spec.find("basic").read_text("utf-8")
    other = text.replace("{uses: params}", "\n      uses: [params]").replace("  # your", " # my")
    assert other != text
    changes = compare.compare(spec.loads(text), spec.loads("# mine\n" + other))
    assert changes == ()
    assert compare.as_text(changes) == "no difference in meaning\n"
