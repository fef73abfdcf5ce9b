"""The fence's own steps in every order: over a store, and at the coordinator's hub.

Each process runs the very steps that transports run; a death may come between any two, messages
may be lost or come twice, and clocks run as they like.
"""

from dataclasses import replace
from typing import Any

import pytest

from phasesync.checker.messages import (
    Arrives,
    Cast,
    Explored,
    Moment,
    Process,
    View,
    explore_messages,
)
from phasesync.checker.search import Budget
from phasesync.core.fence import decode_arrivals
from phasesync.core.fence_keys import Read, Space, Verdict, Wait
from phasesync.core.fence_steps import Passed, arriving, connecting, failing
from phasesync.core.model import Arrival, FenceCall, RootCause

from .lives import (
    SPACE,
    Life,
    all_end,
    arrival,
    before_it_arrives,
    call,
    cast,
    deadline,
    in_the_second_epoch,
    iter_of,
    ranks,
    restarted,
    watcher,
)

STATES = Budget(states_max=400_000)
BOTH = pytest.mark.parametrize("at", ["store", "hub"])


def sound(found: Explored) -> None:
    assert (found.wrong, found.bound) == (None, None), "\n".join(found.path)


def explored(players: Cast) -> Explored:
    return explore_messages(players, STATES)


@pytest.mark.parametrize(("at", "states", "ends"), [("store", 1_177, 16), ("hub", 35, 4)])
def test_two_ranks_two_epochs_in_every_order(at: str, states: int, ends: int) -> None:
    found = explored(cast(2, 2, at=at))
    sound(found)
    assert (found.states, found.ends) == (states, ends)


@BOTH
def test_three_ranks_in_every_order(at: str) -> None:
    sound(explored(cast(3, 1, at=at)))


@BOTH
def test_a_death_between_any_two_operations_is_known_by_its_watcher(at: str) -> None:
    more = tuple(watcher(rank, at) for rank in ranks(2))
    sound(explored(cast(2, 2, at=at, crashes=1, more=more)))


def test_the_last_to_arrive_may_die_before_it_opens_the_fence() -> None:
    """It is reached: both have arrived, nobody has a verdict, and the closer is dead."""
    more = (watcher(ranks(2)[1]),)

    def closer_died(view: View) -> str | None:
        notes = [note for each in view.notes.values() for note in each]
        both = sum(note[0] == "arrived" for note in notes) == 2
        return "reached" if both and view.crashed and len(notes) == 2 else None

    players = cast(2, 1, mortal=(1,), crashes=1, more=more, always=closer_died)
    assert explored(players).wrong == "reached"
    sound(explored(replace(players, always=cast(2, 1).always)))


@BOTH
def test_a_deadline_at_any_moment_splits_no_verdict(at: str) -> None:
    more = tuple(deadline(2, rank, 0, at) for rank in ranks(2))
    sound(explored(cast(2, 1, at=at, crashes=1, more=more)))


@BOTH
def test_a_message_that_comes_twice_counts_once(at: str) -> None:
    sound(explored(cast(2, 2, at=at, repeats=1)))
    sound(explored(cast(2, 1, at=at, repeats=2)))


@BOTH
def test_who_loses_a_message_or_its_answer_is_found_and_nobody_else_waits(at: str) -> None:
    more = tuple(watcher(rank, at) for rank in ranks(2))
    sound(explored(cast(2, 2, at=at, losses=1, more=more)))


@BOTH
def test_a_lost_message_ends_at_the_others_deadline(at: str) -> None:
    more = tuple(deadline(2, rank, 0, at) for rank in ranks(2))
    sound(explored(cast(2, 1, at=at, losses=1, more=more)))


@BOTH
def test_arrivals_of_the_older_epoch_come_late(at: str) -> None:
    """One gives the first epoch up and goes on; the other arrives there when it is long over."""
    first = ranks(2)[0]
    more = (deadline(2, first, 0, at),)

    def late(view: View) -> str | None:
        ahead = {note[:2] for note in view.notes.get(str(first), ())}
        behind = [note[:2] for note in view.notes.get("t/1", ())]
        return "reached" if ("arrived", 1) in ahead and behind == [("arrived", 0)] else None

    players = cast(2, 2, at=at, more=more, always=late)
    assert explored(players).wrong == "reached"
    sound(explored(replace(players, always=cast(2, 2).always)))


@BOTH
def test_a_rank_that_is_called_dead_and_lives_splits_no_verdict(at: str) -> None:
    more = (watcher(ranks(2)[1], at, wrongly=True),)
    sound(explored(cast(2, 1 if at == "store" else 2, at=at, more=more)))


def test_a_late_failure_breaks_nothing_that_is_open() -> None:
    cause = RootCause(kind="cancelled", ranks=(ranks(2)[0],))
    late = replace(arrival(ranks(2)[0], 0), cause=cause, nonce="late")

    def fails_late() -> Life:
        yield from connecting(SPACE, late.rank, 0, nonce="late")
        return (yield from failing(SPACE, call(2, 0), late))

    sound(explored(cast(2, 2, more=(Process("late", fails_late),))))
    at_hub = (Process("late", lambda: iter_of(Arrives(call(2, 0), late))),)
    sound(explored(cast(2, 2, at="hub", more=at_hub)))


@pytest.mark.parametrize(("at", "epochs"), [("store", 1), ("hub", 1), ("hub", 2)])
def test_a_restarted_rank_does_not_take_the_place_of_its_older_self(at: str, epochs: int) -> None:
    """The older one dies at any point; the new one comes to the last fence."""
    sound(explored(restarted(epochs, at, patience=epochs > 1)))


@pytest.mark.parametrize(
    ("crash", "patience", "states"),
    [(before_it_arrives, True, 61_836), (in_the_second_epoch, False, 46_705)],
)
def test_a_rank_restarted_in_the_second_of_two_epochs(
    crash: Moment, patience: bool, states: int
) -> None:
    """Over a store it may die at some moments here, and at any in `make faults`."""
    found = explored(restarted(2, crash=crash, patience=patience))
    sound(found)
    assert found.states == states


def _for_the_older_one(space: Space, asked: FenceCall, own: Arrival, **how: Any) -> Life:
    """The mistake: whose rank is in the log already does not arrive, but waits for the verdict."""
    log = (yield Read(space.at("world", asked.key.generation).log)) or b""
    if all(each.rank != own.rank for each in decode_arrivals(log)):
        return (yield from arriving(space, asked, own, **how))
    text = yield Wait(space.at("world", asked.key.generation).verdict)
    verdict = Verdict.decode(text)
    return Passed(verdict, verdict.read_by(asked))


def test_an_arrival_of_the_older_incarnation_that_counts_for_the_new_one_is_found() -> None:
    players = restarted(2, crash=in_the_second_epoch, patience=False, arrive=_for_the_older_one)
    found = explored(players)
    assert found.wrong == "t/0.1 passes by an arrival that is not its own"
    assert "t/0 crashes" in found.path


def test_without_a_watcher_the_peer_of_the_dead_waits_for_ever() -> None:
    found = explored(cast(2, 1, crashes=1))
    assert found.wrong == "waits for ever: ['t/1']"
    assert "t/0 crashes" in found.path
    assert all_end(View({}, frozenset(), frozenset(), frozenset(), frozenset())) is None
