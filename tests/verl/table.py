"""The table of `make test-verl`: what stock verl does at each fault, and what phasesync does.

python -m tests.verl.table FILE...   prints the rows that the tests have left there
"""

import json
import os
import sys
from pathlib import Path

__all__ = ("row", "show")

_HEADS = ("verl", "fault", "stock verl", "verl with phasesync")


def row(release: str, fault: str, stock: str, phasesync: str) -> None:
    """Leave a row for the table, where $PHASESYNC_TABLE says."""
    path = os.environ.get("PHASESYNC_TABLE")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(json.dumps([release, fault, stock, phasesync]) + "\n")


def show(paths: list[str]) -> str:
    """The rows in `paths` as a Markdown table."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    lines = [_HEADS, tuple("---" for _ in _HEADS), *sorted(map(tuple, rows))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(show(sys.argv[1:]))
