"""verl's own adapters and engines take the calls that phasesync makes: all of them, by their text.

Megatron, SGLang and TensorRT-LLM are not installed where this runs, so their classes are read and
not imported; the calls are those recorded of verl's own body.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import verl

WORKERS = Path(verl.__file__).parent / "workers"
RECORDED = Path(__file__).parent.parent / "data" / "verl" / f"calls-{verl.__version__}.json"
POSITIONAL = {"engine.to": ("device",), "rollout.update_weights": ("weights",)}


class Method(NamedTuple):
    """A method as its text has it; `**` among the names stands for any keyword."""

    where: str
    names: frozenset[str]


def calls() -> dict[str, frozenset[str]]:
    """By method, every argument that it is given in some configuration."""
    found: dict[str, frozenset[str]] = {"rollout.release": frozenset()}
    for ranks in json.loads(RECORDED.read_text()).values():
        for call in (call for rank in ranks for call in rank):
            name, _, said = call.partition(" ")
            if name == "rollout.resume":
                given = {"tags"}
            else:
                words = (word.split("=") for word in said.split() if "=" in word)
                given = {word[0] for word in words} | set(POSITIONAL.get(name, ()))
            found[name] = found.get(name, frozenset()) | given
    return found


def methods(folder: str, name: str, *, beside: str) -> Iterator[Method]:
    """The method `name` of all classes in `folder` that have one called `beside` too."""
    for path in sorted({*(WORKERS / folder).rglob("*.py")} - {WORKERS / folder / "base.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            own = {
                each.name: each
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if name in own and beside in own:
                takes = own[name].args
                listed = (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)
                names = {argument.arg for argument in listed} | ({"**"} if takes.kwarg else set())
                where = f"{path.relative_to(WORKERS)}:{node.name}"
                yield Method(where, frozenset(names))


SURFACES = [
    ("engine", "get_per_tensor_param", "to", ("fsdp", "megatron")),
    ("engine", "to", "get_per_tensor_param", ("fsdp", "megatron")),
    ("rollout", "resume", "update_weights", ("vllm", "sglang", "trtllm")),
    ("rollout", "release", "update_weights", ("vllm", "sglang", "trtllm")),
    ("rollout", "update_weights", "resume", ("vllm", "sglang", "trtllm")),
]


@pytest.mark.parametrize(("folder", "name", "beside", "known"), SURFACES)
def test_every_adapter_takes_what_it_is_given(
    folder: str, name: str, beside: str, known: tuple[str, ...]
) -> None:
    given = calls()[f"{folder}.{name}"]
    found = list(methods(folder, name, beside=beside))
    assert all(any(each in method.where for method in found) for each in known), found
    for method in found:
        assert "**" in method.names or given <= method.names, (method, given - method.names)
