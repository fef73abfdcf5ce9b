"""Journals for tests: as a healthy run writes them, without running it.

usage: journal_maker.py FOLDER RANKS EPOCHS [REPLICA_SIZE] [HOSTS]
"""

import sys
from pathlib import Path

from phasesync.bench.journals import make, write

__all__ = ("make", "write")

if __name__ == "__main__":
    print(write(Path(sys.argv[1]), *map(int, sys.argv[2:])), "lines")
