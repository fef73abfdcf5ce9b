"""Healthy syncs of many shapes, interleaved by chance: whoever is accused in one is innocent."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.audit.variants import Trace

__all__ = ("SHAPES", "colocated", "disaggregated", "in_flight")

Attrs = dict[str, Any]
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One phase of a rank. It starts after `after`, and ends after `until` and its fence's members;
    `key` is what others may wait for: `("began", *key)` and `key`.
    """

    epoch: int
    phase: str
    start: Attrs = field(default_factory=dict)
    end: Attrs = field(default_factory=dict)
    after: tuple[Key, ...] = ()
    until: tuple[Key, ...] = ()
    key: Key = ()


Programs = dict[int, list[Step]]


def interleaved(programs: Programs, chance: random.Random) -> Trace:
    """The events of all ranks, in an order that the steps allow."""
    at = dict.fromkeys(programs, 0)
    running: set[int] = set()
    known: set[Key] = set()
    events: Trace = []
    while ready := [rank for rank in programs if _may(rank, programs, at, running, known)]:
        rank = chance.choice(ready)
        step = programs[rank][at[rank]]
        over = rank in running
        attrs = step.end if over else step.start
        event = {"rank": rank, "epoch": step.epoch, "phase": step.phase}
        events.append({**event, "event": "end" if over else "start", "attrs": attrs})
        known.add(step.key if over else ("began", *step.key))
        running ^= {rank}
        at[rank] += over
    assert all(at[rank] == len(steps) for rank, steps in programs.items())
    return events


def _may(
    rank: int, programs: Programs, at: dict[int, int], running: set[int], known: set[Key]
) -> bool:
    if at[rank] >= len(programs[rank]):
        return False
    step = programs[rank][at[rank]]
    return known.issuperset(step.until if rank in running else step.after)


def _fence(programs: Programs, ranks: Iterable[int], epoch: int, name: str, **attrs: Any) -> None:
    members = tuple(ranks)
    came = tuple(("began", name, epoch, rank) for rank in members)
    for rank in members:
        key = (name, epoch, rank)
        programs[rank].append(
            Step(epoch=epoch, phase=name, start=attrs, end=attrs, until=came, key=key)
        )


def colocated(chance: random.Random) -> Trace:
    """Trainer and engine on one card: a leader resumes for all, behind a fence."""
    world = range(chance.choice([2, 3, 4, 6]))
    figures, tags = chance.random() < 0.6, chance.random() < 0.5
    programs: Programs = {rank: [] for rank in world}

    def changes(gib: int, *ranks: int) -> Attrs:
        return {"delta_gib": {str(rank): gib for rank in ranks}} if figures else {}

    def leads(epoch: int, phase: str, gib: int, *named: str) -> None:
        said = {"tags": list(named)} if tags else {}
        need = {"need_gib": gib} if figures and gib > 0 else {}
        start, end = {"gpus": [*world], **need, **said}, {**changes(gib, *world), **said}
        programs[0].append(Step(epoch=epoch, phase=phase, start=start, end=end))

    def all_do(epoch: int, phase: str, gib: int = 0) -> None:
        for rank in world:
            end = changes(gib, rank) if gib else {}
            programs[rank].append(Step(epoch=epoch, phase=phase, end=end))

    for epoch in range(3, 3 + chance.choice([1, 2, 3])):
        all_do(epoch, "train", 10)
        all_do(epoch, "trim_cache", -10)
        _fence(programs, world, epoch, "fence")
        leads(epoch, "resume_weights", 16, "weights")
        _fence(programs, world, epoch, "fence_staged")
        all_do(epoch, "sync_weights")
        _fence(programs, world, epoch, "fence_transferred")
        all_do(epoch, "offload", -30)
        all_do(epoch, "empty_cache")
        _fence(programs, world, epoch, "fence_released")
        leads(epoch, "resume_kv", 40, "kv_cache")
        _fence(programs, world, epoch, "fence_ready")
        all_do(epoch, "serve")
        _fence(programs, world, epoch, "fence_over")
        leads(epoch, "sleep", -56, "weights", "kv_cache")
        _fence(programs, world, epoch, "fence_asleep")
        all_do(epoch, "load_back", 30)
    header: Attrs = {"trace": 1, "name": "colocated", "ranks": [*world]}
    if figures:
        header["memory"] = {"capacity_gib": 80, "initial_gib": {str(rank): 32 for rank in world}}
    return [header, *interleaved(programs, chance)]


def disaggregated(chance: random.Random) -> Trace:
    """Trainers send buckets over a group to engines that are paused, drained and flushed."""
    trainers = range(chance.choice([1, 2, 3]))
    engines = range(10, 10 + chance.choice([1, 2, 3]))
    everybody = (*trainers, *engines)
    group: Attrs = {"group": "wu"} if chance.random() < 0.6 else {}
    buckets = range(1, 1 + chance.choice([1, 2, 4]))
    programs: Programs = {rank: [] for rank in everybody}
    for epoch in range(1, 1 + chance.choice([1, 2, 3])):
        for rank in trainers:
            programs[rank].append(Step(epoch=epoch, phase="train"))
        for rank in engines:
            for phase in ("serve", "pause", "drain"):
                programs[rank].append(Step(epoch=epoch, phase=phase))
        _fence(programs, everybody, epoch, "init_group", **group)
        for bucket in buckets:
            _bucket(programs, engines, epoch, bucket, group)
        if len(trainers) > 1:
            own = {"group": "train"} if group else {}
            _fence(programs, trainers, epoch, "fence", **own)
        for rank in engines:
            for phase in ("flush_cache", "resume_gen"):
                programs[rank].append(Step(epoch=epoch, phase=phase))
        for rank in everybody:
            programs[rank].append(Step(epoch=epoch, phase="destroy_group", start=group))
    roles = {str(rank): "trainer" if rank in trainers else "engine" for rank in everybody}
    header = {"trace": 1, "name": "disaggregated", "ranks": [*everybody], "roles": roles}
    return [header, *interleaved(programs, chance)]


def _bucket(
    programs: Programs, engines: Iterable[int], epoch: int, bucket: int, group: Attrs
) -> None:
    said = {"bucket": bucket, **group}
    sent = ("sent", epoch, bucket)
    read = [("read", epoch, bucket, rank) for rank in engines]
    programs[0].append(
        Step(
            epoch=epoch,
            phase="transfer",
            start=said,
            end=said,
            until=tuple(("began", *key) for key in read),
            key=sent,
        )
    )
    for rank, key in zip(engines, read, strict=True):
        after = (("began", *sent),)
        phase = f"load_b{bucket}"
        programs[rank].append(Step(epoch=epoch, phase=phase, start=group, after=after, key=key))
    programs[0].append(Step(epoch=epoch, phase=f"free_b{bucket}", after=tuple(read)))


def in_flight(chance: random.Random) -> Trace:
    """A controller has engines take each version over requests that run on."""
    engines = range(10, 10 + chance.choice([1, 2, 3]))
    programs: Programs = {0: [], **{rank: [] for rank in engines}, 100: []}
    for epoch in range(1, 1 + chance.choice([2, 3, 5])):
        said = {"version": epoch}
        offered: Key = ("offered", epoch)
        taken = tuple(("taken", epoch, rank) for rank in engines)
        programs[0] += [
            Step(epoch=epoch, phase="train"),
            Step(epoch=epoch, phase="publish", start=said, end=said, key=offered),
        ]
        for rank, key in zip(engines, taken, strict=True):
            keep = {"mode": "keep"}
            programs[rank] += [
                Step(epoch=epoch, phase="pause_generation", start=keep, after=(offered,)),
                Step(epoch=epoch, phase="update_weights", start=said, end=said, key=key),
                Step(epoch=epoch, phase="continue_generation"),
                Step(epoch=epoch, phase="generate", start=said),
            ]
        target = {"target": [*engines]}
        programs[100].append(
            Step(epoch=epoch, phase="update_policy", start=target, after=(offered,), until=taken)
        )
    roles = {"0": "trainer", **{str(rank): "rollout" for rank in engines}, "100": "controller"}
    header = {"trace": 1, "name": "in flight", "ranks": [0, *engines, 100], "roles": roles}
    return [header, *interleaved(programs, chance)]


SHAPES: tuple[Callable[[random.Random], Trace], ...] = (colocated, disaggregated, in_flight)
