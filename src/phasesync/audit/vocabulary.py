"""What phase names mean, in one table: from any framework's words to the auditor's few actions.

Rules never look at a name; they ask for its meaning here. A name that no row knows is `other`: it
is shown and ordered like the rest, and no rule concludes anything from it.
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple

__all__ = (
    "ACTIONS",
    "KV",
    "WEIGHTS",
    "Meaning",
    "is_bad_output",
    "is_echo",
    "is_ended_error",
    "is_gone_error",
    "is_idle_error",
    "is_memory_error",
    "is_requests_error",
    "is_timeout_error",
    "is_unprepared_error",
    "is_unroutable_error",
    "meaning",
    "role_kind",
    "tag_name",
)

WEIGHTS: Final = "weights"
KV: Final = "kv_cache"

ACTIONS: Final = (
    "abort",
    "acquire",
    "admit",
    "begin",
    "close",
    "collective",
    "compute",
    "decide",
    "destroy_group",
    "drain",
    "fence",
    "finish",
    "flush",
    "free",
    "init_group",
    "life",
    "load_model",
    "lock",
    "open",
    "other",
    "pause",
    "poll",
    "publish",
    "receive",
    "register",
    "release",
    "resume_gen",
    "send",
    "serve",
    "synchronize",
    "teardown",
    "train",
    "unlock",
    "unregister",
    "wait",
    "window",
    "write",
)


class Meaning(NamedTuple):
    """What a phase does, to which tags, and to which bucket or part of the weights."""

    action: str
    tags: tuple[str, ...] = ()
    bucket: str | None = None
    part: str | None = None
    engine: bool = False
    whole: bool = False  # all memory of whoever does it
    step: bool = False  # one pass through the model, not a request that outlives many


# Words that name one concept. A word stands for its inflections too (see `_stem`).
_WORDS: Final[dict[str, str]] = {
    "weight": "weight weights model params parameters param state_dict",
    "kv": "kv kvcache cache kvcaches blocks",
    "graph": "graph graphs cudagraph cudagraphs",
    "adapter": "adapter adapters lora peft delta",
    "base": "base dense full",
    "group": "group groups pg communicator comm comms nccl process_group communicators subgroup",
    "bucket": "bucket buckets buffer buffers handle handles chunk staging slot tensor tensors ipc",
    "generation": "gen generation generate scheduler rollout inference request requests engine "
    "replicas replica sampling router traffic serving",
    "admission": "admission admissions gate submission intake",
    "cache": "cache caches kv prefix radix",
    "session": "update session refit weight",
    "version": "version versions step policy",
}

# First match wins. Each row: the action, then alternatives of words that must all be present.
_ROWS: Final[tuple[tuple[str, str], ...]] = (
    # Windows that one tool may hold on a device.
    ("window", "profile | profiler | profiling | nsys | nsight | kineto | tracer"),
    ("window", "exclusive window"),
    ("poll", "health check|monitor|generate | healthcheck"),
    # An engine's memory as a whole.
    ("release", "release|suspend|free|offload|sleep|discard|pause memory|occupation"),
    ("acquire", "resume|restore|wake|onload|reload memory|occupation"),
    ("acquire", "resume|wake|wakeup|onload kv|kvcache|weight|cuda_graph"),
    # Gates of the request path.
    ("close", "close|shut|block|stop|disable @admission | close|stop|disable router"),
    ("close", "stop|disable|reject accept|accepting|new"),
    (
        "open",
        "open|unblock|reopen|enable @admission | enable router | start|resume accept|accepting",
    ),
    ("resume_gen", "resume|continue|restart|unpause|start @generation"),
    ("resume_gen", "unpause | unsuspend"),
    ("drain", "drain | quiesce | settle | wait idle|requests|inflight|pending|complete"),
    ("pause", "pause|suspend|freeze|halt|interrupt @generation"),
    ("pause", "pause | freeze"),
    ("abort", "abort|cancel @generation"),
    ("admit", "admit | enqueue | submit | accept request | add request | dispatch request"),
    ("admit", "arrive request | incoming | reissue | refill"),
    # Caches of the engine and of the allocator: not the same thing.
    ("release", "empty|trim cache|caches | gc | empty cuda | trim allocator | clear memory"),
    ("flush", "flush|reset|invalidate|clear|drop @cache"),
    ("flush", "flush | reset prefix"),
    # Groups and connections.
    ("destroy_group", "destroy|disconnect|leave|abort|teardown @group | disconnect"),
    ("init_group", "init|initialise|initialize|create|new|build|make|setup|join|form @group"),
    ("init_group", "connect | init transfer | build topology | topology"),
    # Membership and routes.
    ("unregister", "unregister|deregister|remove|evict|retire @generation|engine|worker|member"),
    ("unregister", "unregister | deregister | shrink"),
    ("register", "register|enlist|enroll|route | add replica|worker|engine"),
    # Locks.
    ("unlock", "unlock | release|drop|free lock|mutex|lease"),
    ("lock", "lock | mutex | lease | acquire semaphore"),
    # Fences.
    ("fence", "fence | barrier | rendezvous | barriers"),
    ("fence", "join|sync ranks|all|peers|world|replicas | wait peers|ranks|all|everyone"),
    ("synchronize", "synchronize | synchronise | devicesync"),
    ("synchronize", "device|stream|cuda|ipc sync|collect"),
    # Waits for one counterpart.
    ("wait", "wait | await | offer | ack | acknowledge | handshake | ready"),
    ("poll", "poll | query | status | check transfer|state|status"),
    ("abort", "abort | cancel"),
    ("teardown", "teardown | shutdown | cleanup | dispose | finalize | finalise"),
    # Sessions around a weight update.
    ("begin", "begin|start|open|prepare @session | begin"),
    ("finish", "finish|end|close|complete|finalize @session | finish"),
    # Publishing a version.
    ("publish", "publish | commit | announce | advertise | promote"),
    ("publish", "set|bump|update @version"),
    # Memory comes back, or goes.
    ("load_model", "load|read|restore|reload checkpoint|ckpt|disk|model_from_disk"),
    ("load_model", "init|initialise|initialize engine|model|llm | load model | from_pretrained"),
    ("write", "reload weight|weights"),
    ("acquire", "resume | wake | wakeup | awake | onload | reload states|optimizer"),
    ("acquire", "map|remap|materialize|materialise|allocate|alloc|acquire|restore"),
    ("acquire", "load back | backload | to gpu|device|cuda | move gpu|device"),
    ("free", "free|release|drop|unpin|discard|recycle|reuse @bucket"),
    ("free", "free | reuse | recycle | overwrite | unpin"),
    (
        "release",
        "sleep | release | suspend | unmap | discard | offload | onhost | evict | relinquish",
    ),
    ("release", "stage host | to cpu|host | move cpu|host | unload"),
    ("train", "update actor|critic|policy"),
    ("compute", "process weight|weights"),
    # Payload.
    (
        "collective",
        "gather | allgather | allreduce | reduce | scatter | alltoall | all to | a2a | collective",
    ),
    ("compute", "load|fetch|next|prepare data|batch|dataset|dataloader | dataloader"),
    ("write", "sync|update|refit|install|copy|apply|swap|load @weight"),
    ("write", "sync|update|refit|install|apply|swap|load|add @adapter"),
    ("write", "sync|load @base"),
    (
        "send",
        "transfer | send | broadcast | bcast | push | stream | put | isend | transmit | upload",
    ),
    ("send", "forward|relay|pass @bucket|@weight|@kv"),
    ("send", "write @weight|@bucket|@kv | nixl|rdma write|put | xfer"),
    (
        "receive",
        "receive | recv | load | pull | fetch | read | irecv | download | consume | prefetch",
    ),
    ("write", "refit | sync | resync | update"),
    # Work.
    ("serve", "serve | generate | generation | rollout | decode | prefill | infer | inference"),
    ("serve", "sample | sampling | dummy | request | requests | completion"),
    ("train", "train | training | backward | optimizer | optim | learner | fit | ppo | grpo | sft"),
    ("train", "forward backward | log prob|probs | logprob | logprobs"),
    ("decide", "decide | choose | select | decision | plan | resolve | negotiate"),
    ("compute", "fill | pack | serialize"),
    ("compute", "compile | warmup | warm | jit | autotune | tune | eval | evaluate | validate"),
    ("compute", "save | checkpoint | quantize | postprocess | process weights | capture | build"),
    (
        "life",
        "metrics | telemetry | stats | logging | worker | process | actor | restart | boot "
        "| heartbeat | alive | main | engine",
    ),
    ("serve", "forward"),
)

_TAG_WORDS: Final[tuple[tuple[str, str], ...]] = (
    (KV, "kv kvcache kv_cache kvcaches"),
    (WEIGHTS, "weight weights"),
    ("cuda_graph", "graph graphs cudagraph cudagraphs cuda_graph"),
    ("optimizer", "optimizer optim states"),
    ("params", "params parameters"),
)

_SPLIT: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_BUCKET: Final = re.compile(r"(?:^|_)(?:b|bucket|p|chunk|slot|buf|part)_?(\d+)$")
# Who begins with a collective's name is one, whatever else it is about.
_COLLECTIVES: Final = r"(all_?(reduce|gather|to_?all)|reduce_?scatter)"
_COLLECTIVE: Final = re.compile(rf"{_COLLECTIVES}(_|\Z)", re.IGNORECASE)
# Who ends with one is one too: what is before it says what is moved by it.
_ENDS_AS: Final = (
    ("collective", re.compile(rf"_{_COLLECTIVES}\Z", re.IGNORECASE)),
    ("send", re.compile(r"_(broadcast|bcast)\Z", re.IGNORECASE)),
)
_SUFFIXES: Final = ("ing", "ed", "es", "s", "e")


def _stem(word: str) -> str:
    for suffix in _SUFFIXES:
        if len(word) - len(suffix) >= 3 and word.endswith(suffix):
            return word[: -len(suffix)]
    return word


def _compile(text: str) -> tuple[tuple[frozenset[str], ...], ...]:
    ways = []
    for way in text.split(" | "):
        needs = []
        for need in way.split():
            words: list[str] = []
            for word in need.split("|"):
                words += _WORDS[word[1:]].split() if word.startswith("@") else [word]
            needs.append(frozenset(_stem(word) for word in words))
        ways.append(tuple(needs))
    return tuple(ways)


_TABLE: Final = tuple((action, _compile(text)) for action, text in _ROWS)
_TAG_TABLE: Final = tuple(
    (tag, frozenset(_stem(word) for word in words.split())) for tag, words in _TAG_WORDS
)
_ADAPTER: Final = frozenset(_stem(word) for word in _WORDS["adapter"].split())
_STEPS: Final = frozenset(_stem(word) for word in ("forward", "step", "execute", "batch"))
_MEMORY_WORD: Final = _stem("memory")
_GATES: Final = frozenset({"init_group", "destroy_group", "fence", "wait", "poll", "abort"})
_ENGINE_VERBS: Final = frozenset(
    _stem(word)
    for word in ["sleep", "wake", "wakeup", "awake", "resume", "onload", "occupation", "suspend"]
)


@lru_cache(maxsize=8192)
def meaning(phase: str) -> Meaning:
    """What the phase called `phase` does."""
    parts = [part.lower() for part in _SPLIT.split(phase[:200]) if part]
    stems = frozenset(_stem(part) for part in parts)
    bucket = _BUCKET.search(phase.lower()[:200])
    tags = tuple(tag for tag, words in _TAG_TABLE if words & stems)
    action = "other"
    for name, ways in _TABLE:
        if any(all(need & stems for need in way) for way in ways):
            action = name
            break
    if action not in _GATES:
        action = next((kind for kind, ends in _ENDS_AS if ends.search(phase)), action)
    if _COLLECTIVE.match(phase):
        action = "collective"
    part = "adapter" if stems & _ADAPTER else "base" if "bas" in stems else None
    return Meaning(
        action,
        tags,
        bucket.group(1) if bucket else None,
        part,
        bool(stems & _ENGINE_VERBS) or WEIGHTS in tags or KV in tags,
        action in ("release", "acquire") and _MEMORY_WORD in stems and "clear" not in stems,
        action == "serve" and bool(stems & _STEPS),
    )


def tag_name(tag: object) -> str:
    """One name for one tag, whatever the engine calls it."""
    text = str(tag)[:200]
    stems = frozenset(_stem(part.lower()) for part in _SPLIT.split(text) if part)
    for name, words in _TAG_TABLE:
        if words & stems:
            return name
    return text


_ROLES: Final[tuple[tuple[str, str], ...]] = (
    (
        "controller",
        "controller driver orchestrator router coordinator manager",
    ),
    ("engine", "engine rollout inference vllm sglang trtllm generator sampler server worker_llm"),
    ("trainer", "trainer actor train learner policy fsdp megatron critic replica leader"),
    ("controller", "head scheduler master"),
)


@lru_cache(maxsize=1024)
def role_kind(role: str) -> str:
    """`trainer`, `engine` or `controller`; the role's first word where it is none of them."""
    words = [word.lower() for word in _SPLIT.split(role[:200]) if word]
    bare = [re.sub(r"\d+$", "", word) for word in words]
    for kind, names in _ROLES:
        if any(word in names.split() for word in bare):
            return kind
    return words[0] if words else ""


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_MEMORY: Final = _matcher(
    r"\boom\b|out.?of.?memory|cuda.?malloc|cumemcreate|memory.?alloc|alloc\w*.?fail|no.?memory"
)
_HOST_MEMORY: Final = _matcher(
    r"node running low on memory|oom.?kill|host memory|host ram|cgroup|ray\.exceptions\.outofmemory"
)
_TIMEOUT: Final = _matcher(
    r"time.?d?.?out|deadline|watchdog|expired|failed to (pass|reach|arrive|join)"
    r"|(did not|didn.t|never) (pass|reach|arrive|join|come|answer|respond)|\bin \d+ ?ms\b"
)
_GONE: Final = _matcher(
    r"lost|kill|died|dead|exit|reset.by.peer|refused|segfault|sigkill|crash|preempt"
)
_ECHO: Final = _matcher(
    r"remote|peer|by (the )?driver|torn down|\baborted\b|actor.?(un)?(died|avail)|owner|watchdog"
)
# Ended by somebody on purpose: why, that one knows.
_ENDED: Final = _matcher(
    r"ray\.kill"
    r"|(killed|cancel\w*|stopped|terminated) by (the )?(driver|controller|launcher|agent|owner)"
)
_IDLE: Final = _matcher(r"idle|busy|in.?flight|running.?req|pending|not.?empty|assert.?flush|queue")
_UNROUTABLE: Final = _matcher(
    r"not.?implemented|unimplemented|none.?type.{0,40}attribute|no.?control|unsupported"
    r"|not.?supported|no.?(route|path|handler|method|such(?!.file)"
    r"|endpoint|server|listener|receiver)|unknown.?(command|method|rank|target|op)|unreachable"
    r"|attribute.?error|no.?attribute|\A\W*(http\W*)?not.?found|\b404\b|\b405\b|\b501\b"
    r"|not.?registered"
    r"|\b(route|handler|method|endpoint|command|function|rank|target|server|rpc|actor|op)\b.{0,40}not.?found"
)
_REQUESTS: Final = _matcher(
    r"pending.?req|req\w*.{0,12}pending|running.?req|not.?(fully.?)?idle|in.?flight|not.?freed.?yet"
)
_UNPREPARED: Final = _matcher(
    r"(not|never|isn.t|hasn.t)( been| yet)* "
    r"(initiali[sz]ed|set.?up|created|started|connected|loaded)"
    r"|please (call|run|init)|must (be called|call)|(call|run) \S+ (first|before)|before calling"
    r"|not in (the )?(list|set) of \S*.{0,20}groups?|no (active|open|update) (session|update|group)"
)
_BAD_OUTPUT: Final = _matcher(
    r"garbage|gibberish|nan|wrong|corrupt|repeat|nonsense|bad|random|empty"
)


def is_memory_error(error: object) -> bool:
    """Whether a device ran out of memory; what the host runs out of is another matter."""
    text = str(error)[:2000]
    return error is not None and bool(_MEMORY.search(text)) and not _HOST_MEMORY.search(text)


def is_timeout_error(error: object) -> bool:
    return error is not None and bool(_TIMEOUT.search(str(error)[:2000]))


def is_gone_error(error: object) -> bool:
    return error is not None and bool(_GONE.search(str(error)[:2000]))


def is_idle_error(error: object) -> bool:
    return error is not None and bool(_IDLE.search(str(error)[:2000]))


def is_unroutable_error(error: object) -> bool:
    return error is not None and bool(_UNROUTABLE.search(str(error)[:2000]))


def is_echo(error: object) -> bool:
    """Whether an error tells of somebody else's."""
    return error is not None and bool(_ECHO.search(str(error)[:2000]))


def is_ended_error(error: object) -> bool:
    """Whether a process says that somebody else ended it on purpose."""
    return error is not None and bool(_ENDED.search(str(error)[:2000]))


def is_requests_error(error: object) -> bool:
    """Whether an error says itself that requests were there where none may be."""
    return error is not None and bool(_REQUESTS.search(str(error)[:2000]))


def is_unprepared_error(error: object) -> bool:
    """Whether an error says that something should have been done before."""
    return error is not None and bool(_UNPREPARED.search(str(error)[:2000]))


def is_bad_output(output: object) -> bool:
    return output is not None and bool(_BAD_OUTPUT.search(str(output)[:2000]))
