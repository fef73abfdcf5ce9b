"""`python -m phasesync`."""

from phasesync.cli import main

main()
