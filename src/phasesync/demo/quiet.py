"""Loaded before torch in the demo's processes: its store warns of each connection that closes."""

import os

__all__ = ()

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
