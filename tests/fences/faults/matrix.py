"""The same faults against stock barriers and against every transport, as one table.

    python -m tests.fences.faults.matrix [--deadline 3] [--only NAME ...] [--json FILE]

A cell says how long the survivors waited, how many of those that were told were told which rank it
was, and SPLIT where one rank passed what another saw break.
"""

import argparse
import json
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tests.fences.faults import stock
from tests.fences.faults.promises import named
from tests.fences.faults.ranks import (
    FREEZES,
    Ending,
    Life,
    Record,
    Report,
    board,
    endpoint_of,
    entered,
    listen,
    live,
    process,
    started,
    together,
    until_entered,
)
from tests.fences.processes import hosted, store_host, tcp_host
from tests.workers import PATHS

__all__ = ("COLUMNS", "OURS", "Cell", "cell", "table")

T = TypeVar("T")
SIZE = 4
VICTIM = 2
AT = 8  # By then the ranks of one host have found each other.
PACE_S = 0.03
LATE_S = 1.5  # So long after the deadline a late rank comes.
HANG_S = 8.0  # Whoever has not come back so long after a deadline hangs.

# What happens to the victim, or to the process that carries the fences.
COLUMNS: Mapping[str, str] = {
    "killed": "SIGKILL",
    "exits": "exit(1)",
    "fails": "exception",
    "frozen": "frozen",
    "skips": "skips, alive",
    "late": f"late by {LATE_S:g} s",
    "options": "other options",
    "host killed": "host killed",
    "host frozen": "host frozen",
}
HOST_ACTS = {"host killed": signal.SIGKILL, "host frozen": signal.SIGSTOP}
OURS = {"phasesync store": "store", "phasesync tcp": "tcp", "phasesync ray": "ray"}
HOSTLESS = ("dist.barrier (gloo)", "monitored_barrier", "wait_for(to_thread(barrier))")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one fault was under one mechanism."""

    mechanism: str
    fault: str
    waited_s: float = 0.0
    told: int = 0
    named: int = 0
    passed: tuple[int, ...] = ()
    broke: tuple[int, ...] = ()
    hung: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    early: bool = False
    usable: bool | None = None
    said: str = ""
    together: bool = False  # Whether one rank of the host brought the arrivals of all.
    lag_s: float = 0.0  # For how long a survivor's event loop stood still at worst.

    @property
    def split(self) -> bool:
        """One rank passed a fence that another saw break, or hangs in."""
        return bool(self.passed) and bool(self.broke or self.hung or self.lost)

    def __str__(self) -> str:
        if not (self.passed or self.broke or self.hung or self.lost):
            return "-"
        words = [f"> {self.waited_s:.0f} s" if self.hung else _seconds(self.waited_s)]
        if self.lost:
            words.append("StoreLost")
        if self.told:
            words.append(f"named {self.named}/{self.told}")
        if self.split:
            words.append(f"SPLIT: {','.join(map(str, self.passed))} passed")
        elif self.passed:
            words.append("PASSED WITHOUT IT" if self.early else "passed unseen")
        if self.usable is not None:
            words.append("usable" if self.usable else "unusable")
        return ", ".join(words)


def _seconds(waited_s: float) -> str:
    return f"{1000 * waited_s:.0f} ms" if waited_s < 1 else f"{waited_s:.1f} s"


# --- One cell --------------------------------------------------------------------------------


def cell(
    mechanism: str, fault: str, *, deadline_s: float = 3.0, actors: "Actors | None" = None
) -> Cell:
    """Play one fault under one mechanism, in processes of its own."""
    if fault in HOST_ACTS and mechanism in HOSTLESS:
        return Cell(mechanism=mechanism, fault=fault)
    transport = OURS.get(mechanism, mechanism)
    with ExitStack() as ended:
        host = None
        if transport != "ray":
            host = ended.enter_context(hosted(tcp_host if transport == "tcp" else store_host))
        life = Life(
            number=0,
            size=SIZE,
            run=secrets.token_hex(4),
            transport=transport,
            address=host and host.address,
            board=ended.enter_context(board()),
            deadline_s=deadline_s,
            comes_back=fault == "late",
        )
        if mechanism in OURS:
            last = AT + (2 if fault == "late" else 1)
            life = replace(life, at=AT, generations=last + 1, pace_s=PACE_S)
        lives = [replace(life, number=n) for n in range(SIZE)]
        bad = replace(life, number=VICTIM, act=fault, late_s=deadline_s + LATE_S)
        if fault in HOST_ACTS:
            bad = replace(bad, act="late", late_s=60.0)
        lives[VICTIM] = bad
        if transport == "ray":
            assert actors is not None
            reports = actors.play(lives, fault)
        else:
            target = process if mechanism in OURS else stock.process
            reports = _as_processes(target, lives, fault, host)
        return _read(mechanism, fault, reports)


def _as_processes(target: Any, lives: Sequence[Life], fault: str, host: Any) -> list[Report]:
    deadline_s = lives[0].deadline_s
    with started(lives, target) as begun:
        if fault in HOST_ACTS:
            until_entered(lives[0], SIZE - 1)
            os.kill(host.process.pid, HOST_ACTS[fault])
            waiting = _without_victim(begun)
            listen(waiting, deadline_s + HANG_S)
            return [each.report for each in waiting]
        frozen = [each for each in begun if each.report.life.act in FREEZES]
        listen([each for each in begun if each not in frozen], 2 * deadline_s + HANG_S)
        for each in frozen:
            os.kill(each.process.pid, signal.SIGCONT)
        listen(frozen, 2 * deadline_s)
        return [each.report for each in begun]


def _without_victim(of_each: Sequence[T]) -> list[T]:
    return [one for number, one in enumerate(of_each) if number != VICTIM]


class Member:
    """A rank as an actor; what it saw can be asked for while it waits."""

    def __init__(self) -> None:
        import_module("phasesync.fences.ray")  # Not while the others wait.
        self.said: list[Any] = []

    async def live(self, life: Life) -> None:
        self.said.clear()
        await live(life, endpoint_of(life), self.said.append)

    async def seen(self) -> tuple[int, list[Any]]:
        return os.getpid(), self.said


class Actors:
    """Standing actors, one fault at a time: to start one takes longer than to play with it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._member = ray.remote(num_cpus=0)(Member)
        self._actors: list[Any] = []
        self._lock = threading.Lock()

    def play(
        self, lives: Sequence[Life], fault: str, *, victim: int = VICTIM, is_spent: bool = False
    ) -> list[Report]:
        """Let them live, one of them badly; `is_spent` says that its process must not be used
        again."""
        with self._lock:
            self._actors += [self._member.remote() for _ in lives[len(self._actors) :]]
            seen = self._ray.get([actor.seen.remote() for actor in self._actors], timeout=120)
            reports = self._play(lives, fault, victim, [pid for pid, _ in seen])
            if is_spent and len(self._actors) == len(lives):
                self._ray.kill(self._actors.pop(victim))
            return reports

    def play_and_kill(self, lives: Sequence[Life], victim: int) -> tuple[float, list[Report]]:
        """Kill one while the others wait; when that was, and what the others saw."""
        self._actors += [self._member.remote() for _ in lives[len(self._actors) :]]
        seen = self._ray.get([actor.seen.remote() for actor in self._actors], timeout=120)
        asked = [a.live.remote(life) for a, life in zip(self._actors, together(lives), strict=True)]
        until_entered(lives[0], len(lives) - 1)
        killed = time.monotonic()
        os.kill(seen[victim][0], signal.SIGKILL)
        others = [n for n in range(len(lives)) if n != victim]
        self._ray.wait([asked[n] for n in others], num_returns=len(others), timeout=30)
        return killed, self._reports([Report(life) for life in lives], others, gone=victim)

    def _play(
        self, lives: Sequence[Life], fault: str, victim: int, pids: Sequence[int]
    ) -> list[Report]:
        reports = [Report(life) for life in lives]
        asked = [a.live.remote(life) for a, life in zip(self._actors, together(lives), strict=True)]
        others = [n for n in range(len(lives)) if n != victim]
        longest_s = 2 * lives[0].deadline_s + HANG_S
        if fault in HOST_ACTS:
            until_entered(lives[0], len(others))
            host = self._coordinator_pid(lives[0].run)
            os.kill(host, HOST_ACTS[fault])
        self._ray.wait([asked[n] for n in others], num_returns=len(others), timeout=longest_s)
        if fault in HOST_ACTS:
            with suppress(ProcessLookupError):
                os.kill(host, signal.SIGKILL)
            return self._reports(reports, others, gone=victim)
        if fault in FREEZES:
            with suppress(ProcessLookupError):
                os.kill(pids[victim], signal.SIGCONT)
        self._ray.wait([asked[victim]], timeout=longest_s)
        return self._reports(reports, list(range(len(lives))))

    def _reports(
        self, reports: list[Report], of: Sequence[int], gone: int | None = None
    ) -> list[Report]:
        dead = [] if gone is None else [gone]
        for number in of:
            try:
                _, said = self._ray.get(self._actors[number].seen.remote(), timeout=30)
            except self._ray.exceptions.RayError:
                dead.append(number)
                continue
            reports[number].records = [each for each in said if isinstance(each, Record)]
            reports[number].ending = next((e for e in said if isinstance(e, Ending)), None)
        for number in sorted(dead, reverse=True):
            self._ray.kill(self._actors.pop(number))
        return [reports[number] for number in of]

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _coordinator_pid(self, run: str) -> int:
        actor = self._ray.get_actor(f"phasesync.{run}.0", namespace="phasesync")
        pid: int = self._ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        return pid


# --- What the ranks saw ----------------------------------------------------------------------

COMES_LATER = ("frozen", "late", "options")  # Here the victim, too, comes to the fence.


def _read(mechanism: str, fault: str, reports: Sequence[Report]) -> Cell:
    life = reports[0].life
    at = {r.life.number: _record(r, life.at) for r in reports}
    survivors = [n for n in at if n != VICTIM]
    hung = tuple(
        n for n, record in at.items() if record is None and (n != VICTIM or fault in COMES_LATER)
    )
    told = {r.life.number: _told(r) for r in reports}
    knows = [n for n, said in told.items() if said is not None]
    waited = [record.waited_s for n in survivors if (record := at[n]) is not None]
    return Cell(
        mechanism=mechanism,
        fault=fault,
        waited_s=life.deadline_s + HANG_S if hung else max(waited),
        told=len(knows),
        named=sum(_names_victim(told[n]) for n in knows),
        passed=_numbers(at, "open"),
        broke=_numbers(at, "broken"),
        hung=hung,
        lost=_numbers(at, "lost"),
        early=math.isinf(entered(life.board, life.at, life.size)[VICTIM]),
        usable=_usable(reports) if fault == "late" else None,
        said=str(told[knows[0]]) if knows else "",
        together=all(r.ending.together for r in reports if r.ending and _is_well(r)),
        lag_s=max((r.ending.lag_s for r in reports if r.ending and _is_well(r)), default=0.0),
    )


def _record(report: Report, generation: int) -> Record | None:
    return next((r for r in report.records if r.generation == generation), None)


def _is_well(report: Report) -> bool:
    return report.ending is not None and report.life.number != VICTIM


def _told(report: Report) -> Any:
    """What a rank was told first: the cause of the break, or the text of the error."""
    return next((r.said for r in report.records if r.kind == "broken"), None)


def _numbers(at: Mapping[int, Record | None], kind: str) -> tuple[int, ...]:
    return tuple(sorted(n for n, r in at.items() if r is not None and r.kind == kind))


def _names_victim(said: Any) -> bool:
    if not isinstance(said, str):
        return named(said) == {VICTIM}
    return re.search(rf"[Rr]anks?(\(s\))?:? \[?{VICTIM}\b", said) is not None


def _usable(reports: Sequence[Report]) -> bool:
    """Whether all passed the last fence, after the one that broke."""
    last = [_record(report, report.life.generations - 1) for report in reports]
    return all(record is not None and record.kind == "open" for record in last)


# --- The table -------------------------------------------------------------------------------


def table(cells: Sequence[Cell]) -> str:
    """A row for each fault, a column for each mechanism; the widest word sets the width."""
    faults = [fault for fault in COLUMNS if any(c.fault == fault for c in cells)]
    lines = []
    for mechanism in dict.fromkeys(c.mechanism for c in cells):
        lines.append(mechanism)
        of = {c.fault: c for c in cells if c.mechanism == mechanism}
        lines += [f"  {COLUMNS[fault]:16} {of[fault]}" for fault in faults if fault in of]
    return "\n".join(lines)


@contextmanager
def actors_if(wanted: bool) -> Iterator[Actors | None]:
    """Actors under a Ray of their own, or under the one that is there."""
    if not wanted:
        yield None
        return
    import ray

    with ExitStack() as ended:
        if not ray.is_initialized():
            ended.enter_context(started_ray())
        actors = Actors(ray)
        ended.callback(actors.end)
        yield actors


@contextmanager
def started_ray() -> Iterator[None]:
    """Ray on this machine, with workers that find the tests."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": PATHS},
    )
    try:
        yield
    finally:
        ray.shutdown()


def play(
    mechanisms: Sequence[str],
    faults: Sequence[str],
    *,
    deadline_s: float,
    together: int = 4,
    actors: Actors | None = None,
) -> list[Cell]:
    """Play every fault under every mechanism, some at once: most of the time they wait."""
    with ThreadPoolExecutor(together) as pool:
        asked = [
            pool.submit(cell, mechanism, fault, deadline_s=deadline_s, actors=actors)
            for mechanism in mechanisms
            for fault in faults
        ]
        return [each.result() for each in asked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deadline", type=float, default=3.0)
    parser.add_argument("--only", nargs="+", default=[*stock.STOCK, *OURS], metavar="NAME")
    parser.add_argument("--faults", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with actors_if("phasesync ray" in given.only) as actors:
        cells = play(given.only, given.faults, deadline_s=given.deadline, actors=actors)
    print(f"{SIZE} ranks, deadline {given.deadline:g} s, the victim is rank {VICTIM}")
    print(table(cells))
    if given.json:
        given.json.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n")
    bad = [c for c in cells if c.mechanism in OURS and (c.split or c.hung or c.named < c.told)]
    for each in bad:
        print(
            f"NOT AS PROMISED: {each.mechanism}, {each.fault}: {each}; {each.said}", file=sys.stderr
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
