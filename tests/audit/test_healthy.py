"""Nobody is accused where nothing is wrong, however ranks interleave and wherever a log ends."""

import random
from collections.abc import Callable

import pytest

from tests.audit.healthy_flows import FLOWS
from tests.audit.healthy_traces import SHAPES
from tests.audit.variants import SYNONYMS, Trace, audit_lines, renamed

SEEDS = range(40)


def in_some_words(trace: Trace, chance: random.Random) -> Trace:
    words = chance.choice([{}, *SYNONYMS])
    return renamed(trace, lambda phase: words.get(phase, phase))


@pytest.mark.parametrize("shape", [*SHAPES, *FLOWS])
def test_a_healthy_run_is_ok(shape: Callable[[random.Random], Trace]) -> None:
    for seed in SEEDS:
        chance = random.Random(seed)
        answer = audit_lines(in_some_words(shape(chance), chance))
        assert (answer.verdict, answer.guilty) == ("ok", ()), f"seed {seed}: {answer.because}"


@pytest.mark.parametrize("shape", [*SHAPES, *FLOWS])
def test_a_healthy_run_that_is_cut_accuses_nobody_of_a_deed(
    shape: Callable[[random.Random], Trace],
) -> None:
    """Only a call that nobody had answered when the log ended may be held against the callee."""
    for seed in SEEDS:
        chance = random.Random(seed)
        trace = in_some_words(shape(chance), chance)
        answer = audit_lines(trace[: chance.randrange(2, len(trace) + 1)])
        says = f"seed {seed}: {answer.verdict} {answer.rule} {answer.because}"
        assert answer.verdict in ("ok", "inconclusive", "hang"), says
        assert not answer.guilty or answer.rule in ("R-CTRL", "R-HANDSHAKE"), says
