"""Versions and evidence: what is served must be what was committed, and a success must be shown.

Asynchronous trainers serve older weights on purpose; only a version that this rank had already
gone past, or a newcomer that never got one, is stale.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from phasesync.audit.answer import SUSPECTED, Finding
from phasesync.audit.events import Event, Name, number, version_number
from phasesync.audit.facts import Facts, Open
from phasesync.audit.vocabulary import is_bad_output, is_unprepared_error

__all__ = ("Evidenced", "Monotone", "Prerequisites", "Scope", "Versions")

_NONE: Final = ("", "none", "null")
# Which version a caller was told it gets, beside the one that it gets.
_CLAIMS: Final = (
    "labelled",
    "label_version",
    "expected_version",
    "required_version",
    "requested_version",
    "min_version",
)
# Of what there may be more than was expected: sizes, times, versions.
_AMOUNT: Final = re.compile(r"byte|gib|gb|mib|mb|free|token|len|version|step|epoch|time|_m?s$")
# What a phase says of its own work, and the words that are formed alike and say something else.
_DONE: Final = re.compile(r"actual|got|sent|read|written|put|[a-z]{2,}ed")
_NOT_DONE: Final = frozenset(
    {
        "allocated",
        "cached",
        "dropped",
        "excluded",
        "expected",
        "failed",
        "freed",
        "frozen",
        "ignored",
        "mapped",
        "missed",
        "needed",
        "padded",
        "pinned",
        "planned",
        "queued",
        "rejected",
        "released",
        "removed",
        "requested",
        "required",
        "reserved",
        "shared",
        "skipped",
        "tied",
        "unloaded",
        "unused",
    }
)
_COUNTED: Final = ("bytes", "params", "tensors", "weights")
_KEPT: Final = 512


class Versions:
    """R-VERSION and R-KVVERSION: weights older than committed, or KV older than its weights.

    Sees: a rank that serves a version below the one that it (or, for engines, the trainer's
    finished update) committed; a newcomer that serves below what all its peers serve, before its
    first sync; an engine that serves its first version on while a trainer, in turns with it, is two
    further, with no update in between; `kv_version` below the version it is used with. Cannot see:
    which version is served where no line says so, nor a lag that an asynchronous trainer allows.
    Sources: TRL issue 5312, miles issue 1724, NeMo-RL PR 4018, lmdeploy issue 4917, verl PR 4248.
    """

    rule = "R-VERSION"
    wants = frozenset({"serve", "publish", "register", "write", "receive", "train", "life"})

    def __init__(self) -> None:
        self._served: dict[Name, float] = {}
        self._published: dict[Name, tuple[float, Event]] = {}
        self._trained: tuple[float, Event] | None = None
        self._own: dict[Name, tuple[float, Event]] = {}
        self._new: dict[Name, Event] = {}
        self._synced: set[Name] = set()
        self._side_by_side = False  # somebody trained while somebody served
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        version = version_number(event.attrs.get("version"))
        if not self._side_by_side and event.kind == "start" and event.action in ("serve", "train"):
            self._side_by_side = _meanwhile(event, facts)
        match event.action:
            case "serve":
                if event.kind == "start" or (event.kind == "progress" and version is not None):
                    self._serve(event, version, facts)
            case "publish" if event.kind == "end":
                said = version if version is not None else _version(start)
                if said is not None:
                    self._published[event.rank] = (said, event)
            case "register" if event.kind == "start":
                self._new[event.rank] = event
            case "life" if event.kind == "start" and "replaces" in event.attrs:
                self._new[event.rank] = event
            case "train" if event.kind == "end" and version is not None:
                self._own[event.rank] = (version, event)
            case "receive" if event.kind == "end":
                self._synced.add(event.rank)
            case "write" if event.kind == "end":
                self._synced.add(event.rank)
                said = version if version is not None else _version(start)
                if said is not None and facts.header.kind(event.rank) == "trainer":
                    self._trained = (said, event)
            case _:
                pass

    def _serve(self, event: Event, version: float | None, facts: Facts) -> None:
        if len(self._found) >= _KEPT:
            return
        state = facts.tags.of.get(event.rank)
        content = state.content if state else None
        if version is None and content is not None:
            version = content.version
        kv = version_number(event.attrs.get("kv_version"))
        if kv is not None and version is not None and kv < version:
            self._found.append(
                Finding.on(
                    "R-KVVERSION",
                    event,
                    f"rank {event.rank} serves weights of version {version:g} with KV of "
                    f"version {kv:g}",
                )
            )
        if version is None:
            return
        said = [name for name in _CLAIMS if version_number(event.attrs.get(name)) is not None]
        if said and version < (claim := version_number(event.attrs[said[0]]) or 0.0):
            why = f"rank {event.rank} serves version {version:g} where {said[0]} says {claim:g}"
            self._found.append(Finding.on("R-VERSION", event, why))
            return
        self._compare(event, version, facts)
        self._served[event.rank] = version

    def _compare(self, event: Event, version: float, facts: Facts) -> None:
        state = facts.tags.of.get(event.rank)
        content = state.content if state else None
        committed, by = (content.committed, content.committed_by) if content else (None, None)
        own = self._published.get(event.rank)
        if own is not None and (committed is None or own[0] > committed):
            committed, by = own
        trained = self._trained
        ahead = trained is not None and (committed is None or trained[0] > committed)
        if ahead and trained is not None and facts.header.kind(event.rank) == "engine":
            committed, by = trained
        if committed is not None and by is not None and version < committed:
            self._found.append(
                Finding.on(
                    "R-VERSION",
                    event,
                    f"rank {event.rank} serves version {version:g}, and version {committed:g} was "
                    f"committed by {by.phase}",
                    by,
                )
            )
            return
        self._never_synced(event, version, facts)
        new = self._new.get(event.rank)
        if new is None or event.rank in self._synced:
            return
        peers = facts.header.peers(event.rank, self._served)
        others = [self._served[peer] for peer in peers if peer != event.rank]
        if others and version < min(others):
            self._found.append(
                Finding.on(
                    "R-VERSION",
                    event,
                    f"rank {event.rank} joined and serves version {version:g} before its first "
                    "sync; "
                    f"its peers serve {min(others):g}",
                    new,
                )
            )

    def _never_synced(self, event: Event, version: float, facts: Facts) -> None:
        """Who serves what it began with, although it (or, in turns with it, a trainer) has trained
        newer versions, and no update ever ran.
        """
        own = self._own.get(event.rank)
        if own is None and self._own and facts.header.kind(event.rank) == "engine":
            own = max(self._own.values(), key=lambda each: each[0])
            if self._side_by_side or facts.silent():
                return  # An asynchronous trainer says by itself how far behind it serves.
        if own is None or event.rank in self._synced or version > own[0] - 2:
            return  # One step behind may be how it is meant.
        if self._served.get(event.rank) != version:
            return  # It changed, so something brings it new ones that no line tells of.
        by = "itself" if own[1].rank == event.rank else f"by rank {own[1].rank}"
        why = (
            f"rank {event.rank} serves version {version:g}, trained is version {own[0]:g} {by}, and"
        )
        self._found.append(
            Finding.on("R-VERSION", event, f"{why} no update ever ran there", own[1])
        )

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found


def _meanwhile(event: Event, facts: Facts) -> bool:
    """Whether serving and training overlap where `event` begins one of them."""
    other = "train" if event.action == "serve" else "serve"
    return any(rank.opened(other) for rank in facts.ranks.values() if rank.exit is None)


def _version(start: Open | None) -> float | None:
    return version_number(start.event.attrs.get("version")) if start is not None else None


class Monotone:
    """R-MONOTONE: a published version fell.

    Sees: one rank publishes, registers or installs a version lower than its own last one. Cannot
    see: a restart from a checkpoint that says so (another `attempt`), which begins a new count.
    Sources: slime `weight_version` after a restart, prime-rl watcher.
    """

    rule = "R-MONOTONE"
    wants = frozenset({"publish", "write"})

    def __init__(self) -> None:
        self._last: dict[tuple[Name, str], tuple[float, Event, object]] = {}
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind not in ("start", "end"):
            return
        if event.action == "write" and (event.kind == "start" or "source" in event.attrs):
            return  # A reload from somewhere else publishes nothing; R-VERSION sees what it serves.
        version = version_number(event.attrs.get("version"))
        if version is None and event.kind == "end":
            version = _version(start)
        if version is None or len(self._found) >= _KEPT:
            return
        key = (event.rank, event.action)
        attempt = event.attrs.get("attempt")
        last = self._last.get(key) or self._heir(event, facts)
        if last is not None and version < last[0] and attempt == last[2]:
            self._found.append(
                Finding.on(
                    "R-MONOTONE",
                    event,
                    f"rank {event.rank} went back: {event.phase} of version {version:g} came after "
                    f"version {last[0]:g}"
                    + (f" of rank {last[1].rank}" if last[1].rank != event.rank else ""),
                    last[1],
                )
            )
        self._last[key] = (version, event, attempt)

    def _heir(self, event: Event, facts: Facts) -> tuple[float, Event, object] | None:
        """What the last one in this rank's place said before it was lost.

        Engines catch up one by one, so none of them is another's heir.
        """
        if not facts.exits or facts.header.kind(event.rank) == "engine":
            return None
        lost = [
            said
            for (rank, action), said in self._last.items()
            if action == event.action
            and rank in facts.exits
            and facts.header.kind(rank) == facts.header.kind(event.rank)
        ]
        return max(lost, key=lambda said: said[1].at, default=None)

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found


class Prerequisites:
    """R-PREREQ: a phase starts without what was never supplied.

    Sees: payload on a group that is named as none, that was destroyed, or whose creation on this
    rank has not ended; a delta whose `base_version` is not the version that the rank holds; an
    update outside a session where the log shows sessions, and which then fails; payload that fails
    and whose error says what should have come first. Cannot see: what was supplied before the log,
    where nobody complains. Sources: vime PR 87, vime issue 22, verl delta_sharded, NeMo-RL
    issue 3274.
    """

    rule = "R-PREREQ"
    wants = frozenset(
        {
            "send",
            "receive",
            "write",
            "collective",
            "init_group",
            "destroy_group",
            "begin",
            "finish",
            "serve",
        }
    )

    def __init__(self) -> None:
        self._dead: dict[tuple[Name, str], Event] = {}
        self._joining: dict[tuple[Name, str], Event] = {}
        self._session: dict[Name, bool] = {}
        self._inside: set[tuple[Name, str]] = set()
        self._sessions_seen: Event | None = None
        self._version: dict[Name, float] = {}
        self._sure: list[Finding] = []
        self._unsure: list[tuple[Event, Finding]] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        group = str(event.attrs["group"]) if "group" in event.attrs else None
        match event.action:
            case "init_group":
                key = (event.rank, group or "")
                if event.kind == "start":
                    self._joining[key] = event
                else:
                    self._joining.pop(key, None)
                    if event.kind == "end":
                        self._dead.pop(key, None)
            case "destroy_group":
                if event.kind == "end" and group is not None:
                    self._dead[(event.rank, group)] = event
            case "begin":
                if event.kind == "end":
                    self._session[event.rank] = True
                    self._sessions_seen = event
            case "finish":
                if event.kind == "end":
                    self._session[event.rank] = False
            case _:
                if event.kind == "start":
                    self._payload(event, group, facts)
                elif event.kind == "end" and event.action in ("write", "receive"):
                    version = version_number(event.attrs.get("version"))
                    version = version if version is not None else _version(start)
                    if version is not None:
                        self._version[event.rank] = version
                elif event.kind == "fail":
                    if event.action == "write":
                        self._session[event.rank] = False
                    self._complained(event, start)

    def _complained(self, event: Event, start: Open | None) -> None:
        """The callee says itself what was not done before."""
        error = event.attrs.get("error")
        began = event if start is None else start.event
        if is_unprepared_error(error) and not any(each.at == began.at for each in self._sure):
            why = f"rank {event.rank} entered {event.phase} without what comes first: {error}"
            self._sure.append(Finding.on("R-PREREQ", began, why, event))

    def _payload(self, event: Event, group: str | None, facts: Facts) -> None:
        if len(self._sure) >= _KEPT or event.action == "serve":
            version = version_number(event.attrs.get("version"))
            if version is not None:
                self._version[event.rank] = version
            return
        if group is not None and group.lower() in _NONE:
            self._sure.append(
                Finding.on(
                    "R-PREREQ",
                    event,
                    f"rank {event.rank} entered {event.phase} with no group: none was ever created",
                )
            )
            return
        dead = self._dead.get((event.rank, group)) if group is not None else None
        if dead is not None:
            why = f"group {group} was destroyed and not created again"
            self._sure.append(
                Finding.on("R-PREREQ", event, f"rank {event.rank}: {event.phase}, but {why}", dead)
            )
            return
        joining = self._joining.get((event.rank, group)) if group is not None else None
        if joining is not None:
            why = f"group {group} is still being created"
            self._sure.append(
                Finding.on(
                    "R-PREREQ", event, f"rank {event.rank}: {event.phase}, but {why}", joining
                )
            )
            return
        base = version_number(event.attrs.get("base_version"))
        state = facts.tags.of.get(event.rank)
        held = state.content.version if state is not None else None
        held = self._version.get(event.rank) if held is None else held
        if base is not None and held is not None and base != held and event.action != "send":
            why = f"its base is version {base:g}, and the rank holds {held:g}"
            self._sure.append(
                Finding.on("R-PREREQ", event, f"rank {event.rank} entered {event.phase}: {why}")
            )
            return
        if event.action == "write" and self._session.get(event.rank, False):
            self._inside.add((event.rank, event.phase))
        elif event.action == "write":
            seen = self._sessions_seen
            if seen is not None and (event.rank, event.phase) in self._inside:
                why = "no update session is open, as there was whenever it did this before"
                self._sure.append(
                    Finding.on("R-PREREQ", event, f"rank {event.rank}: {event.phase}: {why}", seen)
                )
                return
            if seen is not None:
                why = "no update session is open on this rank"
                finding = Finding.on(
                    "R-PREREQ", event, f"rank {event.rank}: {event.phase}, but {why}", seen
                )
                self._unsure.append((event, finding))

    def finish(self, facts: Facts) -> list[Finding]:
        return self._sure + [
            finding
            for event, finding in self._unsure
            if facts.outcome(event) == "bad"
            and any(
                "session" in str(failure.attrs.get("error", "")).lower()
                or "begin" in str(failure.attrs.get("error", "")).lower()
                or "start" in str(failure.attrs.get("error", "")).lower()
                or "must" in str(failure.attrs.get("error", "")).lower()
                for failure in facts.failures_after(event.at, [event.rank])
            )
        ]


class Evidenced:
    """R-EVIDENCE: success was claimed, and its own figures say otherwise.

    Sees: at the end of a phase, `received_X` (or `loaded_X`, `moved_X`, `actual_X`, `X`) that does
    not match `expected_X` (of what is counted, more is as wrong as less); 0 bytes where more than
    none was expected; a checksum that does not match, or that a new version did not change; ranks
    that report different checksums for one version.
    Cannot see: a success without figures, which is why checksums are worth logging. Sources:
    tokenspeed issue 1373, verl delta_sharded, verl PR 7762.
    """

    rule = "R-EVIDENCE"
    wants = None

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._sums: dict[tuple[str, str], dict[Name, tuple[str, Event]]] = {}

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "end" or not event.attrs:
            return
        attrs: Mapping[str, Any] = event.attrs
        began: Mapping[str, Any] = start.event.attrs if start is not None else {}
        checksum = attrs.get("checksum")
        if checksum is not None and event.action in ("write", "receive", "send", "publish"):
            version = attrs.get("version", began.get("version", event.epoch))
            if len(self._sums) > 64:
                self._sums.pop(next(iter(self._sums)))
            key = (str(version), str(attrs.get("bucket", began.get("bucket", ""))))
            self._sums.setdefault(key, {})[event.rank] = (str(checksum), event)
        why = _mismatch({**began, **attrs}) or (
            _unchanged({**began, **attrs}) if event.action in ("write", "receive") else None
        )
        if why is not None and len(self._found) < _KEPT:
            self._found.append(
                Finding.on(
                    "R-EVIDENCE",
                    event,
                    f"rank {event.rank} ended {event.phase} as a success, but {why}",
                    *([start.event] if start is not None else []),
                )
            )

    def finish(self, facts: Facts) -> list[Finding]:
        return self._found + [
            finding for sums in self._sums.values() for finding in _odd_sums(sums)
        ]


def _odd_sums(sums: dict[Name, tuple[str, Event]]) -> list[Finding]:
    groups: dict[str, list[Name]] = {}
    for rank, (checksum, _) in sums.items():
        groups.setdefault(checksum, []).append(rank)
    if len(groups) < 2:
        return []
    sizes = sorted(groups.values(), key=len)
    guilty = sizes[0] if len(sizes) == 2 and len(sizes[0]) < len(sizes[1]) else []
    events = [event for _, event in sums.values()]
    first = sums[guilty[0]][1] if guilty else events[-1]
    return [
        Finding.on(
            "R-EVIDENCE",
            first,
            "ranks report different checksums for one version: "
            + "; ".join(f"{ranks} {checksum[:16]}" for checksum, ranks in groups.items()),
            *events[:8],
            guilty=tuple(guilty),
        )
    ]


def _unchanged(attrs: Mapping[str, Any]) -> str | None:
    """A new version whose sum is what it was before."""
    if "version" not in attrs:
        return None
    for name in ("checksum", "digest", "hash", "sum"):
        before, after = attrs.get(f"{name}_before"), attrs.get(f"{name}_after")
        if before is not None and before == after:
            return f"its {name} is what it was before ({str(after)[:16]})"
    return None


def _mismatch(attrs: Mapping[str, Any]) -> str | None:
    for name, expected in attrs.items():
        if not name.startswith("expected_"):
            continue
        thing = name.removeprefix("expected_")
        if thing in ("free_gib", "freed_gib", "gib"):
            continue
        for actual_name, actual in attrs.items():
            if actual_name != thing and not _is_done(actual_name, thing):
                continue
            want, got = number(expected), number(actual)
            if want is None or got is None:
                if isinstance(expected, str) and str(actual) != expected:
                    return f"{actual_name} is {str(actual)[:40]}, expected {expected[:40]}"
                continue
            if (want == 1 and thing == "bytes" and got < 1) or (
                not (want == 1 and thing == "bytes") and got < want
            ):
                return f"{actual_name} is {got:g}, expected {want:g}"
            if got > want > 0 and got.is_integer() and not _AMOUNT.search(thing):
                return f"{actual_name} is {got:g}, expected {want:g}"
    for name, value in attrs.items():
        thing = name.rpartition("_")[2]
        if thing not in _COUNTED or f"expected_{thing}" in attrs or not _is_done(name, thing):
            continue
        if number(value) == 0:
            return f"{name} is 0"
    verified = attrs.get("verified", attrs.get("checksum_ok", attrs.get("checksum_match")))
    if verified is False:
        return "its own check did not match"
    return None


def _is_done(name: str, thing: str) -> bool:
    """Whether a figure says how much of a thing was dealt with, as `loaded_tensors` does."""
    verb, _, rest = name.partition("_")
    return rest == thing and bool(_DONE.fullmatch(verb)) and verb not in _NOT_DONE


class Scope:
    """R-SCOPE: outputs are bad, and nothing that phase logs can show is wrong.

    Sees: an `output` that the log itself calls bad. It is no fault of order, fence, tag or version,
    so the answer stays `ok` and says what would show more. Cannot see: anything of the output that
    the log does not say. Source: SGLang issue 15246, vLLM RFC 48312.
    """

    rule = "R-SCOPE"
    wants = None

    def __init__(self) -> None:
        self._bad: Event | None = None

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if (
            self._bad is None
            and event.attrs
            and (is_bad_output(event.attrs.get("output")) or event.attrs.get("output_ok") is False)
        ):
            self._bad = event

    def finish(self, facts: Facts) -> list[Finding]:
        if self._bad is None:
            return []
        return [
            Finding.on(
                "R-SCOPE",
                self._bad,
                "the output is bad, and no phase, fence, tag or version in this log explains it",
                strength=SUSPECTED + 2,
                guilty=(),
                record_next=("a checksum of the weights after every sync, or a log-prob probe",),
            )
        ]
