"""Nobody serves from a replica whose recovery failed, nor from weights that are half written."""

import pytest

from phasesync.checker.explicit import explore
from phasesync.core.kernel import Faults
from phasesync.core.plan import resolve
from phasesync.core.verdict import Holds, Violated
from phasesync.spec import load, loads

from .pushed import replica

TWICE = Faults(most=2, fail=True)
TEXT = replica("""\
  params:  {owner: trainer}
phases:
  - train: {acquires: params}
  - load:  {by: leader, writes: {weights: replica}}
  - serve: {by: leader, needs: {weights: replica}}
  - drop:  {releases: params}
  - fence: over
    deadline_s: 60
recover:
  - reset:   {ensures: {params: start}}
  - reclaim: {by: leader, ensures: {weights: start}}
""")
CLOSED = "  - fence: reclaimed\n    deadline_s: 60\n"


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("more", "property_"), [("", "poisoned"), (CLOSED, None)])
def test_a_recovery_that_no_fence_closes(more: str, property_: str | None, reduced: bool) -> None:
    """The leader puts its part back and serves, whatever became of its peer's."""
    plan = resolve(loads(TEXT + more), 2)
    verdict, _ = explore(plan, TWICE, 2, symmetry=reduced, reduction=reduced, deadlocks=False)
    if property_ is None:
        assert isinstance(verdict, Holds)
        return
    assert isinstance(verdict, Violated)
    assert verdict.property == property_
    assert (verdict.path[-1].name, verdict.violations[0].holders) == ("serve", (plan.members[1],))


def test_partial_weights_are_not_served() -> None:
    """Whoever serves what a failed transfer left half written is found out by `needs`."""
    text = TEXT.replace("serve: {by: leader, needs: {weights: replica}}", "serve: {needs: weights}")
    verdict, _ = explore(resolve(loads(text), 2), Faults(most=1, fail=True), 1)
    assert isinstance(verdict, Violated)
    assert verdict.property == "content"


@pytest.mark.parametrize("name", ["basic", "colocated", "colocated_each", "disagg_broadcast"])
def test_shipped_protocols_serve_no_poisoned_engine(name: str) -> None:
    protocol = load(name)
    ranks = 2 if protocol.name != "disagg_broadcast" else 1
    verdict, _ = explore(resolve(protocol, ranks), TWICE, 2, deadlocks=False)
    assert isinstance(verdict, Holds)
