"""A plan as a Promela model, for a second opinion from Spin.

One process a rank, one atomic step an event of the kernel, without faults. The model has as many
states as the checker's own search without reductions, so that not only the verdict is compared.
"""

from collections.abc import Iterator

from phasesync.core.plan import Act, Plan, Wait
from phasesync.core.properties import raced
from phasesync.core.protocol import Verb
from phasesync.errors import PlanError

__all__ = ("promela",)

_MAPPED = {Verb.ACQUIRES: 0, Verb.RELEASES: 1}
_NEEDS_MAPPED = frozenset(
    (Verb.NEEDS, Verb.USES, Verb.WRITES, Verb.FILLS, Verb.DISCARDS, Verb.HOLDS)
)


def promela(plan: Plan, epochs: int = 2) -> str:
    """The model's text; `spin -a`, compile with -DSAFETY -DNOREDUCE, run.

    Raises:
        PlanError: the protocol asks for something that the model does not say.
    """
    if plan.agree or any(plan.monotone) or any(plan.always_on):
        wrong = "the Promela model does not say agree, monotone, or always without during"
        raise PlanError(f"{wrong}; drop them for the export")
    return "\n".join(_Model(plan, epochs).lines()) + "\n"


class _Model:
    """Names and numbers of one model: actions and fences count from 1."""

    def __init__(self, plan: Plan, epochs: int) -> None:
        self.plan = plan
        self.epochs = epochs
        self.acts: dict[tuple[int, int], int] = {}
        self.fences: dict[tuple[int, int, str], int] = {}
        for rank, program in enumerate(plan.programs):
            for at, item in enumerate(program):
                if isinstance(item, Act):
                    self.acts[rank, at] = len(self.acts) + 1
        for epoch in range(1, epochs + 1):
            for program in plan.programs:
                for item in program:
                    if isinstance(item, Wait):
                        key = (epoch, item.scope, item.fence)
                        self.fences.setdefault(key, len(self.fences))

    def lines(self) -> Iterator[str]:
        plan = self.plan
        yield f"/* {plan.protocol.name}: {len(plan.members)} ranks, {self.epochs} epochs."
        yield " * A cell is 4 * (content + 2) + mapped: 0 no, 1 yes, 2 unknown. */"
        yield f"byte cell[{len(plan.start)}];"
        yield f"byte doing[{len(plan.members)}];"
        yield f"byte came[{max(1, len(self.fences))}];"
        if plan.elsewhere:
            yield f"#define ELSEWHERE ({' || '.join(self._apart())})"
        for rank in range(len(plan.members)):
            yield f"proctype R{rank}() {{"
            yield from self._process(rank)
            yield "end_done: false"
            yield "}"
        yield "init {"
        yield "  atomic {"
        for number, (start, content) in enumerate(zip(plan.start, plan.content, strict=True)):
            held = 4 * (2 if start and content else 1) + (1 if start else 0)
            yield f"    cell[{number}] = {held};"
        for rank in range(len(plan.members)):
            yield f"    run R{rank}();"
        yield "  }"
        yield "end_init: false"
        yield "}"

    def _process(self, rank: int) -> Iterator[str]:
        pending: list[int] = []
        program = self.plan.programs[rank]
        for epoch in range(1, self.epochs + 1):
            if epoch > 1:
                yield f"  d_step {{ true -> skip }} /* begin epoch {epoch} */"
            for at, item in enumerate(program):
                match item:
                    case Act():
                        yield from self._act(rank, at, item, epoch, pending)
                    case Wait():
                        yield from self._wait(item, epoch, pending)

    def _act(self, rank: int, at: int, act: Act, epoch: int, pending: list[int]) -> Iterator[str]:
        """Start and end of an action, with what they break as assertions."""
        yield f"  d_step {{ /* start {act.phase} */"
        for touch in act.touches:
            if touch.verb in _MAPPED:
                yield f"    assert(cell[{touch.cell}] % 4 == {_MAPPED[touch.verb]});"
            elif touch.verb in _NEEDS_MAPPED:
                yield f"    assert(cell[{touch.cell}] % 4 == 1);"
            yield from self._content(act, touch.cell, touch.verb, epoch)
        who = self.plan.members
        for (other, place), number in self.acts.items():
            theirs = self.plan.programs[other][place]
            if other != rank and isinstance(theirs, Act):
                pair = ((who[other], theirs),)
                if next(raced(self.plan, who[rank], act, pair), None) is not None:
                    yield f"    assert(doing[{other}] != {number}); /* race */"
        for touch in act.touches:
            yield from self._effect(touch.cell, touch.verb, epoch, end=False)
        yield f"    doing[{rank}] = {self.acts[rank, at]};"
        yield from self._never(act)
        yield "  };"
        yield f"  d_step {{ /* end {act.phase} */"
        for touch in act.touches:
            if act.enqueued and touch.verb is Verb.RELEASES:
                if touch.cell not in pending:
                    pending.append(touch.cell)
                continue
            yield from self._effect(touch.cell, touch.verb, epoch, end=True)
        yield f"    doing[{rank}] = 0;"
        yield from self._never(act)
        yield "  };"

    def _content(self, act: Act, cell: int, verb: Verb, epoch: int) -> Iterator[str]:
        if not self.plan.content[cell]:
            return
        if verb is Verb.NEEDS:
            fills = any(t.verb is Verb.FILLS and t.cell == cell for t in act.touches)
            empty = f" || cell[{cell}] / 4 == 1" if fills else ""
            yield f"    assert(cell[{cell}] / 4 == {epoch + 2}{empty});"
        elif verb is Verb.USES:
            yield f"    assert(cell[{cell}] / 4 != 0);"

    def _effect(self, cell: int, verb: Verb, epoch: int, *, end: bool) -> Iterator[str]:
        """The kernel's table of effects, as arithmetic."""
        here = f"cell[{cell}]"
        holds = self.plan.content[cell]
        version = 4 * (epoch + 2) if holds else 4
        match verb, end:
            case ((Verb.ACQUIRES | Verb.RELEASES), False):
                yield f"    {here} = ({here} / 4) * 4 + 2;"
            case Verb.ACQUIRES, True:
                yield f"    {here} = 5;"
            case Verb.RELEASES, True:
                yield f"    {here} = 4;"
            case Verb.WRITES | Verb.DISCARDS, False:
                yield f"    {here} = {here} % 4 + {0 if holds else 4};"
            case Verb.WRITES, True:
                yield f"    {here} = {here} % 4 + {version};"
            case Verb.DISCARDS, True:
                yield f"    {here} = {here} % 4 + 4;"
            case Verb.FILLS, _:
                yield f"    {here} = {here} % 4 + {version};"
            case _:
                pass

    def _apart(self) -> Iterator[str]:
        """Each way in which one of a pair is held while the other is held on another device."""
        width = len(self.plan.protocol.resources)
        devices = range(len(self.plan.devices))
        for one, two in self.plan.elsewhere:
            for here in devices:
                far = [f"cell[{at * width + two}] % 4" for at in devices if at != here]
                if far:
                    yield f"(cell[{here * width + one}] % 4 && ({' || '.join(far)}))"

    def _never(self, act: Act) -> Iterator[str]:
        width = len(self.plan.protocol.resources)
        devices = {touch.cell // width for touch in act.touches}
        for pair in self.plan.never:
            if pair.device in devices:
                held = " && ".join(f"cell[{at}] % 4 != 0" for at in pair.cells)
                yield f"    assert(!({held})); /* never {', '.join(pair.resources)} */"
        if self.plan.elsewhere and len(self.plan.devices) > 1:
            yield "    assert(!ELSEWHERE);"

    def _wait(self, wait: Wait, epoch: int, pending: list[int]) -> Iterator[str]:
        number = self.fences[epoch, wait.scope, wait.fence]
        yield f"  d_step {{ /* arrive {wait.fence} */"
        if "device_synchronised" in wait.established:
            for cell in pending:
                yield f"    cell[{cell}] = 4;"
            pending.clear()
        yield f"    came[{number}]++;"
        yield "  };"
        size = len(self.plan.scopes[wait.scope].members)
        yield f"  d_step {{ came[{number}] == {size} -> skip }}; /* pass {wait.fence} */"
