"""Healthy syncs as frameworks order them, call by call, under the names that they use.

A call runs on its ranks side by side, and the next begins when all of them have ended; a chain of
hops runs as far ahead as its double buffer allows.
"""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from tests.audit.healthy_traces import Attrs, Key, Programs, Step, interleaved
from tests.audit.variants import Trace

__all__ = ("FLOWS",)

_Said = Callable[[int], Attrs]


class Flow:
    """What a driver has its ranks do, one call after the other."""

    def __init__(self, chance: random.Random, roles: dict[int, str]) -> None:
        self.chance = chance
        self.roles = roles
        self.programs: Programs = {rank: [] for rank in roles}
        self.after: tuple[Key, ...] = ()
        self.calls = 0

    def of(self, role: str) -> list[int]:
        return [rank for rank, mine in self.roles.items() if role in mine]

    def call(
        self,
        epoch: int,
        ranks: Iterable[int],
        phase: str,
        start: Attrs | _Said | None = None,
        end: Attrs | _Said | None = None,
        *,
        together: bool = False,
        joined: bool = True,
    ) -> None:
        """`phase` on `ranks`; `together`: none ends before all have begun."""
        self.calls += 1
        keys: list[Key] = [(phase, self.calls, rank) for rank in ranks]
        came = tuple(("began", *key) for key in keys) if together else ()
        for key in keys:
            rank = int(str(key[-1]))
            said = [each(rank) if callable(each) else each or {} for each in (start, end)]
            step = Step(
                epoch=epoch,
                phase=phase,
                start=said[0],
                end=said[1],
                after=self.after if joined else (),
                until=came,
                key=key,
            )
            self.programs[rank].append(step)
        self.after = tuple(keys) if joined else ()

    def trace(self, name: str, **more: Any) -> Trace:
        header = {"trace": 1, "name": name, "ranks": [*self.roles], **more}
        roles = {str(rank): role for rank, role in self.roles.items() if role}
        return [{**header, **({"roles": roles} if roles else {})}, *self._events()]

    def _events(self) -> Trace:
        return interleaved(self.programs, self.chance)


def offload_first(chance: random.Random) -> Trace:
    """slime: the trainer is away before the engine's weights come, generation goes on before KV."""
    cards = range(chance.choice([1, 2, 4]))
    actors = dict.fromkeys(cards, "megatron actor")
    flow = Flow(chance, {**actors, **{20 + card: "rollout engine" for card in cards}})
    trainers, engines = flow.of("actor"), flow.of("engine")
    figures = chance.random() < 0.5

    def needs(gib: int, *tags: str) -> _Said:
        said: Attrs = {"tags": [*tags]} if tags else {}
        return lambda rank: {
            **said,
            **({"need_gib": gib, "gpus": [rank % 20]} if figures else {}),
        }

    def moves(gib: int, *tags: str) -> _Said:
        said: Attrs = {"tags": [*tags]} if tags else {}
        return lambda rank: {**said, **({"delta_gib": {str(rank % 20): gib}} if figures else {})}

    for epoch in range(5, 5 + chance.choice([1, 2, 3])):
        version = {"version": epoch}
        flow.call(epoch, engines, "generate")
        flow.call(epoch, engines, "flush_cache")
        flow.call(epoch, engines, "release_memory_occupation", None, moves(-60))
        flow.call(epoch, trainers, "wake_up_actor", needs(50), moves(50))
        flow.call(epoch, trainers, "train_actor")
        flow.call(epoch, trainers, "sleep_actor", None, moves(-50))
        flow.call(epoch, engines, "onload_weights", needs(16, "weights"), moves(16, "weights"))
        flow.call(epoch, engines, "pause_generation")
        flow.call(epoch, trainers, "gloo_barrier", {"group": "gloo"}, together=True)
        for bucket in range(chance.choice([1, 3])):
            said = {"bucket": bucket}
            flow.call(epoch, trainers, "gather_object", said)
            flow.call(epoch, engines, "update_weights_from_tensor", {**said, **version}, version)
            flow.call(epoch, trainers, "ipc_collect")
        flow.call(epoch, trainers, "gloo_barrier", {"group": "gloo"}, together=True)
        flow.call(epoch, engines, "continue_generation")
        kept = ("kv_cache", "cuda_graph")
        flow.call(epoch, engines, "onload_kv", needs(44, *kept), moves(44, *kept))
    held = {str(card): 66 for card in cards}
    memory = {"memory": {"capacity_gib": 80, "initial_gib": held}} if figures else {}
    return flow.trace("offload first", **memory)


def in_process(chance: random.Random) -> Trace:
    """TRL: trainer and engine in one process, ranks meet only where they gather prompts."""
    ranks = range(chance.choice([1, 2, 4]))
    flow = Flow(chance, dict.fromkeys(ranks, ""))
    staged = chance.random() < 0.7
    first, second = ({"tags": [tag]} for tag in ("weights", "kv_cache"))
    for epoch in range(1, 1 + chance.choice([1, 2, 4])):
        flow.call(epoch, ranks, "empty_cache", joined=False)
        flow.call(epoch, ranks, "wake_up", first if staged else None, joined=False)
        version = {"version": epoch}
        flow.call(epoch, ranks, "load_weights", version, version, joined=False)
        flow.call(epoch, ranks, "reset_prefix_cache", joined=False)
        if staged:
            flow.call(epoch, ranks, "wake_up", second, joined=False)
        flow.call(epoch, ranks, "all_gather_object", {"group": "tp"}, together=True, joined=False)
        flow.call(epoch, ranks, "generate", version, joined=False)
        flow.call(epoch, ranks, "sleep", {"level": 2}, {"content_lost": ["weights"]}, joined=False)
        flow.call(epoch, ranks, "optimizer_step", joined=False)
    return flow.trace("in process")


def hops(chance: random.Random) -> Trace:
    """verl with a chain of engines: each hop reads a slot, and hands it on to the next."""
    chain = [0, *range(10, 10 + chance.choice([1, 2, 3]))]
    flow = Flow(chance, {rank: "engine worker" if rank else "trainer" for rank in chain})
    engines = flow.of("engine")
    kv = {"tags": ["kv_cache"]}
    for epoch in range(1, 1 + chance.choice([1, 2])):
        flow.call(epoch, engines, "abort_generation")
        flow.call(epoch, engines, "release_kv_cache", kv, kv)
        group = {"group": f"ckpt{epoch}"}
        flow.call(epoch, chain, "init_process_group", group, group, together=True)
        buckets = chance.choice([2, 3, 5])
        for hop, pair in enumerate(pairwise(chain)):
            _hop(flow, epoch, hop, pair, buckets)
        flow.after = tuple(("got", epoch, hop, buckets - 1) for hop in range(len(engines)))
        flow.call(epoch, chain, "finalize")
        flow.call(epoch, engines, "resume_kv_cache", kv, kv)
        flow.call(epoch, engines, "resume_generation")
        flow.call(epoch, engines, "generate_sequences")
    return flow.trace("hops")


def _hop(flow: Flow, epoch: int, hop: int, pair: tuple[int, int], buckets: int) -> None:
    """A slot is filled again once the bucket before was read from it."""
    sender, reader = pair
    for bucket in range(buckets):
        said: Attrs = {"bucket": bucket, "slot": bucket % 2, "slot_epoch": epoch}
        had: tuple[Key, ...] = (("got", epoch, hop - 1, bucket),) if hop else ()
        free: tuple[Key, ...] = (("got", epoch, hop, bucket - 2),) if bucket > 1 else ()
        put, got = ("put", epoch, hop, bucket), ("got", epoch, hop, bucket)
        name = "forward_bucket" if hop else "publish_bucket"
        after = (*flow.after, *had, *free)
        flow.programs[sender].append(
            Step(epoch=epoch, phase=name, start=said, end=said, after=after, key=put)
        )
        said = {**said, "sources": [sender]}
        after = (*flow.after, put)
        flow.programs[reader].append(
            Step(epoch=epoch, phase="read_bucket", start=said, end=said, after=after, key=got)
        )


FLOWS: tuple[Callable[[random.Random], Trace], ...] = (offload_first, in_process, hops)
