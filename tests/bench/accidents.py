"""Accidental fences over many seeds: `python -m tests.bench.accidents [SEEDS]`.

Without its fence the KV resume of the colocated world is ordered by an all-reduce, or by a slow
call; with the fence the same calls are there and order nothing. Counts how many runs are `ok`, and
in how many an accident is named: with its call, and the pair of ranks.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.audit.accidents import Accident, fenced, unfenced
from tests.audit.test_journals import audited

CALLS = {"all_reduce": "dist.all_reduce", "slow": "empty_cache"}


def one(kind: str, seed: int, *, fence: bool) -> tuple[str, bool]:
    """The verdict, and whether the accident is named."""
    protocol = fenced() if fence else unfenced()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        world = Accident(2, path, protocol=protocol, epochs=3, seed=seed, kind=kind)
        asyncio.run(world.go())
        answer = audited(path, protocol)
    wanted = ("resume_kv of trainer/0", "trainer/1", repr(CALLS[kind]), "accident")
    named = any(all(word in found["what"] for word in wanted) for found in answer.findings)
    return answer.verdict, named or bool(fence and answer.findings)


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"{'orders the ranks':24} {'runs':>5} {'ok':>5} {'accident named':>15}")
    for fence in (False, True):
        for kind, call in CALLS.items():
            found = [one(kind, seed, fence=fence) for seed in range(seeds)]
            name = f"the fence, and {kind}" if fence else f"{call} only"
            ok = sum(verdict == "ok" for verdict, _ in found)
            print(f"{name:24} {seeds:5} {ok:5} {sum(named for _, named in found):15}")


if __name__ == "__main__":
    main()
