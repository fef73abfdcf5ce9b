"""What each fence is for: the phases that nothing would keep apart without it."""

from dataclasses import dataclass, replace

from phasesync.core.model import FenceName
from phasesync.core.options import assignments
from phasesync.core.protocol import Protocol
from phasesync.lint.fences import order_rules
from phasesync.lint.view import View

__all__ = ("Guard", "guards")


@dataclass(frozen=True, slots=True)
class Guard:
    """`fence` keeps `first` of one rank from `then` of another."""

    fence: FenceName
    first: str
    then: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.fence, self.then, self.first


def guards(protocol: Protocol) -> tuple[Guard, ...]:
    """What each fence of an epoch keeps apart, under any options, in the order of the epoch."""
    found: dict[Guard, None] = {}
    every = (View(protocol, chosen, protocol.steps) for chosen in assignments(protocol))
    views = tuple({view.shape: view for view in every}.values())
    open_anyway = {each.phases for view in views for each in order_rules(view)}
    for fence in protocol.fences:
        left = tuple(step for step in protocol.steps if step.name != fence.name)
        for view in views:
            without = View(replace(protocol, steps=left), view.options, left)
            for each in order_rules(without):
                if len(each.phases) == 2 and each.phases not in open_anyway:
                    found[Guard(fence.name, *each.phases)] = None
    order: list[str] = [step.name for step in protocol.steps]
    return tuple(sorted(found, key=lambda each: [order.index(name) for name in each.names]))
