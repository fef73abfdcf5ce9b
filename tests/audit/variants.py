"""Variants of a trace that must not change its verdict: renamed, reordered, shifted, resized."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phasesync.audit import Answer, audit_trace
from phasesync.audit.vocabulary import meaning

__all__ = (
    "CASES",
    "SYNONYMS",
    "Raw",
    "Trace",
    "accepted",
    "accuses_innocent",
    "audit_lines",
    "cloned",
    "expected",
    "innocents",
    "ranks_of",
    "read",
    "relabelled",
    "renamed",
    "reordered",
    "shifted",
    "told_otherwise",
)

CASES = Path(__file__).parent.parent / "data" / "cases"

Trace = list[dict[str, Any]]

# The same phases in the words of other frameworks (verl, vLLM, SGLang, slime, NeMo-RL, TRL).
SYNONYMS = [
    {
        "resume_kv": "wake_up_kv_cache",
        "resume_weights": "wake_up_weights",
        "sleep": "release_memory_occupation",
        "serve": "generate_sequences",
        "sync_weights": "update_weights",
        "offload": "offload_fsdp_model_to_cpu",
        "empty_cache": "torch_empty_cache",
        "fence": "dist_barrier",
        "transfer": "broadcast_bucket",
        "train": "update_actor",
        "init_group": "init_weights_update_group",
        "begin_update": "start_weight_update",
        "finish_update": "finish_weight_update",
        "pause": "pause_generation",
        "resume_gen": "continue_generation",
        "flush_cache": "reset_prefix_cache",
        "profile_rollout": "rollout_profiler",
        "profile_train": "train_profiler",
        "drain": "wait_for_requests_to_drain",
    },
    {
        "resume_kv": "onload_kv",
        "resume_weights": "onload_weights",
        "sleep": "suspend_engine_memory",
        "serve": "rollout",
        "sync_weights": "refit",
        "offload": "move_params_to_cpu",
        "fence": "rendezvous",
        "transfer": "send_weights",
        "load": "receive_weights",
        "train": "train_step",
        "init_group": "connect_nccl_group",
        "admit": "enqueue_request",
        "publish": "announce_version",
        "wait_offer": "await_offer",
        "close_admission": "close_gate",
        "open_admission": "open_gate",
        "poll": "query_transfer_status",
        "teardown": "shutdown",
    },
]


class Raw(NamedTuple):
    """A line as a reader hands it over."""

    number: int
    data: dict[str, Any] | None
    problem: str | None = None
    file: str = ""


def read(path: Path) -> Trace:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def expected(folder: Path) -> dict[str, dict[str, Any]]:
    answer: dict[str, dict[str, Any]] = json.loads((folder / "expected.json").read_text())
    return answer


def audit_lines(trace: Trace, vocabulary: dict[str, str] | None = None) -> Answer:
    lines = [Raw(number, data) for number, data in enumerate(trace, 1)]
    return audit_trace("trace.jsonl", lines, vocabulary=vocabulary)


def ranks_of(answer: Answer) -> list[int]:
    return sorted(int(str(name).rsplit("/", 1)[-1]) for name in answer.guilty)


def accepted(answer: Answer, want: dict[str, Any], names: dict[int, int] | None = None) -> bool:
    """Whether `answer` is one that the key accepts; `names` are the new numbers of ranks."""
    names = names or {}
    guilty = ranks_of(answer)
    return any(
        answer.verdict in each["kinds"]
        and (
            want["kind"] == "ok"
            or (
                answer.rule in each["rules"]
                and guilty in [sorted(names.get(r, r) for r in group) for group in each["guilty"]]
            )
        )
        for each in want["accept"]
    )


def accuses_innocent(
    answer: Answer, want: dict[str, Any], names: dict[int, int] | None = None
) -> bool:
    names = names or {}
    allowed = {
        names.get(rank, rank)
        for each in want["accept"]
        for group in each["guilty"]
        for rank in group
    }
    cried = answer.verdict in ("violation", "failure", "hang", "false_alarm")
    return bool(set(ranks_of(answer)) - allowed) or (want["kind"] == "ok" and cried)


def check(
    trace: Trace,
    want: dict[str, Any],
    names: dict[int, int] | None = None,
    vocabulary: dict[str, str] | None = None,
) -> None:
    """The auditor's answer to `trace` is one that the key accepts."""
    answer = audit_lines(trace, vocabulary)
    says = f"{answer.verdict} {answer.rule} guilty={answer.guilty}: {answer.because}"
    assert not accuses_innocent(answer, want, names), says
    assert accepted(answer, want, names), says


_RANKS = ("members", "handles", "gpus", "targets")
_RANK = ("target", "gpu", "device", "replaces", "waiting_for")


def relabelled(trace: Trace, names: dict[int, int], *, devices: bool = True) -> Trace:
    """Every rank (and, with `devices`, every device) under another number, and nothing else."""
    fresh = copy.deepcopy(trace)
    head = fresh[0]

    def new(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return names.get(value, value)
        if isinstance(value, str) and value.isdigit():
            return str(names.get(int(value), int(value)))
        return value

    head["ranks"] = [new(rank) for rank in head["ranks"]]
    if "roles" in head:
        head["roles"] = {new(rank): role for rank, role in head["roles"].items()}
    if "memory" in head:
        initial = head["memory"]["initial_gib"]
        head["memory"]["initial_gib"] = {new(rank): gib for rank, gib in initial.items()}
    for event in fresh[1:]:
        event["rank"] = new(event["rank"])
        attrs = event.get("attrs", {})
        for name in _RANKS:
            if name in attrs and (devices or name != "gpus"):
                attrs[name] = [new(rank) for rank in attrs[name]]
        for name in _RANK:
            if name in attrs and (devices or name not in ("gpu", "device")):
                value = attrs[name]
                attrs[name] = [new(v) for v in value] if isinstance(value, list) else new(value)
        if devices and isinstance(attrs.get("delta_gib"), dict):
            attrs["delta_gib"] = {new(gpu): gib for gpu, gib in attrs["delta_gib"].items()}
    return fresh


def shifted(trace: Trace, by: int) -> Trace:
    """All epochs later by `by`; versions are names of their own and stay."""
    fresh = copy.deepcopy(trace)
    for event in fresh[1:]:
        if "epoch" in event:
            event["epoch"] += by
        attrs = event.get("attrs", {})
        if isinstance(attrs.get("epoch"), int):
            attrs["epoch"] += by
    return fresh


def renamed(trace: Trace, words: Callable[[str], str]) -> Trace:
    """Every phase in other words; buckets keep their numbers."""
    fresh = copy.deepcopy(trace)
    for event in fresh[1:]:
        event["phase"] = words(event["phase"])
    return fresh


_LOCAL = frozenset({"release", "compute", "decide", "begin", "finish", "window", "train", "other"})


def _independent(one: dict[str, Any], other: dict[str, Any], local: frozenset[str]) -> bool:
    """Whether two neighbours may have happened the other way round."""
    if one["rank"] == other["rank"]:
        return False
    for event in (one, other):
        if meaning(event["phase"]).action not in local or "target" in event.get("attrs", {}):
            return False
        if event["event"] not in ("start", "end"):
            return False
    return True


def reordered(trace: Trace, seed: int, *, apart: bool = True) -> Trace:
    """Another order of the same events that nobody could tell from the first one.

    `apart` says that no two ranks share a device, so that training and profiling are local too.
    """
    local = _LOCAL if apart else _LOCAL - {"train", "window"}
    chance = random.Random(seed)
    fresh = copy.deepcopy(trace)
    # A command and what it starts elsewhere have one name, and an order.
    sent = {event["phase"] for event in fresh[1:] if "target" in event.get("attrs", {})}
    for _ in range(4 * len(fresh)):
        at = chance.randrange(1, max(2, len(fresh) - 1))
        if at + 1 >= len(fresh) or {fresh[at]["phase"], fresh[at + 1]["phase"]} & sent:
            continue
        if _independent(fresh[at], fresh[at + 1], local):
            fresh[at], fresh[at + 1] = fresh[at + 1], fresh[at]
    return fresh


_FIGURES = ("_gib", "_s", "_bytes", "_params", "_tensors")
_COUNTS = ("version", "kv_version", "base_version", "level", "arrivals", "expected", "count")
_EVENTS = {
    "start": "begin",
    "end": "done",
    "fail": "error",
    "exit": "died",
    "timeout": "timed_out",
}


def told_otherwise(trace: Trace, seed: int) -> Trace:
    """The same facts as another logger would print them: figures, epochs and ranks as text, other
    words for events, more keys than anybody asked for, and lines that mean nothing in between.
    """
    chance = random.Random(seed)
    fresh = [copy.deepcopy(trace[0])]
    head = fresh[0]
    head["ranks"] = [str(rank) for rank in head["ranks"]]
    if "memory" in head:
        head["memory"] = _as_text(head["memory"])
    seen: set[object] = set()
    for number, event in enumerate(copy.deepcopy(trace[1:])):
        same: dict[str, Any] = {
            name: str(event[name]) for name in ("rank", "epoch") if name in event
        }
        if event["rank"] in seen and chance.random() < 0.3:
            fresh.append({**same, "phase": "log_metrics", "event": "begin", "pid": number})
            fresh.append({**same, "phase": "log_metrics", "event": "done", "attrs": {"loss": 0.3}})
        attrs = {
            name: _as_text(value) if name.endswith(_FIGURES) or name in _COUNTS else value
            for name, value in event.get("attrs", {}).items()
        }
        fresh.append(
            {
                **event,
                **same,
                "event": _EVENTS.get(event["event"], event["event"]),
                "attrs": {**attrs, "note": "kept and shown"},
                "host": "n0",
            }
        )
        seen.add(event["rank"])
        if event["event"] == "exit":
            seen.discard(event["rank"])
    return fresh


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_text(each) for key, each in value.items()}
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if plain else value


def cloned(trace: Trace, rank: int, new: int) -> Trace:
    """One more rank, that does what `rank` does, right after it, on a device of its own."""
    fresh = [copy.deepcopy(trace[0])]
    head = fresh[0]
    head["ranks"] = [*head["ranks"], new]
    if str(rank) in head.get("roles", {}):
        head["roles"][str(new)] = head["roles"][str(rank)]
    if "memory" in head:
        initial = head["memory"]["initial_gib"]
        if str(rank) in initial:
            initial[str(new)] = initial[str(rank)]
    for event in trace[1:]:
        mine = copy.deepcopy(event)
        attrs = mine.get("attrs", {})
        for name in ("members", "handles", "gpus", "targets", "target"):
            if (
                isinstance(attrs.get(name), list)
                and rank in attrs[name]
                and (name != "gpus" or mine["rank"] != rank)
            ):
                attrs[name] = [*attrs[name], new]
        deltas = attrs.get("delta_gib")
        if isinstance(deltas, dict) and mine["rank"] != rank and str(rank) in deltas:
            deltas[str(new)] = deltas[str(rank)]
        for name in ("arrivals", "expected"):
            if isinstance(attrs.get(name), int):
                attrs[name] += 1
        fresh.append(mine)
        if event["rank"] == rank:
            twin = relabelled([head, mine], {rank: new})[1]
            for name in ("members", "handles"):
                if name in attrs:
                    twin["attrs"][name] = attrs[name]
            fresh.append(twin)
    return fresh


def innocents(trace: Trace, want: dict[str, Any]) -> list[int]:
    """Ranks that act in `trace`, are not guilty, and do not act for others' devices."""
    guilty = {rank for each in want["accept"] for group in each["guilty"] for rank in group}
    acting = {event["rank"] for event in trace[1:]}
    leaders = {
        event["rank"] for event in trace[1:] if len(event.get("attrs", {}).get("gpus", ())) > 1
    }
    elsewhere = {
        event["rank"]
        for event in trace[1:]
        for name in ("device", "gpus")
        if event.get("attrs", {}).get(name) not in (None, event["rank"], [event["rank"]])
    }
    return [
        rank
        for rank in trace[0]["ranks"]
        if rank in acting and rank not in guilty | leaders | elsewhere and rank < 100
    ]
