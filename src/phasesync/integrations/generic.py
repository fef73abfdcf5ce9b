"""Any code base: a body that exists becomes phases without being rewritten.

    @phasesync.protocol("colocated", rank=rank, ranks=ranks, fences=fences)
    async def sync(engine):
        async with phasesync.phase("stage"):
            ...
        async with phasesync.phase("load") as mine:
            if mine:
                ...

Code stays where it is. On the way into a block, what the protocol wants before it is waited for.
What must survive edits: the body runs in its own order, a block out of order is refused before it
runs, and a body that raises has arrived as failed wherever it is awaited.
"""

import ast
import asyncio
import functools
import inspect
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

from phasesync.core.plan import Act
from phasesync.core.protocol import Protocol
from phasesync.errors import EpochOrderError
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
    ) -> None:
        functools.update_wrapper(self, body)
        self.protocol = load(declared) if isinstance(declared, str) else declared
        self.body = body
        self._arguments = runner
        self._runner: RankRunner | None = None
        self._epoch: _Epoch | None = None

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """One epoch.

        Raises:
            EpochFailed: it failed somewhere; where the body raised, that is its cause.
            EpochOrderError: the blocks are not in the protocol's order, or one is missing.
        """
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
                name: value() if callable(value) and name != "mono_ns" else value
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

    def _blocks(self) -> list[str]:
        """The phases that blocks perform: all that are not outside, and those that have one."""
        named = {name for name, _ in blocks_of(self.body)}
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
        waits = asyncio.ensure_future(self._offered.wait())
        try:
            await asyncio.wait((waits, self.run), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
        if self._offer is None:
            self.run.result()
            raise self._misplaced(f"{self._rank} cannot enter {name!r}: the epoch is over for it")
        offered, turn = self._offer
        if offered != name:
            error = self._misplaced(
                f"{self._rank} cannot enter {name!r} yet; next is phase {offered!r}"
            )
            self.leave(error)
            raise error
        return turn

    def leave(self, error: BaseException | None) -> None:
        """The block is through, or raised."""
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


def check_body(body: Body[Any, Any]) -> None:
    """Hold the order of a body's blocks against its protocol, without running it.

    Raises:
        EpochOrderError: a block is unknown, out of order or missing; it names the line.
    """
    order = {str(step.name): at for at, step in enumerate(body.protocol.steps)}
    last = -1
    seen = set()
    for name, line in blocks_of(body.body):
        if name not in order:
            known = ", ".join(step.name for step in body.protocol.phases)
            raise EpochOrderError(f"{line}: no phase {name!r}; phases are: {known}")
        if order[name] < last:
            before = body.protocol.steps[last].name
            raise EpochOrderError(f"{line}: phase {name!r} stands after {before!r}; swap them")
        last = order[name]
        seen.add(name)
    bound = body._arguments.get("actions", {})
    for step in body.protocol.phases:
        if not (step.outside or step.when is not None or step.name in seen or step.name in bound):
            raise EpochOrderError(
                f"{body.__name__}: no block for phase {step.name!r}; write "  # type: ignore[attr-defined]
                f"`async with phase({step.name!r}):`"
            )


def blocks_of(body: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """The blocks in the source of a body, in order: phase, and `file:line`."""
    try:
        lines, first = inspect.getsourcelines(body)
    except (OSError, TypeError):
        return
    file = inspect.getsourcefile(body)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    found = [
        (call.lineno, call.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for call in (item.context_expr for item in node.items)
        if isinstance(call, ast.Call)
        and _name_of(call.func) == "phase"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    ]
    for line, name in sorted(found):
        yield str(name), f"{file}:{first + line - 1}"


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
