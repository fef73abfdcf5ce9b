"""Accidental fences: what no fence of the plan orders, and what yet came in one order every time.

Such a run is `ok`, and only because some call happened to keep the ranks apart. The finding names
the two ranks, their phases, and the call: one that a journal names as such (`call=` on a progress
line), else the phase that the later rank was in until then.
"""

from phasesync.audit.answer import NOTE, Evidence, Finding
from phasesync.audit.rounds import Unordered, unordered
from phasesync.core.plan import Plan

__all__ = ("Luck",)

_PAIRS_MAX = 64
_SHOWN = 4


class _Pair:
    """Two phases of two ranks that luck keeps apart, and in which order they came."""

    __slots__ = ("call", "first", "lines", "second", "seen", "swapped")

    def __init__(self, first: tuple[str, str], second: tuple[str, str]) -> None:
        self.first, self.second = first, second
        self.seen = 0
        self.swapped = False
        self.call = ""
        self.lines: tuple[Evidence, ...] = ()


class Luck:
    """Watches the pairs of a plan that no fence orders; there are none in a sound plan."""

    def __init__(self, plan: Plan) -> None:
        self._pairs: dict[tuple[str, str], list[_Pair]] = {}
        self._ended: dict[str, dict[str, Evidence]] = {}
        self._last: dict[str, str] = {}
        self._calls: dict[str, str] = {}
        for pair in unordered(plan, _PAIRS_MAX):
            self._watch(plan, pair)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def _watch(self, plan: Plan, pair: Unordered) -> None:
        one = (str(plan.members[pair.one]), str(pair.act.phase))
        other = (str(plan.members[pair.other]), str(pair.other_act.phase))
        if any({known.first, known.second} == {one, other} for known in self._pairs.get(one, ())):
            return
        found = _Pair(one, other)
        self._pairs.setdefault(one, []).append(found)
        self._pairs.setdefault(other, []).append(found)

    def begin(self, rank: str) -> None:
        """A rank begins an epoch: what it did in the last one is past."""
        self._ended[rank] = {}
        self._last.pop(rank, None)
        self._calls.pop(rank, None)

    def called(self, rank: str, call: str) -> None:
        """A rank names a call at which it may have waited for others."""
        self._calls[rank] = call

    def started(self, rank: str, phase: str, where: Evidence) -> None:
        me = (rank, phase)
        for pair in self._pairs.get(me, ()):
            partner = pair.second if pair.first == me else pair.first
            before = self._ended.get(partner[0], {}).get(partner[1])
            if before is None:
                continue
            if pair.seen and pair.first != partner:
                pair.swapped = True
            pair.first, pair.second = partner, me
            pair.seen += 1
            pair.call = self._calls.get(rank) or self._last.get(rank) or partner[1]
            pair.lines = (where, before)

    def ended(self, rank: str, phase: str, where: Evidence) -> None:
        self._ended.setdefault(rank, {})[phase] = where
        self._last[rank] = phase

    def findings(self) -> list[Finding]:
        """One finding for each pair that came in one order whenever it was seen."""
        found: dict[int, _Pair] = {
            id(pair): pair
            for pairs in self._pairs.values()
            for pair in pairs
            if pair.seen and not pair.swapped
        }
        return [
            Finding(
                rule=None,
                strength=NOTE,
                at=1 << 60,
                because=(
                    f"{pair.second[1]} of {pair.second[0]} came after {pair.first[1]} of "
                    f"{pair.first[0]} every time ({pair.seen}x), and no fence of this plan "
                    f"orders them: an accident does, {pair.call!r} on {pair.second[0]}, the last "
                    f"call before it"
                ),
                evidence=pair.lines,
            )
            for pair in list(found.values())[:_SHOWN]
        ]
