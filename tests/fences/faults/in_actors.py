"""Faults by chance with Ray actors as ranks: real processes that find each other as those of a user
do, through a coordinator that is an actor too."""

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.fences.faults.in_processes import DEADLINE_S, FAULTS, PACES
from tests.fences.faults.matrix import HOST_ACTS, Actors
from tests.fences.faults.promises import broken_promises
from tests.fences.faults.ranks import Life, board

__all__ = ("ACTS", "play_in_actors")

SIZE = 3
GONE_S = 20.0
IDLE_EXIT_S = 1.0
# An actor's event loop is in no main thread, so it sets no timers of the kernel; a fork of Ray's
# own threads is not ours to try; and a rank has one actor.
NOT_HERE = (
    "killed at any time",
    "forks and is killed",
    "a second process of a rank",
    "a second incarnation",
)
ACTS = tuple(name for name in FAULTS if name not in NOT_HERE)


def play_in_actors(first: int, faults: int, actors: Actors, ray: Any) -> Counter[str]:
    """Play so many scenarios from `first` on, one after the other.

    Raises:
        AssertionError: a promise was broken; the message names the scenario.
    """
    tally: Counter[str] = Counter()
    for number in range(first, first + faults):
        name = ACTS[number % len(ACTS)]
        wrong = _play(number, name, actors, ray)
        assert not wrong, f"scenario {number}, {name}, by actors: {wrong}"
        tally[name] += 1
    return tally


def _play(number: int, name: str, actors: Actors, ray: Any) -> list[str]:
    """Which promises were broken."""
    from phasesync.fences.ray import start_coordinator

    rng = random.Random(number)
    fault = FAULTS[name]
    generations, pace_s = rng.choice(PACES)
    victim = rng.randrange(SIZE)
    with board() as board_name:
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(6),
            transport="ray",
            address=None,
            board=board_name,
            deadline_s=DEADLINE_S,
            generations=generations,
            pace_s=pace_s,
            at=rng.randrange(generations),
        )
        lives = [replace(life, number=n) for n in range(SIZE)]
        lives[victim] = replace(lives[victim], act=fault.act, **fault.draw(rng))
        start_coordinator(life.run, idle_exit_s=IDLE_EXIT_S)
        act = name if name in HOST_ACTS else fault.act
        reports = actors.play(lives, act, victim=victim, is_spent=True)
        culprits = [] if fault.harmless else [victim]
        wrong = broken_promises(reports, culprits=culprits, host_lost=name in HOST_ACTS)
    if fault.harmless:
        wrong += [f"{r.life.rank} did not pass" for r in reports if r.last.kind != "open"]
    if not _becomes(lambda: not _is_there(ray, life.run)):
        wrong.append("the coordinator is left")
    return wrong


def _is_there(ray: Any, run: str) -> bool:
    named = ray.util.list_named_actors(all_namespaces=True)
    return any(run in each["name"] for each in named)


def _becomes(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + GONE_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
