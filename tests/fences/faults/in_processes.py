"""Faults by chance with real processes: killed, frozen, stalled, or their host taken away."""

import asyncio
import os
import random
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from phasesync.core.model import RootCause
from phasesync.fences.store import StoreFences
from tests.fences.faults.promises import broken_promises
from tests.fences.faults.ranks import FREEZES, Life, Report, board, listen, started, until_entered
from tests.fences.processes import Host, hosted, rank_of, store_client, store_host, tcp_host

__all__ = ("FAULTS", "Hosts", "play_in_processes", "play_one")

DEADLINE_S = 1.5
# So many fences, and so long between them: before the ranks of a host have come together, or after.
PACES = ((3, 0.0), (12, 0.01))
WITHIN_S = 60.0  # Whoever has not ended by then hangs.
TOGETHER = 3
HOSTED = ("store", "tcp")  # Where a process carries the fences.


@dataclass(frozen=True)
class Fault:
    """What is done to one rank, or to the host; `harmless` ones must stop nobody."""

    act: str = "well"
    draw: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    harmless: bool = False
    host_signal: int | None = None
    second: int | None = None
    over: tuple[str, ...] = ("store", "tcp", "file")


def _point(rng: random.Random) -> dict[str, Any]:
    return {"point": rng.randrange(40), "late_s": rng.choice((0.0, 0.05))}


def _moment(rng: random.Random) -> dict[str, Any]:
    return {"late_s": 10 ** rng.uniform(-5, -1)}


def _turns(rng: random.Random) -> dict[str, Any]:
    return {"point": rng.randrange(20), "late_s": rng.choice((0.0, 0.02))}


def _never(_: random.Random) -> dict[str, Any]:
    return {"late_s": 30.0}


FAULTS: Mapping[str, Fault] = {
    "killed": Fault("killed"),
    "killed at a point": Fault("killed at a point", _point),
    "killed at any time": Fault("killed at any time", _moment),
    "frozen": Fault("frozen"),
    "frozen at a point": Fault("frozen at a point", _point),
    "exits": Fault("exits"),
    "forks and is killed": Fault("forks", over=HOSTED),
    "late": Fault("late", lambda _: {"late_s": 1.3 * DEADLINE_S}),
    "skips": Fault("skips"),
    "loop stalls for long": Fault("stalls", lambda _: {"late_s": 1.5 * DEADLINE_S}),
    "loop stalls": Fault("stalls", lambda _: {"late_s": 0.3 * DEADLINE_S}, harmless=True),
    "full executor": Fault("full executor", harmless=True),
    "clock jumps": Fault("clock jumps", harmless=True),
    "cancelled": Fault("cancelled", _turns),
    "fails": Fault("fails"),
    "options": Fault("options"),
    "epoch": Fault("epoch"),
    "older version": Fault("older"),
    "twice": Fault("twice"),
    "a second process of a rank": Fault(second=0),
    "a second incarnation": Fault(second=1),
    "host killed": Fault("late", _never, host_signal=signal.SIGKILL, over=HOSTED),
    "host frozen": Fault("late", _never, host_signal=signal.SIGSTOP, over=HOSTED),
}
HOST_OF: Mapping[str, Any] = {"store": store_host, "tcp": tcp_host}


class Hosts:
    """Hosts that are kept from scenario to scenario, as long as nobody takes them away."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._kept: dict[str, Host] = {}
        self._lock = threading.Lock()
        self._folder = self._stack.enter_context(TemporaryDirectory(prefix="phasesync-"))

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def file(self, run: str) -> str:
        return f"{self._folder}/{run}"

    @contextmanager
    def of(self, transport: str, *, kept: bool) -> Iterator[Host | None]:
        if transport == "file":
            yield None
        elif kept:
            with self._lock:
                if transport not in self._kept:
                    host = self._stack.enter_context(hosted(HOST_OF[transport]))
                    self._kept[transport] = host
            yield self._kept[transport]
        else:
            with hosted(HOST_OF[transport]) as host:
                yield host


def play_in_processes(first: int, faults: int) -> Counter[str]:
    """Play so many scenarios from `first` on, some at once: most of the time they wait.

    Raises:
        AssertionError: a promise was broken; the message names the scenario.
    """
    names = list(FAULTS)
    tally: Counter[str] = Counter()
    with Hosts() as hosts, ThreadPoolExecutor(TOGETHER) as pool:
        numbers = range(first, first + faults)
        played = pool.map(lambda n: (n, play_one(hosts, n, names[n % len(names)])), numbers)
        failed = []
        for number, (over, wrong) in played:
            name = names[number % len(names)]
            tally[f"{name} ({over})"] += 1
            if wrong:
                failed.append(f"scenario {number}, {name} over {over}: {wrong}")
    assert not failed, f"{len(failed)} of {faults} in processes: {failed}"
    return tally


def play_one(hosts: Hosts, number: int, name: str) -> tuple[str, list[str]]:
    """What one scenario was played over, and which promises were broken."""
    rng = random.Random(number)
    fault = FAULTS[name]
    over = rng.choice(fault.over)
    with board() as board_name, hosts.of(over, kept=fault.host_signal is None) as host:
        run = secrets.token_hex(6)
        generations, pace_s = rng.choice(PACES)
        life = Life(
            number=0,
            size=rng.randint(2, 4),
            run=run,
            transport=over,
            address=host.address if host else hosts.file(run),
            board=board_name,
            deadline_s=DEADLINE_S,
            generations=generations,
            pace_s=pace_s,
            at=rng.randrange(generations),
        )
        lives = [replace(life, number=n) for n in range(life.size)]
        victim = rng.randrange(life.size)
        lives[victim] = replace(lives[victim], act=fault.act, **fault.draw(rng))
        if fault.second is not None:
            lives.append(replace(lives[victim], incarnation=fault.second))
        reports = _played(lives, fault, host)
        culprits = [] if fault.harmless else [victim]
        wrong = broken_promises(reports, culprits=culprits, host_lost=fault.host_signal is not None)
        if fault.harmless:
            wrong += [f"{r.life.rank} did not pass" for r in reports if r.last.kind != "open"]
        if fault.host_signal is None:
            wrong += LEFT[over](reports, victim)
        return over, wrong


def _played(lives: Sequence[Life], fault: Fault, host: Host | None) -> list[Report]:
    with started(lives) as begun:
        if fault.host_signal is not None:
            assert host is not None
            until_entered(lives[0], lives[0].size - 1)
            os.kill(host.process.pid, fault.host_signal)
            begun_living = [each for each in begun if each.report.life.act == "well"]
            hung = listen(begun_living, WITHIN_S)
            return [each.report for each in begun_living] + _marked(hung)
        frozen = [each for each in begun if each.report.life.act in FREEZES]
        hung = listen([each for each in begun if each not in frozen], WITHIN_S)
        for each in frozen:
            if each.process.is_alive():
                os.kill(each.process.pid, signal.SIGCONT)
        hung += listen(frozen, WITHIN_S)
        return [each.report for each in begun] + _marked(hung)


def _marked(hung: Sequence[Any]) -> list[Report]:
    """Nothing that ends itself may hang, the victims neither."""
    return [replace(each.report, ending=None) for each in hung]


def _keys_of_store(reports: Sequence[Report], victim: int) -> list[str]:
    """Once its launcher has said who is dead, a run has no key."""
    life = reports[0].life
    store = store_client(("tcp" if life.transport == "store" else "file", life.address))

    async def sweep() -> None:
        observer = StoreFences.observer(store, run=life.run)
        await observer.connect()
        gone = RootCause(kind="dead", ranks=(rank_of(victim),), error="it ended")
        if any(report.ending is None for report in reports):
            await observer.report_lost(gone, incarnation=1)
        await observer.close()

    asyncio.run(sweep())
    left = (
        [key for key in store.list_keys() if life.run in key] if life.transport == "store" else []
    )
    return [f"keys are left: {left}"] if left else []


def _nothing(reports: Sequence[Report], victim: int) -> list[str]:
    return []


LEFT: Mapping[str, Callable[[Sequence[Report], int], list[str]]] = {
    "store": _keys_of_store,
    "file": _keys_of_store,
    "tcp": _nothing,
}
