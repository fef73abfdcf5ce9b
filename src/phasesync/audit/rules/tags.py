"""Tags: what is used must be mapped and filled, and what is moved twice was moved wrongly.

No engine reports which of its tags are mapped, so the ledger knows only what the log said. A
leader may have mapped memory for its peers; whoever could have been served that way is not
accused.
"""

from collections.abc import Mapping
from typing import Final

from phasesync.audit.answer import NOTE, Finding
from phasesync.audit.events import Event, Name, number
from phasesync.audit.facts import Facts, Open
from phasesync.audit.ledgers import ALL, TagState, tags_of
from phasesync.audit.vocabulary import KV, WEIGHTS, is_bad_output, is_idle_error, tag_name

__all__ = ("Contents", "Mapped", "Once", "TagSets")

_USES: Final = {
    "serve": (WEIGHTS, KV),
    "write": (WEIGHTS,),
    "receive": (WEIGHTS,),
    "flush": (KV,),
    "finish": (WEIGHTS,),
}
_KEPT: Final = 512


class Mapped:
    """R-MAPPED: something uses a tag that is released.

    Sees: serving needs weights and KV, a weight update needs weights; the ledger of that rank says
    released. It accuses where the use then failed or never ended, where the same rank resumed
    other tags since, so that resumes are known to be logged, or where it resumed that tag only
    afterwards. Flushing a cache whose memory is away
    is legal on some engines and fatal on others: only a failure tells. Cannot see: a tag that a
    leader mapped for this rank without saying on which devices. Sources: vLLM issues 57853 and
    44395, SGLang issue 19029.
    """

    rule = "R-MAPPED"
    wants = frozenset({*_USES, "acquire", "send"})

    def __init__(self) -> None:
        self._uses: list[tuple[Event, str, Event, bool]] = []
        self._after: set[int] = set()

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.action == "acquire":
            self._resumed(event)
            return
        if event.kind != "start" or event.attrs.get("dispatch") or event.attrs.get("target"):
            return
        state = facts.tags.of.get(event.rank)
        if state is None or len(self._uses) >= _KEPT:
            return
        if event.action == "send" and "tags" not in event.attrs:
            return  # What is sent may come from anywhere.
        for tag in _USES.get(event.action) or tags_of(event):
            known = state.of(tag)
            if known is None or known[0] != "released":
                continue
            if _mapped_for(event.rank, tag, known[1], facts):
                continue
            self._uses.append((event, tag, known[1], state.acquired_at > known[1].at))
            return

    def _resumed(self, event: Event) -> None:
        """What was used in this epoch comes back only now."""
        if event.kind != "start" or not ("tags" in event.attrs or event.means.tags):
            return
        for use, tag, _, _ in self._uses[-64:]:
            if use.rank == event.rank and use.epoch == event.epoch and tag in tags_of(event):
                self._after.add(use.at)

    def finish(self, facts: Facts) -> list[Finding]:
        found = []
        for event, tag, released, resumes_logged in self._uses:
            outcome = facts.outcome(event)
            logged = resumes_logged or event.at in self._after
            logged = logged and event.action in ("serve", "write", "receive")
            if outcome == "good" and not logged:
                continue
            if event.action in ("flush", "finish") and outcome != "bad":
                continue
            found.append(
                Finding.on(
                    "R-MAPPED",
                    event,
                    f"rank {event.rank} entered {event.phase} while tag {tag} is released",
                    released,
                    *facts.failures_after(event.at, [event.rank])[:2],
                )
            )
        return found


def _mapped_for(rank: Name, tag: str, released: Event, facts: Facts) -> bool:
    """Whether another rank resumed the tag since, in a way that may have reached this one."""
    others = [
        event
        for name in (tag, ALL)
        for other, event in facts.tags.acquired.get(name, {}).items()
        if other != rank and event.at > released.at
    ]
    return (
        len(others) == 1
        and "gpus" not in others[0].attrs
        and facts.header.kind(rank) == (facts.header.kind(others[0].rank))
    )


class Contents:
    """R-CONTENT and R-PREREQ: a tag is mapped, but what was in it was discarded, or never came.

    Sees: a release that discards (`content_lost`, or level 2), then serving without a full write,
    a reload or a resume that names what it loaded; an adapter is no full write, and a write of one
    part fills no other that serving says it `uses`. Weights that
    started as dummies and were never written are R-PREREQ. Cannot see: levels that no line names.
    Sources: verl PR 3461, PR 3541; SkyRL PR 326.
    """

    rule = "R-CONTENT"
    wants = frozenset({"serve", "write"})

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind == "end" and is_bad_output(event.attrs.get("output")) and start is not None:
            self._without(start.event, facts)
        if event.kind != "start" or event.attrs.get("dispatch") or len(self._found) >= _KEPT:
            return
        state = facts.tags.of.get(event.rank)
        if state is None:
            return
        content = state.content
        part = str(event.attrs.get("part", event.means.part or "")).lower()
        if content.never is not None:
            needs_base = event.action == "serve" or part in ("adapter", "lora", "delta", "peft")
            if needs_base and not _written_by_other(event.rank, content.never, facts):
                self._found.append(
                    Finding.on(
                        "R-PREREQ",
                        event,
                        f"rank {event.rank} entered {event.phase} on dummy weights: the "
                        "base was "
                        "never supplied",
                        content.never,
                    )
                )
            return
        if event.action != "serve":
            return
        self._also(event, content.also)
        if content.lost is None:
            return
        known = state.of(WEIGHTS)
        if known is not None and known[0] == "released":
            return  # Then it is not even mapped, which is the earlier fault.
        if _written_by_other(event.rank, content.lost, facts):
            return
        self._found.append(
            Finding.on(
                "R-CONTENT",
                event,
                f"rank {event.rank} entered {event.phase} with weights that {content.lost.phase} "
                "discarded and nothing wrote in full since",
                content.lost,
            )
        )

    def _without(self, event: Event, facts: Facts) -> None:
        """The output is bad, and a part that was discarded never came back."""
        state = facts.tags.of.get(event.rank)
        also = state.content.also if state is not None else {}
        gone = {tag: lost for tag, lost in also.items() if tag_name(tag) != KV}
        if any(each.at == event.at for each in self._found) or len(self._found) >= _KEPT:
            return
        for tag, lost in gone.items():
            if lost.at < event.at:
                why = f"with {tag} that {lost.phase} discarded and nothing wrote since"
                why = f"rank {event.rank} entered {event.phase} {why}; its output is bad"
                self._found.append(Finding.on("R-CONTENT", event, why, lost))
                return

    def _also(self, event: Event, lost: Mapping[str, Event]) -> None:
        """What serving says it uses besides the weights."""
        uses = event.attrs.get("uses")
        for tag in uses[:64] if isinstance(uses, list | tuple) else ():
            if str(tag) in lost:
                why = f"with {tag} that {lost[str(tag)].phase} discarded and nothing wrote since"
                self._found.append(
                    Finding.on(
                        "R-CONTENT",
                        event,
                        f"rank {event.rank} entered {event.phase} {why}",
                        lost[str(tag)],
                    )
                )
                return

    def finish(self, facts: Facts) -> list[Finding]:
        return [finding.doubted(facts.silent("trainer")) for finding in self._found]


def _written_by_other(rank: Name, since: Event, facts: Facts) -> bool:
    """Whether another rank wrote weights since, perhaps for this one."""
    return any(event.at > since.at for other, event in facts.tags.written.items() if other != rank)


class Once:
    """R-ONCE: one transition twice without its inverse between, or over a half-done one.

    Sees: a release of tags that are all released, a resume of tags that are all mapped, a session
    or group opened twice, each where the first is in the log; a release or resume over one that
    failed half-way (`partial`); and one that starts while the same one still runs. A second
    resume, session or group that does no harm is only noted. Cannot see: what happened before the
    log. Sources: slime issue 1895, vLLM issue 36651.
    """

    rule = "R-ONCE"
    wants = frozenset({"release", "acquire", "begin", "finish", "init_group", "destroy_group"})

    _INVERSE: Final = {"begin": "finish", "init_group": "destroy_group"}

    def __init__(self) -> None:
        self._sure: list[Finding] = []
        self._unsure: list[tuple[Event, Finding]] = []
        self._session: dict[tuple[Name, str, str], Event] = {}

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if len(self._sure) + len(self._unsure) >= _KEPT:
            return
        if event.action in ("release", "acquire"):
            if event.kind == "start" and facts.tags.concerns(event):
                self._memory(event, facts)
        elif event.action in self._INVERSE:
            key = (event.rank, event.action, str(event.attrs.get("group", "")))
            if event.kind == "start" and key in self._session:
                first = self._session[key]
                self._unsure.append((event, _twice(event, first)))
            elif event.kind == "end":
                self._session[key] = event
        elif event.kind == "end":
            inverse = "begin" if event.action == "finish" else "init_group"
            for key in list(self._session):
                if key[:2] == (event.rank, inverse):
                    del self._session[key]
        if event.kind in ("fail", "exit") and event.action in ("write", "finish"):
            self._session.pop((event.rank, "begin", ""), None)  # A failure closes the session.

    def _memory(self, event: Event, facts: Facts) -> None:
        state = facts.tags.of.get(event.rank)
        running = [
            each.event
            for each in facts.ranks[event.rank].open
            if each.event is not event
            and each.event.action == event.action
            and each.event.phase == event.phase
            and _overlap(tags_of(each.event), tags_of(event))
        ]
        if running and "gpus" not in event.attrs:
            self._sure.append(
                Finding.on(
                    "R-ONCE",
                    event,
                    f"rank {event.rank} entered {event.phase} while its earlier {event.phase} "
                    "still runs",
                    running[-1],
                )
            )
            return
        if state is None:
            return
        if state.half is not None and state.half.phase == event.phase:
            self._sure.append(
                Finding.on(
                    "R-ONCE",
                    event,
                    f"rank {event.rank} entered {event.phase} again over one that failed half-way",
                    state.half,
                )
            )
            state.half = None
            return
        tags = tags_of(event)
        want = "released" if event.action == "release" else "mapped"
        first = _all_are(state, tags, want)
        if first is None or first.rank != event.rank:
            return
        finding = _twice(event, first)
        if event.action == "release" and (first.epoch == event.epoch or state.acquired_at >= 0):
            self._sure.append(finding)
        else:
            self._unsure.append((event, finding))

    def finish(self, facts: Facts) -> list[Finding]:
        harmed = [finding for event, finding in self._unsure if facts.outcome(event) == "bad"]
        return self._sure + harmed


def _twice(event: Event, first: Event) -> Finding:
    caller = event.attrs.get("caller")
    by = f" (caller {caller})" if caller is not None else ""
    return Finding.on(
        "R-ONCE",
        event,
        f"rank {event.rank} entered {event.phase}{by} again, with nothing that undoes "
        f"{first.phase} "
        "between",
        first,
    )


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return ALL in one or ALL in other or bool(set(one) & set(other))


def _all_are(state: TagState, tags: tuple[str, ...], want: str) -> Event | None:
    """The event that last put all of `tags` into the state `want`, if they all are."""
    if ALL in tags:
        if state.every is None or state.every[0] != want:
            return None
        if any(known[0] != want for known in state.each.values()):
            return None
        return state.every[1]
    events = []
    for tag in tags:
        known = state.of(tag)
        if known is None or known[0] != want:
            return None
        events.append(known[1])
    return max(events, key=lambda each: each.at) if events else None


class TagSets:
    """R-TAGS: a tag is resumed that was never released, or the sets of two sides differ.

    Sees: a resume that names a tag which this rank's releases did not name, and which then fails;
    a tag other than weights and KV that stays released while the rank serves and dies; peers that
    resume different tags in one phase and then fail. Cannot see: releases before the log, so a
    resume that works is never accused. Sources: SGLang PR 24123 (KeyError), vLLM `wake_up` with a
    tag that is awake, verl PR 7434.
    """

    rule = "R-TAGS"
    wants = frozenset({"acquire", "serve", "release"})

    def __init__(self) -> None:
        self._odd: list[tuple[Event, Event, str]] = []
        self._sets: dict[tuple[int | None, str], dict[Name, Event]] = {}

    def see(self, event: Event, start: Open | None, facts: Facts) -> None:
        if event.kind != "start" or len(self._odd) >= _KEPT:
            return
        state = facts.tags.of.get(event.rank)
        named = "tags" in event.attrs or "tag" in event.attrs
        if event.action in ("acquire", "release") and named:
            if len(self._sets) > 64:
                self._sets.pop(next(iter(self._sets)))
            self._sets.setdefault((event.epoch, event.phase), {})[event.rank] = event
        if state is None or event.action == "release":
            return
        if event.action == "acquire":
            self._resumed(event, state)
        else:
            left = {
                tag: released
                for tag, released in state.released().items()
                if tag not in (WEIGHTS, KV)
                and tag in ("cuda_graph",)
                and released.at < state.acquired_at
            }
            for tag, released in left.items():
                why = f"rank {event.rank} serves, and tag {tag} was released and never resumed"
                self._odd.append((event, released, why))

    def _resumed(self, event: Event, state: TagState) -> None:
        released = state.released()
        if state.released_at < 0 or state.every is not None:
            return
        tags = tags_of(event)
        if not released and not state.said:
            return
        last = max(
            (known[1] for known in state.each.values()), key=lambda each: each.at, default=None
        )
        if last is None:
            return
        if ALL in tags:
            awake = sorted({WEIGHTS, KV} - set(released))
            if awake:
                why = f"{event.phase} resumes all tags, but {', '.join(awake)} is not released"
                self._odd.append((event, last, f"rank {event.rank}: {why}"))
            return
        never = [tag for tag in tags if state.of(tag) is None]
        awake = [tag for tag in tags if tag not in released and tag not in never]
        if never:
            why = f"{event.phase} resumes {', '.join(never)}, which was never released"
            self._odd.append((event, last, f"rank {event.rank}: {why}"))
        elif awake and len(awake) < len(tags):
            why = f"{event.phase} resumes {', '.join(awake)}, which is mapped"
            self._odd.append((event, last, f"rank {event.rank}: {why}"))

    def finish(self, facts: Facts) -> list[Finding]:
        found = [
            Finding.on(
                "R-TAGS", event, why, other, *facts.failures_after(event.at, [event.rank])[:2]
            )
            for event, other, why in self._odd
            if facts.outcome(event) == "bad"
        ]
        for events in self._sets.values():
            sets = {rank: frozenset(tags_of(event)) for rank, event in events.items()}
            if len(set(sets.values())) < 2 or not facts.failures_after(
                min(event.at for event in events.values())
            ):
                continue
            found += _differ(events, sets, facts)
        return found


def _differ(
    events: dict[Name, Event], sets: dict[Name, frozenset[str]], facts: Facts
) -> list[Finding]:
    kinds = {facts.header.kind(rank) for rank in events}
    if len(kinds) > 1:
        return []
    counts: dict[frozenset[str], list[Name]] = {}
    for rank, tags in sets.items():
        counts.setdefault(tags, []).append(rank)
    groups = sorted(counts.values(), key=len)
    minority = groups[0] if len(groups) == 2 and len(groups[0]) < len(groups[1]) else []
    first = events[(minority or groups[0])[0]]
    return [
        Finding.on(
            "R-TAGS",
            first,
            "ranks name different tags in one phase: "
            + "; ".join(f"{sorted(tags)} on {ranks}" for tags, ranks in counts.items()),
            *events.values(),
            guilty=tuple(minority),
            strength=0 if minority else NOTE,
        )
    ]


def needs_idle(event: Event) -> bool:
    """Whether a failure says that the engine was not idle."""
    return is_idle_error(event.attrs.get("error")) and number(event.attrs.get("running")) != 0
