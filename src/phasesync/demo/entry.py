"""Where a child process of the demo begins; imports torch only there."""

from contextlib import suppress
from importlib import import_module

__all__ = ("PRELOADED", "enter")

CODE = "phasesync.demo.children"
PRELOADED = ("phasesync.demo.quiet", CODE)  # In this order: see `quiet`.


def enter(part: str, *arguments: object) -> None:
    """Play a part: `host_store`, `be_engine` or `be_trainer`."""
    # Where the launcher has been interrupted, nobody is left to be told.
    with suppress(BrokenPipeError, ConnectionResetError):
        getattr(import_module(CODE), part)(*arguments)
