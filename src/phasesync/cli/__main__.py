"""`python -m phasesync.cli`."""

from phasesync.cli import main

main()
