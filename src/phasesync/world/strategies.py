"""Schedules and faults for hypothesis, which shrinks them to the smallest run that goes wrong.

@given(schedule=schedules(), planted=faults(ranks=3, places=["offload", "resume_kv"]))
def test_update(schedule, planted):
    SimWorld(3, faults=planted).run(main, schedule=schedule, allow=(FenceBroken,))
"""

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from phasesync.simulator.faults import Fault
from phasesync.world.schedule import Replay

__all__ = ("faults", "schedules")


def schedules(*, length: int = 200, ranks: int = 8) -> st.SearchStrategy[Replay]:
    """Timeless schedules; one shrinks towards each rank going on until it waits."""
    choices = st.lists(st.integers(0, ranks - 1), max_size=length)
    return choices.map(partial(Replay, timeless=True))


def faults(
    *,
    ranks: int,
    places: Sequence[str],
    kinds: Sequence[str] = ("crash", "fail", "slow"),
    most: int = 1,
) -> st.SearchStrategy[list[Fault]]:
    """At most so many faults; they shrink towards none, and towards the first rank and place."""
    one = st.builds(
        Fault,
        kind=st.sampled_from(list(kinds)),
        rank=st.integers(0, ranks - 1),
        place=st.sampled_from(list(places)),
        factor=st.just(8.0),
    )
    return st.lists(one, max_size=most)
