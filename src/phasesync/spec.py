"""Protocol files: where they are, and how their text becomes a declaration.

Files are read as YAML nodes and doubted: every complaint has its line and column, and words stay
words (`on` is not true). Nothing is built from tags, no alias may grow the file, and whatever is
wrong ends as a ProtocolError, never as a traceback. The one file that imports yaml.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from phasesync.core.protocol import Place, Protocol
from phasesync.declare import declare, written
from phasesync.errors import ProtocolError
from phasesync.nodes import Entry, Items, Node, Table, Text

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ("check_file", "check_text", "dumps", "find", "load", "loads", "shipped")

BYTES_MAX = 2**20
NODES_MAX = 20_000
DEPTH_MAX = 24
SUFFIX = ".yaml"


def load(name_or_path: str | Path) -> Protocol:
    """The protocol in a file, or the shipped one of that name.

    Raises:
        ProtocolError: there is none, or it is wrong; `others` has what else is wrong.
    """
    protocol, errors = check_file(name_or_path)
    return _or_raise(protocol, errors)


def loads(text: str | bytes, file: str = "<protocol>") -> Protocol:
    """The protocol that `text` declares; `file` is what complaints call it.

    Raises:
        ProtocolError: it is wrong; `others` has what else is wrong.
    """
    protocol, errors = check_text(text, file)
    return _or_raise(protocol, errors)


def dumps(protocol: Protocol) -> str:
    """The text of a protocol file that declares `protocol`; comments are not kept."""
    return written(protocol)


def _or_raise(protocol: Protocol | None, errors: tuple[ProtocolError, ...]) -> Protocol:
    if errors:
        errors[0].others = errors[1:]
        raise errors[0]
    assert protocol is not None
    return protocol


def check_file(name_or_path: str | Path) -> tuple[Protocol | None, tuple[ProtocolError, ...]]:
    """The protocol, or everything that is wrong with its file."""
    try:
        where = find(name_or_path)
        with where.open("rb") as stream:
            text = stream.read(BYTES_MAX + 1)
    except ProtocolError as error:
        return None, (error,)
    except (OSError, ValueError) as error:
        right = "give a file that can be read, or the name of a shipped protocol"
        wrong = getattr(error, "strerror", None) or str(error)
        return None, (ProtocolError(f"cannot be read: {wrong}", right, file=str(name_or_path)),)
    shown = _shown(where, name_or_path)
    sound = _sound(text, shown)
    return check_text(text, shown) if sound is None else (sound, ())


@lru_cache(maxsize=32)
def _sound(text: bytes, file: str) -> Protocol | None:
    """The protocol, if nothing is wrong with it: the same text is the same value, made once."""
    protocol, errors = check_text(text, file)
    return None if errors else protocol


def check_text(
    text: str | bytes, file: str = "<protocol>"
) -> tuple[Protocol | None, tuple[ProtocolError, ...]]:
    """The protocol, or everything that is wrong with its text, in order."""
    try:
        return declare(_tree(_decoded(text, file), file), file)
    except ProtocolError as error:
        return None, (error,)


def shipped() -> tuple[str, ...]:
    """The names of the protocols that come with phasesync."""
    return tuple(
        sorted(
            entry.name.removesuffix(SUFFIX)
            for entry in _home().iterdir()
            if entry.name.endswith(SUFFIX)
        )
    )


def find(name_or_path: str | Path) -> Traversable:
    """The file of that path, or of the shipped protocol of that name.

    Raises:
        ProtocolError: there is neither.
    """
    path = Path(name_or_path)
    text = str(name_or_path)
    if path.is_file():
        return path
    names = shipped()
    if text in names:
        return _home() / (text + SUFFIX)
    if path.is_dir():
        raise ProtocolError("is a folder", "give a file in it", file=text)
    right = f"give a file, or one of: {', '.join(names)}"
    raise ProtocolError("no such file or shipped protocol", right, file=text)


def _home() -> Traversable:
    """Where the shipped protocols are: in the package, or beside the sources of a checkout."""
    packed = resources.files("phasesync") / "protocols"
    if packed.is_dir():
        return packed
    return Path(__file__).resolve().parents[2] / "protocols"


def _shown(where: Traversable, asked: str | Path) -> str:
    return str(where) if isinstance(where, Path) and where == Path(asked) else f"{asked}{SUFFIX}"


# --------------------------------------------------------------------------- text to nodes


def _decoded(text: str | bytes, file: str) -> str:
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > BYTES_MAX:
        right = "a protocol is a page or two; keep it under 1 MiB"
        raise ProtocolError("the file is larger than 1 MiB", right, file=file)
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        before = text[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        wrong = f"byte 0x{text[error.start]:02x} is not UTF-8"
        raise ProtocolError(
            wrong, "save the file as UTF-8", file=file, line=line, column=column
        ) from None


def _tree(text: str, file: str) -> Node:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            return _node(root)
    except _Doubt as error:
        raise _at(error.place, error.wrong, error.right, file) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(mark) if mark else Place(1, 1)
        raise _at(place, *_yaml_problem(error), file) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        wrong = f"character {_code(error.character)} is not allowed"
        raise _at(place, wrong, "remove it", file) from None
    except (ValueError, OverflowError):
        # An escape such as "\Uffffffff" names no character, and the scanner passes that on.
        place = _place(loader.get_mark()) if loader else Place(1, 1)
        raise _at(place, "an escape names no character", "write the text itself", file) from None
    raise _at(Place(1, 1), "the file is empty", "begin with `phasesync: 1`", file)


def _at(place: Place, wrong: str, right: str, file: str) -> ProtocolError:
    return ProtocolError(wrong, right, file=file, line=place.line, column=place.column)


def _code(character: Any) -> str:
    return f"U+{ord(character) if isinstance(character, str) else int(character):04X}"


def _yaml_problem(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    problem = (error.problem or "cannot be read").replace("<", "").replace(">", "")
    if "'\\t'" in problem:
        return "a tab where YAML wants spaces", "indent and separate with spaces"
    if error.context and error.context.startswith("found duplicate anchor"):
        return error.context.partition(";")[0], "give each anchor its own name"
    if "another document" in problem:
        return "a second document begins", "keep one protocol a file"
    if "but got '['" in problem and error.context == "while parsing a flow mapping":
        return "brackets within braces", "quote a condition that has brackets: 'x in [a, b]'"
    right = f"mend the YAML ({error.context})" if error.context else "mend the YAML"
    return f"this is not YAML: {problem}", right.replace("while ", "", 1)


class _Doubt(Exception):
    """What YAML allows and a protocol file does not."""

    def __init__(self, mark: Any, wrong: str, right: str) -> None:
        super().__init__(wrong)
        self.place = _place(mark)
        self.wrong = wrong
        self.right = right


class _Loader(yaml.SafeLoader):
    """Composes nodes only: no tags, no cycles, and no more nodes than a protocol can have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []
        self._sizes: dict[str, int] = {}
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        anchor: str | None = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                raise _Doubt(event.start_mark, f"alias {anchor!r} contains itself", "write it out")
            self._count += self._sizes.get(anchor or "", 0)
        elif event.tag is not None:
            wrong = f"tag {event.tag!r}" if event.tag != "!" else "tag '!'"
            raise _Doubt(event.start_mark, wrong, "drop it; a protocol file has no tags")
        self._count += 1
        if self._count > NODES_MAX:
            wrong = f"the file has more than {NODES_MAX} nodes"
            raise _Doubt(event.start_mark, wrong, "a protocol is a page or two; use fewer aliases")
        if len(self._open) >= DEPTH_MAX:
            wrong = f"nested deeper than {DEPTH_MAX}"
            raise _Doubt(event.start_mark, wrong, "a protocol is flat; close the brackets")
        before = self._count
        self._open.append(None if isinstance(event, yaml.AliasEvent) else anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[anchor] = self._count - before + 1
        return node


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _node(node: yaml.Node) -> Node:
    place = _place(node.start_mark)
    match node:
        case yaml.ScalarNode():
            lines = node.end_mark.line - node.start_mark.line + 1
            return Text(_word(node), place, node.style is None, lines)
        case yaml.SequenceNode():
            return Items(tuple(map(_node, node.value)), place)
        case yaml.MappingNode():
            return Table(tuple(_entry(key, value) for key, value in node.value), place)
        case _:
            raise AssertionError(node)


def _word(node: yaml.ScalarNode) -> str:
    """The text of a scalar; what YAML takes for nothing is no word."""
    value: str = node.value
    return "" if node.style is None and value in ("~", "null", "Null", "NULL") else value


def _entry(key: yaml.Node, value: yaml.Node) -> Entry:
    if not isinstance(key, yaml.ScalarNode):
        raise _Doubt(key.start_mark, "a key is a list or a mapping", "write a word")
    word = _node(key)
    assert isinstance(word, Text)
    return Entry(word, _node(value))
