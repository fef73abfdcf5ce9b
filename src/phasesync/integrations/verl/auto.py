"""Importing this module is `install()`: for verl's lists of modules to import.

verl imports them while it is being imported itself, so its modules are waited for, not pulled in.
"""

from phasesync.integrations.verl import _install_as_told, installed

__all__ = ("MODE",)

MODE = installed() if installed() != "off" else _install_as_told()
