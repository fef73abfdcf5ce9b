"""Real verl on a CPU: its own worker class and method, real processes, real gloo.

`make test-verl` runs this folder in the environments of several releases of verl. Where verl is not
installed the tests are skipped, except where CI is set: there a missing verl is a failure.
"""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
os.environ.setdefault("OMP_NUM_THREADS", "1")
HAS_VERL = importlib.util.find_spec("verl") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = os.environ.get("CI") and any("verl" in Path(arg).parts for arg in config.args)
    return True if not HAS_VERL and not wanted and collection_path.suffix == ".py" else None
