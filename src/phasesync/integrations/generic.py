"""Any code base: a body that exists becomes phases without being rewritten.

    @phasesync.protocol("colocated", rank=rank, ranks=ranks, fences=fences)
    async def sync(engine):
        async with phasesync.phase("stage"):
            ...
        async with phasesync.phase("load") as mine:
            if mine:
                ...

Code stays where it is. On the way into a block, what the protocol wants before it is waited for.
A block is entered on every rank: one of the leader's alone asks what it was given, as above.
What must survive edits: the body runs in its own order, a block out of order is refused before it
runs, and a body that raises has arrived as failed wherever it is awaited.
"""

import ast
import asyncio
import functools
import inspect
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from phasesync.core.plan import Act
from phasesync.core.protocol import Protocol
from phasesync.errors import EpochOrderError, PlanError
from phasesync.runtime import RankRunner, Turn
from phasesync.spec import load

__all__ = ("Body", "check_body", "phase", "protocol")

P = ParamSpec("P")
T = TypeVar("T")
_here: ContextVar["_Epoch | None"] = ContextVar("phasesync_epoch", default=None)


def protocol(
    name: Protocol | str, **runner: Any
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], "Body[P, T]"]:
    """Make each call of an async body one epoch of a protocol, a block a phase.

    `runner` are arguments of `RankRunner`. What is known only when the job runs is given as a
    function of no arguments, which is called once, at the first epoch. Phases that have no block,
    those of `recover` among them, are bound with `actions=`. What lies before and after the body
    is the caller's, unless `caller_joins=False`.

    On a method every object has a runner of its own, and a function that takes an argument is given
    the object: `rank=lambda self: self.rank`.

    Raises:
        PlanError: what stands below is no `async def`.
    """

    def decorate(body: Callable[P, Coroutine[Any, Any, T]]) -> Body[P, T]:
        return Body(name, body, runner)

    return decorate


@asynccontextmanager
async def phase(name: str) -> AsyncIterator[Turn | None]:
    """One phase of the epoch whose body this is in; gives the turn, which has the ticket.

    None where the phase is another rank's (`by: leader`), or off under the plan's options.

    Raises:
        EpochOrderError: there is no such body, or the protocol wants another phase first.
        EpochFailed: a fence before the phase broke; the same root cause on every rank.
    """
    epoch = _here.get()
    if epoch is None:
        raise EpochOrderError(
            f"phase {name!r} stands outside; it belongs into a body under @phasesync.protocol(...)"
        )
    turn = await epoch.enter(name)
    if turn is None:
        yield None
        return
    try:
        yield turn
    except BaseException as error:
        epoch.leave(error)
        raise
    epoch.leave(None)


class Body(Generic[P, T]):
    """A body under a protocol. Its runner is made at the first call; `close` ends it."""

    def __init__(
        self,
        declared: Protocol | str,
        body: Callable[P, Coroutine[Any, Any, T]],
        runner: dict[str, Any],
        of: Any = None,
    ) -> None:
        is_method = isinstance(body, staticmethod | classmethod)
        if is_method or not inspect.iscoroutinefunction(inspect.unwrap(body)):
            raise PlanError(
                f"{getattr(body, '__qualname__', body)} is no coroutine function; "
                "@phasesync.protocol stands on an `async def` that awaits and does not yield, "
                "below @staticmethod and @classmethod"
            )
        functools.update_wrapper(self, body)
        self.protocol = load(declared) if isinstance(declared, str) else declared
        self.body = body
        self._arguments = runner
        self._of = of
        self._bound: dict[int, Body[Any, Any]] = {}
        self._runner: RankRunner | None = None
        self._epoch: _Epoch | None = None
        self._calls = 0

    def __get__(self, of: Any, owner: type | None = None) -> "Body[Any, Any]":
        """The body of one object, which is kept as long as this is: it has a runner."""
        if of is None:
            return self
        if id(of) not in self._bound:
            body = functools.update_wrapper(functools.partial(self.body, of), self.body)
            self._bound[id(of)] = Body(self.protocol, body, self._arguments, of)
        return self._bound[id(of)]

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """One epoch.

        Raises:
            EpochFailed: it failed somewhere; where the body raised, that is its cause.
            EpochOrderError: the blocks are not in the protocol's order, one is missing, or another
                call is not over.
        """
        if self._calls:
            raise EpochOrderError(
                f"{self.__qualname__} is in an epoch that another call has begun; "  # type: ignore[attr-defined]
                "await that first"
            )
        self._calls += 1
        try:
            return await self._one_epoch(*args, **kwargs)
        finally:
            self._calls -= 1

    async def _one_epoch(self, *args: P.args, **kwargs: P.kwargs) -> T:
        runner = await self._ready()
        epoch = self._epoch = _Epoch(runner)
        token = _here.set(epoch)
        try:
            epoch.work = work = asyncio.create_task(self.body(*args, **kwargs))
        finally:
            _here.reset(token)
        epoch.run = run = asyncio.create_task(runner.run_epoch())
        try:
            await asyncio.wait((work, run), return_when=asyncio.FIRST_COMPLETED)
            if run.done() and run.exception() is not None:
                work.cancel()
            if work.done():
                epoch.end(None if work.cancelled() else work.exception())
            await asyncio.wait((work, run))
        finally:
            await _stopped(work, run)
        if epoch.order is not None:
            raise epoch.order
        run.result()
        return work.result()

    async def close(self) -> None:
        """Say goodbye in the journal and leave nothing behind."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()

    async def _ready(self) -> RankRunner:
        if self._runner is None:
            given = {
                name: self._given(value) if callable(value) and name != "mono_ns" else value
                for name, value in self._arguments.items()
            }
            blocks = {name: functools.partial(self._perform, name) for name in self._blocks()}
            actions = {**blocks, **given.pop("actions", {})}
            runner = RankRunner(
                self.protocol, **{"caller_joins": True, **given, "actions": actions}
            )
            await runner.start()
            self._runner = runner
        return self._runner

    def _given(self, value: Callable[..., Any]) -> Any:
        return value(self._of) if inspect.signature(value).parameters else value()

    def _blocks(self) -> list[str]:
        """The phases that blocks perform: all that are not outside, and those that have one."""
        named = {block.phase for block in blocks_of(self.body)}
        return [
            step.name for step in self.protocol.phases if not step.outside or step.name in named
        ]

    async def _perform(self, name: str, turn: Turn) -> None:
        assert self._epoch is not None
        await self._epoch.perform(name, turn)


class _Epoch:
    """Where the runner and the body meet: the runner offers a phase, the body's block takes it."""

    work: "asyncio.Task[Any]"
    run: "asyncio.Task[Any]"

    def __init__(self, runner: RankRunner) -> None:
        index = runner.plan.index(runner.rank)
        self._rank = runner.rank
        self._own = {step.phase for step in runner.plan.programs[index] if isinstance(step, Act)}
        self._known = [step.name for step in runner.protocol.phases]
        self._offer: tuple[str, Turn] | None = None
        self._offered = asyncio.Event()
        self._left: asyncio.Future[None] | None = None
        self._inside = ""  # The phase whose block is open.
        self._been: set[str] = set()
        self._ended = False
        self._error: BaseException | None = None
        self.order: EpochOrderError | None = None

    async def perform(self, name: str, turn: Turn) -> None:
        """As the runner's action: wait until the block of this phase is through."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise self._misplaced(f"the body of {self._rank} ended before phase {name!r}")
        self._left = asyncio.get_running_loop().create_future()
        self._offer = (name, turn)
        self._offered.set()
        try:
            await self._left
        except asyncio.CancelledError:
            # A peer failed: the block is cut off, and has ended before anybody hears so.
            await _stopped(self.work)
            raise

    async def enter(self, name: str) -> Turn | None:
        """As the body's block: wait until the protocol comes to this phase."""
        if name not in self._own:
            if name not in self._known:
                known = ", ".join(self._known)
                raise self._misplaced(f"no phase {name!r} in this protocol; phases are: {known}")
            return None
        if self._inside:
            raise self._refused(
                f"{self._rank} cannot enter {name!r} inside the block of {self._inside!r}; "
                "blocks stand one after another"
            )
        waits = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait((waits, self.run), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
        if self._offer is None:
            self.run.result()
            raise self._misplaced(f"{self._rank} cannot enter {name!r}: the epoch is over for it")
        offered, turn = self._offer
        if self._inside:  # Another task of the body was faster.
            raise self._refused(
                f"{self._rank} cannot enter {name!r} beside the block of {self._inside!r}; "
                "blocks stand one after another"
            )
        if offered != name:
            why = "again" if name in self._been else "yet"
            raise self._refused(
                f"{self._rank} cannot enter {name!r} {why}; next is phase {offered!r}"
            )
        self._inside = name
        return turn

    def _refused(self, why: str) -> EpochOrderError:
        """The error for a block that has no place here; the phase that is offered fails by it."""
        error = self._misplaced(why)
        self.leave(error)
        return error

    def leave(self, error: BaseException | None) -> None:
        """The block is through, or raised."""
        self._been.add(self._inside)
        self._inside = ""
        left, self._left, self._offer = self._left, None, None
        self._offered.clear()
        if left is None or left.done():
            return
        if error is None:
            left.set_result(None)
        else:
            left.set_exception(_plain(error))

    def end(self, error: BaseException | None) -> None:
        """The body is through, or raised: what the protocol still wants of it will not come."""
        self._ended = True
        self._error = None if error is None else _plain(error)
        if self._offer is not None:
            name = self._offer[0]
            self.leave(
                error or self._misplaced(f"the body of {self._rank} ended before phase {name!r}")
            )

    def _misplaced(self, why: str) -> EpochOrderError:
        self.order = self.order or EpochOrderError(why)
        return self.order


def _plain(error: BaseException) -> Exception:
    """An error that a future takes and a peer can be told of."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the body ended with {error!r}")


async def _stopped(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    open_ = [task for task in tasks if not task.done()]
    if open_:
        await asyncio.wait(open_)


# --- At test time -----------------------------------------------------------------------------


_COMPUTED = ""  # The name of a phase that the source does not say.


class _Block(NamedTuple):
    """A block in the source of a body; `given` is whether it takes what it is given, with `as`."""

    phase: str
    line: str
    given: bool


def check_body(body: Body[Any, Any]) -> None:
    """Hold the order of a body's blocks against its protocol, without running it.

    Branches (`if`, `match`, `except`) are alternatives: each is held against what stands before it.

    Raises:
        EpochOrderError: a block is unknown, out of order or missing, or is the leader's alone and
            does not ask whether it is this rank's; it names the line.
    """
    order = {str(step.name): at for at, step in enumerate(body.protocol.steps)}
    for way in _ways_of(body.body):
        last = -1
        for name, line, _ in way:
            if name not in (*order, _COMPUTED):
                known = ", ".join(step.name for step in body.protocol.phases)
                raise EpochOrderError(f"{line}: no phase {name!r}; phases are: {known}")
            if order.get(name, last) < last:
                before = body.protocol.steps[last].name
                raise EpochOrderError(f"{line}: phase {name!r} stands after {before!r}; swap them")
            last = order.get(name, last)
    blocks = list(blocks_of(body.body))
    leads = {step.name for step in body.protocol.phases if step.by is not None}
    for name, line, given in blocks:
        if name in leads and not given:
            raise EpochOrderError(
                f"{line}: phase {name!r} is the leader's alone, and this block runs on every rank; "
                f"write `async with phase({name!r}) as mine:` and ask `if mine:`"
            )
    seen = {block.phase for block in blocks}
    bound = body._arguments.get("actions", {})
    for step in body.protocol.phases:
        # A block whose phase is computed may be any of those that are not named.
        if _COMPUTED in seen or step.outside or step.when is not None:
            continue
        if not (step.name in seen or step.name in bound):
            raise EpochOrderError(
                f"{body.__name__}: no block for phase {step.name!r}; write "  # type: ignore[attr-defined]
                f"`async with phase({step.name!r}):`"
            )


def blocks_of(body: Callable[..., Any]) -> Iterator[_Block]:
    """The blocks in the source of a body, in the order of their lines."""
    known = {block.line: block for way in _ways_of(body) for block in way}
    return iter(known.values())


class _Way(NamedTuple):
    """A way through some statements: its blocks in order; `ends` where it leaves the body."""

    blocks: tuple[_Block, ...] = ()
    ends: bool = False


_WAYS_MAX = 256  # More are as many ways through one body as nobody writes on purpose.
_STRAIGHT = [_Way()]


def _ways_of(body: Callable[..., Any]) -> list[tuple[_Block, ...]]:
    """The ways through a body's source, each as its blocks in order."""
    body = inspect.unwrap(body)
    try:
        lines, first = inspect.getsourcelines(body)
    except (OSError, TypeError):
        return []
    where = f"{inspect.getsourcefile(body)}", first - 1
    tree = ast.parse(textwrap.dedent("".join(lines)))
    return list(dict.fromkeys(way.blocks for way in _through(tree.body, where)))


def _through(statements: Sequence[ast.AST], where: tuple[str, int]) -> list[_Way]:
    ways = _STRAIGHT
    for each in statements:
        if (more := _of_one(each, where)) != _STRAIGHT:
            ways = [
                new
                for way in ways
                for new in ([way] if way.ends else [_then(way, each) for each in more])
            ][:_WAYS_MAX]
    return list(dict.fromkeys(ways))


def _then(way: _Way, more: _Way) -> _Way:
    return _Way((*way.blocks, *more.blocks), more.ends)


def _of_one(node: ast.AST, where: tuple[str, int]) -> list[_Way]:
    """The ways through one statement; one that branches has several."""
    match node:
        case ast.Return() | ast.Raise():
            return [_Way(ends=True)]
        case ast.AsyncWith(items=items, body=inside):
            entered = _Way(tuple(_blocks_in(items, where)))
            return [_then(entered, way) for way in _through(inside, where)]
        case ast.If(body=then, orelse=other):
            return _either(_through(then, where), _through(other, where))
        case ast.Match(cases=cases):
            return _either(_STRAIGHT, *(_through(case.body, where) for case in cases))
        case ast.Try(body=tried, handlers=handlers, orelse=other, finalbody=final):
            caught = (_through(handler.body, where) for handler in handlers)
            ways = _either(_through([*tried, *other], where), *caught)
            last = _through(final, where)
            return [_Way((*way.blocks, *end.blocks), way.ends) for way in ways for end in last]
        case _:
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            return _through(inner, where)


def _either(*alternatives: list[_Way]) -> list[_Way]:
    return list(dict.fromkeys(way for ways in alternatives for way in ways))


def _blocks_in(items: Sequence[ast.withitem], where: tuple[str, int]) -> Iterator[_Block]:
    file, before = where
    for item in items:
        call = item.context_expr
        if isinstance(call, ast.Call) and _name_of(call.func) == "phase" and call.args:
            said = call.args[0]
            name = str(said.value) if isinstance(said, ast.Constant) else _COMPUTED
            line = f"{file}:{before + call.lineno}"
            yield _Block(name, line, item.optional_vars is not None)


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
