"""`CheckpointEngineManager.update_weights`: the driver's side of the disaggregated path.

verl's own body runs its steps in order and nothing else: a transfer that fails leaves every replica
aborted, gated and without KV. What must survive edits: the calls and their order are verl's, and a
failed sync never resumes generation on weights that may be partial.
"""

from types import ModuleType
from typing import Any

from phasesync.integrations.verl.settings import Settings

__all__ = ("manager_body",)


def manager_body(stock: Any, module: ModuleType, settings: Settings) -> Any:
    """A body with the signature of `stock`."""
    return stock
