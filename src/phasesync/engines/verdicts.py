"""The fences' verdicts as a guard reads them, in whatever process it stands: from the fences' own
store, or from the journals of the run. Neither is the word of whoever presents a ticket.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from phasesync.core import wire
from phasesync.core.fence import cause_from_json, ticket_hash
from phasesync.core.fence_keys import NOT_THERE, REPORTER, Registered, Space, Verdict
from phasesync.core.fence_steps import judged_in
from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceKey,
    FenceName,
    FenceVerdict,
    Opened,
    Rank,
    RootCause,
    Ticket,
    Version,
)
from phasesync.errors import EngineRefused
from phasesync.journal import line_cut

__all__ = ("JournalVerdicts", "StoreVerdicts")

_DECIDED = b'"fence.decide"'


_EVERY_S = 0.002


class StoreVerdicts:
    """Verdicts by key, from the `torch.distributed.Store` that the run's fences are kept in.

    Nothing is waited for, because whoever asks holds an engine up meanwhile, and a store that does
    not answer for `within_s` is not either. What nobody can come to any more has been swept from
    the store, and counts as never decided.
    """

    def __init__(self, store: Any, *, token: str = "", within_s: float = 10.0) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._token = token
        self._within_s = within_s

    def __call__(self, key: FenceKey) -> FenceVerdict | None:
        """What was decided at that fence instance, or None.

        Raises:
            EngineRefused: the store cannot be asked.
        """
        answers: SimpleQueue[FenceVerdict | Exception | None] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._find(key))
            except Exception as error:
                answers.put(error)

        # A thread, never joined: a call to a store that is frozen keeps no time.
        threading.Thread(target=ask, name="phasesync.verdict", daemon=True).start()
        try:
            answer = answers.get(timeout=self._within_s)
        except Empty:
            answer = TimeoutError(f"no answer within {self._within_s:g} s")
        if isinstance(answer, Exception):
            raise EngineRefused(
                f"the store cannot say what {key.scope}/{key.generation} has decided "
                f"({type(answer).__name__}: {line_cut(str(answer))}); until then no ticket is good"
            ) from answer
        return answer

    def _find(self, key: FenceKey) -> FenceVerdict | None:
        space = Space.of(key.run, key.attempt, token=self._token)
        found, by = self._at(space, key)
        if isinstance(found, Broken) and by == REPORTER:
            return self._beside(space, key) or found
        return found

    def _beside(self, space: Space, key: FenceKey) -> Opened | None:
        """Members that a reported loss was none of have met beside the fence that it broke."""
        registered = Registered.lines(self._read(space.scopes))
        scopes = {line.scope for line in registered if line.scope.startswith(f"{key.scope}~")}
        for scope in sorted(scopes):
            found, _ = self._at(space, key._replace(scope=scope))
            if isinstance(found, Opened):
                return replace(found, ticket=replace(found.ticket, key=key))
        return None

    def _at(self, space: Space, key: FenceKey) -> tuple[FenceVerdict | None, str]:
        """The verdict of exactly that instance, and who has written it."""
        at = space.at(key.scope, key.generation)
        text = self._read(at.verdict)
        if text is None:
            return None, ""
        verdict = Verdict.decode(text)
        if verdict.broken is not None:
            cause = cause_from_json(verdict.broken["cause"])
            fence = FenceName(verdict.broken["fence"] or "")
            return Broken(key=key, fence=fence, cause=cause), verdict.by
        arrivals = judged_in(self._read(at.log) or b"", verdict)
        if not arrivals:  # All are through and at the next fence: the log has been tidied up.
            return None, ""
        first = arrivals[0]
        ticket = Ticket(
            key=key,
            fence=first.fence,
            epoch=first.epoch,
            count=verdict.count,
            hash=verdict.hash,
        )
        return Opened(ticket=ticket, arrivals=arrivals), verdict.by

    def _read(self, key: str) -> bytes | None:
        """What is there now; a missing key answers with what was expected of it."""
        if not self._store.check([key]):
            return None
        value: bytes = self._store.compare_set(key, NOT_THERE, NOT_THERE)
        return None if value == NOT_THERE.encode() else value


class JournalVerdicts:
    """Verdicts by key, from the journals below `folder`; only what was added is read again.

    A rank may pass before the line of whoever closed the fence is written, so a guard in a process
    of its own looks for it for `within_s`. Not in the event loop of the ranks: there nobody could
    write while it looks.
    """

    def __init__(self, folder: Path | str, *, within_s: float = 0.0) -> None:
        self._folder = Path(folder)
        self._within_s = within_s
        self._read: dict[Path, int] = {}
        self._known: dict[FenceKey, FenceVerdict] = {}

    def __call__(self, key: FenceKey) -> FenceVerdict | None:
        """What was decided at that fence instance, or None while no journal says."""
        until = time.monotonic() + self._within_s
        while key not in self._known:
            for line in self._added():
                verdict = _verdict(line)
                if verdict is not None:
                    self._known.setdefault(*verdict)
            if key in self._known or time.monotonic() >= until:
                break
            time.sleep(_EVERY_S)
        return self._known.get(key)

    def _added(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.rglob("*.jsonl")):
            with path.open("rb") as journal:
                journal.seek(self._read.get(path, 0))
                for line in journal:
                    if not line.endswith(b"\n"):
                        break  # It is still being written.
                    self._read[path] = self._read.get(path, 0) + len(line)
                    if _DECIDED in line:
                        yield wire.decode(line)


def _verdict(line: dict[str, Any]) -> tuple[FenceKey, FenceVerdict] | None:
    if line.get("event") != "fence.decide" or "generation" not in line:
        return None
    key = FenceKey(line["run"], line["attempt"], line["scope"], line["generation"])
    fence = FenceName(line["fence"])
    if line.get("verdict") != "open":
        cause = RootCause(kind=str(line.get("verdict")), ranks=(), fence=fence)
        return key, Broken(key=key, fence=fence, cause=cause)
    judged = line["judged"]
    ticket = Ticket(
        key=key,
        fence=fence,
        epoch=Epoch(line.get("epoch", 0)),
        count=len(judged),
        hash=ticket_hash(judged),
    )
    return key, Opened(ticket=ticket, arrivals=tuple(_arrival(ticket, each) for each in judged))


def _arrival(ticket: Ticket, entry: list[Any]) -> Arrival:
    """An arrival as far as a judged list has it: who, which incarnation, and what it showed."""
    rank, incarnation, _, seq, free_bytes = entry
    return Arrival(
        rank=Rank.parse(rank),
        incarnation=incarnation,
        nonce="",
        fence=ticket.fence,
        epoch=ticket.epoch,
        version=Version(0),
        digest=Digest(""),
        seq=seq,
        free_bytes=free_bytes,
    )
