"""Doubts about a declaration that is well formed: does it mean anything, and can it be safe?

Pure: a protocol in, findings out. Each rule is asked under every assignment of the options that
can make a difference; what lint finds is an error for all numbers of ranks, and what it does not
find is for the checker.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from phasesync.core.options import assignments
from phasesync.core.protocol import PhaseDecl, Protocol, Verb
from phasesync.lint.fences import WAITS, fence_rules, order_rules
from phasesync.lint.finding import Finding, Findings, Severity
from phasesync.lint.idle import idle_rules, step_rules
from phasesync.lint.memory import memory_rules
from phasesync.lint.references import references
from phasesync.lint.view import View

__all__ = ("Finding", "Severity", "lint", "refuse")


def lint(protocol: Protocol) -> tuple[Finding, ...]:
    """Everything doubtful, in the order of the file; names first, since all else rests on them."""
    return tuple(sorted(_once(_found(protocol)), key=lambda found: (found.place, found.rule)))


def refuse(protocol: Protocol) -> None:
    """Nothing, unless lint finds an error.

    Raises:
        ProtocolError: the first one; `others` has the rest.
    """
    errors = [found.error() for found in lint(protocol) if found.severity is Severity.ERROR]
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]


def _found(protocol: Protocol) -> Findings:
    broken = [replace(found, file=protocol.file) for found in references(protocol)]
    yield from broken or chain(step_rules(protocol), _doubts(protocol))


def _doubts(protocol: Protocol) -> Findings:
    views = [View(protocol, chosen, protocol.steps) for chosen in assignments(protocol)]
    yield from idle_rules(protocol, views)
    views = list({view.shape: view for view in reversed(views)}.values())[::-1]
    fences = [found for view in views for found in fence_rules(view)]
    order = [found for view in views for found in order_rules(view)]
    yield from (*fences, *order)
    if not any(found.rule in WAITS for found in fences):
        # Two that come together because no fence stands between them are one mistake, not two.
        hidden = ("never", "unsynchronised") if order else ()
        for view in views:
            yield from (found for found in memory_rules(view) if found.rule not in hidden)
    for view in views if protocol.recover else ():
        yield from order_rules(View(protocol, view.options, protocol.recover, cyclic=False))
        yield from _put_back(protocol, view)


def _put_back(protocol: Protocol, view: View) -> Findings:
    """A recovery that leaves something as it is does not let the epoch run again."""
    moved = {
        effect.resource
        for step in view.steps
        if isinstance(step, PhaseDecl)
        for effect in step.effects
        if effect.verb in (Verb.ACQUIRES, Verb.RELEASES, Verb.WRITES)
    }
    ensured = {
        effect.resource
        for step in protocol.recover
        if isinstance(step, PhaseDecl) and view.true(step.when, absent=True)
        for effect in step.effects
        if effect.verb is Verb.ENSURES
    }
    for resource in protocol.resources:
        if resource.name in moved - ensured:
            yield Finding(
                rule="recover",
                wrong=f"recover leaves {resource.name} as the failure left it",
                right=f"add `ensures: {{{resource.name}: start}}` to one of its phases",
                place=resource.place,
                severity=Severity.WARNING,
                under=view.under,
                file=protocol.file,
            )


def _once(findings: Findings) -> Iterator[Finding]:
    """Each mistake once, under the first assignment that shows it."""
    seen: set[tuple[object, ...]] = set()
    for found in findings:
        what = found.wrong if found.rule == "reference" else found.right
        key = (found.rule, found.place, what)
        if key not in seen:
            seen.add(key)
            yield found
