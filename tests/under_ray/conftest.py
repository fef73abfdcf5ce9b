"""One small Ray for all tests under it; skipped where Ray is missing, but never in CI."""

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.workers import PATHS

STORE_BYTES = 80 * 2**20


def _ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        if os.environ.get("CI"):
            pytest.fail("the tests under Ray need it: pip install -c constraints.txt ray")
        pytest.skip("Ray is not installed: pip install 'phasesync[ray]'")


@pytest.fixture(scope="package")
def ray_module() -> Any:
    """The module, for tests that start a Ray of their own."""
    return _ray()


@pytest.fixture(scope="package")
def ray(ray_module: Any) -> Iterator[Any]:
    """Ray on this machine, with workers that find the tests."""
    ray_module.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": PATHS},
    )
    yield ray_module
    ray_module.shutdown()
