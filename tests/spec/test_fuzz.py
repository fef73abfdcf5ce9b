"""Malformed files: never a traceback, never an accepted mistake."""

import pathlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phasesync import spec
from phasesync.declare.steps import FENCE_KEYS
from phasesync.errors import ProtocolError
from phasesync.lint import Severity, lint

HERE = pathlib.Path(__file__).parent
RIGHT = {path.stem: path.read_text("utf-8") for path in (HERE / "right").glob("*.yaml")}
TREE = {name: yaml.load(text, Loader=yaml.BaseLoader) for name, text in RIGHT.items()}
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""What writes the edited files: libyaml's, where PyYAML was built with it."""

SLOW = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def judge(text: str | bytes) -> list[str]:
    """Everything said of a text; whatever is accepted must be fit for lint."""
    protocol, errors = spec.check_text(text)
    assert (protocol is None) == bool(errors)
    lines = len(text.splitlines()) + 1
    for error in errors:
        assert isinstance(error, ProtocolError)
        assert error.wrong
        assert error.right, str(error)
        assert 1 <= error.line <= lines, str(error)
        assert error.column >= 1
        assert str(error).isprintable(), repr(str(error))
    if protocol is None:
        return [str(error) for error in errors]
    return [str(found) for found in lint(protocol)]


@SLOW
@given(st.binary(max_size=400))
@example(b"\xef\xbb\xbf")
@example(b"phasesync: 1\n\xff")
def test_bytes(text: bytes) -> None:
    assert judge(text)


@SLOW
@given(st.text(max_size=400))
@example('a: "\\Uffffffff"')
@example("a: !!python/object/apply:os.system [x]")
@example("? ? ? a")
@example("\ud800")
def test_text(text: str) -> None:
    assert judge(text)


KEYWORDS = """
    phasesync protocol summary options groups roles resources never phases fences transitions
    recover type int bool enum default min max of size leader first place driven_by owner content
    version start mapped together on device when by acquires releases needs uses writes fills
    discards ensures outside enqueued retry deadline_s fence scope requires joined role from to
    trainer engine replica kv_cache params 1 2 0 -1 true false yes null world all not and x
"""
WORDS = st.sampled_from(KEYWORDS.split())
TREES = st.recursive(
    WORDS | st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=8),
    lambda kids: st.lists(kids, max_size=4) | st.dictionaries(WORDS, kids, max_size=5),
    max_leaves=30,
)


@SLOW
@given(st.dictionaries(WORDS, TREES, max_size=8))
def test_trees_of_the_right_words(tree: dict[str, Any]) -> None:
    assert judge(yaml.safe_dump(tree))


@SLOW
@given(st.data())
def test_right_text_with_a_piece_cut_or_moved(data: st.DataObject) -> None:
    text = RIGHT[data.draw(st.sampled_from(sorted(RIGHT)))]
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 60)))
    put = data.draw(st.integers(0, len(text)))
    piece = data.draw(
        st.sampled_from(["", text[start:end], "\t", "\0", "&a", "*a", "{", "]", ": "])
    )
    cut = text[:start] + text[end:]
    judge(cut[:put] + piece + cut[put:])


Path = tuple[str | int, ...]


def paths(tree: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a tree."""
    if at:
        yield at
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield from paths(tree[key], (*at, key))


def edited(name: str, path: Path, edit: Callable[[Any, Any], None]) -> str:
    tree = deepcopy(TREE[name])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    edit(parent, path[-1])
    return yaml.dump(_typed(tree), Dumper=DUMPER, sort_keys=False)


def _typed(tree: Any) -> Any:
    """Words and numbers as they stood in the file, without the quotes a string would get."""
    if isinstance(tree, dict):
        return {key: _typed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_typed(value) for value in tree]
    return {"true": True, "false": False}.get(tree, int(tree) if tree.isdecimal() else tree)


PLACES = [(name, path) for name, tree in TREE.items() for path in paths(tree)]


def test_the_edits_start_from_what_is_right() -> None:
    for name in RIGHT:
        assert judge(edited(name, ("phasesync",), lambda parent, key: None)) == []


def free(path: Path) -> bool:
    """Whether the author may write any word there."""
    in_steps = path[0] in ("phases", "recover")
    return path in (("protocol",), ("summary",)) or (
        in_steps and ((len(path) == 3 and path[2] not in FENCE_KEYS) or path[-1] == "fence")
    )


def test_every_key_misspelt() -> None:
    def misspell(parent: Any, key: Any) -> None:
        items = [(f"{each}x" if each == key else each, value) for each, value in parent.items()]
        parent.clear()
        parent.update(items)

    for name, path in PLACES:
        if isinstance(path[-1], str):
            said = judge(edited(name, path, misspell))
            if not free(path):
                assert said, (name, path)


VALUES: tuple[Any, ...] = ("nonsense", [], {"nonsense": "x"}, "-7", {}, [["x"]], "")


def test_every_value_replaced() -> None:
    for number, (name, path) in enumerate(PLACES):
        value = deepcopy(VALUES[number % len(VALUES)])

        def replace(parent: Any, key: Any, value: Any = value) -> None:
            parent[key] = value

        said = judge(edited(name, path, replace))
        if not free(path):
            assert said, (name, path, value)


def test_every_key_dropped() -> None:
    def drop(parent: Any, key: Any) -> None:
        del parent[key]

    for name, path in PLACES[::3]:
        judge(edited(name, path, drop))


def test_two_mebibytes() -> None:
    text = "# " + "x" * 2**21
    assert "larger than 1 MiB" in judge(text)[0]
    assert "larger than 1 MiB" in judge(text.encode())[0]


def test_lint_speaks_of_severity() -> None:
    protocol = spec.loads(
        RIGHT["basic"].replace("kv_cache: {owner", "spare: {owner: engine}\n  kv_cache: {owner")
    )
    assert [found.severity for found in lint(protocol)] == [Severity.WARNING]
