"""What a call does to what is known about an engine, and which calls are refused.

Pure: one frozen status in, the next out. A port asks `refusal` before each call and books
`done` or `failed` after it, whatever the engine behind it. A rule is a row; adapters add none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from phasesync.core.model import Version
from phasesync.engines.base import KV_CACHE, WEIGHTS, EngineStatus, InFlight, Tag

__all__ = ("Call", "begun", "done", "failed", "refusal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a port: `name` is the method."""

    name: str
    tags: tuple[Tag, ...] = ()
    policy: InFlight | None = None
    policies: tuple[InFlight, ...] = ()
    version: Version | None = None
    releasable: tuple[frozenset[Tag], ...] = ()
    keeps_weights: bool = False
    ranks: int = 1

    def __str__(self) -> str:
        what = ", ".join(map(repr, self.tags)) or (
            (self.policy or "") if self.version is None else f"version {self.version}"
        )
        return f"{self.name}({what})"


Rule: TypeAlias = tuple[Callable[[EngineStatus, Call], bool], str]
Effect: TypeAlias = Callable[[EngineStatus, Call], EngineStatus]


def _unknown_tags(status: EngineStatus, call: Call) -> set[Tag]:
    return set(call.tags) - set(status.tags)


def _before(status: EngineStatus, tag: Tag) -> tuple[Tag, ...]:
    return status.tags[: status.tags.index(tag)] if tag in status.tags else ()


_ALWAYS: tuple[Rule, ...] = (
    (lambda s, _: s.health != "usable", "the engine is {s.health}: {s.because}; replace it"),
    (lambda s, _: s.under_way is not None, "{s.under_way} is still under way; wait for it"),
)
_NO_SESSION: Rule = (
    lambda s, _: s.session is not None,
    "the update to version {s.session} is open; finish it first",
)
_SHUT: Rule = (lambda s, _: s.gate == "open", "the engine is serving; pause it first")
_WEIGHTS_THERE: Rule = (
    lambda s, _: WEIGHTS in s.asleep | s.doubtful,
    "the weights are not resident; resume 'weights' first",
)
_KNOWN: Rule = (
    lambda s, c: bool(_unknown_tags(s, c)),
    "this engine has no such tag; its tags are: {tags}",
)

_RULES: Mapping[str, tuple[Rule, ...]] = {
    "pause": ((lambda _, c: c.policy not in c.policies, "this engine knows only {policies}"),),
    "resume_generation": (
        (lambda s, _: bool(s.asleep), "{asleep} is released; resume it first"),
        (lambda s, _: bool(s.doubtful), "{doubtful} may be unmapped; replace the engine"),
        _NO_SESSION,
        (lambda s, _: s.content != "whole", "the weights are {s.content}; load a whole version"),
        (lambda s, _: s.kv_stale, "the caches are of older weights; flush first"),
    ),
    "release": (
        (lambda _, c: not c.tags, "name the tags; 'all' means something else on every engine"),
        _KNOWN,
        _SHUT,
        _NO_SESSION,
        (lambda s, c: bool(s.asleep & set(c.tags)), "{asleep} is released already"),
        (lambda s, c: bool(s.doubtful & set(c.tags)), "{doubtful} may be unmapped already"),
        (
            lambda s, c: bool(c.releasable) and frozenset(c.tags) not in c.releasable,
            "this engine releases only {releasable}",
        ),
    ),
    "resume": (
        (
            lambda _, c: len(c.tags) != 1,
            "resume one tag a call: a batch with one wrong tag is lost",
        ),
        _KNOWN,
        (
            lambda s, c: bool(s.doubtful & set(c.tags)),
            "an earlier resume of it failed, and that is never retried; replace the engine",
        ),
        (lambda s, c: not s.asleep >= set(c.tags), "it is not released"),
        (
            lambda s, c: bool(s.asleep & set(_before(s, c.tags[0]))),
            "{before} comes first",
        ),
        (
            lambda s, c: c.tags[0] == KV_CACHE and (s.session is not None or s.content != "whole"),
            "the weights are {s.content}; load a whole version before mapping KV",
        ),
    ),
    "remap": (  # Only to be released at once, so that it does not matter what the weights are.
        _KNOWN,
        _SHUT,
        _NO_SESSION,
        (lambda s, c: not s.asleep >= set(c.tags), "it is not released"),
        (lambda s, _: bool(s.doubtful), "{doubtful} may be unmapped; replace the engine"),
    ),
    "begin": (
        _NO_SESSION,
        _WEIGHTS_THERE,
        _SHUT,
        (
            lambda s, c: (
                s.version is not None
                and ((c.version or 0), s.content != "whole") <= (s.version, False)
            ),
            "version {s.version} is committed; versions only rise",
        ),
    ),
    "load": (
        (lambda s, _: s.session is None, "no update is open; begin one first"),
        _WEIGHTS_THERE,
    ),
    "finish": (
        (lambda s, _: s.session is None, "no update is open; begin one first"),
        (lambda s, c: s.session != c.version, "the open update is to version {s.session}"),
        (lambda s, _: s.loaded == 0, "nothing was loaded; that is no version"),
    ),
    "abandon": ((lambda s, _: s.session is None, "no update is open"),),
    "flush": (
        _SHUT,
        (lambda s, _: KV_CACHE in s.asleep | s.doubtful, "the KV cache is released"),
    ),
}


def refusal(status: EngineStatus, call: Call) -> str | None:
    """Why `call` may not reach an engine of which `status` is known, or None."""
    for broken, reason in (*_ALWAYS, *_RULES[call.name]):
        if broken(status, call):
            return f"cannot {call}: " + reason.format(
                s=status,
                tags=_names(status.tags),
                asleep=_names(_first(call.tags, status.asleep)),
                doubtful=_names(_first(call.tags, status.doubtful)),
                before=_names(
                    set(_before(status, call.tags[0])) & status.asleep if call.tags else ()
                ),
                policies=_names(call.policies),
                releasable=" or ".join("{" + _names(tags) + "}" for tags in call.releasable),
            )
    return None


def _first(wanted: tuple[Tag, ...], held: frozenset[Tag]) -> frozenset[Tag]:
    return held & set(wanted) or held


def _names(tags: object) -> str:
    assert isinstance(tags, tuple | frozenset | set)
    return ", ".join(sorted(map(repr, tags)))


def begun(status: EngineStatus, call: Call) -> EngineStatus:
    """What is known while `call` is under way. A pause shuts the gate before it asks the engine."""
    status = replace(status, under_way=str(call))
    match call.name:
        case "pause":
            return replace(status, gate="shut")
        case "begin":
            return replace(status, content="loading")
        case _:
            return status


def _released(status: EngineStatus, call: Call) -> EngineStatus:
    lost = WEIGHTS in call.tags and not call.keeps_weights
    return replace(
        status,
        asleep=status.asleep | set(call.tags),
        content="discarded" if lost else status.content,
        kv_stale=status.kv_stale and KV_CACHE not in call.tags,
    )


_DONE: Mapping[str, Effect] = {
    "pause": lambda s, _: replace(s, gate="shut"),
    "resume_generation": lambda s, _: replace(s, gate="open"),
    "release": _released,
    "resume": lambda s, c: replace(s, asleep=s.asleep - set(c.tags)),
    "remap": lambda s, c: replace(s, asleep=s.asleep - set(c.tags)),
    "begin": lambda s, c: replace(s, session=c.version, loaded=0, content="loading"),
    "load": lambda s, _: replace(s, loaded=s.loaded + 1),
    "finish": lambda s, c: replace(
        s,
        session=None,
        loaded=0,
        content="whole",
        version=c.version,
        kv_stale=KV_CACHE not in s.asleep,
    ),
    "abandon": lambda s, _: replace(s, session=None, loaded=0, content="partial"),
    "flush": lambda s, _: replace(s, kv_stale=False),
}


def _unmappable(status: EngineStatus, call: Call) -> EngineStatus:
    return replace(
        status,
        asleep=status.asleep - set(call.tags),
        doubtful=status.doubtful | set(call.tags),
        health="unknown",
        because=f"{call} failed",
    )


_FAILED: Mapping[str, Effect] = {
    "pause": lambda s, _: replace(s, gate="shut"),
    "resume_generation": lambda s, _: s,
    "release": lambda s, c: replace(
        s,
        asleep=s.asleep - set(c.tags),
        doubtful=s.doubtful | set(c.tags),
        content="discarded" if WEIGHTS in c.tags and not c.keeps_weights else s.content,
    ),
    # A tag that failed to map cannot be mapped again, and what follows it is not to be trusted.
    "resume": _unmappable,
    "remap": _unmappable,
    # The engine has closed its session; a whole new update mends partial weights.
    "begin": lambda s, _: replace(s, session=None, content="partial"),
    "load": lambda s, _: replace(s, session=None, loaded=0, content="partial"),
    "finish": lambda s, _: replace(s, session=None, loaded=0, content="partial"),
    "abandon": lambda s, _: replace(s, session=None, loaded=0, content="partial"),
    "flush": lambda s, _: replace(s, kv_stale=True),
}


def done(status: EngineStatus, call: Call) -> EngineStatus:
    """What is known once `call` has returned."""
    return replace(_DONE[call.name](status, call), under_way=None)


def failed(status: EngineStatus, call: Call, why: str, *, outcome_known: bool) -> EngineStatus:
    """What is known once `call` has raised, or ran out of time with its outcome unknown.

    With several ranks one failed call leaves their replies one behind, so nothing that such
    an engine answers afterwards can be believed.
    """
    after = replace(_FAILED[call.name](status, call), under_way=None)
    if after.health == "usable" and (call.ranks > 1 or not outcome_known):
        return replace(after, health="unknown", because=f"{call} failed: {why}")
    return replace(after, because=f"{call} failed: {why}") if after.health != "usable" else after
