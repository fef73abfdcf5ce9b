"""One rank brings the arrivals of its host, in every order, and dies between any two operations."""

from dataclasses import replace
from typing import Any

import pytest

from phasesync.checker.messages import Cast, Process, View, explore_messages
from phasesync.checker.search import Budget
from phasesync.core.fence_keys import writer
from phasesync.core.fence_steps import expiring, failing
from phasesync.core.model import RootCause

from .hosts import closing, crashed_before_a_word, follower, leader
from .lives import SPACE, all_end, arrival, call, deadline, life, one_verdict, ranks, watcher

STATES = Budget(states_max=400_000)
TOGETHER = pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])


def host(
    size: int,
    generations: int = 1,
    *,
    followers: int | None = None,
    together: bool = True,
    more: tuple[Process, ...] = (),
    **settings: Any,
) -> Cast:
    """Rank 0 leads so many followers; the others of the fence come from elsewhere."""
    first, *others = ranks(size)
    led = tuple(others[: size - 1 if followers is None else followers])
    lives = [
        Process(
            str(first), leader(size, first, generations, led, together=together), may_crash=True
        )
    ]
    for rank in others:
        if rank in led:
            lives.append(Process(str(rank), follower(size, rank, generations)))
        else:
            lives.append(Process(str(rank), life(size, rank, range(generations))))
    always = settings.pop("always", one_verdict(size))
    return Cast(
        processes=(*lives, closing(first, led, generations), *more),
        always=always,
        at_end=all_end,
        **settings,
    )


def sound(cast: Cast) -> int:
    found = explore_messages(cast, STATES)
    assert (found.wrong, found.bound) == (None, None), "\n".join(found.path)
    return found.states


@TOGETHER
def test_a_host_comes_together_in_every_order(together: bool) -> None:
    assert sound(host(2, 2, together=together)) > 20
    assert sound(host(3, together=together)) > 20


@pytest.mark.parametrize(("generations", "together"), [(1, True), (1, False), (2, True)])
def test_a_leader_may_die_between_any_two_operations(generations: int, together: bool) -> None:
    """Its follower comes by itself, and whoever watches it tells: nobody waits for ever."""
    more = (watcher(ranks(2)[0]),)
    sound(host(2, generations, together=together, crashes=1, more=more))


@pytest.mark.parametrize("followers", [1, 2])
def test_as_far_as_one_looks_a_leader_of_three_may_die(followers: int) -> None:
    """All orders of three are too many for a test: the shortest 25,000 states of them."""
    more = (watcher(ranks(3)[0]),)
    cast = host(3, followers=followers, crashes=1, more=more)
    assert explore_messages(cast, Budget(states_max=25_000)).wrong is None


def test_a_leader_dies_with_arrivals_in_its_hands() -> None:
    def always(view: View) -> str | None:
        return "reached" if crashed_before_a_word(view, ranks(2)[0]) else None

    players = host(2, crashes=1, more=(watcher(ranks(2)[0]),), always=always)
    assert explore_messages(players, STATES).wrong == "reached"


@TOGETHER
def test_a_host_and_a_rank_of_another_meet(together: bool) -> None:
    sound(host(3, followers=1, together=together))


def test_a_deadline_at_any_moment_splits_no_verdict() -> None:
    """The follower's own deadline brings its arrival itself: it may be in nobody's hands."""
    first, second = ranks(2)
    asked, own = call(2, 0), arrival(second, 0)
    brings_its_own = Process(
        f"deadline of {second}",
        lambda: expiring(SPACE, asked, writer(second, 0), {}, own=own),
        when=lambda view: str(second) in view.waits,
    )
    sound(host(2, more=(deadline(2, first, 0), brings_its_own)))
    mortal = host(2, crashes=1, more=(brings_its_own,))
    assert explore_messages(mortal, Budget(states_max=25_000)).wrong is None


def test_arrivals_that_come_twice_count_once() -> None:
    sound(host(2, 2, repeats=1))
    sound(host(3, followers=1, repeats=1))


@TOGETHER
def test_a_member_fails_after_it_was_handed_over(together: bool) -> None:
    cause = RootCause(kind="cancelled", ranks=(ranks(2)[1],))
    late = replace(arrival(ranks(2)[1], 0), cause=cause, nonce="late")
    more = (Process("late", lambda: failing(SPACE, call(2, 0), late)),)
    sound(host(2, 2, together=together, more=more))
