"""The engine itself says no: to a wake of KV, to a wake of everything, and to generation.

`guard(engine)` wraps the methods of that one object, in the process that owns it, so it does not
matter who calls: a leader, its replacement, or a leader that was frozen and woke up. The ticket
travels with the call as the keyword `ticket`, or as an HTTP header, and is compared here with the
fence's own verdict. A refusal never reaches the engine, which stays as usable as it was.
"""

import functools
import inspect
import re
import threading
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, TypeAlias, TypeVar

from phasesync.core import wire
from phasesync.core.model import Rank, Ticket
from phasesync.engines.base import (
    GRAPHS,
    GROUND,
    KV_CACHE,
    WEIGHT_NAMES,
    WEIGHTS,
    Floor,
    Verdicts,
)
from phasesync.engines.calls import CallThread, Http
from phasesync.engines.tickets import (
    COLOCATED,
    TICKET_HEADER,
    TicketRules,
    Warden,
    parse_ticket,
)
from phasesync.errors import EngineError, EngineRefused

__all__ = ("FLOOR_PATH", "GUARDED", "Guard", "GuardMiddleware", "guard", "raise_floor_at")

T = TypeVar("T")

GUARDED: Mapping[str, tuple[str, ...]] = {
    wanted: fences for wanted, fences in COLOCATED.items() if wanted != WEIGHTS
}
FLOOR_PATH = "/phasesync/floor"
_GUARD = "__phasesync_guard__"

_WEIGHTS = frozenset({WEIGHTS, *WEIGHT_NAMES})
# What the workers call a wake.
_WAKES = frozenset({"wake_up", "wakeup", "checkpoint_restore"})

# Set while an outer call of a guarded engine calls its own inner methods.
_passing: ContextVar[bool] = ContextVar("phasesync_guard_passing", default=False)


def _woken(tags: object) -> str:
    """What a wake of `tags` must be allowed to do: the last of them to be allowed at all.

    What is not known to be weights is taken for KV: all tags, one of a later engine, `scheduling`
    beside the weights, or something that can be read only once.
    """
    named = getattr(tags, "tags", tags)  # SGLang's own request object
    if not named or not isinstance(named, Collection):
        return KV_CACHE
    try:
        listed = frozenset([named] if isinstance(named, str) else named)
    except TypeError:
        return KV_CACHE
    if listed <= _WEIGHTS:
        return WEIGHTS
    return GRAPHS if listed <= _WEIGHTS | {GRAPHS} else KV_CACHE


Wanted: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], str | None]


def _argument(position: int, name: str) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(name)


_tags = _argument(0, "tags")
_level = _argument(0, "level")
_rpc_method = _argument(0, "method")
_rpc_args = _argument(2, "args")
_rpc_kwargs = _argument(3, "kwargs")


def _wake(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    return _woken(_tags(args, kwargs) or kwargs.get("obj"))


def _rpc(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """A wake by its name, or by the worker's own function; into other functions nobody can look."""
    method = _rpc_method(args, kwargs)
    name = getattr(method, "__name__", method)
    if not isinstance(name, str) or name not in _WAKES:
        return None
    inner, named = _rpc_args(args, kwargs), _rpc_kwargs(args, kwargs)
    if isinstance(inner, list | tuple) and inner:
        return _woken(inner[0])
    return _woken(named.get("tags") if isinstance(named, Mapping) else None)


def _utility(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """vLLM's client sends everything to its engine's process by the name of the method there."""
    name = str(_rpc_method(args, kwargs))
    return _ASKS[name](args[1:], {}) if name in _ASKS else None


def _generate(_args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> str | None:
    return "generate"


_ASKS: Mapping[str, Wanted] = {
    "wake_up": _wake,
    "wake_up_async": _wake,
    "resume_memory_occupation": _wake,
    "collective_rpc": _rpc,
    "collective_rpc_async": _rpc,
    "resume_generation": _generate,
    "continue_generation": _generate,
    "resume_scheduler": _generate,
    "resume_scheduler_async": _generate,
    "checkpoint_restore": lambda _args, _kwargs: KV_CACHE,
    "call_utility": _utility,
    "call_utility_async": _utility,
} | dict.fromkeys(
    (
        "add_request",
        "add_request_async",
        "async_encode",
        "async_generate",
        "async_score",
        "beam_search",
        "chat",
        "classify",
        "embed",
        "encode",
        "enqueue",
        "enqueue_chat",
        "generate",
        "generate_async",
        "generate_request",
        "rerank",
        "reward",
        "score",
        "wait_for_completion",
    ),
    _generate,
)
_ADMITS = frozenset({"resume_generation", "continue_generation"})
_RELEASES = frozenset(
    {
        "sleep",
        "sleep_async",
        "release_kv_cache_memory",
        "release_kv_cache_memory_async",
        "release_memory_occupation",
    }
)
_SHUTS = _RELEASES | {"pause_generation", "pause_scheduler", "pause_scheduler_async"}
# Where an engine keeps the object that its own wake goes through, and its requests.
_INNER = ("llm_engine", "engine_core", "model_executor", "tokenizer_manager")
_INNER_ASKS = (
    "wake_up",
    "wake_up_async",
    "collective_rpc",
    "collective_rpc_async",
    "add_request",
    "add_request_async",
    "resume_scheduler",
    "resume_scheduler_async",
    "call_utility",
    "call_utility_async",
    "resume_memory_occupation",
    "continue_generation",
    "generate_request",
)


class Guard:
    """What stands before one engine: its floor, and whether it has been opened for this epoch."""

    def __init__(self, rules: TicketRules, *, floor: Floor = GROUND, name: str = "engine"):
        self._warden = Warden(rules, floor=floor)
        self._open_at: Floor | None = None
        self._shuts = 0
        self._lock = threading.Lock()
        self._name = name
        self._undo: list[tuple[object, str, object]] = []
        self._unknown: tuple[str, ...] = ()

    @property
    def rules(self) -> TicketRules:
        return self._warden.rules

    @property
    def floor(self) -> Floor:
        return self._warden.floor

    @property
    def unverified(self) -> tuple[str, ...]:
        """Methods of the engine that this guard does not know, and so does not refuse."""
        return tuple(f"what {self._name} does in {name}()" for name in self._unknown)

    @property
    def is_open(self) -> bool:
        """Whether generation passes without a ticket of its own: this epoch was admitted."""
        return self._open_at is not None and self._open_at == self.floor

    def raise_floor(self, floor: Floor) -> Floor:
        """Refuse every ticket below `floor` from now on; what was admitted before it is shut."""
        return self._warden.raise_floor(Floor(*floor))

    def expect(self, attempt: int, incarnations: Mapping[Rank, int]) -> None:
        """Refuse what was judged with older incarnations of these ranks: they were replaced."""
        self._warden.expect(attempt, incarnations)

    def spend(self, ticket: Ticket) -> None:
        """Refuse all tickets of this scope that are older than `ticket`, as recovery must."""
        self._warden.spend(ticket.key)

    def admit(self, ticket: Ticket | None) -> None:
        """Let generation pass for the rest of the ticket's epoch.

        Raises:
            EngineRefused: the ticket does not allow generation.
        """
        self._open("admit", ticket)

    def _open(self, call: str, ticket: Ticket | None) -> None:
        shuts = self._shuts
        self.check(call, "generate", ticket)
        with self._lock:
            # The fence may have answered late; who shut the engine meanwhile has the last word.
            if shuts != self._shuts:
                raise EngineRefused(
                    f"{self._name} cannot {call}: it has been shut since it was asked"
                )
            if ticket is not None:
                # Not the floor, which another thread may have raised above this ticket by now.
                self._open_at = Floor(ticket.key.attempt, ticket.epoch)
            elif not self.is_open:
                self._open_at = self.floor

    def shut(self, *, released: bool = False) -> None:
        """Let no generation pass without a ticket of its own.

        Where memory is `released`, tickets that mapped it before do not map it again.
        """
        with self._lock:
            self._shuts += 1
            self._open_at = None
        if released:
            self._warden.give_up()

    def check(self, call: str, wanted: str | None, ticket: Ticket | None) -> None:
        """Pass, or say why not.

        Raises:
            EngineRefused: `ticket` does not allow `wanted`, which `call` asks for.
        """
        if wanted is None or (wanted == "generate" and ticket is None and self.is_open):
            return
        if (reason := self._warden.refusal(wanted, ticket)) is not None:
            raise EngineRefused(f"{self._name} cannot {call}: {reason}")

    def remove(self) -> None:
        """Take the guard off again; the engine is as it was."""
        for owner, name, was in reversed(self._undo):
            if was is _GUARD:
                delattr(owner, name)
            else:
                setattr(owner, name, was)
        self._undo.clear()

    def put_on(self, engine: object) -> None:
        """Wrap the methods of `engine`, and of the objects that its own wake goes through."""
        try:
            self._put(engine, _GUARD, self)
            self._wrap(engine, (*_ASKS, *_SHUTS))
            inner: Any = engine
            while (
                inner := next(filter(None, (_attribute(inner, n) for n in _INNER)), None)
            ) is not None:
                self._wrap(inner, (*_INNER_ASKS, *_SHUTS))
        except BaseException:
            self.remove()
            raise
        self._unknown = tuple(
            name
            for name in dir(type(engine))
            if not name.startswith("_")
            and callable(inspect.getattr_static(type(engine), name))
            and name not in {*_ASKS, *_SHUTS}
            and not (_CONTROLS.match(name) or _CONTROL_METHODS.match(name))
        )

    def _wrap(self, owner: object, names: Iterable[str]) -> None:
        for name in names:
            method = getattr(owner, name, None)
            if callable(method):
                self._put(owner, name, self._wrapped(name, method))

    def _put(self, owner: object, name: str, value: object) -> None:
        # `_GUARD` stands for "it had none of its own", since None may be one.
        was = vars(owner).get(name, _GUARD)
        setattr(owner, name, value)
        self._undo.append((owner, name, was))

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check one call, and take the ticket, which the engine does not know, out of it."""
        ticket = kwargs.pop("ticket", None)
        if _passing.get():
            return
        if name in _SHUTS:
            self.shut(released=name in _RELEASES and _level(args, kwargs) != 0)
        elif name in _ADMITS:
            self._open(name, ticket)
        else:
            self.check(_shown(name, args, kwargs), _ASKS[name](args, kwargs), ticket)

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def guarded(*args: Any, **kwargs: Any) -> Any:
                self._before(name, args, kwargs)
                token = _passing.set(True)
                try:
                    return await method(*args, **kwargs)
                finally:
                    _passing.reset(token)

            return guarded
        if inspect.isasyncgenfunction(method):

            @functools.wraps(method)
            def streamed(*args: Any, **kwargs: Any) -> Any:
                self._before(name, args, kwargs)
                return _streamed(method(*args, **kwargs))

            return streamed

        @functools.wraps(method)
        def plain(*args: Any, **kwargs: Any) -> Any:
            self._before(name, args, kwargs)
            token = _passing.set(True)
            try:
                answer = method(*args, **kwargs)
            finally:
                _passing.reset(token)
            # A decorated method may not look like what it returns.
            return _passed(answer)

        return plain


def _passed(answer: Any) -> Any:
    """What a method returned; if it is yet to be awaited, its own calls pass meanwhile."""
    if isinstance(answer, AsyncGenerator):
        return _streamed(answer)
    if not inspect.iscoroutine(answer):
        return answer

    async def awaited() -> Any:
        token = _passing.set(True)
        try:
            return await answer
        finally:
            _passing.reset(token)

    return awaited()


async def _streamed(answers: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """What an engine yields; each time it is asked, its own calls of itself pass."""
    try:
        while True:
            token = _passing.set(True)
            try:
                answer = await anext(answers)
            except StopAsyncIteration:
                return
            finally:
                _passing.reset(token)
            yield answer
    finally:
        await answers.aclose()


def _attribute(owner: object, name: str) -> Any:
    return getattr(owner, name, None)


def _shown(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    if _ASKS[name] is _generate:
        return name
    told = [repr(value) for value in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{name}({', '.join(told)})"[:200]


def guard(
    engine: object,
    *,
    run: str,
    scope: str,
    verdicts: Verdicts,
    fences: Mapping[str, tuple[str, ...]] = GUARDED,
    floor: Floor = GROUND,
) -> Guard:
    """Make `engine` refuse what has no valid ticket, whoever calls it.

    Call it in the process that owns the engine, before anybody else has the object. `scope` is the
    engine's replica, `replica/3`; `verdicts` reads the verdict of a fence instance from its
    transport. `fences` names the fences whose tickets allow each tag, and `generate`: as in
    `colocated`, where weights need none, and KV one of `memory_released` or, in recovery, `let_go`.

    Raises:
        EngineRefused: the engine has a guard already.
        EngineError: it is no engine, or only a handle of one that lives in another process.
    """
    name = f"{type(engine).__name__} of {scope}"
    wakes = [getattr(engine, call, None) for call in ("wake_up", "resume_memory_occupation")]
    if any(hasattr(wake, "remote") for wake in wakes):
        raise EngineError(
            f"{name} is a handle; others have handles of their own. Call guard() inside the actor, "
            "on the engine that it holds"
        )
    if not any(map(callable, wakes)):
        raise EngineError(
            f"{name} has no wake_up() to guard; give the engine object itself, in the process that "
            "owns it. A server is guarded by GuardMiddleware"
        )
    if getattr(engine, _GUARD, None) is not None:
        raise EngineRefused(f"{name} has a guard already; two would each see half of the tickets")
    new = Guard(
        TicketRules(run=run, scope=scope, verdicts=verdicts, fences=fences), floor=floor, name=name
    )
    new.put_on(engine)
    return new


Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_HTTP_ASKS: Mapping[str, str] = {
    "/wake_up": "tags",
    "/resume_memory_occupation": "body",
    "/resume_memory": "body",
    "/collective_rpc": "rpc",
    "/resume": "generate",
    "/continue_generation": "generate",
}
# What an engine object has besides, that generates nothing and maps nothing.
_CONTROL_METHODS = re.compile(
    r"(add_lora|check|checkpoint_prepare|compute|do_log|from|handle_fault|list_loras|notify|pin_lora|remove_lora"
    r"|wait_for_requests)(_|$)"
)
# How the last word of a route begins that sets or tells something and generates nothing.
_CONTROLS = re.compile(
    r"(abort|apply|attach|begin|cancel|clear|close|collective|configure|count|derender|destroy|detach"
    r"|detokenize|dump|end|fault_tolerance|finish|flush|freeze|get|health|init|is|load|open|parse"
    r"|pause|ping|profile|register|release|remote|render|reset|scale|send|separate|server|set"
    r"|shutdown|sleep|slow|start|stop|tokenize|unload|update|version|weight)(_|$)"
)
# Read, and yet one token is generated.
_HTTP_GENERATES = frozenset({"/health_generate"})
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_IN_BODY = frozenset({"body", "rpc"})
_HTTP_ADMITS = frozenset({"/resume", "/continue_generation"})
_HTTP_RELEASES = frozenset(
    {
        "/sleep",
        "/release_kv_cache_memory",
        "/release_memory_occupation",
        "/release_memory",
    }
)
_HTTP_SHUTS = _HTTP_RELEASES | {"/pause", "/pause_generation"}


class GuardMiddleware:
    """The guard of an engine behind HTTP: ASGI middleware in the server's own process.

    Subclass it with `rules` set and name the subclass to the server, as in
    `--middleware my_run.guards.ReplicaGuard`. A route that is not known to leave the engine alone
    is taken for generation, and so is a WebSocket; `passes` names routes of your own that are
    neither. There must be one such process: several API servers over one engine
    (`--api-server-count`, as many as data-parallel ranks) would each have a floor of their own.
    `POST /phasesync/floor` raises the floor, and tells of ranks that were replaced where
    it names `incarnations`: `{"trainer/0": 1}`.
    """

    rules: ClassVar[TicketRules]
    passes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, app: App) -> None:
        self._app = app
        self._guard = Guard(self.rules, name=f"server of {self.rules.scope}")
        # The fence may answer late, and a server's event loop has others to serve meanwhile.
        self._asking = CallThread("phasesync-guard")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", ""))).rstrip("/")
        if path == FLOOR_PATH and scope["type"] == "http":
            await self._floor(scope, receive, send)
            return
        if path in _HTTP_SHUTS:
            asked = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
            at_rest = path == "/sleep" and asked.get("level") == ["0"]
            self._guard.shut(released=path in _HTTP_RELEASES and not at_rest)
        how = self._how(path, scope)
        body = b""
        if how in _IN_BODY:
            body = await _body(receive)
            receive = _again(body, receive)
        try:
            await self._check(path, how, scope, body)
        except (EngineRefused, ValueError) as refused:
            await _refuse(send, scope, str(refused))
            return
        await self._app(scope, receive, send)

    def _how(self, path: str, scope: Scope) -> str | None:
        """Where a request says what it wants, `generate` if it wants that, and None for neither."""
        if scope["type"] == "websocket":
            return "generate"
        if (how := _HTTP_ASKS.get(path)) is not None:
            return how
        if path in _HTTP_GENERATES:
            return "generate"
        last = path.rpartition("/")[2].replace("-", "_")
        leaves_alone = scope["method"] in _READS or path in self.passes or _CONTROLS.match(last)
        return None if leaves_alone else "generate"

    async def _check(self, path: str, how: str | None, scope: Scope, body: bytes) -> None:
        if how is None:
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        told = headers.get(TICKET_HEADER.encode("ascii"))
        ticket = None if told is None else parse_ticket(told)
        call = f"{scope.get('method', 'WebSocket')} {path}"
        wanted = _asked(how, scope["query_string"], body)

        def decide() -> None:
            if path in _HTTP_ADMITS:
                self._guard.admit(ticket)
            else:
                self._guard.check(call, wanted, ticket)

        if ticket is None:
            decide()
        else:
            await self._asking.run(decide)

    async def _floor(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            try:
                told = wire.decode(await _body(receive))
                attempt = int(told["attempt"])
                now = told.get("incarnations", {}).items()
                self._guard.expect(attempt, {Rank.parse(rank): int(each) for rank, each in now})
                self._guard.raise_floor(Floor(attempt, int(told["epoch"])))
            except (wire.JsonError, AttributeError, KeyError, TypeError, ValueError):
                await _answer(send, 422, _refused('send {"attempt": 0, "epoch": 7}'))
                return
        await _answer(send, 200, self._guard.floor._asdict())


def _asked(how: str, query: bytes, body: bytes) -> str | None:
    match how:
        case "tags":
            return _woken(urllib.parse.parse_qs(query.decode("latin-1")).get("tags"))
        case "body":
            return _woken((_json(body) or {}).get("tags"))
        case "rpc":
            # What cannot be read here may well be read by the engine, as a wake.
            told = _json(body)
            return KV_CACHE if told is None else _rpc((told.get("method"),), told)
        case _:
            return "generate"


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        value = wire.decode(body or b"{}")
    except wire.JsonError:
        return None
    return value if isinstance(value, dict) else None


async def raise_floor_at(http: Http, floor: Floor) -> None:
    """Tell the guard of a server; one without its middleware has no such route, and no floor.

    Raises:
        EngineError: the guard is there and did not raise its floor.
    """
    reply = await http.call("POST", FLOOR_PATH, body=floor._asdict(), aside=True)
    if not reply.ok and reply.status not in (404, 405):
        raise EngineError(f"the guard's floor was not raised: {reply.why}")


def _refused(message: str) -> dict[str, Any]:
    return {"error": {"type": "EngineRefused", "message": message}}


async def _refuse(send: Send, scope: Scope, why: str) -> None:
    if scope["type"] == "websocket":  # Closed before it was accepted: the client sees a 403.
        await send({"type": "websocket.close", "code": 1008, "reason": why[:120]})
    else:
        await _answer(send, 409, _refused(why))


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = wire.encode(content)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode("ascii")),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
