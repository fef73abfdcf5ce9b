"""Real SkyRL on a CPU: its own `WorkerDispatch`, a fake engine behind it.

Where SkyRL is not installed the tests are skipped; `make test-verl` has an environment for it.
"""

import importlib.util
import os
from pathlib import Path

import pytest

HAS_SKYRL = importlib.util.find_spec("skyrl") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = os.environ.get("CI") and any("skyrl" in Path(arg).parts for arg in config.args)
    return True if not HAS_SKYRL and not wanted and collection_path.suffix == ".py" else None
