"""The library's face: light to import, complete, and honest about what it needs."""

import subprocess
import sys
from importlib import import_module

import pytest

import phasesync


def test_every_public_name_is_there() -> None:
    assert list(phasesync.__all__) == sorted(phasesync.__all__)
    for name in phasesync.__all__:
        assert getattr(phasesync, name).__name__ == name
        assert name in dir(phasesync)
    with pytest.raises(AttributeError, match="no attribute 'RankRuner'"):
        import_module("phasesync").RankRuner  # noqa: B018


def test_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, phasesync; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'ray', 'structlog', 'transitions', 'yaml', 'numpy', 'rich', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
