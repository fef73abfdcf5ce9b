"""The table of `make test-verl`: at each fault, what stock does and what phasesync does.

`how` says whether the framework's own code ran, or calls written down from it were held against.

python -m tests.verl.table FILE...   prints the rows that the tests have left there
"""

import json
import os
import sys
from pathlib import Path

__all__ = ("row", "show")

_HEADS = ("framework", "tested", "fault", "stock", "with phasesync")


def row(framework: str, fault: str, stock: str, phasesync: str, *, how: str = "run") -> None:
    """Leave a row for the table, where $PHASESYNC_TABLE says."""
    path = os.environ.get("PHASESYNC_TABLE")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(json.dumps([framework, how, fault, stock, phasesync]) + "\n")


def show(paths: list[str]) -> str:
    """The rows in `paths` as a Markdown table."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    lines = [_HEADS, tuple("---" for _ in _HEADS), *dict.fromkeys(sorted(map(tuple, rows)))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(show(sys.argv[1:]))
