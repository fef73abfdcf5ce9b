"""What a protocol guarantees, for whoever chooses one: values, and the same as text.

Nothing here is written by hand for one protocol: what a fence is for is what lint says of the
protocol without it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from phasesync.core.protocol import FenceDecl, InvariantKind, PhaseDecl, Protocol, StepDecl, Verb
from phasesync.core.wire import Json
from phasesync.lint.guards import guards
from phasesync.report import phrases

__all__ = ("Fence", "Overview", "Step", "as_json", "as_text", "listing", "overview")

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence and the pairs of phases that it keeps apart: (`first`, `then`)."""

    name: str
    terms: str
    when: str
    apart: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A phase; `by` is `leader` or `rank`, `outside` where the caller's program does it."""

    name: str
    role: str
    by: str
    outside: bool
    says: str


@dataclass(frozen=True, slots=True)
class Overview:
    """All that `show` has to say."""

    name: str
    summary: str
    options: tuple[tuple[str, str], ...]
    roles: tuple[tuple[str, str], ...]
    never: tuple[tuple[str, str], ...]
    asks: tuple[tuple[str, str], ...]
    fences: tuple[Fence, ...]
    phases: tuple[Step, ...]
    served: tuple[tuple[str, str], ...]
    recover: tuple[str, ...]


def overview(protocol: Protocol) -> Overview:
    """What `protocol` promises, and what it asks of its user."""
    apart: dict[str, list[tuple[str, str]]] = {}
    for guard in guards(protocol):
        apart.setdefault(guard.fence, []).append((guard.first, guard.then))
    fences = {fence.name: fence for fence in protocol.fences}
    never = [each for each in protocol.invariants if each.kind is InvariantKind.NEVER]
    asks = [each for each in protocol.invariants if each.kind is not InvariantKind.NEVER]
    return Overview(
        name=protocol.name,
        summary=protocol.summary,
        options=tuple((each.name, phrases.option(each)) for each in protocol.options),
        roles=tuple((each.name, phrases.role(each)) for each in protocol.roles),
        never=tuple((phrases.never(each), phrases.when(each)) for each in never),
        asks=tuple((phrases.asks(each), phrases.when(each)) for each in asks),
        fences=tuple(
            Fence(
                fence.name,
                phrases.fence_terms(protocol, fence),
                phrases.when(fence),
                tuple(apart.get(fence.name, ())),
            )
            for fence in fences.values()
        ),
        phases=tuple(_step(protocol, step) for step in protocol.phases),
        served=tuple(_served(protocol)),
        recover=tuple(_recovery(step) for step in protocol.recover),
    )


def _step(protocol: Protocol, phase: PhaseDecl) -> Step:
    return Step(
        phase.name,
        phase.role,
        phase.by or "rank",
        phase.outside,
        phrases.step(protocol, phase),
    )


def _served(protocol: Protocol) -> Iterator[tuple[str, str]]:
    """Phases that start only with this epoch's content in what they need."""
    content = {resource.name for resource in protocol.resources if resource.content}
    for phase in protocol.phases:
        for effect in phase.effects:
            if effect.verb is Verb.NEEDS and effect.resource in content:
                yield phase.name, effect.resource


def _recovery(step: StepDecl) -> str:
    if isinstance(step, FenceDecl):
        return f"fence {step.name}"
    return f"{step.name} ({'leader' if step.by else 'every rank'})"


def as_json(found: Overview) -> Json:
    """The overview for programs; `run` is what users bind, `outside` what they do themselves."""
    return asdict(found) | {
        "run": [step.name for step in found.phases if not step.outside],
        "outside": [step.name for step in found.phases if step.outside],
    }


def listing(protocols: tuple[Protocol, ...]) -> str:
    """One line a protocol: its name and its summary."""
    width = max((len(protocol.name) for protocol in protocols), default=0)
    return "".join(f"{each.name:<{width}}  {each.summary}\n" for each in protocols)


def as_text(found: Overview) -> str:
    """The overview for people."""
    return "\n".join(line.rstrip() for line in _lines(found)) + "\n"


def _lines(found: Overview) -> Iterator[str]:
    yield found.name
    yield from _wrapped("", found.summary)
    yield from _section("Options", found.options)
    yield from _section("Roles", found.roles)
    yield from _section("Never mapped together on a device", found.never)
    yield from _section("Must hold", found.asks)
    yield ""
    yield "Fences, in order"
    for fence in found.fences:
        yield from _wrapped("  ", f"{fence.name}  ({fence.terms}) {fence.when}")
        for then, firsts in _by_then(fence.apart):
            yield from _wrapped("      ", f"{then} waits for {_of(found, firsts)}")
    if found.served:
        yield ""
        yield "Needs the weights of this epoch"
        for name in dict.fromkeys(name for name, _ in found.served):
            held = ", ".join(resource for phase, resource in found.served if phase == name)
            yield from _wrapped("  ", f"{name}, in {held}")
    yield ""
    yield "You supply"
    for title, by in (("on every rank", "rank"), ("on leaders", "leader")):
        names = [step.name for step in found.phases if step.by == by and not step.outside]
        if names:
            yield from _wrapped("  ", f"{title}: {', '.join(names)}")
    outside = [step.name for step in found.phases if step.outside]
    if outside:
        yield from _wrapped("  ", f"your program does, and notes: {', '.join(outside)}")
    yield ""
    yield "After a failed epoch"
    if found.recover:
        yield from _wrapped("  ", ", then ".join(found.recover))
    else:
        yield "  nothing is put back: rebuild the engine of the replica that failed"


def _of(found: Overview, names: list[str]) -> str:
    """`offload, empty_cache of every rank`."""
    parts = []
    for by, whose in (("rank", "of every rank"), ("leader", "of the leader")):
        own = [step.name for step in found.phases if step.by == by and step.name in names]
        parts += [f"{', '.join(own)} {whose}"] if own else []
    return " and ".join(parts)


def _by_then(apart: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, list[str]]]:
    for then in dict.fromkeys(then for _, then in apart):
        yield then, [first for first, second in apart if second == then]


def _section(title: str, rows: tuple[tuple[str, str], ...]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield title
    width = max(len(name) for name, _ in rows)
    for name, says in rows:
        yield f"  {name:<{width}}  {says}"


def _wrapped(indent: str, text: str) -> Iterator[str]:
    line = indent
    for word in text.split():
        if len(line) + len(word) > WIDTH and line.strip():
            yield line
            line = indent + "  "
        line += f"{word} "
    yield line
