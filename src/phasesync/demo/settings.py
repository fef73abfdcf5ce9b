"""What a demo is asked for, and the script that all its processes follow.

Everything a user can get wrong is refused here, in one line, before a process is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from phasesync.core.model import GroupName, Rank
from phasesync.core.plan import Act, Plan, resolve
from phasesync.core.protocol import Protocol
from phasesync.demo.budget import MIB
from phasesync.demo.ending import Ending
from phasesync.demo.variant import text_of, without_wait
from phasesync.errors import PlanError
from phasesync.spec import loads

__all__ = (
    "BACKENDS",
    "Backend",
    "DemoSettings",
    "Kill",
    "Script",
    "Sizes",
    "backend_of",
    "script_of",
)

#: Where each backend lives: it is imported when chosen, because torch takes seconds.
BACKENDS = {
    "inprocess": "phasesync.demo.inprocess",
    "ray": "phasesync.demo.ray",
    "torch": "phasesync.demo.processes",
}
RANKS_MAX = 16
EPOCHS_MAX = 100
FENCE = "memory_released"
PROTOCOL_FILE = "protocol.yaml"
SLOW_PHASE = "offload"
SLOW_S = 1.5
SLOW_UNFENCED_S = 4.0  # Never slept to its end: the refusal comes first.
KILL_EPOCH = 2  # The first epoch shows what a good one looks like.
ENGINE_PHASES = ("resume_weights", "load", "resume_kv", "serve", "rollout", "sleep")


class Sizes(NamedTuple):
    """Bytes of each thing on one device: KV fits once parameters and buffers are gone."""

    capacity: int
    params: int = 24 * MIB
    cache: int = 32 * MIB
    weights: int = 12 * MIB
    kv: int = 44 * MIB


#: In `basic` the engine keeps its weights, so that a device needs more room.
SIZES = {"colocated": Sizes(64 * MIB), "basic": Sizes(72 * MIB)}
#: What can order the ranks by accident where the fence is gone, as journals name it.
ACCIDENTS = {"all_reduce": "dist.all_reduce", "slow": "empty_cache"}
RESIDENT = {"basic": ("rollout_weights",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What a user asks for; ranks are written `[ROLE/]NUMBER`, a trainer by default."""

    protocol: str = "colocated"
    ranks: int = 4
    backend: str = "torch"
    break_fence: bool = False
    accident: str | None = None
    slow: str | None = None
    kill: str | None = None
    seed: int = 0
    epochs: int = 3
    runs: Path | None = None


class Kill(NamedTuple):
    """Who is killed, in which phase of which epoch."""

    rank: Rank
    phase: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A demo with everything settled; it goes to every process."""

    protocol: Protocol
    text: str
    plan: Plan
    sizes: Sizes
    devices: tuple[str, ...]
    run: str
    runs: Path
    backend: str
    seed: int
    epochs: int
    broken: bool
    accident: str | None
    slow: Rank | None
    slow_s: Mapping[Rank, float]
    kill: Kill | None

    @property
    def folder(self) -> Path:
        """Where the journals are."""
        return self.runs / self.run

    @property
    def shown(self) -> Path:
        """The folder as a user would type it here."""
        cwd = Path.cwd()
        return self.folder.relative_to(cwd) if self.folder.is_relative_to(cwd) else self.folder

    @property
    def protocol_file(self) -> Path:
        """The protocol that was run, kept beside its journals."""
        return self.folder / PROTOCOL_FILE

    @property
    def resident(self) -> tuple[str, ...]:
        """What an engine has mapped from its start to its end, outside the protocol."""
        return RESIDENT.get(self.protocol.name, ())

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, by number."""
        return dict(self.plan.groups)[GroupName("replica")]

    def replica_of(self, rank: Rank) -> int:
        return next(at for at, part in enumerate(self.replicas) if rank.number in part)


Backend: TypeAlias = Callable[[Script, Any], Ending]
"""Plays a script, and shows it on a View."""


def script_of(settings: DemoSettings, *, run: str, runs: Path, host: str) -> Script:
    """The script of a demo.

    Raises:
        PlanError: a setting is wrong; the message says what would be right.
    """
    _choice("backend", settings.backend, BACKENDS)
    _choice("protocol", settings.protocol, SIZES)
    _range("ranks", settings.ranks, 1, RANKS_MAX)
    _range("epochs", settings.epochs, 1, EPOCHS_MAX)
    text = text_of(settings.protocol)
    if settings.accident is not None:
        _accident(settings)
        text = without_wait(settings.protocol, FENCE, enqueued=True)
    elif settings.break_fence:
        text = without_wait(settings.protocol, FENCE)
    protocol = loads(text, f"{run}/{PROTOCOL_FILE}")
    plan = resolve(protocol, settings.ranks)
    broken = settings.break_fence or settings.accident is not None
    named = settings.slow or ("1" if broken else None)
    slow = None if named is None else _rank("slow", named, plan)
    kill = None if settings.kill is None else _kill(settings, plan)
    return Script(
        protocol=protocol,
        text=text,
        plan=plan,
        sizes=SIZES[settings.protocol],
        devices=tuple(f"{host}/cpu{number}" for number in range(settings.ranks)),
        run=run,
        runs=runs,
        backend=settings.backend,
        seed=settings.seed,
        epochs=settings.epochs,
        broken=broken,
        accident=settings.accident,
        slow=slow,
        slow_s=_delays(plan, slow, broken=broken and settings.accident is None),
        kill=kill,
    )


def _delays(plan: Plan, slow: Rank | None, *, broken: bool) -> dict[Rank, float]:
    """Who is slow, in seconds.

    Without the fence any replica may fail. Where the slow rank is not, leaders come after their
    peers, so that it is the slow rank's replica that fails.
    """
    if slow is None:
        return {}
    if not broken:
        return {slow: SLOW_S}
    parts = dict(plan.groups)[GroupName("replica")]
    leaders = [
        plan.members[part[0]] for part in parts if slow not in map(plan.members.__getitem__, part)
    ]
    return dict.fromkeys(leaders, SLOW_S) | {slow: SLOW_UNFENCED_S}


def backend_of(name: str) -> Backend:
    """The `play` of a backend; torch itself is imported when it plays.

    Raises:
        PlanError: torch is not installed, or not Ray where it is asked for.
    """
    if find_spec("torch") is None:
        raise PlanError("the demo trains a real model; it needs: pip install 'phasesync[torch]'")
    if name == "ray" and find_spec("ray") is None:
        raise PlanError("--backend ray needs: pip install 'phasesync[ray]'")
    play: Backend = import_module(BACKENDS[name]).play
    return play


def _choice(what: str, value: str, known: Mapping[str, object]) -> None:
    if value not in known:
        raise PlanError(f"the demo has no {what} {value!r}; it has: {', '.join(sorted(known))}")


def _range(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise PlanError(f"{what} is {value}; the demo takes {least} to {most}")


def _rank(option: str, text: str, plan: Plan) -> Rank:
    """The trainer or engine that `text` names."""
    known = (*plan.members, *plan.engines)
    try:
        rank = Rank.parse(text, role=plan.members[0].role)
    except ValueError as error:
        raise PlanError(f"--{option}: {error}") from None
    if rank not in known:
        raise PlanError(f"--{option}: there is no {rank}; there are: {', '.join(map(str, known))}")
    return rank


def _accident(settings: DemoSettings) -> None:
    _choice("accident", settings.accident or "", ACCIDENTS)
    if settings.protocol != "colocated" or settings.kill is not None:
        raise PlanError("--accident goes with --protocol colocated, and without --kill")
    if settings.accident == "all_reduce" and settings.backend == "inprocess":
        raise PlanError(
            "an all-reduce needs a process a rank; use --backend torch, or --accident slow"
        )


def _kill(settings: DemoSettings, plan: Plan) -> Kill:
    assert settings.kill is not None
    if settings.backend == "inprocess":
        raise PlanError("--kill needs a process to kill; use it with --backend torch")
    text, at, phase = settings.kill.rpartition("@")
    if not at:
        raise PlanError(f"--kill {settings.kill!r} names no phase; write RANK@PHASE: 3@offload")
    rank = _rank("kill", text, plan)
    does = _phases(plan, rank)
    if phase not in does:
        raise PlanError(f"--kill: {rank} is never in phase {phase!r}; it does: {', '.join(does)}")
    return Kill(rank, phase, min(KILL_EPOCH, settings.epochs))


def _phases(plan: Plan, rank: Rank) -> list[str]:
    """The phases in which `rank` has something to do; an engine does what its leader asks."""
    if rank in plan.engines:
        own = {step.phase for step in plan.programs[0] if isinstance(step, Act)}
        return [phase for phase in ENGINE_PHASES if phase in own]
    return [step.phase for step in plan.programs[plan.index(rank)] if isinstance(step, Act)]
