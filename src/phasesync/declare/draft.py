"""What is known of a file while it is read: the names that later sections refer to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesync.core.condition import Condition, ConditionError, names, parse
from phasesync.core.model import RoleName
from phasesync.core.options import doubt
from phasesync.core.plan import PLAN, STOPPED
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    WORLD,
    OptionDecl,
    Place,
    RoleDecl,
)
from phasesync.nodes import Complaints, Node, Text

__all__ = ("Draft",)

CONDITION_MAX = 500
_RESERVED: dict[str, tuple[str, ...]] = {
    "option": ("and", "or", "not", "in", "true", "false", WORLD, DEVICE, EVERYWHERE),
    "group": (WORLD, DEVICE, EVERYWHERE, "start"),
    "role": (WORLD, DEVICE, EVERYWHERE),
    "resource": (),
    "phase": ("fence",),
    "fence": (PLAN, STOPPED),
}


@dataclass(slots=True)
class Draft:
    """`broken` are options whose own declaration is wrong: what reads them is not blamed."""

    complaints: Complaints
    options: dict[str, OptionDecl] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    groups: dict[str, tuple[Text, Node]] = field(default_factory=dict)
    roles: dict[str, RoleDecl] = field(default_factory=dict)
    resources: dict[str, tuple[Text, Node]] = field(default_factory=dict)

    @property
    def active(self) -> list[RoleName]:
        """The roles that have phases."""
        return [role.name for role in self.roles.values() if not role.passive]

    def refuse_reserved(self, sections: Mapping[str, Mapping[str, tuple[Text, Node]]]) -> None:
        """Say which names of whole sections the language keeps for itself."""
        for section, declared in sections.items():
            kind = section.removesuffix("s")
            for key, _ in declared.values():
                self.reserved(key, kind)

    def reserved(self, key: Text, kind: str) -> None:
        """Say so, if the language keeps this name for itself."""
        if key.value in _RESERVED[kind]:
            self.complaints.say(
                key, f"{key.value!r} means something else here", f"give the {kind} another name"
            )

    def condition(
        self, node: Node | None, what: str, *, constant: bool = False
    ) -> Condition | None:
        """A condition over options; `constant` where one that names none makes sense."""
        if node is None:
            return None
        say = self.complaints
        text = say.text(node, what, "write a condition over options")
        if text is None:
            return None
        if len(text.value) > CONDITION_MAX:
            say.say(text, f"{what} is longer than {CONDITION_MAX} characters", "shorten it")
            return None
        try:
            found = parse(text.value, frozenset(self.options))
        except ConditionError as error:
            right = "conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]"
            say.say(_inside(text, error.column), f"{what} does not parse: {error}", right)
            return None
        if names(found) & self.broken:
            return found
        mistake = doubt(found, self.options)
        if mistake is not None:
            wrong, right, word = mistake
            if word in self.resources and word not in self.options:
                right = "conditions speak of options; for memory, use needs: or never:"
            at = re.search(rf"\b{re.escape(word)}\b", text.value) if word else None
            say.say(_inside(text, at.start() if at else 0), f"{what}: {wrong}", right)
            return None
        if not constant and not names(found):
            say.say(text, f"{what} names no option", "drop it, or name one")
        return found


def _inside(text: Text, column: int) -> Place:
    """A place within a scalar; only one line has columns that can be trusted."""
    if text.lines > 1:
        return text.place
    return Place(text.place.line, text.place.column + column + (not text.plain))
