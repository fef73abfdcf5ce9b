"""Where lint is silent, no interleaving of healthy ranks breaks anything: lint is asked first and
the kernel, over every interleaving of two ranks, has the last word."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from phasesync import spec
from phasesync.core.options import assignments
from phasesync.core.plan import resolve
from phasesync.core.protocol import DEVICE, FenceDecl, PhaseDecl, Protocol, StepDecl
from phasesync.lint import Severity, lint
from tests.spec import interleavings

RIGHT = {path.stem: spec.load(path) for path in (Path(__file__).parent / "right").glob("*.yaml")}
STATES_MAX = 60_000


def broken(protocol: Protocol, options: Mapping[str, Any]) -> str | None:
    """What breaks with two ranks; their states are few enough to be seen whole."""
    says, whole = interleavings.broken(resolve(protocol, 2, options), STATES_MAX)
    assert says or whole
    return says


def with_step(protocol: Protocol, at: int, step: StepDecl) -> Protocol:
    steps = list(protocol.steps)
    steps[at] = step
    return replace(protocol, steps=tuple(steps))


def mutated(data: st.DataObject, protocol: Protocol) -> Protocol:
    """One thing changed: dropped, moved, narrowed, or no longer asked for."""
    steps = list(protocol.steps)
    at = data.draw(st.integers(0, len(steps) - 1))
    step = steps[at]
    how = data.draw(st.sampled_from(["drop", "move", "change", "change", "change"]))
    if how == "drop":
        return replace(protocol, steps=(*steps[:at], *steps[at + 1 :]))
    if how == "move":
        steps.insert(data.draw(st.integers(0, len(steps) - 1)), steps.pop(at))
        return replace(protocol, steps=tuple(steps))
    if isinstance(step, FenceDecl):
        scope = data.draw(st.sampled_from(["replica", "world"]))
        established = data.draw(st.sampled_from([(), ("device_synchronised",)]))
        return with_step(protocol, at, replace(step, scope=scope, established=established))
    return with_step(protocol, at, _changed(data, step))


def _changed(data: st.DataObject, phase: PhaseDecl) -> PhaseDecl:
    if data.draw(st.booleans()):
        leads: str | None = data.draw(st.sampled_from([None, "leader"]))
        phase = replace(phase, by=leads)
    if data.draw(st.booleans()):
        phase = replace(phase, enqueued=not phase.enqueued)
    moves: bool = data.draw(st.booleans())
    if phase.effects and moves:
        number = data.draw(st.integers(0, len(phase.effects) - 1))
        effects = list(phase.effects)
        reach = data.draw(st.sampled_from([DEVICE, "replica"]))
        effects[number] = replace(effects[number], reach=reach)
        phase = replace(phase, effects=tuple(effects))
    return phase


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_where_lint_is_silent_nothing_breaks(data: st.DataObject) -> None:
    protocol = RIGHT[data.draw(st.sampled_from(sorted(RIGHT)))]
    for _ in range(data.draw(st.integers(1, 3))):
        protocol = mutated(data, protocol)
    errors = [found for found in lint(protocol) if found.severity is Severity.ERROR]
    event("lint has doubts" if errors else "lint is silent")
    if errors:
        return
    options = data.draw(st.sampled_from(assignments(protocol)))
    assert broken(protocol, options) is None


def test_what_lint_calls_unprotected_breaks_for_some_options() -> None:
    """Each fence taken away from what is right: no false alarm among the doubts."""
    for protocol in RIGHT.values():
        for fence in protocol.fences:
            left = tuple(step for step in protocol.steps if step is not fence)
            without = replace(protocol, steps=left)
            assert any(found.rule.startswith("unprotected") for found in lint(without))
            assert any(broken(without, options) for options in assignments(without)), fence.name


def test_what_is_right_holds_for_all_options() -> None:
    for protocol in RIGHT.values():
        for options in assignments(protocol):
            assert broken(protocol, options) is None
