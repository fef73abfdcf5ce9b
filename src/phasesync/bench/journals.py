"""Journals as a healthy colocated run of any size writes them, without running it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phasesync.core.plan import Act, Plan, Wait, resolve
from phasesync.core.wire import encode, sha256
from phasesync.spec import load

__all__ = ("make", "write")

_START_NS = 1_790_000_000_000_000_000


@dataclass
class _Rank:
    """One rank that writes: its clock, its line count, its ticket."""

    number: int
    host: str
    common: dict[str, Any]
    seq: int = 0
    now: int = 0
    ticket: dict[str, Any] | None = None
    lines: list[bytes] = field(default_factory=list)

    def say(self, event: str, **fields: Any) -> int:
        seq = self.seq
        wall = _START_NS + self.now
        line = {
            "event": event,
            "level": "info",
            "journal": 1,
            "timestamp": _stamp(wall),
            "mono_ns": self.now,
            "seq": seq,
            **self.common,
            **{key: value for key, value in fields.items() if value is not None},
        }
        self.lines.append(encode(line) + b"\n")
        self.seq += 1
        self.now += 40_000
        return seq


def _stamp(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def make(ranks: int, epochs: int, size: int = 2, hosts: int = 1) -> Iterator[tuple[int, bytes]]:
    """For each epoch, the lines of each rank: (rank, bytes)."""
    protocol = load("colocated")
    devices = [f"host{rank * hosts // ranks}/cpu{rank}" for rank in range(ranks)]
    plan = resolve(protocol, ranks, {"replica_size": size}, devices=devices)
    members = [
        _Rank(rank, f"host{rank * hosts // ranks}", _common(rank, ranks, plan, hosts))
        for rank in range(ranks)
    ]
    generations: dict[str, int] = {}
    for each in members:
        each.say("rank.start")
    _fence(plan, members, "plan", plan.world, 0, generations)
    for each in members:
        each.say("plan", epoch=0, **_plan(plan))
    for epoch in range(1, epochs + 1):
        for each in members:
            each.common["epoch"] = each.common["version"] = epoch
            each.say("epoch.begin")
        _epoch(plan, members, epoch, generations)
        for each in members:
            each.say("epoch.end")
            if epoch == epochs:
                each.say("rank.exit")
            yield each.number, b"".join(each.lines)
            each.lines.clear()


def _common(rank: int, ranks: int, plan: Plan, hosts: int) -> dict[str, Any]:
    return {
        "run": "made",
        "role": "trainer",
        "rank": rank,
        "incarnation": 0,
        "host": f"host{rank * hosts // ranks}",
        "pid": 1000 + rank,
        "device": plan.devices[plan.place[rank]],
        "ranks": ranks,
        "attempt": 0,
        "protocol": plan.protocol.name,
        "digest": plan.digest,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "options": dict(plan.options),
        "members": [str(member) for member in plan.members],
        "devices": list(plan.devices),
        "place": list(plan.place),
        "groups": {name: [list(part) for part in parts] for name, parts in plan.groups},
    }


def _epoch(plan: Plan, members: list[_Rank], epoch: int, generations: dict[str, int]) -> None:
    """All ranks through their programs, fence by fence."""
    at = [0] * len(members)
    done = False
    while not done:
        done = True
        waiting: dict[int, list[int]] = {}
        for index, each in enumerate(members):
            steps = plan.programs[index]
            while at[index] < len(steps) and isinstance(step := steps[at[index]], Act):
                each.say("phase.start", phase=step.phase, ticket=each.ticket)
                each.now += 900_000
                each.say("phase.end", phase=step.phase, duration_s=0.0009, free_bytes=1 << 30)
                at[index] += 1
            if at[index] < len(steps):
                done = False
                wait = steps[at[index]]
                assert isinstance(wait, Wait)
                waiting.setdefault(wait.scope, []).append(index)
        for scope, came in waiting.items():
            if len(came) == len(plan.scopes[scope].members):
                step = plan.programs[came[0]][at[came[0]]]
                assert isinstance(step, Wait)
                _fence(plan, [members[i] for i in came], step.fence, scope, epoch, generations)
                for index in came:
                    at[index] += 1


def _fence(
    plan: Plan,
    came: list[_Rank],
    fence: str,
    scope: int,
    epoch: int,
    generations: dict[str, int],
) -> None:
    name = plan.scopes[scope].name
    generation = generations.get(name, 0)
    generations[name] = generation + 1
    where: dict[str, Any] = {"fence": fence, "scope": name, "generation": generation}
    judged = []
    for each in came:
        seq = each.say("fence.arrive", **where, status="ok", free_bytes=1 << 30)
        judged.append([f"trainer/{each.number}", 0, "ok", seq, 1 << 30])
    judged.sort(key=lambda row: int(str(row[0]).split("/")[1]))
    ticket = {
        "fence": fence,
        "scope": name,
        "epoch": epoch,
        "generation": generation,
        "count": len(came),
        "hash": sha256(judged),
    }
    now = max(each.now for each in came)
    for order, each in enumerate(came):
        each.now = now + 50_000 + 100 * order
        each.ticket = ticket
        if each is came[-1]:
            each.say("fence.decide", **where, verdict="open", judged=judged)
        each.say("fence.pass", **where, arrival=order, ticket=ticket, duration_s=0.00005)


def write(folder: Path, ranks: int, epochs: int, size: int = 2, hosts: int = 1) -> int:
    """Write the journals; how many lines they have."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for rank, data in make(ranks, epochs, size, hosts):
        with (folder / f"trainer-{rank}.0.jsonl").open("ab") as file:
            file.write(data)
        count += data.count(b"\n")
    return count
