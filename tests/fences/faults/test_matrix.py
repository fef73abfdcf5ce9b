"""Our column of the fault matrix: nobody passes alone, and every rank is told who it was."""

from collections.abc import Iterator

import pytest

from tests.fences.faults.matrix import (
    COLUMNS,
    HOST_ACTS,
    OURS,
    Actors,
    Cell,
    actors_if,
    cell,
    play,
)

DEADLINE_S = 2.0
SOON_S = 1.0  # What nobody waits a deadline for, on a busy machine.
AT_ONCE = ("killed", "exits", "fails", "options", "host killed")
NOT_TOLD = ("killed", "exits")  # Whoever is dead is told nothing.
LAG_S = 0.5  # A survivor whose loop stood still for so long had no processor, and was late itself.
TRIES = 3


def cells_of(mechanism: str) -> Iterator[Cell]:
    with actors_if(mechanism == "phasesync ray") as actors:
        for each in play([mechanism], list(COLUMNS), deadline_s=DEADLINE_S, actors=actors):
            yield _calm(each, actors)


def _calm(played: Cell, actors: Actors | None) -> Cell:
    """The cell, played anew and alone where the machine had no time for its survivors: a rank that
    was kept away from the fence for seconds is rightly named beside the victim."""
    for _ in range(TRIES - 1):
        if played.lag_s < LAG_S:
            break
        played = cell(played.mechanism, played.fault, deadline_s=DEADLINE_S, actors=actors)
    return played


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mechanism", OURS)
def test_every_fault_of_the_matrix(mechanism: str, request: pytest.FixtureRequest) -> None:
    if mechanism == "phasesync ray":
        request.getfixturevalue("shared_ray")
    for each in cells_of(mechanism):
        said = f"{mechanism}, {each.fault}: {each}; {each.said}"
        assert not each.hung, said
        assert not each.passed, said
        assert each.waited_s < DEADLINE_S + 1.5, said
        if each.fault in AT_ONCE:
            assert each.waited_s < SOON_S, said
        if each.fault in HOST_ACTS:
            assert len(each.lost) == 3, said
            assert each.told == 0, said
        else:
            expected = 3 if each.fault in NOT_TOLD else 4
            assert (each.named, each.told) == (expected, expected), said
        assert each.usable in (None, True), said
        if mechanism == "phasesync store":
            assert each.together, said


@pytest.mark.parametrize("mechanism", ["elastic store barrier", "Store.barrier()"])
def test_a_stock_store_barrier_lets_a_late_rank_pass_alone(mechanism: str) -> None:
    """What the table is about: when torch mends this, the table says so no longer."""
    late = cell(mechanism, "late", deadline_s=1.0)
    assert late.split, late
    assert late.passed == (2,)
