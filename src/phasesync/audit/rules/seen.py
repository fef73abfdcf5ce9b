"""What only the order of a log tells about waits: kept in one pass, read when the log is over.

Waits that a limit cut, choices, locks and gates that are held, polls that told nothing, commands
that were sent, and errors after which somebody went on.
"""

from typing import Any, Final

from phasesync.audit.events import Event, Name
from phasesync.audit.facts import WAITING, Facts, Open, is_timeout, ranks_in
from phasesync.audit.waits import Wait, unrecovered

__all__ = ("Seen", "lock_of")

_KEPT: Final = 512
_CHOICES: Final = ("plan", "digest", "choice", "branch", "decision", "config", "config_hash")


class Seen:
    """The collector that all rules about hangs share."""

    def __init__(self) -> None:
        self.cut: list[Wait] = []
        self.choices: dict[tuple[int | None, str], dict[Name, tuple[str, Event]]] = {}
        self.held: dict[tuple[Name, str], Event] = {}
        self.polls: dict[Name, Event] = {}
        self.swallowed: list[tuple[Event, Event, str]] = []
        self.unnamed: set[str] = set()
        self.dispatched: list[tuple[Event, Event | None]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        match event.kind:
            case "start":
                self._began(event, facts)
            case "end":
                self._ended(event, start, facts)
            case "fail" | "timeout":
                if event.action in WAITING and is_timeout(event) and len(self.cut) < _KEPT:
                    self.cut.append(Wait(start.event if start else event, event))
                if event.action == "poll" or event.attrs.get("terminal") is False:
                    self.polls.setdefault(event.rank, event)
                self._end_dispatch(event, start, facts)
            case _:
                pass
        if event.attrs:
            self._choose(event)

    def _began(self, event: Event, facts: Facts) -> None:
        aimed = "target" in event.attrs or "targets" in event.attrs
        command = aimed and event.action not in ("poll", "life", "window")
        if (command or event.attrs.get("dispatch") is True) and len(self.dispatched) < 4096:
            self.dispatched.append((event, None))
        if event.action not in ("lock", "unlock", "life", "poll", "window"):
            for each in facts.ranks[event.rank].opened("lock"):
                name = lock_of(each.event)
                taken = any(lock == name and rank != event.rank for rank, lock in self.held)
                if not taken:  # Else it still waits for it, and does something beside.
                    self.held.setdefault((event.rank, name), each.event)
        if event.action == "unlock":
            self.held.pop((event.rank, lock_of(event)), None)
        elif event.action in ("open", "resume_gen"):
            self.held.pop((event.rank, "gate"), None)
        failed = unrecovered(facts.ranks[event.rank].failed, facts)
        if (
            failed is not None
            and failed.action in ("write", "receive", "acquire", "load_model")
            and (
                event.action in ("serve", "publish")
                or (failed.action == "acquire" and event.action in ("write", "receive"))
            )
            and failed.epoch == event.epoch
            and len(self.swallowed) < _KEPT
        ):
            self.swallowed.append((failed, event, "went on to {}"))
        elif event.action == "publish" and facts.failures:
            self._published(event, facts)

    def _published(self, event: Event, facts: Facts) -> None:
        """A version is announced although a rank failed to take it in this epoch."""
        for failure in facts.failures[-8:]:
            if (
                failure.rank != event.rank
                and failure.epoch == event.epoch
                and failure.kind == "fail"
                and failure.action in ("write", "receive", "load_model", "finish")
                and unrecovered(failure, facts) is not None
                and len(self.swallowed) < _KEPT
            ):
                self.swallowed.append((failure, event, "went on to {}"))
                return

    def _ended(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.action == "lock":
            # Work between its start and its end shows that the lock was held, and is given back.
            name = lock_of(start.event if start is not None else event)
            if self.held.pop((event.rank, name), None) is None:
                self.held[(event.rank, name)] = event
        elif event.action in ("pause", "close"):
            self.held[(event.rank, "gate")] = event
        if event.attrs.get("terminal") is False:
            self.polls.setdefault(event.rank, event)
        self._end_dispatch(event, start, facts)
        if start is None or facts.header.kind(event.rank) == "engine":
            return
        if event.action not in ("write", "send", "acquire") and not start.event.attrs.get(
            "dispatch"
        ):
            return
        target = start.event.attrs.get("target", start.event.attrs.get("targets"))
        wanted = set(ranks_in(target, facts.header.ranks)) if target is not None else None
        for failure in facts.failures[-8:]:
            if failure.at < start.event.at or failure.rank == event.rank:
                continue
            if wanted is not None and failure.rank not in wanted:
                continue
            if facts.header.kind(failure.rank) == facts.header.kind(event.rank):
                continue
            if unrecovered(failure, facts) is not None and len(self.swallowed) < _KEPT:
                self.swallowed.append((failure, event, "ended {} as a success"))

    def _end_dispatch(self, event: Event, start: Open | None, facts: Facts) -> None:
        if start is None:
            return
        for index, (sent, _) in enumerate(self.dispatched):
            if sent is start.event:
                if event.kind == "end":
                    del self.dispatched[index]
                    self._named(sent, facts)
                else:
                    self.dispatched[index] = (sent, event)
                return

    def _named(self, sent: Event, facts: Facts) -> None:
        """Note a command that came to its end under another name than its targets know it by."""
        target = sent.attrs.get("target", sent.attrs.get("targets"))
        told = ranks_in(target, facts.header.ranks) if target is not None else ()
        known = [facts.ranks[rank] for rank in told if rank in facts.ranks]
        other = not any(sent.phase in rank.started(sent.epoch) for rank in known)
        if known and other and len(self.unnamed) < _KEPT:
            self.unnamed.add(sent.phase)

    def _choose(self, event: Event) -> None:
        decisions = (name for name in event.attrs if name not in _CHOICES)
        for name in (*_CHOICES, *(decisions if event.action == "decide" else ())):
            if name in event.attrs:
                value = event.attrs[name]
                if isinstance(value, bool | int | str | float):
                    if len(self.choices) > 64:
                        self.choices.pop(next(iter(self.choices)))
                    phase = event.phase if event.action == "decide" else ""
                    own = "" if name in _CHOICES else "decision "
                    key = (event.epoch, f"{own}{name} {phase}".strip())
                    self.choices.setdefault(key, {})[event.rank] = (str(value), event)


def lock_of(event: Event) -> str:
    """The name of the lock that a phase takes or gives back."""
    for name in ("lock", "name", "key", "resource", "holds"):
        value: Any = event.attrs.get(name)
        if isinstance(value, str):
            return value
    return "lock"
