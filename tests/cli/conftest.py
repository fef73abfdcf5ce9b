"""The command line called in this process: what it prints, and its exit code."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest

from phasesync.cli import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run: TypeAlias = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Said(caught.value.code, out, err)

    return call
