"""Commands: who must get one, and who has a path for it.

A command that reaches some of the ranks, or one that cannot take it, is legal where it runs and
fatal beside the others.
"""

from dataclasses import replace
from typing import Final

from phasesync.audit.answer import SUSPECTED, Finding
from phasesync.audit.events import Event, Name
from phasesync.audit.facts import Facts, Open, ranks_in
from phasesync.audit.vocabulary import is_memory_error, is_unroutable_error

__all__ = ("AllRanks", "FanOut")

_KEPT: Final = 512


class FanOut:
    """R-FANOUT: a command was sent to a rank that has no path for it.

    Sees: a dispatch whose target is no rank of the run, or whose target fails because it does not
    know the command (no handler, no route, not implemented). Without a logged dispatch the failing
    rank is named. Cannot see: commands that are dropped in silence; that is R-CTRL. Sources:
    TensorRT-LLM PR 14636, SGLang multi-node `release_memory_occupation`.
    """

    rule = "R-FANOUT"
    wants = None

    def __init__(self) -> None:
        self._sent: dict[tuple[Name, str], Event] = {}
        self._found: list[Finding] = []
        self._unsent: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "start":
            target = event.attrs.get("target", event.attrs.get("targets")) if event.attrs else None
            if target is None:
                return
            known = set(map(str, facts.header.ranks))
            for rank in ranks_in(target, facts.header.ranks):
                if len(self._sent) < 4096:
                    self._sent[(rank, event.phase)] = event
                if known and str(rank) not in known and len(self._found) < _KEPT:
                    why = f"{event.phase} was sent to rank {rank}, which is not in this run"
                    self._found.append(Finding.on("R-FANOUT", event, why))
        elif event.kind in ("fail", "exit") and is_unroutable_error(event.attrs.get("error")):
            if event.action in ("poll", "admit", "load_model"):
                return
            sent = self._sent.get((event.rank, event.phase))
            why = f"rank {event.rank} has no path for {event.phase}: {event.attrs.get('error')}"
            if len(self._found) < _KEPT:
                finding = Finding.on("R-FANOUT", sent or event, why, event)
                (self._found if sent is not None else self._unsent).append(finding)

    def finish(self, facts: Facts) -> list[Finding]:
        # Who sent it, is not among those who say anything: then nobody is to blame for it.
        silent = bool(facts.silent())
        return self._found + [
            replace(finding, guilty=()) if silent else finding for finding in self._unsent
        ]


class AllRanks:
    """R-ALLRANKS: a command ran on some of the ranks that it must run on.

    Sees: a state change of the engine that some ranks of a role did and others did not, although
    all did it in another epoch or the log shows harm on the others; or a dispatch to several
    targets that ended although some never ran it. If the others have no lines at all it is
    `inconclusive`: they may have done it unseen. Cannot see: a leader that acts for its peers,
    unless it names the devices. Source: TensorRT-LLM PR 14636.
    """

    rule = "R-ALLRANKS"
    wants = frozenset(
        {"release", "acquire", "pause", "resume_gen", "flush", "write", "train", "serve", "begin"}
    )

    _NEXT: Final = {
        "release": "train",
        "acquire": "serve",
        "write": "serve",
        "pause": "write",
        "flush": "serve",
        "resume_gen": "serve",
        "begin": "write",
    }

    def __init__(self) -> None:
        self._ran: dict[tuple[int | None, str], dict[Name, Event]] = {}
        self._all: dict[str, frozenset[Name]] = {}
        self._next: dict[tuple[int | None, str], Event] = {}
        self._sent: list[tuple[Event, Event, tuple[Name, ...]]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "start":
            if event.action in ("train", "serve", "write"):
                self._next.setdefault((event.epoch, event.action), event)
                if len(self._next) > 64:
                    self._next.pop(next(iter(self._next)))
            if event.action in self._NEXT:
                if len(self._ran) > 96:
                    self._forget(next(iter(self._ran)))
                self._ran.setdefault((event.epoch, event.phase), {})[event.rank] = event
        elif event.kind == "end" and start is not None:
            target = start.event.attrs.get("targets", start.event.attrs.get("target"))
            if isinstance(target, list | tuple) and len(self._sent) < _KEPT:
                ranks = tuple(ranks_in(target, facts.header.ranks))
                self._sent.append((start.event, event, ranks))

    def _forget(self, key: tuple[int | None, str]) -> None:
        ran = self._ran.pop(key)
        self._all[key[1]] = self._all.get(key[1], frozenset()) | ran.keys()

    def finish(self, facts: Facts) -> list[Finding]:
        found = [finding for sent in self._sent if (finding := self._dispatched(*sent, facts))]
        usual: dict[str, frozenset[Name]] = dict(self._all)
        for (_, phase), ran in self._ran.items():
            usual[phase] = usual.get(phase, frozenset()) | ran.keys()
        for (epoch, phase), ran in self._ran.items():
            finding = self._partial(epoch, phase, ran, usual[phase], facts)
            if finding is not None:
                found.append(finding)
        return found

    def _dispatched(
        self, start: Event, end: Event, targets: tuple[Name, ...], facts: Facts
    ) -> Finding | None:
        ran = self._ran.get((start.epoch, start.phase), {})
        some = [rank for rank in targets if rank in ran]
        never = tuple(
            rank
            for rank in targets
            if rank not in ran and (known := facts.ranks.get(rank)) and known.exit is None
        )
        if not some or not never:
            return None
        silent = all(facts.ranks[rank].first is None for rank in never)
        return Finding.on(
            "R-ALLRANKS",
            end,
            f"{start.phase} ended, but never ran on {', '.join(map(str, never))}",
            start,
            guilty=() if silent else never,
            strength=SUSPECTED if silent else 0,
        )

    def _partial(
        self,
        epoch: int | None,
        phase: str,
        ran: dict[Name, Event],
        usual: frozenset[Name],
        facts: Facts,
    ) -> Finding | None:
        first = next(iter(ran.values()))
        went_on = self._next.get((epoch, self._NEXT[first.action]))
        if went_on is None or any(event.attrs.get("target") is not None for event in ran.values()):
            return None
        ended = facts.ranks[first.rank].finished(epoch).get(phase)
        if ended is None or went_on.at < ended.at or "gpus" in first.attrs or "gpus" in ended.attrs:
            return None
        if first.action == "release" and not facts.tags.concerns(first):
            return None
        peers = facts.header.peers(first.rank, facts.ranks)
        missing = [
            rank
            for rank in peers
            if rank not in ran
            and ((gone := facts.ranks[rank].exit) is None or gone.at > went_on.at)
        ]
        if not missing:
            return None
        silent = [rank for rank in missing if facts.ranks[rank].first is None]
        went = f"rank {went_on.rank} entered {went_on.phase}"
        who = ", ".join(map(str, missing))
        because = f"{phase} ran on {', '.join(map(str, ran))} and not on {who}, yet {went}"
        if len(silent) == len(missing):
            if facts.header.kind(first.rank) == "engine" or first.action != "release":
                return None
            return Finding.on(
                "R-ALLRANKS",
                ended,
                f"{because}; those ranks have no lines at all",
                went_on,
                strength=SUSPECTED,
                guilty=(),
                record_next=(f"the logs of ranks {who}",),
            )
        short = [
            failure
            for failure in facts.failures_after(ended.at)
            if is_memory_error(failure.attrs.get("error"))
        ]
        beside = [each for each in short if self._is_beside(each, first, facts)]
        harmed = [each for each in short if each.rank in missing]
        harmed += [each for each in beside if self._shares(each, missing, facts)]
        harmed += [
            failure
            for failure in facts.failures_after(ended.at, missing)
            if failure.action == "serve" and failure not in harmed
        ]
        habit = [rank for rank in missing if rank in usual and rank not in silent]
        unaware = [rank for rank in habit if self._went_on(rank, first, ended, facts)]
        hurt = [each for each in facts.failures_after(ended.at) if each.rank not in ran]
        if not harmed and not unaware and not (habit and hurt):
            return self._suspected(ended, because, went_on, beside)
        guilty = tuple(rank for rank in missing if rank not in silent)
        return Finding.on("R-ALLRANKS", ended, because, went_on, *harmed[:2], guilty=guilty)

    @staticmethod
    def _suspected(
        ended: Event, because: str, went_on: Event, beside: list[Event]
    ) -> Finding | None:
        """Somebody ran out of memory, and no line tells on whose card."""
        if not beside:
            return None
        return Finding.on(
            "R-ALLRANKS",
            ended,
            f"{because}, and rank {beside[0].rank} ran out of memory in {beside[0].phase}",
            went_on,
            beside[0],
            strength=SUSPECTED,
            guilty=(),
            record_next=("which devices each engine and each trainer is on",),
        )

    @staticmethod
    def _is_beside(failure: Event, first: Event, facts: Facts) -> bool:
        """Whether who ran out of memory may share a card with engines that should have let go."""
        kind = facts.header.kind
        return (
            first.action == "release"
            and failure.epoch == first.epoch
            and kind(failure.rank) != kind(first.rank)
        )

    @staticmethod
    def _shares(failure: Event, missing: list[Name], facts: Facts) -> bool:
        """Whether a rank is on the card of one of `missing`: by what they said of their devices,
        else by their place among as many others.
        """
        known = facts.devices.device_of
        taken = {known[rank] for rank in missing if rank in known}
        if taken:
            return bool(taken & set(facts.devices.touched(failure)))
        ranks = facts.header.ranks
        mine = facts.header.peers(failure.rank, ranks)
        theirs = facts.header.peers(missing[0], ranks)
        if len(mine) != len(theirs) or failure.rank not in mine:
            return False
        return theirs[mine.index(failure.rank)] in missing

    def _went_on(self, rank: Name, first: Event, ended: Event, facts: Facts) -> bool:
        """Whether a rank that always did this step wrote its weights in this epoch without it.

        Whoever does not write at all may have its turn later.
        """
        wrote = [
            event
            for event in facts.ranks[rank].started(first.epoch).values()
            if event.action == "write"
        ]
        if first.action in ("pause", "begin"):
            return any(event.at > ended.at for event in wrote)
        served = facts.ranks[rank].started(first.epoch).values()
        return (
            first.action == "flush"
            and bool(wrote)
            and any(event.action == "serve" and event.at > ended.at for event in served)
        )
