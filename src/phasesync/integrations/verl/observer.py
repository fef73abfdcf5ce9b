"""Observe: verl's own body, untouched, and a journal of what it did.

It never waits for anybody and never fails the job. The body runs on a view of the worker that
passes everything through and notes the calls that are phases of the protocol. Fences are written
down as the caller's own: no ticket stands behind them, so an audit judges the order by the clocks.
What must survive edits: whatever is wrong with phasesync, its journal or its view of the worker,
verl's body runs, once, and what it returns and raises is the answer.
"""

import inspect
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar

from phasesync.core.plan import PLAN, Act, Plan, Step, Wait, resolve
from phasesync.integrations.verl.place import (
    TorchDevice,
    meeting,
    options_of,
    replicas,
    run_name,
)
from phasesync.integrations.verl.settings import Settings
from phasesync.journal import Journal
from phasesync.runtime import DevicePort, HostDevice
from phasesync.runtime.agreeing import write_plan
from phasesync.spec import load

__all__ = ("ManagerObserver", "Observer")

T = TypeVar("T")

_PROTOCOL = "verl_stock"
_DRIVER_JOINS = frozenset(("updated", "rollout_over", "asleep", "served"))
_FLEET = "disagg_broadcast"
#: Phases that are calls of Ray's, which nobody sees; where the second begins is seen.
_UNSEEN = ("transfer", "finalize")
#: The manager's calls that are phases.
_STEPS = {
    "abort_replicas": "pause",
    "release_kv_cache_replicas": "release_kv",
    "resume_kv_cache_replicas": "resume_kv",
    "resume_generation_replicas": "resume_generation",
}


class Observer:
    """One worker's syncs as verl makes them, written down."""

    def __init__(self, worker: Any, stock: Any, module: ModuleType, settings: Settings) -> None:
        self._worker = worker
        self._stock = stock
        self._module = module
        self._settings = settings
        self._notes: _Notes | None = None
        self._blind = False

    async def update_weights(self, global_steps: Any) -> Any:
        """verl's own sync; whatever it does and raises is verl's."""
        seen = self._look()
        if seen is None:
            return await self._stock(self._worker, global_steps=global_steps, mode="naive")
        view, notes = seen
        with notes.epoch():
            return await self._stock(view, global_steps=global_steps, mode="naive")

    def _look(self) -> "tuple[_WorkerView, _Notes] | None":
        """The worker as it is watched, and where it is written down; None where that cannot be."""
        if self._blind:
            return None
        try:
            notes = self._notes = self._notes or self._open()
            return _WorkerView(self._worker, notes), notes
        except Exception as error:
            self._blind = True
            _say_blind(error)
            return None

    def _open(self) -> "_Notes":
        rank, ranks, store = meeting(self._worker, self._settings, waits=False)
        groups = replicas(self._worker, ranks)
        protocol = load(_PROTOCOL)
        known = {option.name for option in protocol.options}
        given = {**options_of(self._worker, groups), **self._settings.options}
        options = {name: value for name, value in given.items() if name in known}
        plan = resolve(protocol, ranks, options, groups={"replica": groups})
        device = TorchDevice(self._module, rank)
        run = run_name(self._settings, store, alone=ranks == 1)
        return _Notes(plan, rank, run, device, self._settings, ends_before="updated")


class ManagerObserver:
    """The driver's disaggregated syncs as verl makes them, written down."""

    def __init__(self, manager: Any, stock: Any, settings: Settings, run: str) -> None:
        self._manager = manager
        self._stock = stock
        self._settings = settings
        self._run = run
        self._notes: _Notes | None = None
        self._blind = False

    async def update_weights(self, global_steps: Any) -> Any:
        """verl's own sync; whatever it does and raises is verl's."""
        seen = self._look()
        if seen is None:
            return await self._of(self._manager, global_steps)
        view, notes = seen
        with notes.epoch():
            return await self._of(view, global_steps)

    async def _of(self, manager: Any, global_steps: Any) -> Any:
        answer = self._stock(manager, global_steps=global_steps)
        return await answer if inspect.isawaitable(answer) else answer

    def _look(self) -> "tuple[_View, _Notes] | None":
        if self._blind:
            return None
        try:
            notes = self._notes = self._notes or self._open()
            manager = self._manager
            steps = {
                name: _noted_async(getattr(manager, name), notes, lambda phase=phase: (phase,))
                for name, phase in _STEPS.items()
            }
            connect = _noted(manager.build_process_group, notes, "connect")
            name = "actor_wg" if hasattr(manager, "actor_wg") else "trainer"  # verl 0.8
            actors = _senders(getattr(manager, name), notes)
            return _View(manager, build_process_group=connect, **steps, **{name: actors}), notes
        except Exception as error:
            self._blind = True
            _say_blind(error)
            return None

    def _open(self) -> "_Notes":
        plan = resolve(load(_FLEET), 1, {})
        device = HostDevice(f"{socket.gethostname()}/cpu0")
        return _Notes(
            plan, 0, self._run, device, self._settings, ends_before="serve", unseen=_UNSEEN
        )


class _Notes:
    """The journal of one rank that is watched: where it stands in its program, and its lines."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        run: str,
        device: DevicePort,
        settings: Settings,
        *,
        ends_before: str,
        unseen: tuple[str, ...] = (),
    ) -> None:
        self._plan = plan
        self._unseen = unseen
        self._ends_before = ends_before
        self._steps = plan.programs[rank]
        self._at = 0
        self._epoch = 0
        self._generations: dict[int, int] = {}
        self._blind = False
        self._device = device
        self._journal = Journal(
            settings.folder,
            run=run,
            rank=plan.members[rank],
            ranks=len(plan.members),
            device=device.name,
            fsync=settings.fsync,
        )
        self._journal.bind(attempt=0, protocol=plan.protocol.name, digest=plan.digest)
        self._journal.write("rank.start", mode="observe")
        self._fence(Wait(PLAN, plan.world, 0.0, (), (), False), epoch=0)
        write_plan(self._journal, plan, caller_joins=True)

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """One call of the body, and what the program around it has done since the last one."""
        self._quietly(self._begin)
        try:
            yield
        except BaseException as error:
            said = _said(error)
            self._quietly(lambda: self._has_failed(said))
            raise
        self._quietly(self._is_over)

    def _has_failed(self, said: dict[str, str]) -> None:
        step = self._steps[self._at]
        if isinstance(step, Act) and step.phase in self._unseen:
            self._journal.write("phase.start", phase=step.phase, caller="outside")
            self._journal.write("phase.fail", level="error", phase=step.phase, **said)
        self._journal.write("epoch.end", level="error", **said)

    def reached(self, phase: str) -> None:
        """What nobody sees begins, and what was before it is done."""
        self._quietly(lambda: self._pass_by(self._first_of(phase)))

    def _begin(self) -> None:
        if self._epoch:
            self._pass_by(len(self._steps))
        self._at = 0
        self._epoch += 1
        self._journal.bind(epoch=self._epoch, version=self._epoch)
        self._journal.write("epoch.begin")

    def _is_over(self) -> None:
        self._pass_by(self._end_of_call())
        self._journal.write("epoch.end")

    @contextmanager
    def phase(self, *names: str) -> Iterator[None]:
        """A call of the body that is one of these phases, whichever is next; or none of them."""
        step = self._quietly(lambda: self._start(names))
        try:
            yield
        except BaseException as error:
            if step is not None:
                said = {"phase": step.phase, **_said(error)}
                self._quietly(lambda: self._journal.write("phase.fail", level="error", **said))
            raise
        if step is not None:
            self._quietly(lambda: self._is_through(step))

    def _start(self, names: Iterable[str]) -> Act | None:
        found = next((at for at in map(self._first_of, names) if self._at <= at), None)
        if found is None or found == len(self._steps):
            return None
        self._pass_by(found)
        step = self._steps[found]
        assert isinstance(step, Act)
        self._journal.write("phase.start", phase=step.phase)
        return step

    def _is_through(self, step: Act) -> None:
        self._end(step)
        self._at += 1

    def _quietly(self, note: Callable[[], T]) -> T | None:
        """Write something down; what goes wrong with that ends the watching, not the job."""
        if self._blind:
            return None
        try:
            return note()
        except Exception as error:
            self._blind = True
            _say_blind(error)
            return None

    def _first_of(self, name: str) -> int:
        names = [step.phase if isinstance(step, Act) else "" for step in self._steps]
        return names.index(name) if name in names else len(self._steps)

    def _end_of_call(self) -> int:
        """The first step that is the caller's again."""
        names = [str(step.phase if isinstance(step, Act) else step.fence) for step in self._steps]
        return names.index(self._ends_before)

    def _pass_by(self, until: int) -> None:
        """What lies between is done: its phases by the body, unseen, its fences by nobody."""
        for step in self._steps[self._at : until]:
            self._note(step)
        self._at = max(self._at, until)

    def _note(self, step: Step) -> None:
        if isinstance(step, Wait):
            self._fence(step)
            return
        self._journal.write("phase.start", phase=step.phase, caller="outside")
        self._end(step, caller="outside")

    def _end(self, step: Act, **fields: Any) -> None:
        self._journal.write(
            "phase.end", phase=step.phase, free_bytes=self._device.free_bytes(), **fields
        )

    def _fence(self, wait: Wait, **fields: Any) -> None:
        generation = self._generations.get(wait.scope, 0)
        self._generations[wait.scope] = generation + 1
        where: dict[str, Any] = {
            "fence": wait.fence,
            "scope": self._plan.scopes[wait.scope].name,
            "generation": generation,
            "caller": "outside",
            **fields,
        }
        self._journal.write("fence.arrive", status="ok", **where)
        # The driver's joins are joins; inside verl's body nobody is known to wait.
        members = self._plan.scopes[wait.scope].members
        joined = len(members) if wait.fence in _DRIVER_JOINS else None
        self._journal.write("fence.pass", joined=joined, **where)


def _say_blind(error: Exception) -> None:
    why = f"phasesync cannot observe ({type(error).__name__}: {error}); verl runs as it is"
    with suppress(RuntimeWarning):  # Not even where warnings are errors.
        warnings.warn(why, RuntimeWarning, stacklevel=3)


def _said(error: BaseException) -> dict[str, str]:
    return {"error_type": type(error).__name__, "error": str(error) or repr(error)}


class _View:
    """Another object as it is: what is read, called and set reaches it; some calls are noted."""

    def __init__(self, of: Any, **instead: Any) -> None:
        object.__setattr__(self, "_of", of)
        object.__setattr__(self, "_instead", instead)

    def __getattr__(self, name: str) -> Any:
        instead = object.__getattribute__(self, "_instead")
        if name in instead:
            return instead[name]
        return getattr(object.__getattribute__(self, "_of"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_of"), name, value)


class _WorkerView(_View):
    """A worker whose rollout and engine are seen at work."""

    def __init__(self, worker: Any, notes: _Notes) -> None:
        rollout, engine = worker.rollout, worker.actor.engine
        super().__init__(
            worker,
            rollout=_View(
                rollout,
                resume=_noted_async(
                    rollout.resume,
                    notes,
                    lambda **call: (
                        ("resume_kv", "meet_kv")
                        if "kv_cache" in call.get("tags", ())
                        else ("resume_weights", "meet_weights")
                    ),
                ),
                update_weights=_noted_async(
                    rollout.update_weights,
                    notes,
                    lambda **call: ("feed",) if call.get("base_sync_done") else ("ensure_base",),
                ),
            ),
            actor=_View(
                worker.actor,
                engine=_View(
                    engine,
                    get_per_tensor_param=_noted(engine.get_per_tensor_param, notes, "stage"),
                    to=_noted(engine.to, notes, "offload"),
                ),
            ),
        )


def _senders(actors: Any, notes: _Notes) -> _View:
    """The trainers' worker group: with the first call to finalize the transfer is over."""

    def execute(method: Any, *arguments: Any, **named: Any) -> Any:
        if "finalize" in method:
            notes.reached("finalize")
        return actors.execute_checkpoint_engine(method, *arguments, **named)

    return _View(actors, execute_checkpoint_engine=execute)


def _noted(call: Callable[..., Any], notes: _Notes, phase: str) -> Callable[..., Any]:
    def seen(*arguments: Any, **named: Any) -> Any:
        with notes.phase(phase):
            return call(*arguments, **named)

    return seen


def _noted_async(
    call: Callable[..., Awaitable[Any]],
    notes: _Notes,
    phases: Callable[..., tuple[str, ...]],
) -> Callable[..., Awaitable[Any]]:
    async def seen(*arguments: Any, **named: Any) -> Any:
        with notes.phase(*phases(**named)):
            return await call(*arguments, **named)

    return seen
