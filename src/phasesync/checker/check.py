"""`check`: which searches to run for a protocol, in which order, and what to say of them.

The default is what an author should know: safety for any number of ranks under every assignment
of the options that makes a difference, no deadlock up to four ranks with one fault at a time.
Whatever the budget did not reach is a case of its own that says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeGuard

from phasesync.checker.anyn import Mutate, counts, sized, tracked, unclosed
from phasesync.checker.choices import Choices, Options
from phasesync.checker.explicit import (
    behind_plan_fence,
    explore,
    judge,
    never_reached,
    smooth,
    told,
    vacuous,
)
from phasesync.checker.growth import growth
from phasesync.checker.report import NOT_NEEDED, SAFETY, Assignment, Case, Report
from phasesync.checker.search import TIME, Budget, Found
from phasesync.checker.settings import FAULTS, Settings, faults_of
from phasesync.checker.skeleton import bare
from phasesync.checker.widen import widened
from phasesync.core.kernel import Faults, Kind
from phasesync.core.model import OptionValue
from phasesync.core.plan import Plan, resolve, settle
from phasesync.core.protocol import Protocol
from phasesync.core.verdict import DEADLOCK, SOMETIMES, Holds, Undecided, Verdict, Violated
from phasesync.errors import PlanError

__all__ = ("check",)

#: Up to so many ranks are counted out before anything is guessed.
COUNTED_MAX = 4
ANY_TWO = Faults(most=2, crash=True, fail=True, deadlines=True)


class _Plain(NamedTuple):
    """One explicit search to be made."""

    ranks: int
    options: dict[str, OptionValue]
    faults: Faults
    said: str
    epochs: int
    extra: bool = False


def check(
    protocol: Protocol,
    *,
    ranks: int | None = None,
    options: Mapping[str, OptionValue] | None = None,
    faults: str | None = None,
    faults_most: int = 1,
    epochs: int | None = None,
    mutate: Mutate | None = None,
    mutation: str | None = None,
    settings: Settings | None = None,
) -> Report:
    """Whether the protocol is safe and free of deadlock, with a shortest run if it is not.

    `ranks`, `faults` and `epochs` bound the explicit searches where given; `options` pins
    options, the others take every value that makes a difference.

    Raises:
        PlanError: options, ranks or faults do not fit the protocol.
    """
    settle(protocol, options)
    run = _Run(protocol, dict(options or {}), mutate or _same, settings or Settings())
    run.explicit_bounds(ranks, faults, faults_most, epochs)
    run.all()
    lengths = run.lengths()
    return Report(
        protocol=protocol.name,
        cases=tuple(run.cases),
        mutation=mutation,
        reached=tuple(sorted(f"{kind} {name}".strip() for kind, name in run.reached)),
        lengths=lengths,
        elapsed_s=run.elapsed(),
    )


def _same(plan: Plan) -> Plan:
    return plan


class _Run:
    """One call of `check`: its bounds, and the cases so far."""

    def __init__(
        self,
        protocol: Protocol,
        pinned: dict[str, OptionValue],
        mutate: Mutate,
        settings: Settings,
    ) -> None:
        self.protocol = protocol
        self.pinned = pinned
        self.mutate = mutate
        self.settings = settings
        self.began = settings.now() if settings.now else None
        self.cases: list[Case] = []
        self.reached: set[tuple[Kind, str]] = set()
        self.plain: list[_Plain] = []
        self.asked = dict(settle(protocol, pinned))
        self.choices = Choices(protocol, pinned, mutate)
        self.later: list[Options] = []
        self.rest_from: float | None = None
        self.ranks_asked = False

    # ------------------------------------------------------------------------------ bounds

    def elapsed(self) -> float | None:
        if self.settings.now is None or self.began is None:
            return None
        return round(self.settings.now() - self.began, 3)

    def budget(self) -> Budget:
        limits = (
            (self.began, self.settings.time_limit_s),
            (self.rest_from, self.settings.rest_s),
        )
        until = min(
            (begin + most for begin, most in limits if begin is not None and most is not None),
            default=None,
        )
        return Budget(
            states_max=self.settings.states_max,
            until_s=until,
            now=self.settings.now,
            bytes_max=self.settings.bytes_max,
            held=self.settings.held,
        )

    def explicit_bounds(
        self, ranks: int | None, faults: str | None, most: int, epochs: int | None
    ) -> None:
        base: dict[str, OptionValue] = dict(settle(self.protocol, self.pinned))
        asked = faults_of(faults, most)
        self.ranks_asked = ranks is not None
        if ranks is not None:
            self.plain.append(_Plain(ranks, self.choices.fit(base, ranks), *asked, epochs or 2))
            if faults is None:
                hang = (FAULTS["hang"], "hang")
                self.plain.append(_Plain(ranks, self.choices.fit(base, ranks), *hang, epochs or 2))
            return
        self.plain = list(self._usual(base, asked, faults is None, epochs))

    def _usual(
        self,
        base: dict[str, OptionValue],
        asked: tuple[Faults, str],
        all_faults: bool,
        epochs: int | None,
    ) -> Iterator[_Plain]:
        """Two and three ranks with one fault for two epochs, four for one; four without any."""
        two = self.choices.fit(base, 2)
        yield _Plain(2, two, *asked, epochs or 2)
        if all_faults:
            yield _Plain(2, two, FAULTS["hang"], "hang", epochs or 2)
            yield _Plain(2, two, FAULTS["restart"], "crash and restart", epochs or 2)
        for fitted in self.choices.each_family(2):
            if fitted != two:
                yield _Plain(2, fitted, *asked, 1, extra=True)
        yield _Plain(4, self.choices.fit(base, 4), FAULTS["none"], "none", epochs or 2)
        yield _Plain(4, self.choices.fit(base, 4), *asked, epochs or 1)
        yield _Plain(3, self.choices.fit(base, 3), *asked, epochs or 2)

    # ------------------------------------------------------------------------------- cases

    def all(self) -> None:
        """What was asked for, any N first and then the fewest ranks; then all other options."""
        if not self.settings.any_n or self.settings.apart:
            for plain in self.plain:
                self._explicit(plain)
            self._sometimes()
            return
        reason = unclosed(self.protocol, self.asked, self.mutate)
        families_ = self.choices.families() if reason is None else ()
        for family in (each for each in families_ if self.asked in each):
            self._any(family)
        if reason is not None:
            self._note(self.asked, Undecided(bound=reason, states=0, depth=0))
        others = [each for each in families_ if self.asked not in each]
        sound = not any(isinstance(case.verdict, Violated) for case in self.cases)
        for family in others if sound else ():
            self._any(family)
        for plain in sorted(self.plain, key=lambda plain: plain.ranks):
            if not plain.extra:
                self._explicit(plain)
        for family in others if not sound else ():
            self._any(family)
        for plain in self.plain:
            if plain.extra:
                self._explicit(plain)
        for options in self.later:
            self._any((options,))
        self._sometimes()

    def _keep(self, case: Case, *, asked: bool = True) -> None:
        """One more case. Once a rule is broken, a search that is cut short is one that nobody
        needs; `asked` says whether this one is of as many ranks as were asked for, if any were."""
        if self.rest_from is not None and _timed_out(case.verdict):
            case = replace(case, verdict=replace(case.verdict, bound=NOT_NEEDED), extra=True)
        self.cases.append(case)
        broken = isinstance(case.verdict, Violated)
        if broken and self.rest_from is None and (asked or not self.ranks_asked):
            self.rest_from = self.settings.now() if self.settings.now else None

    def _left_out(self) -> bool:
        """Whether nothing more need be looked at, since a rule is broken and its run is known."""
        rest = self.settings.rest_s
        if self.rest_from is None or rest is None or self.settings.now is None:
            return False
        return self.settings.now() > self.rest_from + rest

    def _sometimes(self) -> None:
        """Where no search has said whether all that should happen can: one run that shows it, and
        where that does not, every run without faults."""
        for case in self.cases:
            match case.verdict:
                case Holds() if SOMETIMES in case.asks:
                    return
                case Violated(property=broken) if broken == SOMETIMES:
                    return
                case _:
                    pass
        asked = (plain for plain in self.plain if not plain.extra)
        most = max(asked, key=lambda plain: plain.ranks)
        plain = most._replace(faults=FAULTS["none"], said="none", epochs=1)
        before = self.elapsed()
        plan = self._plan(plain)
        if plan.defects:
            return
        seen = smooth(plan)
        self.reached |= seen.reached
        if never_reached(plan, seen):
            if (whole := self._search(plain, deadlocks=True)) is not None:
                self._keep(whole)
            return
        self._keep(
            Case(
                ranks=len(plan.members),
                options=_assignment(plain.options),
                faults=plain.said,
                epochs=1,
                asks=(SOMETIMES,),
                verdict=judge(seen),
                elapsed_s=self._since(before),
                plan=plan,
            )
        )

    def lengths(self) -> tuple[tuple[int, int | None], ...]:
        """If a rule is broken: how long the shortest run is at each size, as far as time allows."""
        broken = next((p for p in self.plain if self._breaks(p)), None)
        if broken is None:
            return ()
        if not any(self._faulty(case) for case in self.cases):
            broken = broken._replace(faults=FAULTS["none"])

        def plan_of(size: int) -> Plan:
            # Groups grow with the ranks, unless their size is pinned: else N says nothing.
            grown = self.choices.fit(broken.options, size)
            for name, value in sized(self.protocol, grown, size).items():
                grown = grown if name in self.pinned else {**grown, name: value}
            members = counts(self.protocol, size)
            devices = self._devices(members)
            return self.mutate(resolve(self.protocol, members, grown, devices=devices))

        if self.rest_from is not None and self.settings.now is not None:
            self.rest_from = self.settings.now()  # Its own share of the time.
        budget = self.budget()
        most = 3_000 if broken.faults.restart else 20_000  # Each asked of the kernel itself.
        few = replace(budget, states_max=min(budget.states_max, most))
        return growth(plan_of, broken.faults, broken.epochs, (2, 3, 4, 6), few)

    @staticmethod
    def _faulty(case: Case) -> bool:
        """Whether it takes a fault to break the rule."""
        path = case.verdict.path if isinstance(case.verdict, Violated) else ()
        return any(event.kind in (Kind.CRASH, Kind.FAIL, Kind.HANG) for event in path)

    def _breaks(self, plain: _Plain) -> bool:
        return any(
            isinstance(case.verdict, Violated)
            and case.verdict.path
            and (case.faults, case.epochs, case.options)
            == (plain.said, plain.epochs, _assignment(plain.options))
            for case in self.cases
        )

    def _note(self, options: Mapping[str, OptionValue], verdict: Verdict) -> None:
        self._keep(
            Case(
                ranks=None,
                options=_assignment(options),
                faults="any",
                epochs=None,
                asks=(SAFETY,),
                verdict=verdict,
                extra=dict(options) != self.asked,
            ),
            asked=False,
        )

    def _any(self, family: tuple[Options, ...]) -> None:
        """The first of a family, which answers for the others if it holds or time runs out."""
        options, *rest = family
        before = self.elapsed()
        if self._left_out():
            found = Found(states=0, bound=NOT_NEEDED)
        else:
            found = tracked(self.protocol, options, mutate=self.mutate, budget=self.budget())
        if found.trail is not None:
            self._candidate(options, found)
            if self.settings.rest_s is not None:
                self.later += rest
                return
            for each in rest:
                self._any((each,))
            return
        self._keep(
            Case(
                ranks=None,
                options=_assignment(options),
                faults="any",
                epochs=None,
                asks=(SAFETY,),
                verdict=judge(found),
                elapsed_s=self._since(before),
                extra=self._left_out() or self.asked not in family,
                covers=tuple(map(_assignment, rest)),
            ),
            asked=False,
        )

    def _candidate(self, options: dict[str, OptionValue], found: Found) -> None:
        """What the token made look broken counts if explicit ranks break it too."""
        size = next((options[g.size] for g in self.protocol.groups if isinstance(g.size, str)), 1)
        members = 1 if size == 1 else 2
        for ranks, group in (
            (members, members),
            (2 * members, members),
            (members + 1, members + 1),
        ):
            fitted = sized(self.protocol, options, group if size != 1 else 1)
            for most in (1, 2):
                faults = Faults(most=most, crash=True, fail=True, deadlines=most == 2)
                said = f"{most} of crash or fail"
                case = self._search(_Plain(ranks, fitted, faults, said, 2), deadlocks=False)
                if case is not None and isinstance(case.verdict, Violated):
                    self._keep(case, asked=False)
                    return
        bound = "the token for untracked ranks breaks a rule that no explicit run breaks"
        self._note(options, Undecided(bound=bound, states=found.states, depth=found.depth))

    def _explicit(self, plain: _Plain) -> None:
        if self._left_out():
            self._keep(
                Case(
                    ranks=sum(counts(self.protocol, plain.ranks).values()),
                    options=_assignment(plain.options),
                    faults=plain.said,
                    epochs=plain.epochs,
                    asks=(SAFETY, DEADLOCK, SOMETIMES),
                    verdict=Undecided(bound=NOT_NEEDED, states=0, depth=0),
                    extra=True,
                )
            )
            return
        if plain.ranks > COUNTED_MAX and (case := self._widened(plain)) is not None:
            self._keep(case)
            return
        if (case := self._search(plain, deadlocks=True)) is not None:
            self._keep(case)

    def _widened(self, plain: _Plain) -> Case | None:
        """What goes wrong on two ranks, done by that many; None where it does not go wrong."""
        if (few := self._few(plain)) is None:
            return None
        before = self.elapsed()
        assert isinstance(few.verdict, Violated)
        assert few.plan is not None
        many = self._plan(plain)
        faults = plain.faults if few.faults == plain.said else ANY_TWO
        found = widened(few.plan, few.verdict.path, many, faults, plain.epochs)
        if found is None:
            return None
        return Case(
            ranks=len(many.members),
            options=_assignment(plain.options),
            faults=few.faults,
            epochs=plain.epochs,
            asks=(SAFETY,),
            verdict=told(many, found, states=len(found.systems)),
            elapsed_s=self._since(before),
            extra=plain.extra,
            plan=many,
        )

    def _few(self, plain: _Plain) -> Case | None:
        """A case of few ranks and of these options in which a rule breaks."""
        asked = self.choices.sort(dict(plain.options))
        for case in self.cases:
            if isinstance(case.verdict, Violated) and case.verdict.violations and case.plan:
                few = len(case.plan.members) <= COUNTED_MAX
                if few and self.choices.sort(dict(case.options)) == asked:
                    return case
        if self._proved(plain):
            return None
        ranks = min(2, self.choices.size(plain.options) or 1)
        fitted = sized(self.protocol, plain.options, ranks)
        try:
            tried = self._search(plain._replace(ranks=ranks, options=fitted), deadlocks=False)
        except PlanError:
            return None
        if tried is None or not isinstance(tried.verdict, Violated) or not tried.verdict.violations:
            return None
        self._keep(tried, asked=False)
        return tried

    def _search(self, plain: _Plain, *, deadlocks: bool) -> Case | None:
        before = self.elapsed()
        try:
            plan = self._plan(plain)
            plan = behind_plan_fence(plan) if plain.faults.mixed else plan
        except PlanError:
            if plain.ranks == 3:
                return None  # Three ranks make no whole groups here; two and four do.
            raise
        large = plain.faults.most > 0 and (plain.ranks > 2 or plain.extra)
        short = deadlocks and large and not plain.faults.engine and self._is_safe(plain, plan)
        if short and (case := self._bare(plain, plan, before)) is not None:
            return case
        verdict, found = explore(
            plan,
            plain.faults,
            plain.epochs,
            budget=self.budget(),
            symmetry=self.settings.symmetry,
            reduction=self.settings.reduction,
            deadlocks=deadlocks,
            whole=self.settings.atomic,
        )
        self.reached |= found.reached
        missing = never_reached(plan, found) if isinstance(verdict, Holds) else ()
        if missing and not self.pinned_defects(plan):
            verdict = vacuous(missing, found.states)
        return Case(
            ranks=len(plan.members),
            options=_assignment(plain.options),
            faults=plain.said,
            epochs=plain.epochs,
            asks=(SAFETY, DEADLOCK, SOMETIMES) if deadlocks else (SAFETY,),
            verdict=verdict,
            elapsed_s=self._since(before),
            extra=bool(plain.extra),
            product=found.product,
            plan=plan,
        )

    def _plan(self, plain: _Plain) -> Plan:
        members = counts(self.protocol, plain.ranks)
        devices = self._devices(members)
        return self.mutate(resolve(self.protocol, members, plain.options, devices=devices))

    def _is_safe(self, plain: _Plain, plan: Plan) -> bool:
        """Whether safety has been proved under these options, whatever the number of ranks."""
        if plan.defects or self.settings.atomic or not self.settings.reduction:
            return False
        return self._proved(plain)

    def _proved(self, plain: _Plain) -> bool:
        """Whether any N holds under these options."""
        asked = self.choices.sort(dict(plain.options))
        return any(
            asked in (self.choices.sort(dict(each)) for each in (case.options, *case.covers))
            for case in self.cases
            if case.ranks is None and isinstance(case.verdict, Holds)
        )

    def _bare(self, plain: _Plain, plan: Plan, before: float | None) -> Case | None:
        """Who waits for ever in a plan that is safe; None if its skeleton does not say nobody."""
        skeleton = bare(plan)
        if skeleton is None:
            return None
        verdict, found = explore(
            skeleton,
            plain.faults,
            plain.epochs,
            budget=self.budget(),
            symmetry=self.settings.symmetry,
            rules=False,
        )
        if isinstance(verdict, Violated):
            return None
        return Case(
            ranks=len(plan.members),
            options=_assignment(plain.options),
            faults=plain.said,
            epochs=plain.epochs,
            asks=(DEADLOCK,),
            verdict=verdict,
            elapsed_s=self._since(before),
            extra=plain.extra,
            product=found.product,
            plan=plan,
        )

    def _devices(self, members: Mapping[str, int]) -> list[str] | None:
        """One a rank, if that is how ranks are to be placed."""
        many = sum(members.values())
        return [f"device/{number}" for number in range(many)] if self.settings.apart else None

    @staticmethod
    def pinned_defects(plan: Plan) -> bool:
        return bool(plan.defects)

    def _since(self, before: float | None) -> float | None:
        now = self.elapsed()
        return None if now is None or before is None else round(now - before, 3)


def _timed_out(verdict: Verdict) -> TypeGuard[Undecided]:
    return isinstance(verdict, Undecided) and verdict.bound == TIME


def _assignment(options: Mapping[str, OptionValue]) -> Assignment:
    return tuple(sorted(options.items()))
