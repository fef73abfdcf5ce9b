"""The torch demo over many seeds: `python -m tests.bench.demo_accidents [SEEDS] [FIRST]`.

Real processes and real tensors. Without its fence the KV resume is ordered by a real
`dist.all_reduce`: the audit must say `ok`, and name the call and the pair of ranks. With its fence
there is no such finding. Exits 1 on a miss.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from phasesync.report.audit import audit_paths

WANTED = ("resume_kv of trainer/0", "trainer/1", "'dist.all_reduce'", "accident")
KINDS: dict[str, tuple[str, ...]] = {
    "dist.all_reduce only": ("--accident", "all_reduce"),
    "the fence": (),
}
DEADLINE_S = 600  # as on a machine that does much else


def one(seed: int, options: tuple[str, ...]) -> tuple[str, bool, int]:
    """The verdict, whether the accident is named, and how many findings there are."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "phasesync", "demo", "--backend", "torch", "--ranks", "2"]
        command += ["--epochs", "1", "--seed", str(seed), "--runs", runs, *options]
        ended = subprocess.run(command, check=False, capture_output=True, timeout=DEADLINE_S)
        if ended.returncode != 0:
            return f"exit {ended.returncode}", False, 0
        (answer,) = audit_paths(sorted(Path(runs).iterdir()))
    named = any(all(word in found["what"] for word in WANTED) for found in answer.findings)
    return answer.verdict, named, len(answer.findings)


def main(seeds: int = 100, first: int = 0) -> int:
    missed = 0
    for name, options in KINDS.items():
        ok = accidents = 0
        for done, seed in enumerate(range(first, first + seeds), 1):
            verdict, named, count = one(seed, options)
            ok += verdict == "ok"
            accidents += named
            if verdict != "ok" or (not named if options else count):
                missed += 1
                print(f"  seed {seed}: {verdict}, {count} findings", flush=True)
            if done % 10 == 0 or done == seeds:
                said = f"{done:4} runs, {ok:4} ok, {accidents:4} with the accident named"
                print(f"{name + ':':22} {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
