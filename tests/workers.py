"""What processes that others start need to find the tests, and the phasesync that is tested."""

import os
from pathlib import Path

import phasesync

__all__ = ("PATHS",)

_ROOT = Path(__file__).parents[1]
_PACKAGES = Path(phasesync.__file__).parents[1]
PATHS = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(_ROOT), str(_PACKAGES), os.environ.get("PYTHONPATH")))
    )
}
