"""Seeded runs with one injected fault each, audited: is it called by its kind, rank and phase?

usage: audit_faults.py [RUNS] [FIRST_SEED]

Prints a confusion matrix of what was injected against what the audit said; exits 1 on a miss.
"""

import asyncio
import contextlib
import io
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from tests.runtime.world import World

from phasesync.audit import Answer
from phasesync.core.model import Arrival, Broken, FenceCall, Opened
from phasesync.core.protocol import FenceDecl, Protocol
from phasesync.demo import DemoSettings, run_demo
from phasesync.errors import FenceBroken, StaleArrival
from phasesync.report import stats
from phasesync.report.audit import audit_paths, audit_run
from phasesync.spec import load
from phasesync.world.sim import SimFailed, SimRank, SimWorld

DEADLINE_S = 600.0  # as on a machine that does much else
LED = ("resume_weights", "load", "resume_kv", "sleep")
PHASES = (
    "load_back", "train", "trim_cache", "resume_weights", "stage", "load", "offload",
    "empty_cache", "resume_kv", "serve", "sleep",
)  # fmt: skip
# A fence taken away, the rank that is late for it, and what the kernel calls what follows.
UNFENCED = {
    "memory_released": (1, "offload", "R-FENCE", "resume_kv", 0),
    "ready_for_weights": (1, "trim_cache", "R-FENCE", "resume_weights", 0),
}


# What the simulator plants at a place: on ranks that run the real runner, in virtual time.
SIMULATED = ("crash", "fail", "hang", "slow")
KINDS = ("none", "failure", "cancel", "unfenced", *SIMULATED, "drop", "mixed")
# What the demo does to itself, in one process; its kill needs real ones. They take seconds each.
DEMOS = ("demo break", "demo slow", "demo accident", "demo kill")
DEMO_EVERY = 40
DEMO_KILL_EVERY = 4 * DEMO_EVERY
TAKES_S = 1.0
FENCES = tuple(str(step.name) for step in load("colocated").steps if isinstance(step, FenceDecl))


class Fault(NamedTuple):
    """What is injected, and where; `rule` for what must be found, and the fence taken away."""

    kind: str
    rank: int
    phase: str
    epoch: int
    rule: str | None = None
    ranks: int = 0


def fault_of(chance: random.Random, ranks: int, seed: int) -> Fault:
    if seed % DEMO_EVERY == 0:
        kill = seed % DEMO_KILL_EVERY == 0
        return demo_of("demo kill" if kill else chance.choice(DEMOS[:3]), chance, ranks)
    kind = chance.choice(KINDS)
    if kind == "none":
        return Fault(kind, 0, "", 0)
    if kind == "mixed":
        return Fault(kind, chance.randrange(ranks), "", 0, "R-SAMEPLAN")
    if kind == "unfenced":
        fence = chance.choice(sorted(UNFENCED))
        _, _, rule, phase, guilty = UNFENCED[fence]
        return Fault(kind, guilty, phase, 1, f"{rule} {fence}")
    if kind == "drop":
        return Fault(kind, chance.randrange(ranks), chance.choice(FENCES), chance.randint(1, 2))
    phase = chance.choice(PHASES)
    rank = chance.randrange(ranks)
    if phase in LED:
        rank -= rank % 2
    return Fault(kind, rank, phase, chance.randint(1, 2))


def demo_of(kind: str, chance: random.Random, ranks: int) -> Fault:
    """One of the demo's own faults; without the fence it is the peer of a leader that is late."""
    rank = chance.randrange(ranks)
    if kind == "demo kill":
        return Fault(kind, rank, "offload", 2)
    if kind == "demo break":
        return Fault(kind, rank - rank % 2, "resume_kv", 1, "R-FENCE")
    if kind == "demo accident":
        return Fault(kind, 1, "resume_kv", 1)  # Where replicas are alike, the first is named.
    return Fault(kind, rank, "offload", 1)


def without(protocol: Protocol, fence: str) -> Protocol:
    steps = tuple(s for s in protocol.steps if not (isinstance(s, FenceDecl) and s.name == fence))
    return replace(protocol, steps=steps)


def simulate(fault: Fault, seed: int, ranks: int, runs: Path) -> SimWorld:
    """Run simulated ranks once with `fault`; a rank that hangs does so for ever.

    Keep the world until its journals are read: with it goes what a crashed rank left behind, and
    the clean-up of that would still write.
    """
    place = f"{fault.kind}:{fault.rank}@{fault.phase}"
    faults = [] if fault.kind in ("mixed", "drop") else [f"{place}#{fault.epoch}"]
    if fault.kind == "slow":
        faults = [f"{place}*8"]
    world = SimWorld(ranks, seed=seed, faults=faults, runs=runs, spread=0.5, blocking_s=60)

    async def main(rank: SimRank) -> None:
        async def work() -> None:
            await asyncio.sleep(TAKES_S * world.pace(f"work {rank.name}"))

        if fault.kind == "drop" and rank.number == fault.rank:
            lose(rank, fault)
        is_odd = fault.kind == "mixed" and rank.number == fault.rank
        runner = rank.runner(
            "colocated",
            run=f"sim-{seed}",  # A rank that crashed never gives its claim back.
            actions=dict.fromkeys((*PHASES, "reclaim", "reset"), work),
            options={"param_offload": False} if is_odd else {},
        )
        async with runner:
            for _ in range(2):
                await runner.run_epoch()

    with contextlib.suppress(SimFailed):
        world.run(main, allow=(Exception,))
    return world


def lose(rank: SimRank, fault: Fault) -> None:
    """Let one arrival of the rank be lost on its way: the rank waits, and nobody hears of it."""
    arrive = rank.fences.arrive

    async def lossy(call: FenceCall, arrival: Arrival) -> Opened:
        if (call.fence, call.epoch) != (fault.phase, fault.epoch):
            return await arrive(call, arrival)
        verdict = await rank.fences.watch(call)
        raise FenceBroken(verdict) if isinstance(verdict, Broken) else StaleArrival("lost")

    rank.fences.arrive = lossy  # type: ignore[method-assign]


def demo(fault: Fault, seed: int, ranks: int, runs: Path) -> None:
    """Let the demo do it to itself."""
    what: dict[str, Any] = {
        "demo break": {"break_fence": True, "slow": str(fault.rank + 1)},
        "demo slow": {"slow": str(fault.rank), "epochs": 2},
        "demo accident": {"accident": "slow", "slow": str(fault.rank), "epochs": 2},
        "demo kill": {"kill": f"{fault.rank}@{fault.phase}", "backend": "torch", "epochs": 2},
    }[fault.kind]
    settings = {"backend": "inprocess", "ranks": ranks, "seed": seed, "runs": runs, **what}
    console = Console(file=io.StringIO(), width=200)
    run_demo(DemoSettings(**settings), audit_run=audit_run, console=console)


def play(fault: Fault, seed: int, ranks: int, runs: Path) -> object:
    """Run the world once with `fault`."""
    if fault.kind in DEMOS:
        demo(fault, seed, ranks, runs)
        return None
    if fault.kind in (*SIMULATED, "drop", "mixed"):
        return simulate(fault, seed, ranks, runs)
    world = World(ranks, runs, seed=seed, pause_s=0.001)
    place = (fault.rank, fault.phase, fault.epoch)
    if fault.kind == "failure":
        world.fail = place
    elif fault.kind == "cancel":
        world.cancel = place
    elif fault.kind == "unfenced":
        fence = str(fault.rule).split()[1]
        late, phase = UNFENCED[fence][:2]
        world.protocol = without(load("colocated"), fence)
        world.late = {(late, phase): 0.05}
        world.epochs = 1
    asyncio.run(world.go(within_s=DEADLINE_S))
    return world


def is_right(fault: Fault, answer: Answer, slow: list[dict[str, Any]]) -> bool:
    who = (f"trainer/{fault.rank}",)
    if fault.kind in ("none", "slow", "demo slow", "demo accident") and answer.verdict != "ok":
        return False
    if fault.kind == "none":
        return True
    if fault.kind in ("slow", "demo slow"):
        # Of two ranks neither is slower than usual; nor is one of two leaders.
        peers = fault.ranks // 2 if fault.phase in LED else fault.ranks
        found = [(each["rank"], each["phase"]) for each in slow]
        return peers <= 2 or (*who, fault.phase) in found[:1]
    if fault.kind == "demo accident":
        leader = f"resume_kv of trainer/{fault.rank - 1}"
        return any(
            all(word in each["what"] for word in (leader, *who, "'empty_cache'"))
            for each in answer.findings
        )
    if fault.kind == "demo break":
        broke = (answer.verdict, answer.rule, answer.guilty, answer.phase, answer.epoch)
        return broke == ("violation", fault.rule, who, fault.phase, fault.epoch)
    if fault.kind == "drop":
        where = (answer.guilty, answer.fence, answer.epoch)
        return answer.verdict == "failure" and where == (who, fault.phase, fault.epoch)
    if fault.kind == "mixed":
        minority = who if fault.ranks > 2 else ()
        return (answer.rule, answer.guilty) == (fault.rule, minority)
    if fault.kind == "unfenced":
        rule = str(fault.rule).split()[0]
        # Without its fence nothing is synchronised either, so that every leader may be too early.
        leaders = {name for name in answer.guilty if int(str(name).rpartition("/")[2]) % 2 == 0}
        named = set(who) <= set(answer.guilty) == leaders
        return named and (answer.rule, answer.phase) == (rule, fault.phase)
    said = (answer.verdict, answer.guilty, answer.phase, answer.epoch)
    return said == ("failure", who, fault.phase, fault.epoch)


def main(runs: int = 1000, first: int = 0) -> int:
    table: Counter[tuple[str, str]] = Counter()
    missed = 0
    for seed in range(first, first + runs):
        chance = random.Random(seed)
        ranks = chance.choice([2, 4])
        fault = fault_of(chance, ranks, seed)._replace(ranks=ranks)
        with tempfile.TemporaryDirectory() as folder:
            world = play(fault, seed, ranks, Path(folder))
            answer = audit_paths([folder])[0]
            slow = stats.as_json(stats.stats_of([folder]))["slow"]
            del world
        right = is_right(fault, answer, slow)
        missed += not right
        said = f"{answer.verdict} {answer.rule or ''}".strip()
        table[(fault.kind, said if right else f"{said} (wrong rank or phase)")] += 1
        if not right:
            print(f"seed {seed}: injected {fault}; {said} {answer.guilty} {answer.phase} "
                  f"{answer.epoch}: {answer.because}; slow {slow[:3]}", flush=True)  # fmt: skip
        if (seed - first + 1) % 100 == 0:
            print(f"{seed - first + 1 - missed} of {seed - first + 1}", file=sys.stderr, flush=True)
    for (injected, said), count in sorted(table.items()):
        print(f"{injected:13} -> {said:40} {count}")
    print(f"{runs - missed} of {runs} audited to the fault that was injected")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
