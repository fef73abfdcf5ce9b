"""What is not in the journals at hand: whole ranks and hosts, lines in between, the end of one.

A rank with such a gap is never covered by an `ok`, and what the kernel finds around it is doubted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from phasesync.audit.answer import BROKEN, SUSPECTED, Evidence, Finding
from phasesync.audit.events import text_of
from phasesync.audit.facts import Facts
from phasesync.audit.told import Told

__all__ = ("Lacking",)


class Lacking:
    """Who has lines missing; `incomplete` names the ranks."""

    def __init__(self, ranks: Mapping[str, Told], facts: Facts) -> None:
        self._ranks, self._facts = ranks, facts
        self.incomplete: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._begins: dict[str, tuple[int, Evidence]] = {}
        self._kept: dict[str, int] = {}

    def planned(self, names: Sequence[str], line: Mapping[str, Any]) -> None:
        """The plan says on which host each member is."""
        devices, place = line.get("devices"), line.get("place")
        if isinstance(devices, list) and isinstance(place, list):
            for each, on in zip(names, place, strict=False):
                if type(on) is int and 0 <= on < len(devices):
                    self._hosts[each] = str(devices[on]).rpartition("/")[0]

    def begins(self, name: str, seq: int, where: Evidence) -> None:
        """The first file of a journal that is here goes on from another one."""
        self._begins.setdefault(name, (seq, where))

    def part(self, name: str, line: Mapping[str, Any]) -> None:
        """A new file of a journal says from which line on older ones were kept."""
        kept = line.get("kept_seq")
        if type(kept) is int:
            self._kept[name] = max(kept, self._kept.get(name, 0))

    def findings(self, blamed: Set[str]) -> list[Finding]:
        """Members without a journal, and journals that stop where others went on."""
        facts = self._facts
        found = []
        expected = set(facts.header.ranks) | set(facts.members.get("world", ()))
        names = sorted(str(each) for each in expected)
        known = {name: self._ranks.get(name) for name in names}
        lost = [name for name, rank in known.items() if rank is None or rank.last is None]
        self.incomplete.update(lost)
        found += self._lost(lost)
        for name, rank in known.items():
            if rank is None or rank.last is None:
                continue
            if rank.exit is not None or name in blamed:
                continue
            ahead = max((other.epoch or 0 for other in self._ranks.values()), default=0)
            others_left = any(other.exit for other in self._ranks.values())
            if (rank.epoch or 0) < ahead or others_left:
                found.append(self._cut_short(name, rank))
        return found + self._cut_off()

    def _lost(self, names: Sequence[str]) -> list[Finding]:
        """Journals that are not here, those of a whole host together."""
        every = Counter(self._hosts.values())
        here = Counter(self._hosts[name] for name in names if name in self._hosts)
        whole = {host for host, count in here.items() if host and count == every[host]}
        what = {
            f"every journal of host {text_of(host, 80)} is missing": tuple(
                name for name in names if self._hosts.get(name) == host
            )
            for host in sorted(whole)
        }
        what |= {
            f"the journal of {name} is missing": (name,)
            for name in names
            if self._hosts.get(name) not in whole
        }
        return [
            Finding(
                rule="R-DUMPSET",
                strength=SUSPECTED,
                at=-1,
                because=because + (f" ({', '.join(ranks[:8])})" if len(ranks) > 1 else ""),
                record_next=tuple(f"the journal of {name}" for name in ranks[:8]),
            )
            for because, ranks in what.items()
        ]

    def _cut_short(self, name: str, rank: Told) -> Finding:
        where = f" in {rank.phase}" if rank.phase else ""
        return Finding(
            rule="R-DUMPSET",
            strength=SUSPECTED,
            at=(1 << 59) + 1,
            because=(
                f"the journal of {name} stops{where} in epoch {rank.epoch}, while others went "
                "on: it "
                "died, or its last lines are missing"
            ),
            phase=rank.phase,
            epoch=rank.epoch,
            evidence=(rank.last,) if rank.last else (),
            record_next=(f"the whole journal of {name}",),
        )

    def _cut_off(self) -> list[Finding]:
        """Journals that begin later than their rotation left them."""
        late = {
            name: begin
            for name, begin in self._begins.items()
            if begin[0] > self._kept.get(name, 0)
        }
        self.incomplete.update(late)
        return [
            Finding(
                rule="R-DUMPSET",
                strength=SUSPECTED,
                at=-1,
                because=(
                    f"the journal of {name} begins at line number {seq}, and its rotation kept all "
                    f"from {self._kept.get(name, 0)} on: a file of it is missing"
                ),
                evidence=(where,),
                record_next=(f"every file of the journal of {name}",),
            )
            for name, (seq, where) in late.items()
        ]

    def believed(self, finding: Finding) -> Finding:
        """What the kernel found, unless a line that it needed may be missing."""
        if finding.strength != BROKEN or not self.incomplete:
            return finding
        near = set(map(str, finding.guilty))
        for scope, members in self._facts.members.items():
            if scope != "world" and near & set(map(str, members)):
                near |= set(map(str, members))
        if not near & self.incomplete:
            return finding
        who = ", ".join(sorted(near & self.incomplete))
        return replace(
            finding,
            strength=SUSPECTED,
            guilty=(),
            because=f"{finding.because}; but lines of {who} are missing",
            record_next=(f"every line of the journal of {who}",),
        )
