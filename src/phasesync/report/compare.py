"""What differs between two protocols, by meaning and not by line.

A comment, a blank line or another form of writing makes no difference; a fence that moved does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TypeAlias

from phasesync.core.protocol import FenceDecl, Invariant, InvariantKind, Protocol, StepDecl
from phasesync.core.wire import Json
from phasesync.report import phrases

__all__ = ("Change", "as_json", "as_text", "compare")

_SIGNS = {"added": "+", "removed": "-", "changed": "~", "moved": ">"}


@dataclass(frozen=True, slots=True)
class Change:
    """`kind` is `added`, `removed`, `changed` or `moved`; `what` and `name` say of what."""

    kind: str
    what: str
    name: str
    before: str = ""
    after: str = ""


def _never(protocol: Protocol) -> Iterator[Invariant]:
    return (each for each in protocol.invariants if each.kind is InvariantKind.NEVER)


def _others(protocol: Protocol) -> Iterator[Invariant]:
    return (each for each in protocol.invariants if each.kind is not InvariantKind.NEVER)


_Section: TypeAlias = tuple[str, Callable[[Protocol], Mapping[str, str]]]

_SECTIONS: tuple[_Section, ...] = (
    ("option", lambda p: {each.name: phrases.option(each) for each in p.options}),
    ("group", lambda p: {each.name: phrases.group(each) for each in p.groups}),
    ("role", lambda p: {each.name: phrases.role(each) for each in p.roles}),
    ("resource", lambda p: {each.name: phrases.resource(each) for each in p.resources}),
    ("never", lambda p: {phrases.never(e): phrases.when(e) or "always" for e in _never(p)}),
    ("rule", lambda p: {phrases.asks(e): phrases.when(e) or "always" for e in _others(p)}),
)


def compare(one: Protocol, two: Protocol) -> tuple[Change, ...]:
    """The changes that make `two` out of `one`, in the order of a protocol file."""
    return tuple(_changes(one, two))


def _changes(one: Protocol, two: Protocol) -> Iterator[Change]:
    for what, read in _SECTIONS:
        yield from _entries(what, read(one), read(two))
    for before, after, suffix in (
        (one.steps, two.steps, ""),
        (one.recover, two.recover, " of recover"),
    ):
        roles = dict.fromkeys(step.role for step in (*before, *after))
        for role in roles:
            mine = _steps(one, before, role, suffix)
            yours = _steps(two, after, role, suffix)
            for what in (f"phase{suffix}", f"fence{suffix}"):
                yield from _entries(what, mine.get(what, {}), yours.get(what, {}))
            yield from _moves(
                [step for step in before if step.role == role],
                [step for step in after if step.role == role],
                suffix,
            )


def _entries(what: str, one: Mapping[str, str], two: Mapping[str, str]) -> Iterator[Change]:
    for name in one:
        if name not in two:
            yield Change("removed", what, name, before=one[name])
        elif one[name] != two[name]:
            yield Change("changed", what, name, one[name], two[name])
    for name in two:
        if name not in one:
            yield Change("added", what, name, after=two[name])


def _steps(
    protocol: Protocol, steps: tuple[StepDecl, ...], role: str, suffix: str
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for step in steps:
        if step.role == role:
            kind = "fence" if isinstance(step, FenceDecl) else "phase"
            found.setdefault(kind + suffix, {})[step.name] = phrases.step(protocol, step)
    return found


def _moves(before: list[StepDecl], after: list[StepDecl], suffix: str) -> Iterator[Change]:
    """Steps that both have, in another order; as few as explain it."""
    mine: list[str] = [step.name for step in before]
    yours: list[str] = [step.name for step in after]
    old = [name for name in mine if name in yours]
    new = [name for name in yours if name in mine]
    stay: set[str] = set()
    for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        stay.update(old[block.a : block.a + block.size])
    kinds = {step.name: "fence" if isinstance(step, FenceDecl) else "phase" for step in after}
    for name in new:
        if name not in stay:
            what = kinds[name] + suffix  # type: ignore[index]
            yield Change("moved", what, name, _after(mine, name), _after(yours, name))


def _after(names: list[str], name: str) -> str:
    at = names.index(name)
    return f"after {names[at - 1]}" if at else "first"


def as_json(changes: tuple[Change, ...]) -> list[Json]:
    """The changes for programs."""
    return [
        {"kind": each.kind, "what": each.what, "name": each.name, "before": each.before,
         "after": each.after}
        for each in changes
    ]  # fmt: skip


def as_text(changes: tuple[Change, ...]) -> str:
    """The changes for people, one a line, or that there are none."""
    if not changes:
        return "no difference in meaning\n"
    lines = (f"{_SIGNS[each.kind]} {each.what} {each.name}{_says(each)}" for each in changes)
    return "\n".join(lines) + "\n"


def _says(change: Change) -> str:
    if change.before and change.after:
        return f": {change.before}  ->  {change.after}"
    says = change.before or change.after
    return f": {says}" if says else ""
