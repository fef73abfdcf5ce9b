"""What may be asked of a check: which faults, how much time and memory, which reductions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phasesync.core.kernel import Faults
from phasesync.errors import PlanError

__all__ = ("FAULTS", "Settings", "faults_of")

#: The faults that may be asked for, by name.
FAULTS: Mapping[str, Faults] = {
    "none": Faults(),
    "crash": Faults(most=1, crash=True),
    "fail": Faults(most=1, fail=True),
    "hang": Faults(most=1, hang=True, deadlines=True),
    "restart": Faults(most=1, crash=True, restart=True),
    "engine": Faults(most=1, engine=True),
    "lost": Faults(most=1, lost=True, deadlines=True),
    "again": Faults(most=1, again=True),
    "mixed": Faults(most=1, mixed=True),
}
_ONE_FAULT = "crash or fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to check. `now` is a clock in seconds; without it no time is measured or limited. `held`
    says how many bytes the process has; without it no memory is.

    `atomic` takes each phase as one step of explicit searches, as models of other checkers do:
    what two phases do to each other while both are in progress is not looked at then. `apart`
    gives each rank a device of its own, also where two roles would share one. `rest_s` is how long
    to go on once a rule is broken and the run that shows it is known; without it nothing is left
    out.
    """

    any_n: bool = True
    symmetry: bool = True
    reduction: bool = True
    atomic: bool = False
    apart: bool = False
    time_limit_s: float | None = None
    rest_s: float | None = None
    states_max: int = 3_000_000
    now: Callable[[], float] | None = None
    bytes_max: int = 2 << 30
    held: Callable[[], int] | None = None


def faults_of(names: str | None, most: int = 1) -> tuple[Faults, str]:
    """The faults that `names` lists, separated by commas, and how to say them.

    Raises:
        PlanError: a name is unknown.
    """
    if names is None:
        return Faults(most=most, crash=True, fail=True), _ONE_FAULT
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        if name not in FAULTS:
            raise PlanError(f"unknown fault {name!r}; faults are: {', '.join(FAULTS)}")
    chosen = [FAULTS[name] for name in listed]
    kinds = ("crash", "fail", "hang", "deadlines", "restart", "engine", "lost", "again", "mixed")
    faults = Faults(
        most=most if any(each.most for each in chosen) else 0,
        **{kind: any(getattr(each, kind) for each in chosen) for kind in kinds},
    )
    return faults, " or ".join(listed)
