"""The protocol that a demo runs, as text: the shipped one, or that with a wait taken out.

The text is kept beside the journals, so that whoever audits them judges by what was run, and can
see with `diff` what was taken out.
"""

from phasesync.core.protocol import FenceDecl, PhaseDecl, Protocol
from phasesync.spec import find, load, loads

__all__ = ("text_of", "without_wait")

ENQUEUED = ", enqueued: true"


def text_of(name: str) -> str:
    """The text of a shipped protocol."""
    return find(name).read_text(encoding="utf-8")


def without_wait(name: str, fence: str, *, enqueued: bool = False) -> str:
    """The text of a shipped protocol with the wait of a fence gone and its preconditions kept.

    What the fence had synchronised each rank now synchronises alone: releases since the fence
    before it are over when their phase ends. With `enqueued` they stay as they are, and a phase
    has to say that it has synchronised its device.
    """
    steps = load(name).steps
    at = _index(load(name), fence)
    fences = [n for n, step in enumerate(steps[:at]) if isinstance(step, FenceDecl)]
    lines = text_of(name).splitlines(keepends=True)
    for step in steps[fences[-1] + 1 if fences else 0 : at]:
        if isinstance(step, PhaseDecl) and not enqueued:
            lines[step.place.line - 1] = lines[step.place.line - 1].replace(ENQUEUED, "")
    first, last = steps[at].place.line - 1, steps[at + 1].place.line - 1
    text = "".join([*lines[:first], *lines[last:]])
    _check(loads(text), loads(text_of(name)), at, enqueued=enqueued)
    return text


def _index(protocol: Protocol, fence: str) -> int:
    return next(
        at
        for at, step in enumerate(protocol.steps)
        if isinstance(step, FenceDecl) and step.name == fence
    )


def _check(after: Protocol, before: Protocol, at: int, *, enqueued: bool) -> None:
    """A shipped file that is laid out in another way must not give another variant."""
    names = [step.name for step in before.steps]
    assert [step.name for step in after.steps] == names[:at] + names[at + 1 :]
    fences = [n for n, step in enumerate(before.steps[:at]) if isinstance(step, FenceDecl)]
    first = fences[-1] + 1 if fences else 0
    phases = [step for step in after.steps[first:at] if isinstance(step, PhaseDecl)]
    assert any(step.enqueued for step in phases) == enqueued
