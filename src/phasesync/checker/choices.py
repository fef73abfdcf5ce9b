"""The assignments of a protocol's options that a check looks at, and which answer for others."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from phasesync.checker.anyn import Mutate, counts, gist, tracked_plan
from phasesync.checker.cover import decided, families
from phasesync.core.model import OptionValue
from phasesync.core.options import assignments
from phasesync.core.plan import Plan, resolve, settle
from phasesync.core.protocol import Protocol

__all__ = ("Choices", "Options")

Options: TypeAlias = dict[str, OptionValue]


class Choices:
    """What is pinned stays; everything else takes every value that makes a difference."""

    def __init__(self, protocol: Protocol, pinned: Options, mutate: Mutate) -> None:
        self.protocol = protocol
        self.pinned = pinned
        self.mutate = mutate

    def all(self) -> tuple[dict[str, OptionValue], ...]:
        """Every assignment that agrees with what is pinned, the defaults first."""
        fixed = self.pinned.items()
        found = [dict(each) for each in assignments(self.protocol)]
        kept = [each for each in found if all(each.get(name) == value for name, value in fixed)]
        base: dict[str, OptionValue] = dict(settle(self.protocol, self.pinned))
        return (base, *(each for each in kept if each != base))

    def fit(self, options: dict[str, OptionValue], ranks: int) -> dict[str, OptionValue]:
        """Options under which so many ranks make whole groups; a pinned size stays."""
        for group in self.protocol.groups:
            if not isinstance(group.size, str) or group.size in self.pinned:
                continue
            size = options[group.size]
            if isinstance(size, int) and ranks % size:
                options = {**options, group.size: ranks}
        return options

    def families(self) -> tuple[tuple[Options, ...], ...]:
        """Assignments of the options by what one search answers for; groups of one rank, which
        take least to prove, first."""

        def plan_of(options: Options) -> Plan:
            return gist(self.mutate(tracked_plan(self.protocol, options)))

        found = self._covered(self.all(), plan_of)
        return tuple(sorted(found, key=lambda family: self.size(family[0])))

    def each_family(self, ranks: int) -> Iterator[Options]:
        """For so many ranks, assignments whose search answers for all others."""

        def plan_of(options: Options) -> Plan:
            members = counts(self.protocol, ranks)
            # Where one group is all there is, its fences are the world's.
            return gist(self.mutate(resolve(self.protocol, members, options)))

        fitted = [self.fit(options, ranks) for options in self.all()]
        yield from (family[0] for family in self._covered(fitted, plan_of))

    def _covered(
        self, all_: Iterable[Options], plan_of: Callable[[Options], Plan]
    ) -> list[tuple[Options, ...]]:
        """Families of assignments; the first of each covers the rest."""
        same: dict[object, list[Options]] = {}
        for options in all_:
            alike = same.setdefault(decided(self.protocol, options), [])
            if options not in alike:
                alike.append(options)
        groups = list(same.values())
        heads = families([plan_of(group[0]) for group in groups])
        found: dict[int, list[Options]] = {head: [*groups[head]] for head in heads}
        for at, head in enumerate(heads):
            if at != head:
                found[head] += groups[at]
        return [tuple(family) for family in found.values()]

    def size(self, options: Options) -> int:
        """How many ranks the largest group has; 0 where none grows."""
        sizes = [options[g.size] for g in self.protocol.groups if isinstance(g.size, str)]
        return max((size for size in sizes if isinstance(size, int)), default=0)

    def sort(self, options: Options) -> Options:
        """The options, but of sizes of groups only whether they are one."""
        names = {group.size for group in self.protocol.groups if isinstance(group.size, str)}
        return {name: value != 1 if name in names else value for name, value in options.items()}
