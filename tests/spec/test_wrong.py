"""A corpus of mistakes, each with the exact words that are said of it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasesync import spec
from phasesync.lint import lint

HERE = Path(__file__).parent
STORY = HERE / "wrong.story"
FILES = HERE / "wrong"
RIGHT = HERE / "right"
CASE = re.compile(r"(?P<base>\w+): `(?P<old>.+)` -> `(?P<new>.*)`")


def said(text: str | bytes, file: str) -> list[str]:
    """What is wrong with a file; what lint doubts, where every word is right."""
    protocol, errors = spec.check_text(text, file)
    if protocol is None:
        return [f"! {str(error).removeprefix(file + ':')}" for error in errors]
    return [
        f"{'!' if found.severity == 'error' else '?'} {str(found).removeprefix(file + ':')}"
        for found in lint(protocol)
    ]


def edited(line: str) -> str:
    case = CASE.fullmatch(line)
    assert case is not None, line
    old, new = (case[key].replace("\\n", "\n") for key in ("old", "new"))
    text = (RIGHT / f"{case['base']}.yaml").read_text("utf-8")
    assert text.count(old) >= 1, f"{old!r} is not in {case['base']}"
    return text.replace(old, new, 1)


def retold(story: str) -> Iterator[str]:
    for line in story.splitlines():
        if line.startswith("  "):
            continue
        yield line
        if CASE.fullmatch(line):
            yield from (f"  {each}" for each in said(edited(line), "here"))


def test_the_story_is_still_true() -> None:
    told = STORY.read_text("utf-8")
    now = "\n".join(retold(told)) + "\n"
    if os.environ.get("REWRITE"):
        STORY.write_text(now, "utf-8")
    assert now == told


def test_no_mistake_is_accepted() -> None:
    lines = STORY.read_text("utf-8").splitlines()
    cases = [at for at, line in enumerate(lines) if CASE.fullmatch(line)]
    assert len(cases) > 100
    silent = [lines[at] for at in cases if not lines[at + 1].startswith("  ")]
    assert silent == []


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_wrong_file(path: Path) -> None:
    expected = path.with_suffix(".txt")
    now = "".join(f"{line}\n" for line in said(path.read_bytes(), path.name))
    if os.environ.get("REWRITE"):
        expected.write_text(now, "utf-8")
    assert now
    assert now == expected.read_text("utf-8")
