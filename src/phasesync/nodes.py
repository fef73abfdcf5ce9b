"""A declaration file as a tree of nodes that know their place, and the complaints about them.

Whoever reads a node doubts it: every reader here answers with the value or with None and one
complaint, so that one run finds all the mistakes of a file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from phasesync.core.options import suggest
from phasesync.core.protocol import Place
from phasesync.errors import ProtocolError

__all__ = ("Complaints", "Entry", "Items", "Node", "Table", "Text", "describe")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_INTEGER = re.compile(r"-?[0-9]{1,15}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_TRUTH = {"true": True, "false": False}
_OTHER_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_EXAMPLES = {
    "phasesync": "1", "protocol": "NAME", "roles": "{trainer: {place: one per device}}",
    "phases": "[...]", "type": "bool", "owner": "ROLE", "of": "ROLE", "size": "2",
    "place": "one per device", "together": "[A, B]", "mapped": "true", "role": "ROLE",
    "from": "STATE", "to": "STATE",
}  # fmt: skip
SHOWN_MAX = 40


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar as written; `plain` where it has no quotes."""

    value: str
    place: Place
    plain: bool = True
    lines: int = 1


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple["Node", ...]
    place: Place


class Entry(NamedTuple):
    """One `key: value` of a table."""

    key: Text
    value: "Node"


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping, its keys in order."""

    entries: tuple[Entry, ...]
    place: Place


Node: TypeAlias = Text | Items | Table


def describe(node: Node) -> str:
    """A node in a message."""
    match node:
        case Text(""):
            return "nothing"
        case Text(value):
            return repr(value if len(value) <= SHOWN_MAX else value[: SHOWN_MAX - 3] + "...")
        case Items():
            return "a list"
        case Table():
            return "a mapping"


@dataclass(slots=True)
class Complaints:
    """What is wrong with a file, and readers that add to it."""

    file: str
    found: list[ProtocolError] = field(default_factory=list)

    def say(self, where: Node | Place, wrong: str, right: str) -> None:
        place = where if isinstance(where, Place) else where.place
        error = ProtocolError(wrong, right, file=self.file, line=place.line, column=place.column)
        if str(error) not in map(str, self.found):
            self.found.append(error)

    def in_order(self) -> tuple[ProtocolError, ...]:
        return tuple(sorted(self.found, key=lambda error: (error.line, error.column)))

    def unknown(self, where: Text, kind: str, known: Iterable[str]) -> None:
        names = list(known)
        wrong = f"unknown {kind} {describe(where)}"
        self.say(where, wrong, suggest(where.value, names, f"{kind}s"))

    # ------------------------------------------------------------------- shapes

    def table(self, node: Node, what: str, instead: str) -> Table | None:
        if isinstance(node, Table):
            return node
        self.say(node, f"{what} is {describe(node)}, not a mapping", instead)
        return None

    def items(self, node: Node, what: str, instead: str) -> tuple[Node, ...]:
        if isinstance(node, Items):
            if not node.items:
                self.say(node, f"{what} is empty", f"{instead}, or drop it")
            return node.items
        self.say(node, f"{what} is {describe(node)}, not a list", instead)
        return ()

    def fields(
        self, node: Table, what: str, known: Iterable[str], required: Iterable[str] = ()
    ) -> dict[str, Node]:
        """The entries of a table by key; unknown, repeated and missing keys are said."""
        names = list(known)
        found: dict[str, Node] = {}
        for key, value in node.entries:
            if key.value not in names:
                right = suggest(key.value, names, "keys")
                self.say(key, f"unknown key {describe(key)} in {what}", right)
            elif key.value in found:
                self.say(key, f"key {key.value!r} is given twice in {what}", "keep one of them")
            else:
                found[key.value] = value
        for name in required:
            if name not in found:
                example = _EXAMPLES.get(name, "...")
                self.say(node, f"{what} has no {name!r}", f"add `{name}: {example}`")
        return found

    def named(self, node: Node | None, what: str, instead: str) -> dict[str, tuple[Text, Node]]:
        """A table whose keys are names that the file makes up."""
        if node is None:
            return {}
        table = self.table(node, what, instead)
        found: dict[str, tuple[Text, Node]] = {}
        if table and not table.entries:
            self.say(node, f"{what} is empty", f"{instead}, or drop it")
        for key, value in table.entries if table else ():
            if self.name(key, f"a name in {what}") is None:
                continue
            if key.value in found:
                self.say(key, f"{key.value!r} is declared twice in {what}", "keep one of them")
                continue
            found[key.value] = key, value
        return found

    # ------------------------------------------------------------------ scalars

    def text(self, node: Node, what: str, instead: str) -> Text | None:
        if isinstance(node, Text) and node.value:
            return node
        self.say(node, f"{what} is {describe(node)}", instead)
        return None

    def name(self, node: Node, what: str) -> str | None:
        right = "write a letter, then letters, digits and _ (64 at most)"
        if isinstance(node, Text) and _NAME.fullmatch(node.value):
            return node.value
        self.say(node, f"{what} is {describe(node)}", right)
        return None

    def line(self, node: Node | None, what: str) -> str:
        if node is None:
            return ""
        if isinstance(node, Text) and node.value.isprintable():
            return node.value
        self.say(node, f"{what} is not one line of printable text", "write one plain line")
        return ""

    def choice(self, node: Node | None, what: str, known: Iterable[str], default: str) -> str:
        if node is None:
            return default
        names = list(known)
        if isinstance(node, Text) and node.value in names:
            return node.value
        word = node.value if isinstance(node, Text) else ""
        right = f"write `{names[0]}`" if len(names) == 1 else suggest(word, names, "choices")
        self.say(node, f"{what} cannot be {describe(node)}", right)
        return default

    def truth(self, node: Node | None, what: str, *, default: bool = False) -> bool:
        if node is None:
            return default
        word = node.value if isinstance(node, Text) and node.plain else None
        if word in _TRUTH:
            return _TRUTH[word]
        meant = (word or "").lower()
        right = _OTHER_TRUTHS.get(meant) or (meant if meant in _TRUTH else "true or false")
        self.say(node, f"{what} is {describe(node)}", f"write {right}")
        return default

    def integer(self, node: Node | None, what: str) -> int | None:
        if node is None:
            return None
        if isinstance(node, Text) and node.plain and _INTEGER.fullmatch(node.value):
            return int(node.value)
        self.say(node, f"{what} is {describe(node)}", "write a whole number, such as 2")
        return None

    def seconds(self, node: Node | None, what: str) -> float | None:
        if node is None:
            return None
        if isinstance(node, Text) and node.plain and _NUMBER.fullmatch(node.value):
            number = float(node.value)
            if number > 0:
                return number
        self.say(node, f"{what} is {describe(node)}", "write seconds, more than 0, such as 300")
        return None

    def reference(self, node: Node, kind: str, known: Mapping[str, object]) -> str | None:
        if not isinstance(node, Text):
            self.say(node, f"{describe(node)} where a {kind} belongs", f"name one {kind}")
            return None
        if node.value in known:
            return node.value
        self.unknown(node, kind, known)
        return None
