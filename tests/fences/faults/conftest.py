"""One Ray for all that is played under it; skipped where Ray is missing, but never in CI."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.fences.faults.matrix import started_ray


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("CI"):
            pytest.fail("faults under Ray need it: pip install -c constraints.txt ray")
        pytest.skip("Ray is not installed: pip install 'phasesync[ray]'")
    with started_ray():
        yield
